"""Every benchmark runs to its end in a rehearsal, and every result file says how it was made."""

import json
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, nullcontext
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gracetune.data.buckets import bucket_sizes

ROOT = Path(__file__).parent.parent
BENCHMARKS = ROOT / "benchmarks"
RESULTS = BENCHMARKS / "results"
SCRIPTS = [path for path in sorted(BENCHMARKS.glob("*.py")) if "__main__" in path.read_text()]
LONG_REHEARSALS = {
    "async_saving",
    "automagic",
    "data_decode",
    "families_step",
    "gpu_session",
    "gradient_check",
    "host_time",
    "large_families",
    "lora_quality",
    "managed_training",
    "optimizer_state",
    "plan_check",
    "planned_ranks",
    "rank_balance",
    "ring",
    "sharded",
    "shared_weights",
    "tuned_loop",
    "wan14b_step",
    "wan_experts",
}
"""Scripts whose rehearsal takes over three seconds; `make test-slow` runs them."""


@pytest.fixture
def _restored(monkeypatch):
    """Undo what a script sets for its whole process."""
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield
    torch.set_num_threads(threads)
    torch.set_default_dtype(dtype)
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.compiler.set_stance("default")


@pytest.mark.filterwarnings("default")
@pytest.mark.usefixtures("_restored")
@pytest.mark.parametrize(
    "script",
    [
        pytest.param(
            path,
            marks=(pytest.mark.slow, pytest.mark.timeout(1800))
            if path.stem in LONG_REHEARSALS
            else (),
            id=path.stem,
        )
        for path in SCRIPTS
    ],
)
def test_a_rehearsal_runs_to_its_end(script, tmp_path, monkeypatch):
    before = {path: path.read_bytes() for path in RESULTS.iterdir()}
    monkeypatch.setattr(sys, "argv", [str(script), "--rehearse", "--out", str(tmp_path)])
    with suppress_success():
        runpy.run_path(str(script), run_name="__main__")
    assert {path: path.read_bytes() for path in RESULTS.iterdir()} == before
    for path in tmp_path.glob("*.json"):
        record = json.loads(path.read_text())
        assert record["script"] == f"benchmarks/{script.name}"
        assert record["figures"]
        assert (RESULTS / path.name).exists(), "a measurement writes the same files"


@contextmanager
def suppress_success():
    """Suppress the SystemExit of a script that ends with the exit code 0."""
    try:
        yield
    except SystemExit as end:
        if end.code:
            raise


def test_every_measuring_script_is_rehearsed():
    """A file without the guard is imported by others; if nobody does, it must be a script."""
    sources = {path.stem: path.read_text() for path in BENCHMARKS.glob("*.py")}
    for name in sources.keys() - {path.stem for path in SCRIPTS}:
        pattern = rf"^\s*(?:import {name}\b|from {name} import)"
        users = [other for other, text in sources.items() if re.search(pattern, text, re.M)]
        assert users, f"benchmarks/{name}.py is neither imported nor run"


@pytest.mark.usefixtures("_restored")
def test_a_rehearsal_never_writes_to_the_results(monkeypatch, capsys):
    argv = ["bare_loop.py", "--rehearse", "--out", str(RESULTS)]
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(SystemExit):
        runpy.run_path(str(BENCHMARKS / "bare_loop.py"), run_name="__main__")
    assert "a rehearsal does not write to" in capsys.readouterr().err


