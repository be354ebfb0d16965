"""Drive CudaDriver through the installed cuda-bindings against the libcuda on LD_LIBRARY_PATH.

Run as a process of its own, because a process has one libcuda: arguments are `name=code` failures
for the fake; prints what happened as JSON. `older` as an argument hides what CUDA 13 brought.
"""

import ctypes
import json
import sys
from types import ModuleType

from gracetune.memory.driver import HOST, Advice, CudaDriver, NoDriverError, open_cuda_driver

MIB = 1024**2


def cuda_12() -> ModuleType:
    """The bindings as CUDA 12 named them: places in `_v2` calls, no discard."""
    from cuda.bindings import driver

    older = ModuleType("cuda_12")
    for name in dir(driver):
        setattr(older, name, getattr(driver, name))
    older.CUDA_VERSION = 12090
    older.cuMemAdvise_v2 = driver.cuMemAdvise
    older.cuMemPrefetchAsync_v2 = driver.cuMemPrefetchAsync
    del older.cuMemAdvise, older.cuMemPrefetchAsync, older.cuMemDiscardBatchAsync
    return older


def walk(driver: CudaDriver) -> dict[str, object]:
    """Every verb once or twice."""
    _, managed = driver.allocate_managed(MIB)
    _, pinned = driver.allocate_pinned(4096)
    result: dict[str, object] = {
        "devices": driver.device_count,
        "integrated": driver.attribute("integrated", 1),
        "unknown": driver.attribute("no_such", 0),
        "memory": [driver.memory_info(0), driver.memory_info(1)],
        "kinds": [driver.pointer_kind(p).value for p in (managed, managed + 100, pinned, 7)],
        "fresh": repr(driver.range_state(managed, MIB)),
        "advise": [
            driver.advise(managed, MIB, Advice.SET_PREFERRED_LOCATION, HOST),
            driver.advise(managed, MIB, Advice.SET_ACCESSED_BY, 1),
            driver.advise(managed, MIB, Advice.SET_READ_MOSTLY, 0),
            driver.advise(managed, MIB, Advice.SET_READ_MOSTLY, 2),
        ],
        "prefetch": [
            driver.prefetch(managed, MIB, 1, 77),
            driver.prefetch(managed, 4096, HOST, 0),
            driver.prefetch(managed, 4096, 2, 0),
        ],
        "discard": [driver.discard(managed, 4096, 0), driver.discard(managed, 4096, 9)],
        "state": repr(driver.range_state(managed, MIB)),
        "pinned_state": repr(driver.range_state(pinned, 8)),
        "free": [driver.free(pinned), driver.free(managed), driver.free(managed)],
        "names": [driver.error_name(code) for code in (2, 1, 123456)],
    }
    return result


def main(arguments: list[str]) -> dict[str, object]:
    """Set the failures up, walk, and add what the fake heard."""
    fake = ctypes.CDLL("libcuda.so.1")
    fake.fake_calls.restype = ctypes.c_char_p
    for name, _, code in (argument.partition("=") for argument in arguments if "=" in argument):
        fake.fake_fail(name.encode(), int(code))
    try:
        driver = CudaDriver(cuda_12()) if "older" in arguments else open_cuda_driver()
        result = walk(driver)
    except NoDriverError as error:
        return {"refused": str(error)}
    result["calls"] = fake.fake_calls().decode().splitlines()
    return result


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(sys.argv[1:])))
