"""How the shim is found, compiled and refused."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gracetune.errors import RunFailedError
from gracetune.memory.shim import (
    COMPILE_FLAGS,
    LIBRARY,
    SOURCE,
    MissingShim,
    Shim,
    ShimError,
    build_shim,
    find_shim,
)


def test_the_install_built_the_shim_beside_the_package() -> None:
    found = find_shim()
    assert isinstance(found, Shim), found.reason
    assert found.path.parent == SOURCE.parent


def test_a_missing_shim_says_why_and_what_to_do(tmp_path: Path) -> None:
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
    with pytest.raises(ShimError, match=f"has version {version}, this gracetune needs 1"):
        find_shim(tmp_path)


@pytest.mark.parametrize("compiler", ["cc", "no-such-cc"])
def test_the_packages_build_goes_on_without_a_compiler(tmp_path: Path, compiler: str) -> None:
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


def test_building_without_a_compiler_names_it(tmp_path: Path) -> None:
    with pytest.raises(ShimError, match="'no-such-cc' is not on the PATH"):
        build_shim(tmp_path / LIBRARY, compiler="no-such-cc")


def test_building_what_does_not_compile_shows_the_compiler(tmp_path: Path) -> None:
    source = tmp_path / "bad.c"
    source.write_text("int main(void) { return oops; }\n")
    with pytest.raises(RunFailedError, match="oops"):
        build_shim(tmp_path / LIBRARY, source=source)


def test_the_source_compiles_without_warnings_in_strict_c(tmp_path: Path) -> None:
    strict = ["-Wall", "-Wextra", "-Wconversion", "-Wshadow", "-Werror"]
    command = ["cc", *COMPILE_FLAGS, *strict, str(SOURCE), "-o", str(tmp_path / LIBRARY)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