@pytest.mark.filterwarnings("default")
@pytest.mark.usefixtures("_restored")
@pytest.mark.parametrize(("model", "bucket"), [("clip", "64x64x5"), ("qwen", "64x64")])
def test_the_product_trains_the_samples_of_the_tuned_loops(model, bucket, tmp_path, monkeypatch):
    """Videos for `clip`; and Qwen-Image, which does not pad captions, gets 512 tokens."""
    script = BENCHMARKS / "tuned_loop.py"
    argv = [str(script), model, "--rehearse", "--ways", "product", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", argv)
    described = []
    original = import_module("product_run").figures_of

    def figures_of(run, events, began):
        described.extend(event for event in events if event["event"] == "run_described")
        return original(run, events, began)

    monkeypatch.setattr("product_run.figures_of", figures_of)
    with suppress_success():
        runpy.run_path(str(script), run_name="__main__")
    assert bucket in [one["size"] for one in described[0]["data"]["buckets"]]
    figures = json.loads((tmp_path / "tuned_loop.json").read_text())["figures"]
    product = f"{model}.96.product"
    assert "texts of 512 tokens" in figures[f"{product}.shapes"]
    scaled = figures[f"{product}.images_s"] * figures[f"{product}.mean_pixels_of_largest"]
    assert figures[f"{product}.largest_images_s"] == pytest.approx(scaled)


@pytest.mark.usefixtures("_restored")
def test_the_largest_video_bucket_has_the_size_of_the_loops_clips():
    product_run, cases = map(import_module, ("product_run", "model_cases"))
    first, *others = product_run.VIDEO_SIZES
    assert first == (cases.CLIP.width, cases.CLIP.height)
    buckets = bucket_sizes(product_run.VIDEO_RESOLUTION, 16, 3.0)
    assert {first, *others} <= {*buckets}
    assert all(width * height <= first[0] * first[1] for width, height in others)


@pytest.fixture
def _forking(_restored, monkeypatch):
    """Let this process be forked, although earlier tests may have left threads: the forked process
    uses none, and has the functions that a test replaces."""
    monkeypatch.setattr(import_module("results"), "why_not_to_fork", lambda: "")


@pytest.fixture
def product_run(_forking, tmp_path, monkeypatch):
    """The module, whose runs sleep and ignore Ctrl-C; with a log of one step."""

    def sleep(_words):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        time.sleep(60)

    module = import_module("product_run")
    monkeypatch.setattr(module, "run_command", sleep)
    monkeypatch.setattr(module, "EXIT_S", 0.2)
    monkeypatch.setattr(module, "POLL_S", 0.01)
    (tmp_path / "events.jsonl").write_text('{"event": "step_done", "step": 1}\n')
    return module


def test_a_run_that_does_not_end_is_killed_and_has_an_exit_code(product_run, tmp_path):
    log = tmp_path / "events.jsonl"
    assert product_run.train_in_process(tmp_path / "run.json", log, 1) == -9


@pytest.mark.parametrize("has_stepped", [True, False])
def test_the_limit_of_a_run_counts_from_its_first_step(
    has_stepped, product_run, tmp_path, monkeypatch
):
    log = tmp_path / "events.jsonl"
    if not has_stepped:
        log.write_text("")
    short, long = ("STEPS_S", "START_S") if has_stepped else ("START_S", "STEPS_S")
    monkeypatch.setattr(product_run, short, 0.1)
    monkeypatch.setattr(product_run, long, 1e9)
    assert product_run.train_in_process(tmp_path / "run.json", log, 5) == -9


def test_a_run_ends_with_its_exit_code(product_run, tmp_path, monkeypatch):
    monkeypatch.setattr(product_run, "run_command", lambda _words: 3)
    assert product_run.train_in_process(tmp_path / "run.json", tmp_path / "events.jsonl", 5) == 3


@pytest.mark.usefixtures("_restored")
def test_a_run_that_is_stopped_early_has_figures():
    product_run = import_module("product_run")
    run = product_run.ProductRun("flux", 24, 2, 40, 30)
    events = [
        {
            "event": "step_done",
            "step": n,
            "seconds": 9.0 if n == 1 else 2.0,
            "samples": 2,
            "time": n,
        }
        for n in range(1, 8)
    ]
    found = product_run.figures_of(run, events, 0.0)
    assert found["stopped_early"]
    assert (found["seconds"], found["images_s"]) == (2.0, 1.0), "without the first step"
    assert found["step_s"] == [9.0, *[2.0] * 6]


@pytest.mark.usefixtures("_restored")
def test_kept_models_are_deleted_only_if_another_one_needs_the_space(tmp_path, monkeypatch, capsys):
    product_run = import_module("product_run")
    monkeypatch.setattr(product_run, "_write_alone", lambda *_: None)
    monkeypatch.setattr(
        product_run,
        "_free_nbytes",
        lambda folder, _: 10 * (3 - len([*folder.parent.iterdir()])),
    )
    monkeypatch.setenv(product_run.KEEP, str(tmp_path))
    for name, kept in (("a", ["a"]), ("b", ["a", "b"]), ("c", ["c"]), ("c", ["c"])):
        with product_run.model_folder(name, 20 if name == "c" else 10, small=False):
            assert sorted(path.name for path in tmp_path.iterdir()) == kept
    text = capsys.readouterr().out
    assert text.count("is deleted") == 2
    assert "c needs the space" in text


@pytest.mark.usefixtures("_restored")
@pytest.mark.parametrize("memory_gb", [96, 24])
def test_a_loop_that_pins_its_weights_has_the_memory_of_other_models(
    memory_gb, tmp_path, monkeypatch
):
    tuned_loop = import_module("tuned_loop")
    product_run = tuned_loop.product_run
    monkeypatch.setattr(product_run, "_free_nbytes", lambda *_: 0)
    monkeypatch.setattr(tuned_loop, "run_loop_in_process", lambda *_: iter([{}]))
    monkeypatch.setenv(product_run.KEEP, str(tmp_path))
    for name in ("flux", "wan21"):
        (tmp_path / name).mkdir()
    arguments = SimpleNamespace(model="flux", rehearse=False, budget=0.0)
    loop = tuned_loop.MODELS["flux"].loops[memory_gb][0]
    tuned_loop.measure_loop(arguments, loop, memory_gb, lambda *_: None)
    kept = ["flux"] if loop.offload else ["flux", "wan21"]
    assert sorted(path.name for path in tmp_path.iterdir()) == kept


@pytest.mark.usefixtures("_restored")
def test_a_child_process_is_killed_with_its_parent():
    results = import_module("results")
    start = "import subprocess, sys, time; "
    start += "print(subprocess.Popen(sys.argv[1:]).pid, flush=True); time.sleep(60)"
    command = [sys.executable, "-c", start, *results.dying_with_parent(["sleep", "60"])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        status = Path(f"/proc/{int(parent.stdout.readline())}/stat")
        while "(sleep)" not in status.read_text():  # it has asked for the signal
            time.sleep(0.01)
        parent.kill()
    assert ends(status)


def ends(status):
    """Return whether a process ends soon, by its file in /proc."""
    for _ in range(1000):
        if not status.exists() or status.read_text().rpartition(") ")[2].startswith("Z"):
            return True
        time.sleep(0.01)
    return False


@pytest.fixture
def gpu_session(_restored, tmp_path, monkeypatch):
    """The driver, without results, whose jobs are only listed in `ran`."""
    module = import_module("gpu_session")
    ran = []

    def run_job(job, _more, limit_s):
        ran.append((job.name, limit_s))
        return 0

    monkeypatch.setattr(module, "run_job", run_job)
    monkeypatch.setattr(module.results, "FOLDER", tmp_path / "committed")
    monkeypatch.setenv("GRACETUNE_BENCHMARK_MODELS", str(tmp_path / "models"))

    def main(*arguments):
        ran.clear()
        argv = ["gpu_session.py", "--out", str(tmp_path / "out"), "--commit", "abcdef0", *arguments]
        monkeypatch.setattr(sys, "argv", argv)
        assert module.main() == 0
        return [name for name, _ in ran]

    return SimpleNamespace(module=module, main=main, ran=ran, out=tmp_path / "out")


def test_a_session_runs_the_most_valuable_jobs_that_fit(gpu_session, capsys):
    everything = gpu_session.main("--minutes", "1000")
    assert everything == [job.name for job in gpu_session.module.all_jobs()]
    first = ["managed_training.first", "first_steps.flux", "first_steps.qwen_image"]
    assert everything[:3] == first
    assert all(name.startswith("planner_runs.") for name in everything[3:7])
    some = gpu_session.main("--minutes", "2.5")
    assert "first_steps.flux" not in some
    assert "tuned_loop.flux.96.compiled" in some
    assert all(limit_s <= 150 for _, limit_s in gpu_session.ran)
    assert "needs 204 s of 145" in capsys.readouterr().out
    assert gpu_session.main("--minutes", "1000", "--list") == []
    assert "first_steps.flux" not in gpu_session.main("--minutes", "1000", "--skip", "first_steps")


@pytest.mark.parametrize(("started", "counted"), [(5, 5), (10**6, 60), (-(10**6), 0)])
def test_the_time_of_a_session_includes_its_imports(gpu_session, monkeypatch, started, counted):
    """Also if the clock was set after the process began."""
    module, now = gpu_session.module, 2e9
    process = SimpleNamespace(create_time=lambda: now - started)
    monkeypatch.setattr(module.psutil, "Process", lambda: process)
    monkeypatch.setattr(module, "time", SimpleNamespace(time=lambda: now))
    assert module.process_began() == now - counted


def test_a_session_skips_what_this_commit_has_measured(gpu_session):
    results = gpu_session.module.results
    measured = {"qwen_32.commit": "abcdef0-dirty", "qwen_32.seconds": 1.0, "qwen_32.took_s": 900.0}
    stopped = {"fp8_wan_24.commit": "abcdef0", "flux_768_16.commit": "1234567"}
    other = {"flux_768_16.seconds": 1.0, "flux_768_16.took_s": 9000.0}
    results.write("planner_runs", measured | stopped | other, gpu_session.out, "abcdef0")
    ran = gpu_session.main("--minutes", "100")
    assert "planner_runs.qwen_32" not in ran
    assert "planner_runs.fp8_wan_24" in ran, "it has no figures"
    assert "planner_runs.flux_768_16" not in ran, "it takes as long as it did before"
    assert "planner_runs.flux_768_16" in gpu_session.main("--minutes", "1000")


def test_a_session_continues_with_the_ways_that_are_not_measured(gpu_session):
    module, session = import_module("managed_training"), gpu_session.module
    assert [way for ways in session.MANAGED_WAYS for way in ways] == [*module.WAYS]
    *first, last = session.MANAGED_WAYS[0]
    measured = {name: {"commit": "abcdef0"} for name in first}
    assert module.unmeasured(measured, "abcdef0", [*first, last]) == [last]
    assert module.unmeasured(measured, "1234567", [*first, last]) == [*first, last]
    assert module.unmeasured(measured, "abcdef0", first) == first

    job, out = session.all_jobs()[0], gpu_session.out
    whole = session.estimated_seconds(job, out, "abcdef0")
    figures = {name: {"commit": "abcdef0", "step_s": 1.0} for name in first}
    session.results.write("managed_training", figures, out, "abcdef0")
    rest = session.estimated_seconds(job, out, "abcdef0")
    assert rest == pytest.approx(whole / (len(first) + 1))
    assert job.name in gpu_session.main("--minutes", "1000")
    session.results.write("managed_training", figures | {last: figures[first[0]]}, out, "abcdef0")
    assert job.name not in gpu_session.main("--minutes", "1000")


@pytest.mark.usefixtures("_forking")
def test_a_job_that_takes_too_long_is_stopped(monkeypatch):
    session = import_module("gpu_session")
    job = session.Job("endless", "none", (), "none", 1.0)
    monkeypatch.setattr(session, "_run_script", lambda *_: time.sleep(60))
    assert session.run_job(job, [], 0.1) == -signal.SIGTERM
    monkeypatch.setattr(session, "_run_script", lambda *_: sys.exit(3))
    assert session.run_job(job, [], 60) == 3


@pytest.mark.usefixtures("_forking")
def test_a_run_ends_with_its_job(monkeypatch, tmp_path):
    """Otherwise it would hold the memory of the GPU while the next job is measured."""
    session, results = map(import_module, ("gpu_session", "results"))

    def run(*_):
        pid = results.start_forked(time.sleep, 60).pid
        (tmp_path / "pid").write_text(str(pid))
        time.sleep(60)

    monkeypatch.setattr(session, "_run_script", run)
    session.run_job(session.Job("endless", "none", (), "none", 1.0), [], 1.0)
    assert ends(Path(f"/proc/{(tmp_path / 'pid').read_text()}/stat"))


@pytest.mark.usefixtures("_forking")
def test_a_start_that_takes_too_long_is_killed(monkeypatch, tmp_path):
    first_steps = import_module("first_steps")
    monkeypatch.setattr(first_steps, "train", lambda *_: time.sleep(60))
    assert first_steps.train_in_process(tmp_path, tmp_path, 0.1) == "not done after 0 s"
    caches = "TORCHINDUCTOR_CACHE_DIR", "XDG_CACHE_HOME"
    ours = tmp_path / "compiled", tmp_path / "cache"
    monkeypatch.setattr(
        first_steps, "train", lambda *_: 5 + (tuple(map(Path, map(os.getenv, caches))) == ours)
    )
    assert first_steps.train_in_process(tmp_path, tmp_path, 60) == "exit code 6"


@pytest.mark.slow
@pytest.mark.usefixtures("_restored")
@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_a_process_that_cannot_be_forked_starts_a_new_interpreter(method, monkeypatch, capsys):
    results = import_module("results")
    monkeypatch.setattr(results, "why_not_to_fork", lambda: "of a test")
    monkeypatch.setattr(results, "cuda_is_initialized", lambda: method == "spawn")
    process = results.start_forked(sys.exit, 4)
    process.join()
    assert process.exitcode == 4
    assert method in type(process).__name__.lower()
    assert "because of a test" in capsys.readouterr().out


@pytest.mark.usefixtures("_restored")
@pytest.mark.parametrize("reason", ["", "CUDA is initialized", "2 threads"])
def test_a_process_with_threads_or_cuda_is_not_forked(reason, monkeypatch):
    """Any call before cuInit is answered with the error 3."""
    results = import_module("results")
    driver = SimpleNamespace(cuDeviceGetCount=lambda _: 0 if "CUDA" in reason else 3)
    monkeypatch.setattr(results.ctypes, "CDLL", lambda _: driver)
    threads = [None] * (2 if "threads" in reason else 1)
    monkeypatch.setattr(results, "Path", lambda _: SimpleNamespace(iterdir=lambda: threads))
    found = results.why_not_to_fork()
    assert reason in found if reason else not found


@pytest.mark.usefixtures("_restored")
def test_the_machine_is_described_without_cuda_and_nvml(monkeypatch, tmp_path):
    """A process that has used them is not forked, or shares its connection with the fork."""
    results = import_module("results")
    results.gpu_name.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("it was called"))
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho NVIDIA H200\necho NVIDIA H200\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert results.this_machine().startswith("NVIDIA H200, ")
    results.gpu_name.cache_clear()


READY = """
import sys
import gpu_session
assert not gpu_session.results.why_not_to_fork(), gpu_session.results.why_not_to_fork()
assert "torch._inductor.async_compile" not in sys.modules, "it starts processes and a thread"
"""


@pytest.mark.slow
def test_the_imports_of_a_session_leave_a_process_that_can_be_forked():
    paths = os.pathsep.join(map(str, (ROOT / "src", BENCHMARKS)))
    env = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "2"}
    env.pop("OPENBLAS_NUM_THREADS", None)
    subprocess.run([sys.executable, "-c", READY], env=env, check=True)


