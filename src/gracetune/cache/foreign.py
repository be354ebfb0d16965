"""Cache files of ai-toolkit and SimpleTuner, read without running anything that is in them.

ai-toolkit keeps `_latent_cache/STEM_HASH.safetensors` beside the pictures, with what it was made by
as metadata. SimpleTuner keeps `STEM.pt`, gzip'ed or not: a zip file with a pickle in it. A pickle
is a program; here only the few instructions that build plain tensors are understood, and the first
other one refuses the file.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import pickletools
import re
import zipfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from safetensors import SafetensorError, safe_open

from gracetune.errors import CacheError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor


LATENT_FOLDER = "_latent_cache"
TEXT_FOLDER = "_t_e_cache"
MAX_NBYTES = 4 * 1024**3
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
_REBUILD = ("torch._utils", "_rebuild_tensor_v2")
_ORDERED = ("collections", "OrderedDict")
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_FRESH = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}
_VALUES = {
    *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
    *("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
}


@dataclass(frozen=True, slots=True)
class ForeignEntry:
    """One file of another tool."""

    stem: str
    """Of the sample's file."""
    tensors: dict[str, Tensor]
    metadata: dict[str, object]
    """What the tool says of it: sizes, crop, caption; nothing where it does not."""


def read_foreign(path: Path) -> ForeignEntry:
    """One file, whichever tool wrote it."""
    if path.suffix == ".safetensors":
        return _read_ai_toolkit(path)
    if path.suffix == ".pt":
        return ForeignEntry(path.stem, read_pt(path), {})
    raise CacheError(f"{path.name} is no cache file of ai-toolkit or SimpleTuner.")


