"""Fixtures that compile C code for the tests; they need a C compiler."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "data" / "shim"

Compile = Callable[..., Path]


@pytest.fixture(scope="session")
def compile_c(tmp_path_factory: pytest.TempPathFactory) -> Compile:
    """Compile C files once for each set of flags; a program unless -shared is among them."""
    made: dict[tuple[object, ...], Path] = {}

    def compiled(name: str, *arguments: str | Path) -> Path:
        key = (name, *arguments)
        if key not in made:
            target = tmp_path_factory.mktemp("native") / name
            command = ["cc", "-std=gnu11", "-g", "-O1", "-Wall", "-Wextra", "-Werror"]
            command += [*map(str, arguments), "-o", str(target), "-ldl", "-lpthread"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
            made[key] = target
        return made[key]

    return compiled


@pytest.fixture(scope="session")
def fake_libcuda(compile_c: Compile) -> Callable[..., Path]:
    """Compile a fake driver library with these flags."""

    def fake(*flags: str, name: str = "libfakecuda.so") -> Path:
        return compile_c(name, "-shared", "-fPIC", *flags, SOURCES / "fake_libcuda.c")

    return fake
