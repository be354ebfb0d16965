"""gracetune: fine-tune diffusion models on machines with far more CPU than GPU memory.

Public names are imported on first use, so `import gracetune` does not load torch.
"""

from __future__ import annotations

from importlib import import_module

__version__ = "0.1.0"

_PUBLIC = {
    "GracetuneError": "gracetune.errors",
    "RunFile": "gracetune.config.schema",
    "load_run_file": "gracetune.config.load",
    "run_training": "gracetune.train.run",
    "discard": "gracetune.gh200",
    "gh200_uvm_enabled": "gracetune.gh200",
    "manage_memory": "gracetune.gh200",
    "memory_stats": "gracetune.gh200",
    "optimize_batch_for_gh200": "gracetune.gh200",
    "prefer_cpu_residency": "gracetune.gh200",
    "prefer_gpu_residency": "gracetune.gh200",
    "prefetch_to_device": "gracetune.gh200",
    "residency": "gracetune.gh200",
    "set_uvm_hint_override": "gracetune.gh200",
    "unified_pool": "gracetune.gh200",
}

__all__ = ["__version__", *_PUBLIC]  # noqa: PLE0604  strings, resolved by __getattr__


def __getattr__(name: str) -> object:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'gracetune' has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