NOTICES = (
    "plan: expect 2.000 samples/s, 1.000 s per micro-batch, 20.0 GiB of device memory",
    "measured: 1.600 samples/s (expected 2.000), 21.0 GiB of device memory (expected 20.0 GiB)",
    "plan corrected after the first steps: batch 2, eager. Expect 1.900 samples/s, 1.053 s per "
    "micro-batch, 23.0 GiB of device memory; the first plan would give 1.600 samples/s, 1.250 s "
    "per micro-batch, 21.0 GiB of device memory",
    "measured: 1.950 samples/s (expected 1.900), 22.5 GiB of device memory (expected 23.0 GiB)",
)


def test_kept_models_are_written_once(tmp_path, monkeypatch):
    product_run = import_module("product_run")
    written = []

    def write_model(name, folder, config):
        written.append(folder)
        if len(written) == 2:
            raise OSError("the disk is full")

    monkeypatch.setattr(product_run, "_write_alone", write_model)
    monkeypatch.setenv(product_run.KEEP, str(tmp_path))
    for _ in range(2):
        with product_run.model_folder("flux", 1, small=False) as folder:
            assert folder.parent == tmp_path
    assert len(written) == 1
    for expected in (pytest.raises(OSError, match="full"), nullcontext()):
        with expected, product_run.model_folder("flux", 1, small=False, config={"n": 2}) as other:
            assert other != folder
    assert len(written) == 3, "an incomplete model is written again"


