"""scripts/setup_gh200_env.sh and `gracetune env`."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from gracetune.cli import env
from gracetune.cli.main import main
from gracetune.config.environment import claim_alloc_conf, environment_settings
from gracetune.errors import ConfigError

SCRIPT = Path(__file__).parents[2] / "scripts" / "setup_gh200_env.sh"
DEFAULTS = {
    "SIMPLETUNER_GH200_ENABLE_UVM_HINTS": "1",
    "AITK_GH200_ENABLE_UVM_HINTS": "1",
    "GH200_UVM_OVERSUBSCRIPTION_RATIO": "5.0",
    "GH200_UVM_ACCESS_PATTERN": "gpu_first",
    "PYTORCH_CUDA_ALLOC_CONF": (
        "use_uvm:True,uvm_oversubscription_ratio:5.0,uvm_access_pattern:gpu_first"
    ),
    "ACCELERATE_MIXED_PRECISION": "bf16",
}
STARTS = (
    {},
    {"GH200_UVM_OVERSUBSCRIPTION_RATIO": "3.0", "GH200_UVM_ACCESS_PATTERN": "balanced"},
    {"SIMPLETUNER_GH200_ENABLE_UVM_HINTS": "0"},
    {"AITK_GH200_ENABLE_UVM_HINTS": "0"},
    {"ACCELERATE_MIXED_PRECISION": "no"},
    {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True,max_split_size_mb:128"},
    {"PYTORCH_CUDA_ALLOC_CONF": "use_uvm:True,uvm_oversubscription_ratio:3.0"},
    {"PYTORCH_CUDA_ALLOC_CONF": "uvm_stage1_threshold:0.15,max_split_size_mb:64,use_uvm:False"},
)


def source(
    start: dict[str, str], times: int = 1, shell: str = "bash", before: str = ""
) -> dict[str, str]:
    """Source the script in a shell with only these variables; return the variables afterwards."""
    lines = [before, *[f'. "{SCRIPT}" > /dev/null'] * times, "echo options:$-", "env"]
    done = subprocess.run(
        [shutil.which(shell) or shell, "-c", "\n".join(lines)],
        env={"PATH": "/usr/bin:/bin", **start},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    pairs = (line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
    return {name: value for name, value in pairs if name in DEFAULTS or "gracetune" in name.lower()}


def test_variables_and_defaults_of_the_seeds_are_exported() -> None:
    assert source({}) == DEFAULTS


@pytest.mark.parametrize("start", STARTS)
def test_sourcing_twice_changes_nothing(start: dict[str, str]) -> None:
    assert source(start, times=3) == source(start)


@pytest.mark.parametrize("start", STARTS)
def test_the_command_exports_the_same_variables(start: dict[str, str]) -> None:
    sourced = source(start)
    for environment in (dict(start), dict(start)):
        lines = env.export_lines(environment, environment_settings(environment))
        exported = dict(line.removeprefix("export ").split("=", 1) for line in lines)
        assert {name: value.strip("'") for name, value in exported.items()} == sourced
        claim_alloc_conf(environment)


def test_existing_values_are_kept() -> None:
    after = source(STARTS[1])
    assert after["PYTORCH_CUDA_ALLOC_CONF"] == (
        "use_uvm:True,uvm_oversubscription_ratio:3.0,uvm_access_pattern:balanced"
    )
    assert source(STARTS[6])["GH200_UVM_OVERSUBSCRIPTION_RATIO"] == "3.0"
    assert source(STARTS[5])["PYTORCH_CUDA_ALLOC_CONF"].endswith(
        ",expandable_segments:True,max_split_size_mb:128"
    )
    for hints_off in STARTS[2:4]:
        assert environment_settings(source(hints_off)).uvm_hints is False


def test_a_new_ratio_is_used_when_sourced_again() -> None:
    change = f'. "{SCRIPT}" > /dev/null\nGH200_UVM_OVERSUBSCRIPTION_RATIO=2.5'
    assert "ratio:2.5" in source({}, before=change)["PYTORCH_CUDA_ALLOC_CONF"]


@pytest.mark.parametrize("shell", ["bash", "sh"])
def test_strict_shells_keep_their_options(shell: str) -> None:
    assert source({}, shell=shell, before="set -eu") == DEFAULTS
    probe = f'. "{SCRIPT}" > /dev/null\ncase $- in *e*|*u*) exit 9;; esac\nfalse\necho alive'
    done = subprocess.run([shell, "-c", probe], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "alive\n")


def test_no_helper_variables_are_left_behind() -> None:
    probe = f'. "{SCRIPT}" > /dev/null\nset | grep ^_gracetune || true'
    done = subprocess.run(["bash", "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout == ""


def test_settings_of_managed_memory_that_is_off_govern_nothing() -> None:
    conf = "use_uvm:False,uvm_oversubscription_ratio:3.0,uvm_access_pattern:cpu_first"
    settings = environment_settings({"PYTORCH_CUDA_ALLOC_CONF": conf})
    effects = env.describe_effects(settings)
    assert "managed memory is off" in effects
    assert "uvm_oversubscription_ratio limits nothing, because managed memory is off" in effects
    assert "uvm_access_pattern places nothing, because managed memory is off" in effects


def test_the_table_shows_values_meanings_and_effects() -> None:
    environment = {
        "SIMPLETUNER_GH200_ENABLE_UVM_HINTS": "1",
        "PYTORCH_CUDA_ALLOC_CONF": (
            "use_uvm:True,uvm_oversubscription_ratio:3.0,uvm_access_pattern:cpu_first,"
            "uvm_stage1_threshold:0.15,uvm_stage1_min_bytes:10737418240"
        ),
        "ACCELERATE_MIXED_PRECISION": "bf16",
    }
    text = "\n".join(env.variable_table(environment, environment_settings(environment)))
    for words in (
        "hints are on",
        "managed memory is allowed, and used if the machine has a GPU that supports it",
        "the device has no space for (frozen and trained weights, gradients, optimizer state, EMA,",
        "uvm_oversubscription_ratio limits managed memory to 3.0 times device memory, or less",
        "uvm_access_pattern places managed memory cpu_first",
        "below 15% free",
        "below 10.0 GiB free",
        "`auto` means bf16",
        "(not set)",
        *(variable.meaning for variable in env.VARIABLES),
    ):
        assert words in text


def test_without_use_uvm_only_batches_are_managed() -> None:
    settings = environment_settings({"GH200_UVM_ACCESS_PATTERN": "cpu_first"})
    [effect] = env.describe_effects(settings)
    assert effect.endswith("without use_uvm, a run has only batches in it, if hints are on")


def test_without_variables_the_table_says_so() -> None:
    assert "no variable is set" in "\n".join(env.variable_table({}, environment_settings({})))


def test_the_command_prints_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env"]) == 0
    assert "Effects:" in capsys.readouterr().out
    assert main(["env", "--export"]) == 0
    assert capsys.readouterr().out.count("export ") == len(DEFAULTS)


def test_an_invalid_value_is_named() -> None:
    with pytest.raises(ConfigError, match="GH200_UVM_ACCESS_PATTERN"):
        environment_settings({"GH200_UVM_ACCESS_PATTERN": "sideways"})
