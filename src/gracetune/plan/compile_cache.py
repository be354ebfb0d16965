"""Remember which graphs are in the compile cache, so that a plan counts them as loaded.

torch keeps compiled graphs in a folder, by their contents, which are not known before blocks are
compiled. A marker is an empty file beside them for each kind of block, mode and shapes that a run
has compiled, with this torch, GPU and code. A marker whose graph is gone makes a prediction too
short, and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from gracetune import __version__
from gracetune.offload.checkpointing import POLICY_VERSION

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True, slots=True)
class CompileCache:
    """Markers of compiled graphs in a folder."""

    folder: Path | None = None
    """None: there are no markers."""
    environment: str = ""
    """torch, GPU and code; graphs of another one cannot be used."""

    def has(self, graph: object) -> bool:
        """Return True if a graph was compiled before. `graph` describes it, by its `repr`."""
        marker = self._marker(graph)
        return marker is not None and marker.exists()

    def is_empty(self) -> bool:
        """Return True if no graph was noted yet."""
        return self.folder is None or not self.folder.exists()

    def add(self, graphs: Iterable[object]) -> None:
        """Write markers of graphs that were compiled."""
        for marker in filter(None, map(self._marker, graphs)):
            marker.parent.mkdir(parents=True, exist_ok=True)
            marker.touch()

    def _marker(self, graph: object) -> Path | None:
        if self.folder is None:
            return None
        return self.folder / sha256(f"{self.environment} {graph!r}".encode()).hexdigest()[:32]


def compile_cache_of(device: torch.device) -> CompileCache:
    """Return the markers for a device; none for a CPU, where plans are rehearsals."""
    if device.type != "cuda":
        return CompileCache()
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    code = f"gracetune {__version__} {POLICY_VERSION}, diffusers {version('diffusers')}"
    environment = f"torch {torch.__version__}, {torch.cuda.get_device_name(device)}, {code}"
    return CompileCache(Path(cache_dir()) / "gracetune-graphs", environment)
