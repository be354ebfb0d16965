"""Install context parallel in a model: ranks that compute a part of each sample's tokens.

diffusers says in a transformer's `_cp_plan` which inputs and outputs of which modules have a
dimension of tokens. Hooks split them where the divided part of the transformer begins, and gather
the prediction where it ends. In between, our attention processors exchange tokens for heads
(`distributed/context_parallel.py`). diffusers' own `enable_parallelism` is not used: it cannot
train on sequences that are no multiple of the number of ranks, computes attention once more in
backward, and fails on a CPU.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Any

from diffusers import ContextParallelConfig, ParallelConfig
from diffusers.models._modeling_parallel import ContextParallelInput, ContextParallelOutput

from gracetune.adapters.compute.dropout import PositionalDropout
from gracetune.distributed.context_parallel import IMAGE, TEXT, TokenSplit
from gracetune.errors import ConfigError
from gracetune.models.attention_backends import current_backend, dispatched_processors
from gracetune.models.attention_processors import FusedProcessor, use_fused_processors
from gracetune.models.family import transformers_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh

    from gracetune.distributed.context_parallel import ContextGroup
    from gracetune.models.family import Family

WHOLE_INPUTS = ("encoder_hidden_states_mask",)
"""Inputs that `_cp_plan` splits, but that our attention processors take whole."""
RING_BACKENDS = ("cudnn", "flash", "flash_attn_2", "flash_attn_3")
"""Values of `model.attention_mechanism` that return what ring attention needs to add up parts."""


def has_token_plan(transformer: nn.Module) -> bool:
    """Return True if diffusers says how ranks can divide the tokens of a transformer's samples."""
    return vars(type(transformer)).get("_cp_plan") is not None


def check_context_parallel(family: Family, degree: int, kind: str, device_type: str) -> None:
    """Raise if ranks cannot divide the tokens of this model's samples among them."""
    for transformer in transformers_of(family.transformer).values():
        if not has_token_plan(transformer):
            raise ConfigError(
                f"distributed.context_parallel is {degree}, but diffusers has no plan for dividing "
                f"the tokens of {type(transformer).__name__} ({family.name}). Set it to 1."
            )
        heads = int(transformer.config["num_attention_heads"])  # type: ignore[index]
        if kind == "ulysses" and heads % degree:
            divisors = [n for n in range(2, heads + 1) if heads % n == 0]
            raise ConfigError(
                f"distributed.context_parallel is {degree}, which does not divide the {heads} "
                f"attention heads of {family.name}. Set it to 1, or to one of "
                f"{', '.join(map(str, divisors))}."
            )
        if kind == "ring":
            _check_ring(family, transformer, device_type)


def _check_ring(family: Family, transformer: nn.Module, device_type: str) -> None:
    backend = current_backend(transformer)
    if device_type == "cpu":
        raise ConfigError(
            "distributed.context_parallel_kind is ring, which needs a GPU: attention on a CPU does "
            "not return the sums with which parts are added up. Set it to ulysses."
        )
    if backend not in RING_BACKENDS:
        raise ConfigError(
            f"distributed.context_parallel_kind is ring, which does not work with "
            f"model.attention_mechanism {backend}. Set that to one of {', '.join(RING_BACKENDS)}, "
            "or the kind to ulysses."
        )
    if family.name == "qwen_image":
        raise ConfigError(
            "distributed.context_parallel_kind is ring, which has no attention mask, but "
            "qwen_image masks the padding of captions. Set it to ulysses."
        )


def enable_context_parallel(
    family: Family, context: ContextGroup, ring_mesh: DeviceMesh | None = None
) -> None:
    """Let a model compute the part of each sample's tokens that belongs to this rank.

    Call it when the model has its adapter, and `check_context_parallel` before it. From then on,
    all ranks of the group must run the model at the same time, on the same inputs. `ring_mesh` is a
    mesh with the dimensions `ring` and `ulysses`, for ring attention.
    """
    for transformer in transformers_of(family.transformer).values():
        split = split_transformer(transformer, context)
        if ring_mesh is not None:
            split.ring_config = _ring_config(ring_mesh)