@pytest.mark.usefixtures("_restored")
@pytest.mark.parametrize("corrected", [True, False])
def test_the_first_prediction_is_compared_with_the_first_plan(corrected):
    product_run, planner_runs = map(import_module, ("product_run", "planner_runs"))
    run = product_run.ProductRun("flux", 24, 2, 25, 15)
    events = [
        {"event": "notice", "text": text, "level": "info"}
        for text in (NOTICES if corrected else NOTICES[:2])
    ]
    found = product_run.figures_of(run, events, 0.0)
    assert found["plan_corrected"] is corrected
    found |= {"predicted_seconds": 1.0, "predicted_peak_gib": 20.0, "step_s": [9.0] * 10 + [1.0]}
    found = planner_runs.compare(found)
    if not corrected:
        assert found["seconds_off"] == pytest.approx(0.0)
        return
    assert found["seconds_off"] == pytest.approx(1.0 / 1.25 - 1)
    assert found["peak_off"] == pytest.approx(20 / 21 - 1)
    assert found["corrected_seconds_off"] == pytest.approx(0.053)
    assert found["corrected_peak_off"] == pytest.approx(23 / 22.5 - 1)


@pytest.mark.usefixtures("_restored")
def test_a_script_that_is_killed_while_it_writes_leaves_the_earlier_figures(tmp_path, monkeypatch):
    results = import_module("results")
    results.write("one", {"a": 1}, tmp_path, "0000000")
    original = Path.write_text

    def write_text(path, text):
        original(path, text[:20])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", write_text)
    with pytest.raises(KeyboardInterrupt):
        results.write("one", {"a": 1, "b": 2}, tmp_path, "0000000")
    assert results.read("one", tmp_path) == {"a": 1}


