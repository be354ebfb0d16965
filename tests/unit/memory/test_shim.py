"""The compiled shim with a fake driver library, and building the shim."""

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from gracetune.data.bulk_copy import SOURCE as GATHER_SOURCE
from gracetune.errors import RunFailedError
from gracetune.memory.shim import (
    COMPILE_FLAGS,
    LIBRARY,
    SOURCE,
    AccessPattern,
    MissingShim,
    Shim,
    ShimError,
    build_shim,
    find_shim,
)

SLOTS = 16
MIB = 1024**2
HARNESS = Path(__file__).parents[2] / "data" / "shim" / "hammer.c"


class Fake:
    """Controls the fake driver and reads its log."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.library = ctypes.CDLL(self.path)
        self.library.fake_calls.restype = ctypes.c_char_p
        self.library.fake_live.restype = ctypes.c_uint64
        self.library.fake_forget()
        self.failed: set[str] = set()
        self.library.fake_set_current(0)

    def calls(self) -> list[str]:
        text: bytes = self.library.fake_calls()
        return text.decode().splitlines()

    def fail(self, name: str, code: int) -> None:
        self.failed.add(name)
        self.library.fake_fail(name.encode(), code)

    def close(self) -> None:
        for name in self.failed:
            self.library.fake_fail(name.encode(), 0)


class Slot:
    """One slot of the shim, called as torch calls it."""

    def __init__(self, shim: Shim, fake: Fake, pattern: AccessPattern, cap: int) -> None:
        self.shim = shim
        self.number = shim.open(pattern, cap, fake.path)
        library = ctypes.CDLL(str(shim.path))
        self._alloc = library[f"gracetune_alloc_{self.number}"]
        self._alloc.restype = ctypes.c_void_p
        self._alloc.argtypes = (ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
        self._free = library[f"gracetune_free_{self.number}"]
        self._free.restype = None
        self._free.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
        self.pointers: list[int] = []

    def alloc(self, nbytes: int, device: int = 0, stream: int = 0) -> int | None:
        pointer: int | None = self._alloc(nbytes, device, stream)
        if pointer is not None:
            self.pointers.append(pointer)
        return pointer

    def free(self, pointer: int, nbytes: int = 0, device: int = 0) -> None:
        self._free(pointer, nbytes, device, None)
        if pointer in self.pointers:
            self.pointers.remove(pointer)

    def counters(self) -> dict[str, int]:
        return asdict(self.shim.counters(self.number))

    def close(self) -> None:
        for pointer in list(self.pointers):
            self.free(pointer)
        assert self.shim.close(self.number)


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Shim:
    return Shim(build_shim(tmp_path_factory.mktemp("shim") / LIBRARY))


@pytest.fixture
def fresh(shim: Shim, tmp_path: Path) -> Shim:
    """Load a copy of the library, which has slots of its own."""
    return Shim(shutil.copy(shim.path, tmp_path / LIBRARY))


@pytest.fixture
def fake(fake_libcuda: Callable[..., Path]) -> Iterator[Fake]:
    steered = Fake(fake_libcuda())
    yield steered
    steered.close()


@pytest.fixture
def slot(shim: Shim, fake: Fake) -> Iterator[Slot]:
    made = Slot(shim, fake, AccessPattern.BALANCED, 10 * MIB)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (
            AccessPattern.GPU_FIRST,
            ["advise 2097152 3 1:0", "advise 2097152 5 1:0", "prefetch 2097152 1:0 0 7"],
        ),
        (AccessPattern.BALANCED, ["advise 2097152 5 1:0"]),
        (AccessPattern.CPU_FIRST, ["advise 2097152 3 2:0", "advise 2097152 5 1:0"]),
    ],
)
def test_each_access_pattern_gives_its_own_hints(
    shim: Shim, fake: Fake, pattern: AccessPattern, expected: list[str]
) -> None:
    slot = Slot(shim, fake, pattern, 10 * MIB)
    assert slot.alloc(2 * MIB, device=0, stream=7)
    assert fake.calls() == ["alloc 2097152 1", *expected]
    assert slot.counters()["hints"] == len(expected)
    slot.close()


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (
            AccessPattern.GPU_FIRST,
            ["advise_v1 4096 3 1", "advise_v1 4096 5 1", "prefetch_v1 4096 1 7"],
        ),
        (AccessPattern.CPU_FIRST, ["advise_v1 4096 3 -1", "advise_v1 4096 5 1"]),
    ],
)
def test_drivers_before_12_2_get_integer_locations(
    shim: Shim,
    fake_libcuda: Callable[..., Path],
    pattern: AccessPattern,
    expected: list[str],
) -> None:
    fake = Fake(fake_libcuda("-DOLD", name="libold.so"))
    slot = Slot(shim, fake, pattern, MIB)
    assert slot.alloc(4096, device=1, stream=7)
    assert fake.calls() == ["alloc 4096 1", *expected]
    slot.close()


def test_the_cap_is_exact_and_a_refusal_never_reaches_the_driver(slot: Slot, fake: Fake) -> None:
    assert slot.alloc(6 * MIB)
    last = slot.alloc(4 * MIB)
    assert last is not None
    assert slot.alloc(1) is None
    assert sum(call.startswith("alloc") for call in fake.calls()) == 2
    counters = slot.counters()
    assert (counters["live_bytes"], counters["cap_bytes"]) == (10 * MIB, 10 * MIB)
    assert (counters["denied"], counters["denied_bytes"], counters["failed"]) == (1, 1, 0)
    slot.free(last)
    assert slot.alloc(1)
    assert slot.counters()["peak_bytes"] == 10 * MIB


def test_a_segment_larger_than_any_cap_does_not_wrap_around(slot: Slot) -> None:
    assert slot.alloc(2**63 - 1) is None
    assert slot.counters()["denied"] == 1


def test_the_cap_can_be_set_below_the_live_bytes(slot: Slot) -> None:
    held = slot.alloc(4 * MIB)
    assert held
    slot.shim.set_cap(slot.number, 2 * MIB)
    assert slot.alloc(1) is None
    slot.free(held)
    assert slot.alloc(2 * MIB)


def test_frees_are_counted(slot: Slot, fake: Fake) -> None:
    before = fake.library.fake_live()
    pointer = slot.alloc(MIB)
    assert pointer
    assert fake.library.fake_live() == before + MIB
    slot.free(pointer)
    assert fake.library.fake_live() == before
    counters = slot.counters()
    assert (counters["live_bytes"], counters["live_segments"], counters["frees"]) == (0, 0, 1)


def test_a_driver_out_of_memory_returns_null_and_its_code(slot: Slot, fake: Fake) -> None:
    fake.fail("cuMemAllocManaged", 2)
    assert slot.alloc(MIB) is None
    counters = slot.counters()
    assert (counters["failed"], counters["last_code"], counters["live_bytes"]) == (1, 2, 0)


@pytest.mark.parametrize("nbytes", [0, -1])
def test_a_size_of_zero_is_refused(slot: Slot, nbytes: int) -> None:
    assert slot.alloc(nbytes) is None
    assert slot.counters()["failed"] == 1


@pytest.mark.parametrize(("device", "code"), [(-1, 1), (64, 1), (5, 101)])
def test_a_missing_device_is_refused(slot: Slot, device: int, code: int) -> None:
    assert slot.alloc(MIB, device=device) is None
    assert slot.counters()["last_code"] == code


def test_a_failed_hint_leaves_usable_memory_and_is_counted(shim: Shim, fake: Fake) -> None:
    fake.fail("cuMemAdvise_v2", 1)
    fake.fail("cuMemPrefetchAsync_v2", 101)
    slot = Slot(shim, fake, AccessPattern.GPU_FIRST, MIB)
    assert slot.alloc(4096)
    counters = slot.counters()
    assert (counters["hints"], counters["failed_hints"], counters["last_code"]) == (3, 3, 101)
    slot.close()


def test_memory_that_cannot_be_freed_stays_counted_and_keeps_the_slot(
    fresh: Shim, fake: Fake
) -> None:
    slot = Slot(fresh, fake, AccessPattern.BALANCED, MIB)
    pointer = slot.alloc(4096)
    assert pointer
    fake.fail("cuMemFree_v2", 700)
    slot.free(pointer)
    counters = slot.counters()
    assert (counters["failed_frees"], counters["leaked_bytes"]) == (1, 4096)
    assert (counters["live_bytes"], counters["last_code"]) == (4096, 700)
    assert not fresh.close(slot.number)


def test_a_driver_that_is_gone_at_exit_has_freed_its_memory(slot: Slot, fake: Fake) -> None:
    pointer = slot.alloc(4096)
    assert pointer
    fake.fail("cuMemFree_v2", 4)
    slot.free(pointer)
    counters = slot.counters()
    assert (counters["live_bytes"], counters["failed_frees"], counters["frees"]) == (0, 0, 1)


def test_foreign_and_repeated_frees_are_counted_not_passed_on(slot: Slot, fake: Fake) -> None:
    pointer = slot.alloc(4096)
    assert pointer
    slot.free(pointer)
    slot.free(pointer)
    slot.free(12345)
    slot._free(None, 0, 0, None)
    assert slot.counters()["foreign_frees"] == 2
    assert fake.calls().count("free") == 1


def test_a_thread_without_a_context_uses_the_devices_temporarily(shim: Shim, fake: Fake) -> None:
    slot = Slot(shim, fake, AccessPattern.BALANCED, MIB)
    fake.library.fake_set_current(-1)
    before = fake.library.fake_retained(1)
    pointer = slot.alloc(4096, device=1)
    assert pointer
    assert fake.library.fake_depth() == 0
    slot.free(pointer, device=1)
    assert fake.library.fake_depth() == 0
    assert fake.library.fake_retained(1) == before + 1
    slot.close()
    assert fake.library.fake_retained(1) == before


@pytest.mark.parametrize(
    "name", ["cuDeviceGet", "cuCtxGetCurrent", "cuDevicePrimaryCtxRetain", "cuCtxPushCurrent_v2"]
)
def test_a_missing_context_fails_the_allocation(slot: Slot, fake: Fake, name: str) -> None:
    fake.library.fake_set_current(-1)
    fake.fail(name, 46)
    assert slot.alloc(4096) is None
    assert slot.counters()["last_code"] == 46


def test_a_driver_library_that_is_missing_is_named(shim: Shim) -> None:
    with pytest.raises(ShimError, match=r"libnowhere\.so\.1"):
        shim.open(AccessPattern.BALANCED, MIB, "libnowhere.so.1")


@pytest.mark.parametrize(
    ("flags", "symbol"),
    [(("-DOMIT_ALLOC",), "cuMemAllocManaged"), (("-DOMIT_ADVISE",), "cuMemAdvise")],
)
def test_a_driver_without_a_symbol_is_refused_by_its_name(
    shim: Shim, fake_libcuda: Callable[..., Path], flags: tuple[str, ...], symbol: str
) -> None:
    with pytest.raises(ShimError, match=f"the driver library has no {symbol} "):
        shim.open(AccessPattern.BALANCED, MIB, str(fake_libcuda(*flags, name="libless.so")))


def test_a_driver_that_does_not_start_is_refused(shim: Shim, fake: Fake) -> None:
    fake.fail("cuInit", 100)
    with pytest.raises(ShimError, match="cuInit returned 100"):
        shim.open(AccessPattern.BALANCED, MIB, fake.path)


def test_slots_are_limited_and_can_be_reused(fresh: Shim, fake: Fake) -> None:
    taken = [fresh.open(AccessPattern.BALANCED, MIB, fake.path) for _ in range(SLOTS)]
    assert taken == list(range(SLOTS))
    with pytest.raises(ShimError, match=f"all {SLOTS} pools are open"):
        fresh.open(AccessPattern.BALANCED, MIB, fake.path)
    assert fresh.close(5)
    assert fresh.open(AccessPattern.BALANCED, MIB, fake.path) == 5


def test_a_closed_slot_returns_errors(fresh: Shim) -> None:
    library = ctypes.CDLL(str(fresh.path))
    for unknown in (0, -1, SLOTS):
        assert library.gracetune_shim_close(unknown) == -5
        assert library.gracetune_shim_set_cap(unknown, ctypes.c_uint64(1)) == -5
        assert library.gracetune_shim_counters(unknown, None, 0) == -5
    library.gracetune_alloc_0.restype = ctypes.c_void_p
    assert library.gracetune_alloc_0(ctypes.c_ssize_t(1), 0, None) is None
    library.gracetune_free_0(None, ctypes.c_size_t(1), 0, None)


def test_a_pattern_out_of_range_is_refused_in_c(shim: Shim, fake: Fake) -> None:
    library = ctypes.CDLL(str(shim.path))
    error = ctypes.create_string_buffer(64)
    opened = library.gracetune_shim_open(
        fake.path.encode(), 3, ctypes.c_uint64(1), error, ctypes.c_size_t(64)
    )
    assert (opened, error.value) == (-5, b"access pattern 3 is none of 0, 1, 2")


@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_counters_are_thread_safe_under_a_sanitizer(
    compile_c: Callable[..., Path], fake_libcuda: Callable[..., Path], sanitizer: str
) -> None:
    flag = f"-fsanitize={sanitizer}"
    hammer = compile_c("hammer", flag, "-fno-omit-frame-pointer", HARNESS, SOURCE)
    fake = fake_libcuda(flag, name="libsanitized.so")
    done = subprocess.run(
        [str(hammer), str(fake)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "refused" in done.stdout


def test_the_installation_built_the_shim() -> None:
    found = find_shim()
    assert isinstance(found, Shim), found.reason
    assert found.path.parent == SOURCE.parent


def test_a_missing_shim_has_a_reason_and_a_fix(tmp_path: Path) -> None:
    missing = find_shim(tmp_path)
    assert isinstance(missing, MissingShim)
    assert "no C compiler" in missing.reason
    assert "pip install" in missing.reason


def test_a_broken_shim_is_an_error_with_its_path(tmp_path: Path) -> None:
    (tmp_path / LIBRARY).write_bytes(b"not a library")
    with pytest.raises(ShimError, match=f"{LIBRARY} cannot be loaded"):
        find_shim(tmp_path)


@pytest.mark.parametrize(
    ("code", "version"), [("int gracetune_shim_abi(void) { return 99; }", "99"), ("int x;", "none")]
)
def test_a_shim_of_another_version_is_refused(tmp_path: Path, code: str, version: str) -> None:
    source = tmp_path / "old.c"
    source.write_text(f'__attribute__((visibility("default"))) {code}\n')
    build_shim(tmp_path / LIBRARY, source=source)
    with pytest.raises(ShimError, match=f"has version {version}, but gracetune needs 1"):
        find_shim(tmp_path)


@pytest.mark.parametrize("compiler", ["cc", "no-such-cc"])
def test_the_package_builds_without_a_compiler(tmp_path: Path, compiler: str) -> None:
    folders = ["--build-lib", str(tmp_path / "lib"), "--build-temp", str(tmp_path / "temp")]
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", *folders],
        cwd=SOURCE.parents[3],
        env={**os.environ, "CC": compiler},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    built = find_shim(tmp_path / "lib" / "gracetune" / "memory")
    assert isinstance(built, Shim if compiler == "cc" else MissingShim)


def test_a_wheel_is_not_built_without_its_libraries(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", str(tmp_path)],
        cwd=SOURCE.parents[3],
        env={**os.environ, "CC": "no-such-cc", "GRACETUNE_REQUIRE_LIBRARIES": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "no-such-cc" in done.stderr


def test_building_without_a_compiler_names_it(tmp_path: Path) -> None:
    with pytest.raises(ShimError, match="'no-such-cc' is not on the PATH"):
        build_shim(tmp_path / LIBRARY, compiler="no-such-cc")


def test_a_compile_error_shows_the_compilers_output(tmp_path: Path) -> None:
    source = tmp_path / "bad.c"
    source.write_text("int main(void) { return oops; }\n")
    with pytest.raises(RunFailedError, match="oops"):
        build_shim(tmp_path / LIBRARY, source=source)


@pytest.mark.parametrize("source", [SOURCE, GATHER_SOURCE], ids=lambda source: source.name)
def test_our_c_code_compiles_without_warnings_in_strict_c(tmp_path: Path, source: Path) -> None:
    strict = ["-Wall", "-Wextra", "-Wconversion", "-Wshadow", "-Werror"]
    command = ["cc", *COMPILE_FLAGS, *strict, str(source), "-o", str(tmp_path / LIBRARY)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
