"""Read settings from environment variables. No other module of gracetune reads these variables.

The run file takes precedence over the environment, and the environment over defaults.

gracetune replaces a patched torch, whose users have set additional allocator settings (`use_uvm`,
`uvm_*`) in PYTORCH_CUDA_ALLOC_CONF. Stock torch refuses to start with them. `claim_alloc_conf`
therefore moves them to GRACETUNE_ALLOC_CONF before torch is imported, where this process and its
child processes find them. They are called "our" settings below.
"""

from __future__ import annotations

import difflib
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from gracetune.config.fsdp import (
    PARALLELISM_PREFIX,
    FsdpEntry,
    FsdpSettings,
    is_fsdp_key,
    translate_fsdp,
    translate_parallelism,
)
from gracetune.errors import ConfigError
from gracetune.units import parse_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, MutableMapping

HINTS_VARIABLES = ("SIMPLETUNER_GH200_ENABLE_UVM_HINTS", "AITK_GH200_ENABLE_UVM_HINTS")
RATIO_VARIABLE = "GH200_UVM_OVERSUBSCRIPTION_RATIO"
PATTERN_VARIABLE = "GH200_UVM_ACCESS_PATTERN"
PRECISION_VARIABLE = "ACCELERATE_MIXED_PRECISION"
ALLOC_CONF_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables from which torch reads allocator settings; the first takes precedence."""
OWN_ALLOC_CONF_VARIABLE = "GRACETUNE_ALLOC_CONF"
"""Environment variable for gracetune's own allocator settings (`use_uvm`, `uvm_*`), which stock
torch would refuse in PYTORCH_CUDA_ALLOC_CONF."""
EXPANDABLE_SEGMENTS = "expandable_segments:True"
"""Torch allocator setting that gracetune turns on by default. It prevents fragmentation, for which
a memory plan leaves no room: a plan fills the GPU to within a few percent."""
LAUNCHER_VARIABLE = "ACCELERATE_DYNAMO_BACKEND"
"""Environment variable whose presence shows that `accelerate launch` started this process."""

FSDP_VARIABLE = "ACCELERATE_USE_FSDP"
FSDP_PREFIX = "FSDP_"
PARALLELISM_VARIABLE = "ACCELERATE_USE_PARALLELISM_CONFIG"
ENGINE_VARIABLES = {
    "ACCELERATE_USE_DEEPSPEED": (
        "DeepSpeed",
        "distributed.strategy: fsdp2 divides weights as ZeRO-3 does (as ZeRO-2 with "
        "distributed.reshard_after_forward: false), and distributed.cpu_offload: true keeps the "
        "optimizer state in host memory",
    ),
    "ACCELERATE_USE_MEGATRON_LM": (
        "Megatron-LM",
        "distributed.strategy: fsdp2 divides weights, and distributed.context_parallel the tokens "
        "of a sample",
    ),
}
"""Environment variables by which `accelerate launch` requests an engine that gracetune does not
have, with the engine's name and what takes its place."""

ACCESS_PATTERNS = ("gpu_first", "balanced", "cpu_first")
PRECISIONS = ("no", "bf16", "fp16")

TORCH_KEYS = frozenset(
    {
        "backend",
        "expandable_segments",
        "garbage_collection_threshold",
        "graph_capture_record_stream_reuse",
        "large_segment_size_mb",
        "max_non_split_rounding_mb",
        "max_split_size_mb",
        "per_process_memory_fraction",
        "pinned_max_cached_size_mb",
        "pinned_max_round_threshold_mb",
        "pinned_num_register_threads",
        "pinned_reserve_segment_size_mb",
        "pinned_use_background_threads",
        "pinned_use_cuda_host_register",
        "release_lock_on_cudamalloc",
        "release_lock_on_hipmalloc",
        "roundup_power2_divisions",
        "throw_on_cudamalloc_oom",
    }
)
"""Names of the allocator settings that torch 2.13 supports."""

_ITEM = re.compile(r"\s*([A-Za-z0-9_]+)\s*:\s*(\[[^\]]*\]|[^,\[\]]*?)\s*(?:,|$)")