@pytest.mark.usefixtures("_restored")
def test_a_measurement_adds_to_the_committed_figures(tmp_path, monkeypatch):
    results = import_module("results")
    monkeypatch.setattr(results, "FOLDER", tmp_path / "committed")
    results.write("one", {"a": 1}, tmp_path / "committed", "0000000")
    arguments = SimpleNamespace(rehearse=False, out=tmp_path / "out")
    assert results.previous("one", arguments) == {"a": 1}
    results.write("one", {"a": 1, "b": 2}, tmp_path / "out", "0000000")
    assert results.previous("one", arguments) == {"a": 1, "b": 2}
    arguments.rehearse = True
    assert results.previous("one", arguments) == {}


@pytest.mark.usefixtures("_restored")
@pytest.mark.parametrize(
    ("speeds", "budget_s", "peak_gib", "tried"),
    [
        ([1.0, 1.2, 1.1, 9.0], 1e9, 30.0, [4, 6, 9]),
        ([1.0, None], 1e9, 30.0, [4, 6]),
        ([1.0, 2.0], 0.0, 30.0, [4]),
        ([1.0, 2.0], 1e9, 80.0, [4]),
    ],
    ids=["slower", "out of memory", "no time left", "cannot fit"],
)
def test_a_tuned_loop_tries_larger_batches(speeds, budget_s, peak_gib, tried, monkeypatch):
    tuned_loop = import_module("tuned_loop")
    found = iter(speeds)

    def time_loop(*_):
        speed = next(found)
        if speed is None:
            return {"failed": "out of memory"}
        return {"images_s": speed, "weights_gib": 20.0, "peak_gib": peak_gib}

    monkeypatch.setattr(tuned_loop, "time_loop", time_loop)
    monkeypatch.setattr(tuned_loop, "make_transformer", lambda *_: None)
    loop = tuned_loop.Loop("eager", compiled=False, checkpointing=True, batch=4)
    lines = list(tuned_loop.run_loop(tuned_loop.MODELS["flux"], loop, 96, budget_s, rehearse=True))
    batches = [name for line in lines for name in line if name.startswith("batch_")]
    assert batches == [f"batch_{batch}" for batch in tried]
    assert any("not_tried" in line for line in lines) == (tried == [4])
    assert tuned_loop.merge(lines)["images_s"] == max(filter(None, speeds[: len(tried)]))


