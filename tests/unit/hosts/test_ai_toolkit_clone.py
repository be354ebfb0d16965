"""Check a clone of ai-toolkit, and install and remove our file."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from ai_toolkit_clone import status, write_clone
from fork_process import run_python

from gracetune.cli.main import main
from gracetune.errors import HostError
from gracetune.hosts.ai_toolkit.clone import check, extension_path, find_clone, install, uninstall
from gracetune.hosts.ai_toolkit.hooks import REQUIRED_SYMBOLS, TESTED_COMMITS


@pytest.fixture
def clone(tmp_path):
    return write_clone(tmp_path / "ai-toolkit")


def test_a_clone_is_known_by_its_commit(clone):
    found = find_clone(clone)
    assert len(found.version) == 12
    assert found.root == clone


def test_a_clone_without_history_is_known_by_its_version_number(clone):
    shutil.rmtree(clone / ".git")
    assert find_clone(clone).version == "0.12.26"
    (clone / "version.py").write_text("import os\n")
    assert find_clone(clone).version == "of an unknown version"
    (clone / "version.py").unlink()
    assert find_clone(clone).version == "of an unknown version"


def test_a_broken_history_falls_back_to_the_version_number(clone):
    (clone / ".git" / "HEAD").write_text("ref: refs/heads/gone\n")
    assert find_clone(clone).version == "0.12.26"


def test_a_folder_that_is_not_a_clone_is_refused(tmp_path):
    with pytest.raises(HostError, match=r"is not a clone of ai-toolkit: it has no run\.py"):
        find_clone(tmp_path)


def test_the_table_lists_every_symbol_also_for_an_untested_commit(clone):
    lines = check(clone)
    assert len(lines) == len(REQUIRED_SYMBOLS) + 2
    assert all(line.startswith("ok ") for line in lines[1:-1])
    assert "not tested, but has everything that is needed" in lines[-1]
    assert all(len(commit) == 12 for commit in TESTED_COMMITS)


@pytest.mark.parametrize(
    ("file", "old", "new", "problem"),
    [
        (
            "toolkit/dataloader_mixins.py",
            "def get_latent_path(self, recalculate=False)",
            "def get_latent_path(self, again=False)",
            "it should begin with (recalculate)",
        ),
        (
            "jobs/process/BaseSDTrainProcess.py",
            "self.before_dataset_load()",
            "pass",
            "no longer uses self.before_dataset_load()",
        ),
        (
            "jobs/BaseJob.py",
            "def load_processes(",
            "def make_processes(",
            "has no BaseJob.load_processes",
        ),
        (
            "toolkit/prompt_utils.py",
            "load_file(path, device='cpu')",
            "load_file(path)",
            "no longer uses load_file(path, device='cpu')",
        ),
        (
            "toolkit/dataloader_mixins.py",
            "recalculate=False",
            "recalculate=True",
            "recalculate is True by default; it should be False",
        ),
    ],
)
def test_a_clone_that_does_not_fit_is_not_extended(clone, capsys, file, old, new, problem):
    text = (clone / file).read_text()
    assert old in text
    (clone / file).write_text(text.replace(old, new))
    assert main(["host", "ai-toolkit", "check", str(clone)]) == 1
    table = capsys.readouterr().out
    assert problem in table
    assert "cannot be hooked" in table
    assert "27a03a91f23e" in table
    assert main(["host", "ai-toolkit", "install", str(clone)]) == 2
    assert problem in capsys.readouterr().err
    assert not extension_path(clone).exists()


def test_renamed_local_variables_do_not_matter(clone):
    file = clone / "toolkit/dataloader_mixins.py"
    text = file.read_text()
    assert "te_path" in text
    file.write_text(text.replace("te_path", "text_path"))
    assert "symbols fit" in check(clone)[-1]


def test_uninstall_restores_the_clone(clone, capsys):
    before = status(clone)
    assert main(["host", "ai-toolkit", "install", str(clone)]) == 0
    assert "gracetune_shim.py is installed" in capsys.readouterr().out
    assert status(clone) != before
    code = (
        "import sys; sys.dont_write_bytecode = False; sys.path.insert(0, '.'); "
        "from toolkit.extension import *; print([e.uid for e in get_all_extensions()])"
    )
    done = run_python("-c", code, cwd=clone)
    assert done.stdout.strip() == "['gracetune', 'sd_trainer', 'merge']", done.stderr
    assert list((clone / "extensions" / "__pycache__").glob("gracetune_shim.*"))
    assert main(["host", "ai-toolkit", "uninstall", str(clone)]) == 0
    assert "gracetune is removed from" in capsys.readouterr().out
    assert not (clone / "extensions" / "__pycache__").exists()
    left = [line for line in status(clone).splitlines() if "__pycache__" not in line]
    assert "\n".join(left) == before.strip()
    assert main(["host", "ai-toolkit", "uninstall", str(clone)]) == 0
    assert "gracetune was not installed in" in capsys.readouterr().out


def test_installing_again_replaces_the_file(clone):
    file = install(clone)
    file.write_text(file.read_text() + "\n# of an older version\n")
    install(clone)
    assert "older" not in file.read_text()


@pytest.mark.parametrize("action", [install, uninstall])
def test_a_file_of_someone_else_is_left_alone(clone, action):
    extension_path(clone).write_text("mine = 1\n")
    with pytest.raises(HostError, match="was not written by gracetune"):
        action(clone)
    assert extension_path(clone).read_text() == "mine = 1\n"


def test_a_clone_without_an_extensions_folder_is_refused(clone):
    shutil.rmtree(clone / "extensions")
    with pytest.raises(HostError, match="looks for extensions"):
        install(clone)


def test_run_requires_install(clone, capsys):
    assert main(["host", "ai-toolkit", "run", str(clone), "--", "x.yaml"]) == 2
    assert "host ai-toolkit install" in capsys.readouterr().err


def test_run_starts_ai_toolkit_without_our_allocator_settings(clone, tmp_path):
    install(clone)
    (tmp_path / "mine.yaml").write_text("job: extension\n")
    command = [sys.executable, "-m", "gracetune", "host", "ai-toolkit", "run", str(clone)]
    done = subprocess.run(
        [*command, "--", "mine.yaml", "-n", "name"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "use_uvm:True,max_split_size_mb:64"},
    )
    verdict, output = done.stdout.splitlines()
    started = json.loads(output)
    assert "symbols fit" in verdict
    assert started["arguments"] == [str(tmp_path / "mine.yaml"), "-n", "name"]
    assert started["cwd"] == str(clone)
    assert started["environment"]["PYTORCH_CUDA_ALLOC_CONF"] == "max_split_size_mb:64"
    assert started["environment"]["GRACETUNE_ALLOC_CONF"] == "use_uvm:True"


def test_the_installed_file_is_small_and_names_its_author(clone):
    text = install(clone).read_text()
    assert text.startswith('"""Installed by `gracetune host ai-toolkit install`')
    assert len(text.splitlines()) < 20