def split_transformer(transformer: nn.Module, context: ContextGroup) -> TokenSplit:
    """Let one transformer compute this rank's part of the tokens.

    A `context` without process groups is for fake tensors: a transformer is then traced as on one
    of many ranks, without them.
    """
    split = TokenSplit(context)
    use_fused_processors(transformer)
    for processor in dispatched_processors(transformer):
        assert isinstance(processor, FusedProcessor), type(processor)
        processor.token_split = split
    for module in transformer.modules():
        if isinstance(module, PositionalDropout):
            module.split = split
    _install_hooks(transformer, split)
    return split


def _ring_config(mesh: DeviceMesh) -> ParallelConfig:
    config = ParallelConfig(context_parallel_config=ContextParallelConfig(ring_degree=mesh.size()))
    device_type = mesh.device_type
    config.setup(mesh.get_rank(), mesh.size(), device_type, mesh=mesh)
    return config


@contextmanager
def whole_sequences(family: Family) -> Iterator[None]:
    """Compute whole sequences on this rank in the `with` block, without the other ranks."""
    splits = {
        processor.token_split
        for transformer in transformers_of(family.transformer).values()
        for processor in dispatched_processors(transformer)
        if isinstance(processor, FusedProcessor) and processor.token_split is not None
    }
    with ExitStack() as stack:
        for split in splits:
            stack.callback(setattr, split, "enabled", split.enabled)
            split.enabled = False
        yield


# Hooks


def _install_hooks(transformer: nn.Module, split: TokenSplit) -> None:
    """Split and gather tensors where the transformer's `_cp_plan` says."""
    plan: Mapping[str, Any] = transformer._cp_plan  # type: ignore[assignment]
    transformer.register_forward_pre_hook(lambda *_: split.begin_pass(), prepend=True)
    for name, entry in plan.items():
        for module in _find_modules(transformer, name):
            if isinstance(entry, ContextParallelOutput):
                module.register_forward_hook(partial(_gather_output, split, entry.gather_dim))
                continue
            inputs = {n: p for n, p in entry.items() if not p.split_output}
            inputs = {n: p for n, p in inputs.items() if n not in WHOLE_INPUTS}
            outputs = {n: p for n, p in entry.items() if p.split_output}
            if inputs:
                names = list(signature(type(module).forward).parameters)[1:]
                hook: Callable[..., Any] = partial(_split_inputs, split, inputs, names)
                module.register_forward_pre_hook(hook, with_kwargs=True)
            if outputs:
                module.register_forward_hook(partial(_split_outputs, split, outputs))


def _find_modules(transformer: nn.Module, name: str) -> list[nn.Module]:
    """Return the module with this name; if it ends in `*`, all modules of a list."""
    if name.endswith(".*"):
        return list(transformer.get_submodule(name.removesuffix(".*")).children())
    return [transformer.get_submodule(name)]


def _split_inputs(
    split: TokenSplit,
    inputs: Mapping[str, ContextParallelInput],
    names: Sequence[str],
    _: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Forward pre-hook that splits inputs; `names` are those of the module's arguments."""
    if not split.enabled:
        return None
    positional, named = list(args), dict(kwargs)
    for name, place in inputs.items():
        index = names.index(name)
        if name in named:
            named[name] = _split_tensor(split, named[name], place, name)
        elif index < len(positional):
            positional[index] = _split_tensor(split, positional[index], place, name)
    return tuple(positional), named


def _split_outputs(
    split: TokenSplit, outputs: Mapping[int, ContextParallelInput], _: nn.Module, __: Any, out: Any
) -> Any:
    """Forward hook that splits some of a module's outputs."""
    if not split.enabled:
        return out
    return tuple(
        _split_tensor(split, x, outputs[index]) if index in outputs else x
        for index, x in enumerate(out)
    )


def _split_tensor(split: TokenSplit, x: Any, place: ContextParallelInput, name: str = "") -> Any:
    if x is None or x.ndim != place.expected_dims:  # such as one timestep for all tokens
        return x
    return split.split(x, place.split_dim, name if name in (IMAGE, TEXT) else "")


def _gather_output(split: TokenSplit, dim: int, _: nn.Module, __: Any, out: Tensor) -> Tensor:
    """Forward hook that returns the tokens of all ranks."""
    return split.gather(out, dim) if split.enabled else out
