"""gracetune: fine-tuning of diffusion models on machines with far more CPU than GPU memory.

The public face, resolved on first use: `import gracetune` imports no torch.
"""

from __future__ import annotations

from importlib import import_module

__version__ = "0.1.0"

_PUBLIC = {
    "GracetuneError": "gracetune.errors",
    "RunFile": "gracetune.config.schema",
    "load_run_file": "gracetune.config.load",
    "run_training": "gracetune.train.run",
}

__all__ = ["__version__", *_PUBLIC]  # noqa: PLE0604  the names are strings, resolved lazily


def __getattr__(name: str) -> object:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'gracetune' has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