def read_pt(path: Path) -> dict[str, Tensor]:
    """The tensors of a file written by torch.save: one alone, or a dict of them."""
    data = path.read_bytes()
    try:
        if data[:2] == b"\x1f\x8b":
            with gzip.open(io.BytesIO(data)) as packed:
                data = packed.read(MAX_NBYTES)
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            (program,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
            made = _Builder(archive, program.removesuffix("data.pkl")).build(archive.read(program))
    except (OSError, EOFError, ValueError, KeyError, IndexError, zipfile.BadZipFile) as error:
        raise CacheError(f"{path.name} holds no plain tensors: {error}.") from error
    found = {"latents": made} if isinstance(made, torch.Tensor) else made
    if not isinstance(found, dict):
        raise CacheError(f"{path.name} holds a {type(found).__name__}, not tensors.")
    return {str(k): t for k, t in found.items() if isinstance(t, torch.Tensor)}


class _Builder:
    """A machine that knows how to make numbers, texts, dicts and tensors, and nothing else."""

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
            self._do(code.name, value)
        raise ValueError("it ends too soon")

    def _do(self, name: str, value: object) -> None:
        stack = self._stack
        if name in _VALUES:
            stack.append(value)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in _FRESH:
            stack.append(_FRESH[name]())
        elif name in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
            self._memo[len(self._memo) if name == "MEMOIZE" else value] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(self._memo[value])
        elif name == "MARK":
            self._marks.append(len(stack))
        elif name not in ("PROTO", "FRAME"):
            self._combine(name, value)

    def _combine(self, name: str, value: object) -> None:
        stack = self._stack
        match name:
            case "TUPLE":
                stack.append(tuple(self._since_mark()))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                taken = [stack.pop() for _ in range(int(name[-1]))]
                stack.append(tuple(reversed(taken)))
            case "SETITEM":
                item, key = stack.pop(), stack.pop()
                _as_dict(stack[-1])[key] = item
            case "SETITEMS":
                pairs = self._since_mark()
                _as_dict(stack[-1]).update(zip(pairs[::2], pairs[1::2], strict=True))
            case "GLOBAL":
                stack.append(_allowed(*str(value).split(" ")))
            case "STACK_GLOBAL":
                what, where = stack.pop(), stack.pop()
                stack.append(_allowed(str(where), str(what)))
            case "BINPERSID":
                stack.append(self._storage(stack.pop()))
            case "REDUCE":
                given, made = stack.pop(), stack.pop()
                stack.append(_made(made, given))
            case _:
                raise ValueError(f"it wants to do {name}, which tensors do not need")

    def _since_mark(self) -> list[object]:
        mark = self._marks.pop()
        taken = self._stack[mark:]
        del self._stack[mark:]
        return taken

    def _storage(self, told: object) -> Tensor:
        if not isinstance(told, tuple) or len(told) != 5 or told[0] != "storage":
            raise ValueError("it refers to something that is no storage")
        _, kind, key, _, count = told
        if not isinstance(kind, tuple) or kind[1] not in _DTYPES:
            raise ValueError(f"it has a storage of {kind}")
        member = self._archive.getinfo(f"{self._prefix}data/{key}")
        if member.file_size > MAX_NBYTES:
            raise ValueError("it is too large")
        data = torch.frombuffer(bytearray(self._archive.read(member)), dtype=torch.uint8)
        flat = data.view(_DTYPES[str(kind[1])])
        if len(flat) != count:
            raise ValueError("a storage is shorter than it says")
        return flat


def _allowed(where: str, what: str) -> tuple[str, str]:
    if (where, what) in (_REBUILD, _ORDERED) or (where == "torch" and what in _DTYPES):
        return where, what
    raise ValueError(f"it asks for {where}.{what}, which is no part of a tensor")


def _made(what: object, given: object) -> object:
    if what == _ORDERED and given == ():
        return {}
    if what != _REBUILD or not isinstance(given, tuple):
        raise ValueError("it calls something that makes no tensor")
    storage, offset, shape, stride = given[:4]
    if not isinstance(storage, torch.Tensor):
        raise ValueError("it makes a tensor of no storage")
    try:
        return torch.as_strided(storage, shape, stride, offset)
    except (RuntimeError, TypeError) as error:
        raise ValueError("a tensor lies outside of its storage") from error


def _as_dict(value: object) -> dict[object, object]:
    if not isinstance(value, dict):
        raise ValueError("it sets items of what is no dict")
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
    return ForeignEntry(stem, tensors, {name: _value(text) for name, text in metadata.items()})


_HASH_LENGTH = 22
"""Of an md5 in url-safe base64; it may have underscores of its own."""


def _value(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text


# ------------------------------------------------------------------------------------------
# Text embeddings of other tools, brought to the form of ours: no padding, our names and dtypes.
#
# Which of their tensors is which of ours, and how they pad, is found out by comparing the first of
# their entries that has such tensors with what our own encoder makes of the same caption.


ALIKE = 0.98
"""Least cosine between theirs and ours; precision differs between tools by a little."""
_BY_CAPTION = re.compile(r"(?P<digest>[0-9a-f]{32})(-.+)?")

Form = Literal["whole", "masked", "stripped"]
FORMS: Sequence[Form] = ("masked", "stripped", "whole")
"""How many tokens of theirs count: as their mask says, up to the last that is not zero, or all."""


@dataclass(frozen=True, slots=True)
class TensorMatch:
    """One tensor of ours, and where theirs has it."""

    theirs: str
    """Empty for a mask that is all ones, which needs no source."""
    form: Form
    like: Tensor


def captions_by_digest(captions: Iterable[str]) -> dict[str, str]:
    """SimpleTuner names a text's file by the md5 of its caption."""
    return {hashlib.md5(c.encode(), usedforsecurity=False).hexdigest(): c for c in captions}


def caption_digest(stem: str) -> str | None:
    """The digest in the name of such a file; none where it is no such name."""
    found = _BY_CAPTION.fullmatch(stem)
    return None if found is None else found["digest"]


def match_text(theirs: Mapping[str, Tensor], ours: Mapping[str, Tensor]) -> dict[str, TensorMatch]:
    """Where each tensor of ours is in theirs, for one caption that both have encoded."""
    return {name: _match(name, tensor.cpu(), theirs) for name, tensor in ours.items()}


def convert_text(theirs: Mapping[str, Tensor], matches: Mapping[str, TensorMatch]) -> dict[str, Tensor]:
    """Another entry of theirs, as ours would be."""
    taken, length = {}, 0
    for name, match in matches.items():
        if match.theirs:
            taken[name] = _formed(theirs, match.theirs, match.form).to(match.like.dtype)
            if taken[name].shape[1:] != match.like.shape[1:] or not len(taken[name]):
                raise CacheError(f"its {match.theirs!r} is {tuple(theirs[match.theirs].shape)}")
            length = max(length, len(taken[name]) if taken[name].ndim > 1 else 0)
    masks = {name: match.like for name, match in matches.items() if not match.theirs}
    made = {name: like.new_ones(length) for name, like in masks.items()}
    return {name: taken[name] if name in taken else made[name] for name in matches}


def _match(name: str, ours: Tensor, theirs: Mapping[str, Tensor]) -> TensorMatch:
    if ours.dtype == torch.bool and ours.all():
        return TensorMatch("", "whole", ours)
    best = 0.0
    for other, tensor in theirs.items():
        if not tensor.is_floating_point():
            continue
        for form in FORMS:
            formed = _formed(theirs, other, form)
            if formed.shape != ours.shape or not ours.numel():
                continue
            likeness = torch.cosine_similarity(
                formed.float().flatten(), ours.float().flatten(), dim=0
            ).item()
            scale = (formed.float().norm() / ours.float().norm()).item()
            if likeness >= ALIKE and 0.9 < scale < 1.1:
                return TensorMatch(other, form, ours[:0] if ours.ndim > 1 else ours)
            best = max(best, likeness)
    raise CacheError(
        f"it was made by another encoder: nothing in it is like our {name!r} of "
        f"{tuple(ours.shape)}; the best cosine is {best:.3f}"
    )


def _formed(theirs: Mapping[str, Tensor], name: str, form: Form) -> Tensor:
    """A tensor without the dimension of its batch of one, and of its tokens those that count."""
    tensor = theirs[name]
    while tensor.ndim > 1 and tensor.shape[0] == 1:
        tensor = tensor[0]
    if tensor.ndim < 2 or form == "whole":
        return tensor
    if form == "stripped":
        used = tensor.flatten(1).ne(0).any(dim=1).nonzero()
        return tensor[: int(used[-1]) + 1] if len(used) else tensor[:0]
    for other, mask in theirs.items():
        if "mask" in other and mask.numel() == len(tensor):
            return tensor[mask.flatten().bool()]
    return tensor[:0]
