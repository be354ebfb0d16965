"""`CudaDriver` through the real cuda-bindings, with a fake libcuda that the tests compile."""

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
def run_script_with(fake_libcuda: Callable[..., Path]) -> Drive:
    """Run the script in a process whose libcuda is the fake, compiled with these flags."""

    def run_script(*arguments: str, flags: tuple[str, ...] = ()) -> dict[str, object]:
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
        output: dict[str, object] = json.loads(done.stdout)
        return output

    return run_script


@pytest.fixture(scope="module")
def cuda13(run_script_with: Drive) -> dict[str, object]:
    return run_script_with()


def test_attributes_and_memory_are_those_of_the_given_device(
    cuda13: dict[str, object],
) -> None:
    assert cuda13["devices"] == 2
    assert cuda13["integrated"] == 1018
    assert cuda13["unknown"] is None
    assert cuda13["memory"] == [[60, 101], [60, 102]]


def test_kinds_of_pointers_are_distinguished(cuda13: dict[str, object]) -> None:
    assert cuda13["kinds"] == ["managed", "managed", "host", "unknown"]


def test_advice_and_prefetches_are_remembered_by_the_driver(cuda13: dict[str, object]) -> None:
    assert cuda13["fresh"] == cuda13["pinned_state"] == NOTHING
    assert cuda13["advise"] == [0, 0, 0, 101]
    assert cuda13["prefetch"] == [0, 0, 101]
    assert cuda13["state"] == (
        "RangeState(preferred=-1, last_prefetch=-1, read_mostly=True, accessed_by=(1,))"
    )


def test_libcuda_gets_the_expected_calls(cuda13: dict[str, object]) -> None:
    assert cuda13["calls"] == [
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


def test_each_kind_of_memory_is_freed_by_its_own_function(cuda13: dict[str, object]) -> None:
    assert cuda13["free"] == [0, 0, 1]


def test_error_codes_have_names_or_numbers(cuda13: dict[str, object]) -> None:
    assert cuda13["names"] == ["CUDA_ERROR_OUT_OF_MEMORY", "CUDA error 1", "CUDA error 123456"]


def test_cuda_12_functions_are_used_and_discard_is_unsupported(
    run_script_with: Drive, cuda13: dict[str, object]
) -> None:
    older = run_script_with("older")
    assert older["discard"] == [801, 801]
    heard = cuda13["calls"]
    assert isinstance(heard, list)
    assert older["calls"] == [call for call in heard if not call.startswith("discard")]
    assert older["state"] == cuda13["state"]


def test_a_driver_older_than_the_bindings_cannot_discard(run_script_with: Drive) -> None:
    assert run_script_with(flags=("-DOMIT_DISCARD",))["discard"] == [801, 801]


def test_failures_are_returned_as_codes(run_script_with: Drive) -> None:
    output = run_script_with(
        "cuMemAdvise_v2=1", "cuMemPrefetchAsync_v2=46", "cuMemDiscardBatchAsync=801"
    )
    assert output["advise"] == [1, 1, 1, 101]
    assert output["prefetch"] == [46, 46, 101]
    assert output["discard"] == [801, 801]


def test_a_refused_allocation_has_no_pointer(run_script_with: Drive) -> None:
    output = run_script_with("cuMemAllocManaged=2", "cuMemHostAlloc=2")
    assert output["kinds"] == ["unknown"] * 4
    assert output["fresh"] == NOTHING


def test_an_unknown_attribute_is_none(run_script_with: Drive) -> None:
    assert run_script_with("cuDeviceGetAttribute=1")["integrated"] is None


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        ("cuInit=100", "cuInit returned 100"),
        ("devices=1", "sees no GPU"),
        ("cuDevicePrimaryCtxRetain=2", "device 0 cannot be used: CUDA_ERROR_OUT_OF_MEMORY"),
    ],
)
def test_an_unusable_driver_is_refused_with_the_reason(
    run_script_with: Drive, failure: str, message: str
) -> None:
    refused = run_script_with(failure)["refused"]
    assert isinstance(refused, str)
    assert message in refused


def test_without_bindings_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(NoDriverError, match="CUDA builds of torch install it"):
        open_cuda_driver()


def test_without_a_driver_library_there_is_no_driver() -> None:
    def missing(flags: int) -> None:
        raise RuntimeError("Failed to dlopen libcuda.so.1.")

    bindings = ModuleType("bindings without a driver")
    bindings.cuInit = missing  # type: ignore[attr-defined]
    with pytest.raises(
        NoDriverError, match=r"was found: Failed to dlopen libcuda\.so\.1\. Install one, or run"
    ):
        CudaDriver(bindings)
