"""Read cache files of ai-toolkit and SimpleTuner without executing anything in them.

ai-toolkit writes `_latent_cache/STEM_HASH.safetensors` next to the images, with sizes and crop as
metadata. SimpleTuner writes `.pt` files, optionally gzipped: a zip archive with a pickle inside.

A pickle is a program, and unpickling runs it. `_TensorBuilder` therefore interprets only the few
pickle instructions that build plain tensors and dicts, and rejects files with any other.
"""

from __future__ import annotations

import gzip
import io
import json
import pickletools
import zipfile
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open

from gracetune.errors import CacheError

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

LATENT_FOLDER = "_latent_cache"
"""Name of the folders in which ai-toolkit caches latents."""
TEXT_FOLDER = "_t_e_cache"
"""Name of the folders in which ai-toolkit caches text embeddings."""
MAX_NBYTES = 4 * 1024**3
"""Maximum size of a tensor in bytes; files with larger ones are rejected."""
_HASH_LENGTH = 22
"""Characters of the hash in ai-toolkit's file names: an MD5 digest in URL-safe base64."""

_DTYPES = {
    "FloatStorage": torch.float32,
    "DoubleStorage": torch.float64,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}
_REBUILD_TENSOR = ("torch._utils", "_rebuild_tensor_v2")
_ORDERED_DICT = ("collections", "OrderedDict")
# Pickle instructions that push a constant, a new container, or their own argument.
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_CONTAINERS = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}
_ARGUMENTS = {
    *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
    *("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
}


@dataclass(frozen=True, slots=True)
class ForeignEntry:
    """The contents of one cache file of ai-toolkit or SimpleTuner."""

    stem: str
    """File name of the sample, without folder and extension, or the SHA-256 of it (SimpleTuner)."""
    tensors: dict[str, Tensor]
    metadata: dict[str, object]
    """Values that the tool wrote into the file, such as crop and caption; may be empty."""


def read_foreign(path: Path) -> ForeignEntry:
    """Read a cache file of ai-toolkit (`.safetensors`) or SimpleTuner (`.pt`)."""
    if path.suffix == ".safetensors":
        return _read_ai_toolkit(path)
    if path.suffix == ".pt":
        return ForeignEntry(path.stem, read_pt(path), {})
    raise CacheError(f"{path.name} is no cache file of ai-toolkit or SimpleTuner.")


def read_pt(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a `torch.save` file; a single tensor gets the name `latents`."""
    data = path.read_bytes()
    try:
        if data[:2] == b"\x1f\x8b":
            with gzip.open(io.BytesIO(data)) as packed:
                data = packed.read(MAX_NBYTES)
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            (program,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
            builder = _TensorBuilder(archive, program.removesuffix("data.pkl"))
            built = builder.build(archive.read(program))
    except (OSError, EOFError, ValueError, KeyError, IndexError, zipfile.BadZipFile) as error:
        raise CacheError(f"{path.name} holds no plain tensors: {error}.") from error
    found = {"latents": built} if isinstance(built, torch.Tensor) else built
    if not isinstance(found, dict):
        raise CacheError(f"{path.name} holds a {type(found).__name__}, not tensors.")
    return {str(k): t for k, t in found.items() if isinstance(t, torch.Tensor)}


class _TensorBuilder:
    """A pickle interpreter that can build numbers, texts, dicts and tensors, and nothing else."""

    def __init__(self, archive: zipfile.ZipFile, prefix: str) -> None:
        self._archive = archive
        self._prefix = prefix
        self._stack: list[object] = []
        self._marks: list[int] = []
        self._memo: dict[object, object] = {}

    def build(self, program: bytes) -> object:
        for code, value, _ in pickletools.genops(program):
            if code.name == "STOP":
                return self._stack.pop()
            self._execute(code.name, value)
        raise ValueError("the pickle has no end")

    def _execute(self, name: str, value: object) -> None:
        stack = self._stack
        if name in _ARGUMENTS:
            stack.append(value)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in _CONTAINERS:
            stack.append(_CONTAINERS[name]())
        elif name in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
            self._memo[len(self._memo) if name == "MEMOIZE" else value] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(self._memo[value])
        elif name == "MARK":
            self._marks.append(len(stack))
        elif name not in ("PROTO", "FRAME"):
            self._combine(name, value)

    def _combine(self, name: str, value: object) -> None:
        """Execute a pickle instruction that pops values from the stack."""
        stack = self._stack
        match name:
            case "TUPLE":
                stack.append(tuple(self._pop_to_mark()))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                popped = [stack.pop() for _ in range(int(name[-1]))]
                stack.append(tuple(reversed(popped)))
            case "SETITEM":
                item, key = stack.pop(), stack.pop()
                _as_dict(stack[-1])[key] = item
            case "SETITEMS":
                pairs = self._pop_to_mark()
                _as_dict(stack[-1]).update(zip(pairs[::2], pairs[1::2], strict=True))
            case "GLOBAL":
                stack.append(_check_global(*str(value).split(" ")))
            case "STACK_GLOBAL":
                attribute, module = stack.pop(), stack.pop()
                stack.append(_check_global(str(module), str(attribute)))
            case "BINPERSID":
                stack.append(self._read_storage(stack.pop()))
            case "REDUCE":
                arguments, function = stack.pop(), stack.pop()
                stack.append(_call(function, arguments))
            case _:
                raise ValueError(f"the pickle instruction {name} is not needed for tensors")

    def _pop_to_mark(self) -> list[object]:
        mark = self._marks.pop()
        popped = self._stack[mark:]
        del self._stack[mark:]
        return popped

    def _read_storage(self, reference: object) -> Tensor:
        if not isinstance(reference, tuple) or len(reference) != 5 or reference[0] != "storage":
            raise ValueError("it refers to something other than a storage")
        _, kind, key, _, count = reference
        if not isinstance(kind, tuple) or kind[1] not in _DTYPES:
            raise ValueError(f"it has a storage of type {kind}")
        member = self._archive.getinfo(f"{self._prefix}data/{key}")
        if member.file_size > MAX_NBYTES:
            raise ValueError("a tensor is too large")
        data = torch.frombuffer(bytearray(self._archive.read(member)), dtype=torch.uint8)
        flat = data.view(_DTYPES[str(kind[1])])
        if len(flat) != count:
            raise ValueError("a storage is shorter than its header says")
        return flat


def _check_global(module: str, attribute: str) -> tuple[str, str]:
    """Return a global name that a pickle refers to; reject all that tensors do not need.

    The name is only compared, never imported.
    """
    name = (module, attribute)
    if name in (_REBUILD_TENSOR, _ORDERED_DICT) or (module == "torch" and attribute in _DTYPES):
        return name
    raise ValueError(f"it uses {module}.{attribute}, which is not part of a tensor")


def _call(function: object, arguments: object) -> object:
    """Execute a call in a pickle: build a dict or a tensor, and reject any other function."""
    if function == _ORDERED_DICT and arguments == ():
        return {}
    if function != _REBUILD_TENSOR or not isinstance(arguments, tuple):
        raise ValueError("it calls something other than the constructor of a tensor")
    storage, offset, shape, stride = arguments[:4]
    if not isinstance(storage, torch.Tensor):
        raise ValueError("it builds a tensor without a storage")
    try:
        return torch.as_strided(storage, shape, stride, offset)
    except (RuntimeError, TypeError) as error:
        raise ValueError("a tensor lies outside of its storage") from error


def _as_dict(value: object) -> dict[object, object]:
    if not isinstance(value, dict):
        raise ValueError("it sets items of something other than a dict")
    return value


def _read_ai_toolkit(path: Path) -> ForeignEntry:
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise CacheError(f"{path.name} cannot be read: {error}.") from error
    if path.parent.name == LATENT_FOLDER:
        tensors = {"latents" if name == "latent" else name: t for name, t in tensors.items()}
    stem = path.stem[: -1 - _HASH_LENGTH]
    return ForeignEntry(stem, tensors, {name: _parse(text) for name, text in metadata.items()})


def _parse(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text