@pytest.mark.usefixtures("_forking")
@pytest.mark.parametrize("ending", ["done", "failed", "too late"])
def test_a_loop_in_a_process_of_its_own_sends_its_figures(ending, monkeypatch):
    tuned_loop = import_module("tuned_loop")

    def run_loop(*_, rehearse):
        assert not rehearse
        yield {"batch_4": {"images_s": 1.0}}
        if ending == "failed":
            sys.exit(3)
        if ending == "too late":
            time.sleep(60)

    monkeypatch.setattr(tuned_loop, "run_loop", run_loop)
    now = 0.0
    monkeypatch.setattr(tuned_loop, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(tuned_loop, "KILLED_AFTER_S", 60)
    model = tuned_loop.MODELS["flux"]
    lines = tuned_loop.run_loop_in_process(model, model.loops[96][0], 96, 0.0)
    assert next(lines) == {"batch_4": {"images_s": 1.0}}
    if ending == "too late":
        now = 61.0
    assert (
        list(lines)
        == {
            "done": [],
            "failed": [{"failed": "ended with exit code 3"}],
            "too late": [{"failed": "stopped after 60 s"}],
        }[ending]
    )


def git(*arguments):
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_a_result_file_names_its_date_commit_machine_and_script(path):
    record = json.loads(path.read_text())
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", record["date"])
    assert re.fullmatch(r"[0-9a-f]{7,40}(-dirty)?", record["commit"])
    assert "torch" in record["machine"]
    assert ROOT / record["script"] in SCRIPTS
    assert record["figures"]
    shallow = git("rev-parse", "--is-shallow-repository").stdout.strip()
    if shallow != "false":
        pytest.skip("the history is not complete, or this is not a git repository")
    commit = record["commit"].removesuffix("-dirty")
    assert git("merge-base", "--is-ancestor", commit, "HEAD").returncode == 0, commit