@dataclass(frozen=True, slots=True)
class AllocConf:
    """The allocator settings in an environment variable, split into gracetune's and torch's."""

    gracetune_keys: Mapping[str, str]
    """Values of gracetune's own settings (`use_uvm`, `uvm_*`) by name, as text that was checked."""
    torch_keys: str
    """All other settings as `key:value,...`, for torch to read."""
    unknown: tuple[str, ...]
    """Keys in `theirs` that torch 2.13 does not support; a newer torch may."""


@dataclass(frozen=True, slots=True)
class EnvironmentSettings:
    """Settings from environment variables; None for a variable that is not set."""

    uvm_hints: bool | None = None
    oversubscription_ratio: float | None = None
    access_pattern: str | None = None
    mixed_precision: str | None = None
    alloc_conf: str = ""
    """Value of the variable from which torch reads allocator settings, such as PYTORCH_ALLOC_CONF.
    It may still contain gracetune's own settings (`use_uvm`, `uvm_*`)."""
    use_uvm: bool | None = None
    stage1_threshold: float | None = None
    stage1_min_bytes: int | None = None
    fsdp: FsdpSettings = field(default_factory=FsdpSettings)
    """FSDP settings of `accelerate launch`."""
    sharding: Mapping[str, object] = field(default_factory=dict)
    """Settings of the section `distributed`, and others, that `accelerate launch` requests; by
    their dotted names."""
    notices: tuple[str, ...] = ()
    """Messages for the user, such as which of two variables takes precedence."""


def check_engine(env: Mapping[str, str]) -> None:
    """Raise if `accelerate launch` requests an engine that gracetune does not have."""
    for variable, (engine, successor) in ENGINE_VARIABLES.items():
        if _parse_bool(variable, env.get(variable) or "0"):
            raise ConfigError(
                f"Accelerate is configured for {engine} ({variable}={env[variable]}), which "
                f"gracetune does not have. In the run file, {successor}. Set distributed_type in "
                "the configuration file given to accelerate launch to FSDP, MULTI_GPU or 'NO'."
            )


def hide_sharding_from_accelerate() -> None:
    """Remove the variables by which `accelerate launch` requests FSDP and groups of ranks.

    Call it before Accelerate starts. gracetune shards the model itself, with the settings that
    `environment_settings` reads from these variables; Accelerate would wrap it a second time, and
    transformers would load empty weights on all ranks but the first.
    """
    for name in list(os.environ):
        if _requests_sharding(name):
            del os.environ[name]


def _requests_sharding(variable: str) -> bool:
    prefixes = (FSDP_PREFIX, PARALLELISM_PREFIX)
    return variable in (FSDP_VARIABLE, PARALLELISM_VARIABLE) or variable.startswith(prefixes)


def _fsdp_settings(env: Mapping[str, str]) -> FsdpSettings:
    """Return the FSDP settings of `accelerate launch`, without unknown variables."""
    if not _parse_bool(FSDP_VARIABLE, env.get(FSDP_VARIABLE) or "0"):
        return FsdpSettings()
    entries = [
        FsdpEntry(name, value, name)
        for name, value in env.items()
        if name.startswith(FSDP_PREFIX) and is_fsdp_key(name)
    ]
    return translate_fsdp(entries, is_on=True)


def process_environment() -> Mapping[str, str]:
    """Return this process's environment variables (`os.environ`)."""
    return os.environ


def set_for_children(values: Mapping[str, str]) -> None:
    """Set environment variables of processes that this one starts, except those already set."""
    for name, value in values.items():
        os.environ.setdefault(name, value)


@dataclass(frozen=True, slots=True)
class SlurmStep:
    """The place of this process in a Slurm job step, that is, among the tasks of one `srun`."""

    task: int
    num_tasks: int
    local_task: int
    tasks_on_node: int
    node: int
    num_nodes: int
    first_host: str
    """Host name of the first node, which has task 0."""
    port: int
    """A port that depends on the ids of job and step only, so that all tasks choose the same."""


