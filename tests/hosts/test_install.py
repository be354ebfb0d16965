"""The wheels, installed as the README says: `make test-install`.

The x86_64 wheel goes into a new Debian without a compiler, where a shell runs, in order, every
command of the README's sections "Install" and "Try it without a GPU". The aarch64 wheel is used by
an aarch64 Python under qemu. This needs root, debootstrap, qemu-user-static and a package index.
INSTALL_ROOT=FOLDER keeps the Debian in a folder, and uses it again.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(3600)]

REPOSITORY = Path(__file__).parents[2]
WHEELS = os.environ.get("WHEELS")
SECTIONS = ("Install", "Try it without a GPU")
COMPILERS = ("cc", "gcc", "g++", "clang", "tcc", "c99")
PACKAGES = "python3,python3-venv,ca-certificates"
MIRROR = os.environ.get("DEBIAN_MIRROR", "http://deb.debian.org/debian")
FROM_HOST = ("etc/resolv.conf", "etc/hosts", "etc/ssl/certs/ca-certificates.crt")
NEED_TORCH = {"accelerate", "diffusers", "peft", "tensorboard", "torch", "transformers"}
"""Dependencies that are not installed for qemu, in which torch does not start."""

if WHEELS is None:
    pytest.skip("WHEELS does not name the folder of the wheels", allow_module_level=True)


def wheel_for(machine: str) -> Path:
    (found,) = Path(WHEELS).resolve().glob(f"*_{machine}.whl")
    return found


def readme_commands() -> str:
    """Return the code blocks of the README's sections on installing and trying, in order."""
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    blocks = []
    for section in SECTIONS:
        found = re.search(rf"^## {section}\n(.*?)(?=^## )", text, re.M | re.S)
        assert found, f"the README has no section {section!r}"
        blocks += re.findall(r"^```(?:bash)?\n(.*?)^```", found[1], re.M | re.S)
    return "\n".join(blocks)


def pip_configuration() -> dict[str, str]:
    """Return this machine's pip settings, so that the new system uses the same package index."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    )
    lines = [line.partition("=") for line in listed.stdout.splitlines()]
    return {key.rpartition(".")[2]: ast.literal_eval(value) for key, _, value in lines}


def local_folders(configuration: dict[str, str]) -> list[str]:
    """Return the folders that pip's settings name, with those that local indexes link to."""
    words = {
        word.removeprefix("file://") for text in configuration.values() for word in text.split()
    }
    folders = {str(Path(word).resolve()) for word in words if os.path.isdir(word)}
    return sorted(folders | {str(Path(folder).parent) for folder in folders if "/simple" in folder})


def debootstrap(root: Path, *options: str) -> None:
    subprocess.run(
        [
            "debootstrap",
            "--variant=minbase",
            f"--include={PACKAGES}",
            *options,
            "bookworm",
            root,
            MIRROR,
        ],
        check=True,
        stdout=subprocess.DEVNULL,
    )


@pytest.fixture(scope="module")
def debian(tmp_path_factory):
    """Return the root of a new Debian, with the wheel in /root/work."""
    if os.geteuid() != 0 or shutil.which("debootstrap") is None:
        pytest.skip("this needs root and debootstrap")
    kept = os.environ.get("INSTALL_ROOT")
    root = Path(kept) if kept else tmp_path_factory.mktemp("debian") / "root"
    if not (root / "usr/bin/python3").exists():
        debootstrap(root)
    for name in FROM_HOST:
        if Path("/", name).exists():
            shutil.copyfile(Path("/", name), root / name)
    configuration = pip_configuration()
    settings = "".join(f"{key} = {value}\n" for key, value in configuration.items())
    (root / "etc/pip.conf").write_text(f"[global]\n{settings}")
    for folder in local_folders(configuration):
        (root / folder[1:]).mkdir(parents=True, exist_ok=True)
    shutil.copyfile(REPOSITORY / "constraints.txt", root / "etc/constraints.txt")
    shutil.rmtree(root / "root/work", ignore_errors=True)
    (root / "root/work").mkdir()
    shutil.copy(wheel_for("x86_64"), root / "root/work")
    yield root
    if not kept:
        shutil.rmtree(root)


