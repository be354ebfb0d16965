"""Build the source distribution and the wheels for x86_64 and aarch64 in dist/, and check them.

`make wheels` runs this. ziglang, a C compiler from PyPI, compiles the two libraries for both
architectures on either of them, against glibc 2.28. Every wheel is built from the source
distribution, so the source distribution is complete. The checks of a wheel:

- it contains both libraries, for the architecture in its name, stripped of the build's paths;
- auditwheel finds no newer glibc and no other shared library than its platform tag allows;
- it contains every module and example of the source tree.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

from elftools.elf.elffile import ELFFile

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
GLIBC = (2, 28)
ELF_MACHINES = {"x86_64": "EM_X86_64", "aarch64": "EM_AARCH64"}
LIBRARIES = ("gracetune/memory/_shim.so", "gracetune/data/_bulk_copy.so")


def main() -> int:
    """Build and check everything; return the exit code."""
    shutil.rmtree(DIST, ignore_errors=True)
    build("--sdist", ROOT)
    (sdist,) = DIST.glob("*.tar.gz")
    for machine in ELF_MACHINES:
        with tempfile.TemporaryDirectory() as folder:  # a build folder must not serve two machines
            with tarfile.open(sdist) as archive:
                archive.extractall(folder, filter="data")
            (source,) = Path(folder).iterdir()
            build_wheel(source, machine)
    problems = [problem for wheel in find_wheels() for problem in check_wheel(wheel)]
    for file in sorted(DIST.iterdir()):
        print(f"{file.relative_to(ROOT)}  {file.stat().st_size / 1e6:.2f} MB")
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if problems else 0


def build(kind: str, source: Path, *options: str, **variables: str) -> None:
    """Call the `build` package for a source tree; it creates a clean environment of its own."""
    command = [sys.executable, "-m", "build", kind, *options, "--outdir", str(DIST), str(source)]
    done = subprocess.run(
        command, env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{done.stdout}{done.stderr}\nerror: {' '.join(command)} failed.")


def build_wheel(source: Path, machine: str) -> None:
    """Build the wheel for one architecture, with the compiled libraries."""
    glibc = "{}.{}".format(*GLIBC)
    compiler = f"{sys.executable} -m ziglang cc -target {machine}-linux-gnu.{glibc}"
    build(
        "--wheel",
        source,
        f"-C=--build-option=--plat-name=manylinux_{glibc.replace('.', '_')}_{machine}",
        CC=compiler,
        CFLAGS="-fno-sanitize=undefined",  # zig's default, which aborts without a message
        LDSHARED=f"{compiler} -shared -s",
        GRACETUNE_REQUIRE_LIBRARIES="1",
    )


def find_wheels() -> dict[str, Path]:
    """Return the wheels in dist/ by architecture."""
    return {machine: next(DIST.glob(f"*_{machine}.whl")) for machine in ELF_MACHINES}


def check_wheel(machine: str) -> list[str]:
    """Return a sentence for each problem of a wheel."""
    wheel = find_wheels()[machine]
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        missing = sorted({*LIBRARIES, *expected_files()} - names)
        found = [f"{wheel.name} lacks {name}." for name in missing]
        for library in set(LIBRARIES) & names:
            elf = ELFFile(io.BytesIO(archive.read(library)))
            if elf["e_machine"] != ELF_MACHINES[machine]:
                found.append(f"{wheel.name}: {library} is for {elf['e_machine']}.")
            if elf.get_section_by_name(".debug_info") is not None:
                found.append(f"{wheel.name}: {library} contains paths of the build.")
    report = subprocess.run(
        [sys.executable, "-m", "auditwheel", "show", "--json", str(wheel)],
        capture_output=True,
        text=True,
        check=True,
    )
    tag = json.loads(report.stdout)["overall_tag"]
    prefix, _, version = tag.removesuffix(f"_{machine}").partition("_")
    if prefix != "manylinux" or tuple(map(int, version.split("_"))) > GLIBC:
        found.append(f"{wheel.name}: auditwheel allows only {tag}.")
    return found


def expected_files() -> list[str]:
    """Return the modules, type marker and examples that git tracks, with their paths in a wheel."""
    tracked = subprocess.run(
        ["git", "ls-files", "src", "examples"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    kinds = (".py", ".typed")
    modules = [name.removeprefix("src/") for name in tracked if name.startswith("src/")]
    examples = [f"gracetune/{name}" for name in tracked if name.startswith("examples/")]
    return [name for name in modules if name.endswith(kinds)] + [
        name for name in examples if name.endswith((".json", ".yaml", ".toml"))
    ]


if __name__ == "__main__":
    sys.exit(main())