def slurm_step(env: Mapping[str, str]) -> SlurmStep | None:
    """Return this process's place in a Slurm job step; None if `srun` has not started it.

    The variables of a job, such as SLURM_NTASKS, are not enough: a batch script has them as well,
    but is one process.
    """
    if not env.get("SLURM_STEP_NUM_TASKS") or not env.get("SLURM_PROCID"):
        return None
    node = _slurm_number(env, "SLURM_NODEID")
    counts = _tasks_per_node(env.get("SLURM_STEP_TASKS_PER_NODE", ""))
    num_tasks = _slurm_number(env, "SLURM_STEP_NUM_TASKS")
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_NODELIST", "")
    job, step = _slurm_number(env, "SLURM_JOB_ID"), _slurm_number(env, "SLURM_STEP_ID")
    return SlurmStep(
        task=_slurm_number(env, "SLURM_PROCID"),
        num_tasks=num_tasks,
        local_task=_slurm_number(env, "SLURM_LOCALID"),
        tasks_on_node=counts[node] if node < len(counts) else num_tasks,
        node=node,
        num_nodes=int(env.get("SLURM_STEP_NUM_NODES") or max(1, len(counts))),
        first_host=first_host(nodes) or env.get("SLURM_LAUNCH_NODE_IPADDR", ""),
        port=20_000 + (7 * job + step) % 10_000,
    )


def adopt_slurm_ranks() -> None:
    """Turn Slurm's variables into those that torch.distributed reads, for `srun ... train RUN`.

    Nothing changes if a launcher has set RANK, or if the job step has one task. A MASTER_ADDR or
    MASTER_PORT that the user has set is kept.
    """
    step = None if "RANK" in os.environ else slurm_step(os.environ)
    if step is None or step.num_tasks == 1:
        return
    os.environ |= {
        "RANK": str(step.task),
        "WORLD_SIZE": str(step.num_tasks),
        "LOCAL_RANK": str(step.local_task),
        "LOCAL_WORLD_SIZE": str(step.tasks_on_node),
    }
    set_for_children({"MASTER_ADDR": step.first_host, "MASTER_PORT": str(step.port)})


