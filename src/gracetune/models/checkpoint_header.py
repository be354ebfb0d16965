"""Read the header of a single-file checkpoint, and recognise the model whose weights it has.

Such files come from the models' authors, ComfyUI and other tools. Their tensors have the names of
the original release, often with the prefix `model.diffusion_model.`. Weights may be stored in fp8,
with or without a scale for each layer. This module reads no weights and does not import torch;
`single_file.py` loads them.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from gracetune.errors import ModelError
from gracetune.models.registry import FAMILIES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from gracetune.models.registry import FileMarks, PublishedModel

SAFETENSORS_SUFFIXES = (".safetensors", ".sft")
PICKLE_SUFFIXES = (".ckpt", ".pt", ".pth", ".bin")
CHECKPOINT_SUFFIXES = (*SAFETENSORS_SUFFIXES, *PICKLE_SUFFIXES, ".gguf")
PREFIXES = ("model.diffusion_model.", "diffusion_model.")
"""Prefixes of the transformer's tensors. A file with a whole model has other tensors as well."""
PARTS: Mapping[str, Mapping[str, str]] = {
    "sd15": {"vae": "first_stage_model.", "text_encoder": "cond_stage_model."},
    "sdxl": {
        "vae": "first_stage_model.",
        "text_encoder": "conditioner.embedders.0.",
        "text_encoder_2": "conditioner.embedders.1.",
    },
    "sd3": {
        "vae": "first_stage_model.",
        "text_encoder": "text_encoders.clip_l.",
        "text_encoder_2": "text_encoders.clip_g.",
        "text_encoder_3": "text_encoders.t5xxl.",
    },
}
"""Family -> component -> the prefix of its tensors in a file with a whole model. Other families'
components are always read from a pipeline."""
OTHER_PARTS = ("first_stage_model.", "vae.", "cond_stage_model.", "conditioner.", "text_encoders.")
WEIGHT_SCALES = (".scale_weight", ".weight_scale")
"""Endings of the names of scales. The layer's weight is its stored weight times its scale."""
INPUT_SCALES = (".scale_input", ".input_scale")
"""Endings of the names of scales of a layer's input, for matmuls in fp8, which are not used."""
FP8_MARKERS = ("scaled_fp8", ".comfy_quant")
"""Endings of the names of tensors that only say that weights are scaled."""
FP8_TYPES = ("F8_E4M3", "F8_E5M2")
FLOAT_TYPES = (*FP8_TYPES, "F64", "F32", "F16", "BF16")
OTHER_QUANTIZATIONS = {
    ".weight_scale_2": "NVFP4",
    ".weight_scale_inv": "fp8 with scales of blocks",
    ".qweight": "GPTQ, AWQ or Nunchaku",
    ".absmax": "bitsandbytes' 4 bits",
    ".quant_map": "bitsandbytes' 4 bits",
    ".SCB": "bitsandbytes' 8 bits",
}
"""Ending of a tensor's name -> the storage format that it belongs to, which is not supported."""
ADAPTER_PARTS = (".lora_", "lora_unet_", "lora_te", ".lokr_", ".hada_", ".dora_scale")
UNUSED_TENSORS = ("__index_timestep_zero__", "v_pred", "ztsnr")
"""Markers that ComfyUI reads, without a weight in the model."""


FILE_ON_HUB = re.compile(
    r"(https?://[^/]+/)?(?P<repository>[\w.-]+/[\w.-]+)/((blob|resolve)/[^/]+/)?(?P<file>[^?]+)(\?.*)?"
)
"""Matches the address of a file on the hub, or its path after the name of a model there."""


class TensorInfo(NamedTuple):
    """The type and shape of a tensor in a safetensors file."""

    dtype: str
    """Name in the header, such as `BF16` or `F8_E4M3`."""
    shape: tuple[int, ...]


@dataclass(frozen=True)
class CheckpointHeader:
    """The names, types and shapes of the tensors in a safetensors file."""

    path: Path
    tensors: Mapping[str, TensorInfo]
    metadata: Mapping[str, str]

    @property
    def prefix(self) -> str:
        """The prefix of the transformer's tensors; empty if the file has nothing else."""
        found = (p for p in PREFIXES if any(name.startswith(p) for name in self.tensors))
        return next(found, "")

    @property
    def transformer(self) -> dict[str, TensorInfo]:
        """The transformer's tensors by original name, without the prefix."""
        prefix = self.prefix
        return {n.removeprefix(prefix): t for n, t in self.tensors.items() if n.startswith(prefix)}

    @property
    def scaled_weights(self) -> list[str]:
        """Names of the scales of fp8 weights."""
        return [name for name in self.tensors if name.endswith(WEIGHT_SCALES)]

    @property
    def fp8_weights(self) -> list[str]:
        """Names of the tensors that are stored in fp8, without markers."""
        return [n for n, t in self.tensors.items() if t.dtype in FP8_TYPES and not is_marker(n)]

    @property
    def prediction(self) -> dict[str, object]:
        """Settings of the scheduler that the file asks for: a U-Net that predicts v says so."""
        is_v = "v_pred" in self.tensors or self.metadata.get("modelspec.prediction_type") == "v"
        zero_snr = {"rescale_betas_zero_snr": True} if "ztsnr" in self.tensors else {}
        return {"prediction_type": "v_prediction", **zero_snr} if is_v else {}

    def parts(self, family: str) -> list[str]:
        """Return the components besides the transformer that the file has and the family reads."""
        prefixes = PARTS.get(family, {})
        return [
            component
            for component, prefix in prefixes.items()
            if any(name.startswith(prefix) for name in self.tensors)
        ]

    def ignored_parts(self, family: str) -> list[str]:
        """Return the prefixes of a VAE and text encoders that the family does not read."""
        known = tuple(PARTS.get(family, {}).values())
        return [
            part
            for part in OTHER_PARTS
            if any(n.startswith(part) and not n.startswith(known) for n in self.tensors)
        ]


