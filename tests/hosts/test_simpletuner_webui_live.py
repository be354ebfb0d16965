"""The WebUI of a real SimpleTuner, started by our command and used over HTTP."""

import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from urllib.error import URLError
from urllib.parse import urlencode
from urllib.request import ProxyHandler, build_opener

import pytest

# Not `simpletuner.helpers`: the folder `simpletuner` of the repository has that, too.
pytest.importorskip(
    "simpletuner.helpers.data_backend", reason="make test-hosts runs it in that environment"
)

from tiny_pipeline import write_environment

from gracetune.hosts.simpletuner.webui import WEBUI_OPTIONS

SRC = Path(__file__).resolve().parents[2] / "src"
pytestmark = pytest.mark.timeout(900)
GH200_BLOCK = {"placement": {"latents": "host"}, "enable_uvm_hints": True}
"""One key with a field, and one without."""
ask = build_opener(ProxyHandler({})).open


@pytest.fixture(scope="module")
def webui(tmp_path_factory):
    """The server's address and the configuration that it edits."""
    folder = tmp_path_factory.mktemp("webui")
    source = write_environment(
        folder / "source", folder / "no-model", resolution=256, gh200_optimizations=GH200_BLOCK
    )
    configs = folder / "home" / ".simpletuner" / "config"
    configs.mkdir(parents=True)
    file = configs / "default.json"
    file.write_text((source / "config.json").read_text())
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["host", "simpletuner", "run", "--", "server", "--host", "127.0.0.1"]
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "gracetune", *words, "--port", str(port)],
            cwd=folder,
            env=os.environ
            | {"HOME": str(folder / "home"), "PYTHONPATH": str(SRC), "ACCELERATE_USE_CPU": "true"},
            stdout=log,
            stderr=log,
        )
    address = f"http://127.0.0.1:{port}"
    try:
        wait_for(lambda: answers(f"{address}/health", server), "the server", folder / "log")
        yield SimpleNamespace(address=address, file=file, folder=folder)
    finally:
        server.terminate()
        server.wait(60)


def answers(address, server) -> bool:
    assert server.poll() is None, "the server has stopped"
    try:
        return ask(address, timeout=5).status == 200
    except URLError:
        return False


def wait_for(condition, name, log, limit_s=300):
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, f"{name} did not appear:\n{log.read_text()[-3000:]}"
        time.sleep(1)


def get(webui, path) -> str:
    return ask(webui.address + path, timeout=120).read().decode()


def post(webui, path, **form) -> str:
    return ask(webui.address + path, urlencode(form).encode(), timeout=120).read().decode()


def saved(webui) -> dict:
    return json.loads(webui.file.read_text())


def test_the_registry_and_the_page_have_our_fields(webui):
    fields = json.loads(get(webui, "/api/fields/metadata"))["fields"]
    page = get(webui, "/web/trainer/tabs/hardware")
    for option in WEBUI_OPTIONS:
        assert fields[option.name]["help_text"] == option.help
        assert {"hardware", "gracetune"} == {fields[option.name][k] for k in ("tab", "section")}
        assert f'name="{option.name}"' in page
        assert option.label in page


def test_fields_are_saved_as_blocks(webui):
    page = get(webui, "/web/trainer/tabs/hardware")
    select = re.search(r'<select[^>]*name="gracetune_enable_uvm_hints".*?</select>', page, re.S)
    assert re.search(r'value="true"[^>]*selected', select.group()), select.group()
    form = {"gracetune_vae_cache_type": "unified_memory", "gracetune_host_budget_gb": "2.5"}
    assert "Configuration saved" in post(webui, "/api/training/config", **form)
    after = saved(webui)
    assert after["cache_config"] == {"vae_cache_type": "unified_memory", "host_budget_gb": 2.5}
    assert after["gh200_optimizations"] == GH200_BLOCK
    assert not [key for key in after if key.startswith("gracetune_")]
    form = {"gracetune_enable_uvm_hints": "unset", "gracetune_host_budget_gb": ""}
    post(webui, "/api/training/config", **form)
    after = saved(webui)
    assert after["cache_config"] == {"vae_cache_type": "unified_memory"}
    assert after["gh200_optimizations"] == {"placement": {"latents": "host"}}


def test_the_form_shows_errors_that_would_stop_a_job(webui):
    page = post(webui, "/api/training/validate", gracetune_host_budget_gb="-3")
    assert "cache_config.host_budget_gb is -3; it must be above 0" in page
    assert "host_budget_gb" not in post(webui, "/api/training/validate")


JOB = """
import json, os, sys, time
from importlib import import_module
from gracetune.hosts.simpletuner.hooks import PROCESS_KEEPER, TRAINER
from gracetune.hosts.simpletuner.webui import install_webui
install_webui(os.environ, import_module)
keeper = import_module(PROCESS_KEEPER)
job = keeper.submit_job("one", import_module(TRAINER).run_trainer_job, json.loads(sys.argv[1]))
end = time.monotonic() + 500
while job.is_alive() and time.monotonic() < end:
    text = open(job.log_file, encoding="utf-8").read()
    if sys.argv[2] in text:
        break
    time.sleep(1)
job.terminate()
print(open(job.log_file, encoding="utf-8").read())
"""


def test_a_job_starts_through_our_entry_point_with_the_values_of_the_fields(tmp_path):
    """Submit the job directly, because the WebUI only queues jobs without a GPU."""
    source = write_environment(tmp_path / "source", tmp_path / "no-model")
    config = {
        f"--{key}": value for key, value in json.loads((source / "config.json").read_text()).items()
    }
    fields = {"--gracetune_text_cache_type": "memory", "--gracetune_host_budget_gb": "1.5"}
    line = "cache files are kept in host memory, up to 1.5 GiB"
    bin_folder = str(Path(sys.executable).parent)
    done = subprocess.run(
        [sys.executable, "-c", JOB, json.dumps({**config, **fields}), line],
        cwd=tmp_path,
        env=os.environ
        | {
            "HOME": str(tmp_path),
            "PYTHONPATH": str(SRC),
            "PATH": os.pathsep.join([bin_folder, os.environ["PATH"]]),
            "ACCELERATE_USE_CPU": "true",
            "HF_HUB_OFFLINE": "1",
        },
        capture_output=True,
        text=True,
    )
    assert line in done.stdout, done.stdout[-3000:] + done.stderr[-3000:]
    assert "-m gracetune.hosts.simpletuner" in done.stdout