BROKEN = {
    "uninstalled": ("", "raise ModuleNotFoundError(\"No module named 'gracetune'\")\n"),
    "without-its-hosts": ("", ""),
    "without-a-dependency": ("hosts/ai_toolkit/enter.py", "import a_package_that_is_gone\n"),
    "half-written": ("hosts/ai_toolkit/enter.py", "def extensions(:\n"),
    "without-a-library": (
        "hosts/ai_toolkit/enter.py",
        'raise OSError("libcudart.so.13: cannot open\\nshared object file")\n',
    ),
    "another-version": ("hosts/ai_toolkit/enter.py", "extension_classes = []\n"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_jobs_run_without_a_broken_gracetune(clone, tmp_path, kind):
    """The host's other extensions load, and one line says why gracetune does not."""
    install(clone)
    file, text = BROKEN[kind]
    package = tmp_path / "broken/gracetune"
    if file:
        (package / file).parent.mkdir(parents=True)
        for folder in ("", "hosts", "hosts/ai_toolkit"):
            (package / folder / "__init__.py").touch()
    else:
        package.mkdir(parents=True)
    (package / (file or "__init__.py")).write_text(text)
    done = list_processes(clone, PYTHONPATH=str(package.parent))
    assert done.stdout.strip() == "['merge', 'sd_trainer']", done.stderr
    [line] = done.stderr.splitlines()
    assert "gracetune" in line
    assert "has no effect" in line


def list_processes(clone, **environment: str) -> subprocess.CompletedProcess[str]:
    """Print the process types that ai-toolkit knows, in a process that imports gracetune anew."""
    code = (
        "import sys; sys.path.insert(0, '.')\n"
        "for name in [*sys.modules]:\n"
        "    if name.partition('.')[0] == 'gracetune':\n"
        "        del sys.modules[name]\n"
        "from toolkit.extension import *\n"
        "print(sorted(get_all_extensions_process_dict()))\n"
    )
    return run_python("-c", code, cwd=clone, env={**os.environ, **environment})
