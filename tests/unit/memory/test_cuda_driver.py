"""CudaDriver through the real cuda-bindings, over a libcuda that the tests compile."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from gracetune.memory.driver import CudaDriver, NoDriverError, open_cuda_driver

SCRIPT = Path(__file__).parents[2] / "data" / "shim" / "drive_bindings.py"
NOTHING = "RangeState(preferred=None, last_prefetch=None, read_mostly=False, accessed_by=())"

Drive = Callable[..., dict[str, object]]


@pytest.fixture(scope="module")
def drive(fake_libcuda: Callable[..., Path]) -> Drive:
    """Run the script in a process whose libcuda is the fake, compiled with these flags."""

    def driven(*arguments: str, flags: tuple[str, ...] = ()) -> dict[str, object]:
        library = fake_libcuda(*flags, name="libcuda.so.1")
        environment = {**os.environ, "LD_LIBRARY_PATH": str(library.parent)}
        done = subprocess.run(
            [sys.executable, str(SCRIPT), *arguments],
            capture_output=True,
            text=True,
            env=environment,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        told: dict[str, object] = json.loads(done.stdout)
        return told

    return driven


@pytest.fixture(scope="module")
def newest(drive: Drive) -> dict[str, object]:
    return drive()


def test_devices_attributes_and_memory_are_asked_of_the_right_device(
    newest: dict[str, object],
) -> None:
    assert newest["devices"] == 2
    assert newest["integrated"] == 1018
    assert newest["unknown"] is None
    assert newest["memory"] == [[60, 101], [60, 102]]


def test_pointers_are_told_apart(newest: dict[str, object]) -> None:
    assert newest["kinds"] == ["managed", "managed", "host", "unknown"]


def test_advice_and_prefetches_are_remembered_by_the_driver(newest: dict[str, object]) -> None:
    assert newest["fresh"] == newest["pinned_state"] == NOTHING
    assert newest["advise"] == [0, 0, 0, 101]
    assert newest["prefetch"] == [0, 0, 101]
    assert newest["state"] == (
        "RangeState(preferred=-1, last_prefetch=-1, read_mostly=True, accessed_by=(1,))"
    )


def test_what_reaches_libcuda_is_what_was_meant(newest: dict[str, object]) -> None:
    assert newest["calls"] == [
        "alloc 1048576 1",
        "pin 4096 1",
        "advise 1048576 3 2:0",
        "advise 1048576 5 1:1",
        "advise 1048576 1 1:0",
        "prefetch 1048576 1:1 0 77",
        "prefetch 4096 2:0 0 0",
        "discard 1 4096 0 2",  # the legacy stream becomes the per-thread one
        "discard 1 4096 0 9",
        "unpin",
        "free",
        "free",
    ]


def test_each_kind_of_memory_is_freed_its_own_way(newest: dict[str, object]) -> None:
    assert newest["free"] == [0, 0, 1]


def test_codes_have_names_or_at_least_numbers(newest: dict[str, object]) -> None:
    assert newest["names"] == ["CUDA_ERROR_OUT_OF_MEMORY", "CUDA error 1", "CUDA error 123456"]


def test_cuda_12_is_called_by_its_own_names_and_cannot_discard(
    drive: Drive, newest: dict[str, object]
) -> None:
    older = drive("older")
    assert older["discard"] == [801, 801]
    heard = newest["calls"]
    assert isinstance(heard, list)
    assert older["calls"] == [call for call in heard if not call.startswith("discard")]
    assert older["state"] == newest["state"]


def test_a_driver_older_than_the_bindings_cannot_discard(drive: Drive) -> None:
    assert drive(flags=("-DOMIT_DISCARD",))["discard"] == [801, 801]


def test_failures_come_back_as_codes(drive: Drive) -> None:
    told = drive("cuMemAdvise_v2=1", "cuMemPrefetchAsync_v2=46", "cuMemDiscardBatchAsync=801")
    assert told["advise"] == [1, 1, 1, 101]
    assert told["prefetch"] == [46, 46, 101]
    assert told["discard"] == [801, 801]


def test_a_refused_allocation_has_no_pointer(drive: Drive) -> None:
    told = drive("cuMemAllocManaged=2", "cuMemHostAlloc=2")
    assert told["kinds"] == ["unknown"] * 4
    assert told["fresh"] == NOTHING


def test_a_driver_that_lacks_an_attribute_knows_none(drive: Drive) -> None:
    assert drive("cuDeviceGetAttribute=1")["integrated"] is None


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        ("cuInit=100", "cuInit returned 100"),
        ("devices=1", "shows no GPU"),
        ("cuDevicePrimaryCtxRetain=2", "device 0 cannot be used: CUDA_ERROR_OUT_OF_MEMORY"),
    ],
)
def test_a_driver_that_cannot_be_used_is_refused_with_the_reason(
    drive: Drive, failure: str, message: str
) -> None:
    refused = drive(failure)["refused"]
    assert isinstance(refused, str)
    assert message in refused


def test_without_bindings_the_error_says_who_brings_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(NoDriverError, match="torch's CUDA builds bring it"):
        open_cuda_driver()


def test_without_a_driver_library_there_is_no_driver() -> None:
    def missing(flags: int) -> None:
        raise RuntimeError("Failed to dlopen libcuda.so.1")

    bindings = ModuleType("bindings without a driver")
    bindings.cuInit = missing  # type: ignore[attr-defined]
    with pytest.raises(NoDriverError, match=r"no NVIDIA driver: Failed to dlopen libcuda\.so\.1"):
        CudaDriver(bindings)