def first_host(nodes: str) -> str:
    """Return the first host of a Slurm node list: `gh001` for `gh[001-004,007],login`."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    assert first is not None, nodes
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0])


def _tasks_per_node(text: str) -> list[int]:
    """Return the number of tasks of each node: `[2, 2, 1]` for `2(x2),1`."""
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(times or 1)
    return counts


def _slurm_number(env: Mapping[str, str], name: str) -> int:
    value = env.get(name, "0")
    if not value.isdecimal():
        raise ConfigError(f"{name} is {value!r}; Slurm sets it to a number. Unset it.")
    return int(value)


def claim_process_alloc_conf() -> None:
    """Move gracetune's allocator settings out of the environment variables that torch reads.

    Call it before torch is imported, because stock torch refuses `use_uvm` and `uvm_*`.
    """
    claim_alloc_conf(os.environ)


def claim_alloc_conf(environ: MutableMapping[str, str]) -> None:
    """Move gracetune's own allocator settings (`use_uvm`, `uvm_*`) to GRACETUNE_ALLOC_CONF.

    They are removed from the variables that torch reads. `environ` is changed in place.
    """
    for variable in ALLOC_CONF_VARIABLES:
        conf = split_alloc_conf(environ.get(variable, ""), variable)
        if not conf.gracetune_keys:
            continue
        before = environ.get(OWN_ALLOC_CONF_VARIABLE, "")
        kept = {
            **conf.gracetune_keys,
            **split_alloc_conf(before, OWN_ALLOC_CONF_VARIABLE).gracetune_keys,
        }
        environ[OWN_ALLOC_CONF_VARIABLE] = ",".join(f"{key}:{value}" for key, value in kept.items())
        if conf.torch_keys:
            environ[variable] = conf.torch_keys
        else:
            del environ[variable]


def prefer_expandable_segments() -> None:
    """Turn on torch's expandable segments, unless the user has set any allocator setting.

    Call it before torch is imported.
    """
    if not any(os.environ.get(variable) for variable in ALLOC_CONF_VARIABLES):
        os.environ[ALLOC_CONF_VARIABLES[0]] = EXPANDABLE_SEGMENTS


COMPILE_CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def keep_compiled_graphs() -> None:
    """Let torch keep compiled graphs in the user's cache folder, unless the user has set another.

    torch's default is the folder for temporary files, which a restart of the machine empties. The
    files are keyed by the code, torch's version and the GPU, so a stale one is never used.
    """
    cache_home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    os.environ.setdefault(COMPILE_CACHE_VARIABLE, os.path.join(cache_home, "gracetune", "compiled"))


def compiled_graphs_folder() -> Path | None:
    """Return the folder in which compiled graphs are kept; None if it has not been set."""
    folder = os.environ.get(COMPILE_CACHE_VARIABLE)
    return Path(folder) if folder else None


def split_alloc_conf(text: str, variable: str = ALLOC_CONF_VARIABLES[1]) -> AllocConf:
    """Split `key:value,...` into gracetune's settings, which are checked, and torch's.

    `variable` is the environment variable that the text comes from, for error messages.
    """
    ours: dict[str, str] = {}
    theirs: list[str] = []
    unknown: list[str] = []
    for key, value in _split_items(text, variable):
        if key in _CHECKS:
            _CHECKS[key](f"{key} in {variable}", value)
            ours[key] = value
            continue
        if key.startswith(("uvm", "use_uvm")):
            close = difflib.get_close_matches(key, _CHECKS, n=1, cutoff=0)
            raise ConfigError(
                f"{variable} has {key}:{value}, which is not a known setting; "
                f"did you mean {close[0]}?"
            )
        theirs.append(f"{key}:{value}")
        if key not in TORCH_KEYS:
            unknown.append(key)
    return AllocConf(ours, ",".join(theirs), tuple(unknown))


def environment_settings(env: Mapping[str, str]) -> EnvironmentSettings:
    """Read and check all variables that gracetune supports; raise an error for an invalid value."""
    kept: dict[str, str] = {}
    notices: list[str] = []
    for variable in (ALLOC_CONF_VARIABLES[1], ALLOC_CONF_VARIABLES[0], OWN_ALLOC_CONF_VARIABLE):
        conf = split_alloc_conf(env.get(variable, ""), variable)
        kept.update(conf.gracetune_keys)
        if conf.unknown:
            notices.append(f"{variable}: torch 2.13 does not support {', '.join(conf.unknown)}.")
    if kept:
        settings = ",".join(f"{key}:{value}" for key, value in kept.items())
        notices.append(
            f"{settings} is read by gracetune, because stock torch does not have these settings."
        )
    ratio = _parse_ratio(RATIO_VARIABLE, env[RATIO_VARIABLE]) if env.get(RATIO_VARIABLE) else None
    pattern = (
        _one_of(ACCESS_PATTERNS)(PATTERN_VARIABLE, env[PATTERN_VARIABLE])
        if env.get(PATTERN_VARIABLE)
        else None
    )
    # Allocator settings take precedence over the variables of the same meaning.
    if "uvm_oversubscription_ratio" in kept:
        kept_ratio = float(kept["uvm_oversubscription_ratio"])
        if ratio is not None and ratio != kept_ratio:
            notices.append(
                f"{RATIO_VARIABLE}={ratio} is ignored: uvm_oversubscription_ratio:{kept_ratio} "
                "takes precedence."
            )
        ratio = kept_ratio
    if "uvm_access_pattern" in kept:
        kept_pattern = kept["uvm_access_pattern"]
        if pattern is not None and pattern != kept_pattern:
            notices.append(
                f"{PATTERN_VARIABLE}={pattern} is ignored: uvm_access_pattern:{kept_pattern} "
                "takes precedence."
            )
        pattern = kept_pattern
    fsdp = _fsdp_settings(env)
    unknown = [name for name in env if name.startswith(FSDP_PREFIX) and not is_fsdp_key(name)]
    if fsdp.is_on and unknown:
        notices.append(f"{', '.join(unknown)}: gracetune does not know this FSDP setting.")
    sharding = fsdp.settings()
    if _parse_bool(PARALLELISM_VARIABLE, env.get(PARALLELISM_VARIABLE) or "0"):
        groups, remarks = translate_parallelism(env)
        sharding |= groups
        notices += remarks
    return EnvironmentSettings(
        uvm_hints=_uvm_hints(env),
        oversubscription_ratio=ratio,
        access_pattern=pattern,
        mixed_precision=_mixed_precision(env),
        alloc_conf=env.get(ALLOC_CONF_VARIABLES[0]) or env.get(ALLOC_CONF_VARIABLES[1], ""),
        use_uvm=_parse_bool("use_uvm", kept["use_uvm"]) if "use_uvm" in kept else None,
        stage1_threshold=(
            float(kept["uvm_stage1_threshold"]) if "uvm_stage1_threshold" in kept else None
        ),
        stage1_min_bytes=(
            parse_bytes(kept["uvm_stage1_min_bytes"]) if "uvm_stage1_min_bytes" in kept else None
        ),
        fsdp=fsdp,
        sharding=sharding,
        notices=tuple(notices),
    )


def _uvm_hints(env: Mapping[str, str]) -> bool | None:
    values = {name: _parse_bool(name, env[name]) for name in HINTS_VARIABLES if env.get(name)}
    if len(set(values.values())) > 1:
        both = " and ".join(f"{name}={env[name]}" for name in values)
        raise ConfigError(f"{both} contradict each other. Unset one of them.")
    return next(iter(values.values()), None)


def _mixed_precision(env: Mapping[str, str]) -> str | None:
    """Return the value of ACCELERATE_MIXED_PRECISION; None if the user has not chosen one.

    The value `no` is ignored if `accelerate launch` started this process, because `accelerate`
    sets it by default.
    """
    value = env.get(PRECISION_VARIABLE)
    if not value or (value == "no" and LAUNCHER_VARIABLE in env):
        return None
    return _one_of(PRECISIONS)(PRECISION_VARIABLE, value)


def _split_items(text: str, variable: str) -> list[tuple[str, str]]:
    items, position = [], 0
    while rest := text[position:].strip(" ,"):
        match = _ITEM.match(text, position)
        if match is None or not match[2]:
            raise ConfigError(
                f"{variable} is {text!r}, where {rest!r} does not have the form key:value,..."
            )
        items.append((match[1], match[2]))
        position = match.end()
    return items


def _parse_bool(name: str, value: str) -> bool:
    if value.lower() in ("1", "true", "yes", "on"):
        return True
    if value.lower() in ("0", "false", "no", "off"):
        return False
    raise ConfigError(f"{name} is {value!r}; it must be 1 or 0 (or true or false).")


def _parse_number(name: str, value: str, rule: str, holds: Callable[[float], bool]) -> float:
    try:
        number = float(value)
    except ValueError:
        raise ConfigError(f"{name} is {value!r}; it must be {rule}.") from None
    if not holds(number):
        raise ConfigError(f"{name} is {value}; it must be {rule}.")
    return number


def _parse_ratio(name: str, value: str) -> float:
    return _parse_number(name, value, "a finite number above 1", lambda x: 1 < x < float("inf"))


def _parse_fraction(name: str, value: str) -> float:
    return _parse_number(name, value, "a number between 0 and 1", lambda x: 0 < x < 1)


def _one_of(known: tuple[str, ...]) -> Callable[[str, str], str]:
    def check(name: str, value: str) -> str:
        if value not in known:
            raise ConfigError(f"{name} is {value!r}; it must be one of {', '.join(known)}.")
        return value

    return check


def _parse_size(name: str, value: str) -> int:
    try:
        return parse_bytes(value)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None


_CHECKS: Mapping[str, Callable[[str, str], object]] = {
    "use_uvm": _parse_bool,
    "uvm_oversubscription_ratio": _parse_ratio,
    "uvm_access_pattern": _one_of(ACCESS_PATTERNS),
    "uvm_stage1_threshold": _parse_fraction,
    "uvm_stage1_min_bytes": _parse_size,
}
"""Functions that check the value of each of gracetune's allocator settings, by its name."""