def is_marker(name: str) -> bool:
    """Return True for a tensor that only describes the storage of others."""
    ends = (*WEIGHT_SCALES, *INPUT_SCALES, *FP8_MARKERS)
    return name.endswith(ends) or name.rpartition(".")[2] in UNUSED_TENSORS


def is_checkpoint_file(path: str) -> bool:
    """Return True if a path names a single file, by its suffix or because there is such a file."""
    is_named = path.lower().endswith(CHECKPOINT_SUFFIXES) and not Path(path).is_dir()
    return is_named or Path(path).is_file()


def read_header(path: str, setting: str) -> CheckpointHeader:
    """Read the header of a safetensors file; raise for a file that cannot be loaded.

    `setting` is the run-file setting that names the file.
    """
    named = f"{setting} is {path!r}"
    file = Path(path)
    if not file.is_file():
        fix = "Correct the path."
        if on_hub := FILE_ON_HUB.fullmatch(path):
            command = f"hf download {on_hub['repository']} {on_hub['file']}"
            fix = f"If it is on the hub, run `{command}` and give the path that it prints."
        raise ModelError(f"{named}, but there is no such file. {fix}")
    try:
        with file.open("rb") as opened:
            start = opened.read(8)
            if start.startswith(b"GGUF") or file.suffix.lower() == ".gguf":
                raise ModelError(
                    f"{named}, a GGUF file, whose weights are quantized for inference. Name the "
                    "safetensors file of the same model in bf16 or fp8."
                )
            if start.startswith(b"PK") or file.suffix.lower() in PICKLE_SUFFIXES:
                raise ModelError(
                    f"{named}, a file in PyTorch's pickle format, which can run any program when "
                    "it is read. Name a safetensors file; most models are published as one."
                )
            length = int.from_bytes(start, "little")
            if len(start) < 8 or length > file.stat().st_size:
                raise ValueError("its header is cut off")
            content = json.loads(opened.read(length))
            metadata = content.pop("__metadata__", {})
            tensors = {
                name: TensorInfo(str(entry["dtype"]), tuple(entry["shape"]))
                for name, entry in content.items()
            }
            end = max((entry["data_offsets"][1] for entry in content.values()), default=0)
            if file.stat().st_size < 8 + length + end:
                raise ValueError(
                    f"it has {file.stat().st_size} of {8 + length + end} bytes, so it is cut off"
                )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(
            f"{named}, which cannot be read as a safetensors file ({error}). Download it again, or "
            "name another file."
        ) from error
    header = CheckpointHeader(file, tensors, metadata)
    _check_loadable(header, named)
    return header


def _check_loadable(header: CheckpointHeader, named: str) -> None:
    for name in header.tensors:
        if any(part in name for part in ADAPTER_PARTS):
            raise ModelError(
                f"{named}, which holds an adapter (it has {name}), not a model. Name the file of "
                "the model that it was trained for."
            )
        kind = next((k for end, k in OTHER_QUANTIZATIONS.items() if name.endswith(end)), None)
        if kind is not None:
            raise ModelError(
                f"{named}, whose weights are quantized as {kind} (it has {name}). Name a file in "
                "bf16, fp16, fp32 or fp8."
            )
    for name, tensor in header.transformer.items():
        if name.endswith(".weight") and tensor.dtype not in FLOAT_TYPES:
            raise ModelError(
                f"{named}, whose {name} is stored as {tensor.dtype}. Name a file in bf16, fp16, "
                "fp32 or fp8."
            )


# Recognition


def matching_models(header: CheckpointHeader) -> dict[str, list[PublishedModel]]:
    """Return the published models that a file may be, by family.

    A family's list is empty if the file has its names but the shape of none of its models.
    """
    tensors = header.transformer
    found: dict[str, list[PublishedModel]] = {}
    for family, info in FAMILIES.items():
        named = [m for m in info.models if m.marks is not None and _has_names(tensors, m.marks)]
        if named:
            found[family] = [m for m in named if m.marks and _has_shape(tensors, m.marks)]
    return found


def check_family(header: CheckpointHeader, family: str, setting: str) -> list[PublishedModel]:
    """Return the family's models that a file may be; raise if it is of another family."""
    found = matching_models(header)
    if family in found or not found:
        return found.get(family, [])
    other = next(iter(found))
    raise ModelError(
        f"{setting} is {str(header.path)!r}, which looks like a model of {other}, but model.family "
        f"is {family}. Set model.family: {other}, or name another file."
    )


def describe_storage(header: CheckpointHeader, dtype: str) -> str:
    """Return how fp8 weights are loaded, for a notice; empty if the file has none."""
    count = len(header.fp8_weights)
    if not count:
        return ""
    scaled = len(header.scaled_weights)
    return (
        f"{header.path.name} has {count} weights in fp8, {scaled} of them with a scale; they are "
        f"multiplied by it and loaded as {dtype}"
        if scaled
        else f"{header.path.name} has {count} weights in fp8, which are loaded as {dtype}"
    )


def _has_names(tensors: Iterable[str], marks: FileMarks) -> bool:
    names = set(tensors)
    return names.issuperset(marks.has) and names.isdisjoint(marks.lacks)


def _has_shape(tensors: Mapping[str, TensorInfo], marks: FileMarks) -> bool:
    if marks.shape is None:
        return True
    name, start = marks.shape
    return name in tensors and tensors[name].shape[: len(start)] == start