def run_in(root: Path, script: str) -> subprocess.CompletedProcess[str]:
    """Run a bash script in the new system; its mounts end with it, and its output is shown."""
    mounts = [f"mount -t proc proc {root}/proc", f"mount -t tmpfs tmpfs {root}/dev/shm"]
    mounts += [
        f"mount --bind {folder} {root}{folder}" for folder in local_folders(pip_configuration())
    ]
    environment = (
        "HOME=/root PATH=/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 "
        "PIP_CONSTRAINT=/etc/constraints.txt "
        f"OMP_NUM_THREADS=1 ONEDNN_MAX_CPU_ISA={os.environ.get('ONEDNN_MAX_CPU_ISA', '')}"
    )
    (root / "root/script.sh").write_text(f"cd /root/work\n{script}")
    enter = f"exec chroot {root} /usr/bin/env -i {environment} bash -ex /root/script.sh"
    return subprocess.run(
        [
            "unshare",
            "--mount",
            "sh",
            "-ec",
            "\n".join([f"mkdir -p {root}/dev/shm", *mounts, enter]),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def test_the_readme_leads_from_the_wheel_to_an_adapter_in_diffusers(debian):
    script = readme_commands()
    for word in (
        "pip install",
        "gracetune init",
        "gracetune train",
        "gracetune sample",
        "diffusers",
    ):
        assert word in script, f"the README's commands lack {word!r}"
    assert not any((debian / "usr/bin" / name).exists() for name in COMPILERS)
    done = run_in(debian, script)
    sys.stdout.write(done.stdout)
    assert done.returncode == 0
    assert "loaded: ['default_0']" in done.stdout
    assert not any((debian / "usr/bin" / name).exists() for name in COMPILERS)
    work = debian / "root/work"
    assert list(work.glob("runs/stars/adapter/*.safetensors"))
    assert list(work.glob("runs/stars/samples/*.png"))


def test_the_compiled_libraries_load_and_extras_can_be_added(debian):
    done = run_in(
        debian,
        "source gracetune-env/bin/activate\n"
        "gracetune diagnose --allow-cpu | grep 'OK *libraries'\n"
        f"pip install --quiet './{wheel_for('x86_64').name}[parquet]'\n"  # as the README says
        "python -c 'import pyarrow'\n"
        "pip install --quiet 'gracetune[images]'\n"  # as messages say: keeps the installed wheel
        "python -c 'import imagecodecs'\n"
        "gracetune --version\n",
    )
    assert done.returncode == 0, done.stdout


UNDER_QEMU = """
import ctypes, os, platform, sys, tempfile
assert platform.machine() == "aarch64"
from gracetune.cli.diagnose import check_libraries
assert check_libraries().status == "OK", check_libraries()
from gracetune.data.bulk_copy import find_bulk_copier
from gracetune.cli.main import main
assert main(["examples", "flux"]) == 0
assert main(["schema"]) == 0
assert main(["train", "missing.json"]) == 2
with tempfile.TemporaryDirectory() as folder:
    assert main(["examples", "--images", folder + "/stars"]) == 0
    from gracetune.data.source import FolderSource
    paths = [f"{folder}/stars/{key}" for key in FolderSource(folder + "/stars").keys()]
    assert list(find_bulk_copier().sizes(paths)) == [os.path.getsize(path) for path in paths]
assert "torch" not in sys.modules
print("aarch64 works")
"""


def dependencies_without_torch() -> list[str]:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = project["dependencies"]
    return [each for each in needed if re.split(r"[^\w-]", each)[0] not in NEED_TORCH]


def test_the_aarch64_wheel_works_under_qemu(tmp_path):
    qemu = shutil.which("qemu-aarch64-static")
    if os.geteuid() != 0 or shutil.which("debootstrap") is None or qemu is None:
        pytest.skip("this needs root, debootstrap and qemu-user-static")
    root, site = tmp_path / "root", tmp_path / "site"
    debootstrap(root, "--arch=arm64", "--foreign")
    for package in sorted((root / "var/cache/apt/archives").glob("*.deb")):
        subprocess.run(["dpkg-deb", "-x", package, root], check=True)
    tags = [f"--platform=manylinux_2_{glibc}_aarch64" for glibc in range(17, 29)]
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--target",
        site,
        "--only-binary=:all:",
    ]
    pip += [
        "--python-version=3.11",
        "--implementation=cp",
        *tags,
        "--platform=manylinux2014_aarch64",
    ]
    subprocess.run([*pip, *dependencies_without_torch()], check=True)
    subprocess.run([*pip, "--no-deps", wheel_for("aarch64")], check=True)
    done = subprocess.run(
        [qemu, "-L", root, root / "usr/bin/python3.11", "-c", UNDER_QEMU],
        env={"PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "aarch64 works" in done.stdout
