"""Set the environment that torch reads at import, and define the fixtures most tests share."""

import os
import signal
from contextlib import suppress
from functools import partial
from pathlib import Path

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"  # no test may depend on the real hub; those of downloads differ

import pytest

from gracetune.config.schema import RunFile

# `nohup make test` ignores SIGHUP, a shell ignores SIGINT for its background jobs, and runs started
# by the tests would inherit that.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)


with suppress(ImportError):  # the tests on a GPU do not need it
    from hypothesis import settings

    # An example that takes long on a busy machine is not a failure.
    settings.register_profile("gracetune", deadline=None)
    settings.load_profile("gracetune")


LONGEST = (
    "unit/train/test_gradient_check.py",
    "test_benchmarks.py",
    "e2e/test_several_ranks.py",
    "contract/test_adapter_tools.py",
    "e2e/test_feature_scripts.py",
    "unit/offload/test_interleavings.py",
    "e2e/test_resume.py",
    "e2e/test_launch_lines.py",
    "unit/plan/test_launch_overhead.py",
    "unit/plan/test_meta_models.py",
    "unit/plan/test_planned_run.py",
    "e2e/test_families.py",
    "contract/test_adapter_spellings.py",
    "golden/test_golden.py",
    "unit/cli/test_cli_baseline.py",
    "unit/train/test_run.py",
    "unit/offload/test_checkpointing.py",
    "e2e/test_context_parallel_runs.py",
    "e2e/test_resume_layouts.py",
    "contract/test_family.py",
    "e2e/test_sharded_ranks.py",
    "unit/plan/test_kernel_recorder.py",
)
"""Test files that take longest, by CPU time. They start first: one core would be idle if one of
them started last."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    folder = Path(__file__).parent
    places = {folder / name: place for place, name in enumerate(LONGEST)}
    missing = [str(path) for path in places if not path.is_file()]
    assert not missing, f"LONGEST in tests/conftest.py names {missing}"
    items.sort(key=lambda item: places.get(item.path, len(places)))


class EventRecorder:
    """An event sink that keeps every event; it can also be passed as `emit`."""

    def __init__(self):
        self.events = []

    def __call__(self, event):
        self.events.append(event)

    handle = __call__

    def close(self):
        pass

    def of(self, kind):
        return [event for event in self.events if isinstance(event, kind)]

    def texts(self):
        return [event.text for event in self.events if type(event).__name__ == "Notice"]


@pytest.fixture
def recorder():
    return EventRecorder()


@pytest.fixture(scope="session")
def shapes_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("shapes") / "data"


def build_tiny_run(folder, shapes_folder, **sections) -> RunFile:
    """Return a small run file: 64 images, batches of 4, no validation; `sections` replace parts."""
    settings = {
        "output_dir": str(folder / "run"),
        "datasets": [
            {
                "id": "shapes",
                "type": "shapes",
                "instance_data_dir": str(shapes_folder),
                "shapes": {"copies": 1},
                "resolution": 24,
                "max_aspect": 1.0,
                "caption_dropout": 0.2,
            }
        ],
        "logging": {"tensorboard": False, "every": 1},
        "validation": {"every": 0},
    }
    train = {"max_train_steps": 3, "batch_size": 4, "checkpoint_every": 0, "ema_decay": 0.9}
    settings["train"] = train | sections.pop("train", {})
    settings["optimizer"] = {"lr": 1e-3} | sections.pop("optimizer", {})
    for name, value in sections.items():
        before = settings.get(name)
        settings[name] = before | value if isinstance(before, dict) else value
    return RunFile.model_validate(settings)


@pytest.fixture
def tiny_run(tmp_path, shapes_folder):
    """Return `build_tiny_run` for this test's folder."""
    return partial(build_tiny_run, tmp_path, shapes_folder)


@pytest.fixture(scope="session")
def tiny_run_in(shapes_folder):
    """Return `build_tiny_run` for a folder that is the first argument."""
    return partial(build_tiny_run, shapes_folder=shapes_folder)


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory, shapes_folder):
    """Return the run file of a finished run of three steps; tests must not change its folder."""
    from gracetune.train.run import run_training

    run = build_tiny_run(tmp_path_factory.mktemp("finished"), shapes_folder)
    run_training(run)
    return run


@pytest.fixture(scope="session")
def miniature(tmp_path_factory):
    """Return a function that writes a miniature model once and returns its folder."""
    folders = {}

    def write(name):
        if name not in folders:
            from fakes.miniatures import write_miniature

            folders[name] = write_miniature(name, tmp_path_factory.mktemp("models") / name)
        return folders[name]

    return write


# Lines for the end of the report. Workers of pytest-xdist pass theirs to the main process.


SUMMARY = pytest.StashKey()


def pytest_configure(config):
    config.stash[SUMMARY] = []


@pytest.fixture(scope="session")
def summary_lines(request):
    """Return a list to which tests append lines that the report ends with."""
    return request.config.stash[SUMMARY]


def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["summary"] = session.config.stash[SUMMARY]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    node.config.stash[SUMMARY] += getattr(node, "workeroutput", {}).get("summary", [])


def pytest_terminal_summary(terminalreporter, config):
    if config.stash[SUMMARY]:
        terminalreporter.section("explored")
        for line in config.stash[SUMMARY]:
            terminalreporter.write_line(line)
