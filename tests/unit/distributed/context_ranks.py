"""Compare transformers whose tokens are divided among the ranks of this group with whole ones.

Called as `context_ranks.py FILE`: rank 0 writes, for each model, the largest difference of a
gradient relative to its own norm, with its name. All numbers are in fp64.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from diffusers import (
    Flux2Transformer2DModel,
    FluxTransformer2DModel,
    QwenImageTransformer2DModel,
    WanTransformer3DModel,
)

from gracetune.adapters.compute.dropout import DropoutSeeds
from gracetune.distributed.context_parallel import PeerFailedError, connect_context_group
from gracetune.distributed.layout import Layout
from gracetune.distributed.ranks import connect_ranks
from gracetune.models.context_parallel import split_transformer, whole_sequences
from gracetune.models.flux import PLANNER_SHAPES as FLUX
from gracetune.models.flux2 import PLANNER_SHAPES as FLUX2
from gracetune.models.qwen_image import PLANNER_SHAPES as QWEN_IMAGE

HEADS = {"num_attention_heads": 4, "attention_head_dim": 16}
ROWS, COLUMNS, TEXT_LENGTH = 6, 14, 9
"""Latent cells: 21 patches of 2x2 cells, and 9 text tokens, which 2 and 4 ranks divide unevenly."""


def models():
    """Yield the name of a model, its transformer, and its arguments for a batch of two."""
    generator = torch.Generator().manual_seed(0)
    noisy = torch.randn(2, 4, ROWS, COLUMNS, generator=generator).double()
    sigmas = torch.tensor([0.3, 0.8]).double()
    mask = torch.arange(TEXT_LENGTH)[None] < torch.tensor([[TEXT_LENGTH], [4]])
    conditions = {
        "tokens": torch.randn(2, TEXT_LENGTH, 8, generator=generator).double(),
        "pooled": torch.randn(2, 8, generator=generator).double(),
        "mask": mask,
    }
    joint = {**HEADS, "joint_attention_dim": 8, "num_layers": 2}
    packed = {**joint, "in_channels": 16, "axes_dims_rope": (4, 6, 6)}
    flux = FluxTransformer2DModel(**packed, num_single_layers=1, pooled_projection_dim=8)
    flux2 = Flux2Transformer2DModel(
        **joint, num_single_layers=1, in_channels=4, axes_dims_rope=(4, 4, 4, 4), mlp_ratio=2.0
    )
    qwen = QwenImageTransformer2DModel(**packed, out_channels=4)
    for name, transformer, shapes in (
        ("flux", flux, FLUX),
        ("flux2", flux2, FLUX2),
        ("qwen_image", qwen, QWEN_IMAGE),
    ):
        arguments = shapes.arguments(transformer.config, noisy, sigmas, conditions, torch.float64)
        yield name, transformer, arguments
    short = {"tokens": conditions["tokens"][:, :1], "mask": mask[:, :1]}
    transformer = QwenImageTransformer2DModel.from_config(qwen.config)
    arguments = QWEN_IMAGE.arguments(transformer.config, noisy, sigmas, short, torch.float64)
    yield "one text token", transformer, arguments
    wan = WanTransformer3DModel(
        **HEADS, in_channels=4, out_channels=4, text_dim=8, freq_dim=16, ffn_dim=32, num_layers=2
    )
    clip = torch.randn(2, 4, 3, ROWS, COLUMNS, generator=generator).double()
    per_token = sigmas[:, None] * torch.linspace(0, 1, 63)
    for name, timesteps in (("wan", sigmas), ("wan-ti2v", per_token)):
        yield (
            name,
            wan,
            {
                "hidden_states": clip,
                "timestep": timesteps * 1000,
                "encoder_hidden_states": conditions["tokens"],
            },
        )
        wan = WanTransformer3DModel.from_config(wan.config)


def add_dropout(transformer):
    """Let some layers of the image, of the text, and of both drop elements of their inputs."""
    names = ("attn.to_q", "attn.add_q_proj", "attn1.to_q", "attn2.to_k", "attn.to_qkv_mlp_proj")
    for name, layer in list(transformer.named_modules()):
        if name.endswith(names):
            parent = transformer.get_submodule(name.rpartition(".")[0])
            setattr(
                parent, name.rpartition(".")[2], torch.nn.Sequential(torch.nn.Dropout(0.2), layer)
            )
    seeds = DropoutSeeds(transformer)
    assert len(seeds), "the model has none of these layers"
    return seeds


def gradients(transformer, arguments):
    transformer.zero_grad()
    out = transformer(**arguments, return_dict=False)[0]
    (
        out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    ).square().sum().backward()
    found = {n: p.grad.clone() for n, p in transformer.named_parameters() if p.grad is not None}
    return out.detach(), found


def compare(name, transformer, arguments, context):
    torch.manual_seed(0)
    transformer.double().train()
    for parameter in transformer.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    seeds = add_dropout(transformer)
    split_transformer(transformer, context)
    seeds.set(5)
    with whole_sequences(SimpleNamespace(transformer=transformer)):
        expected_out, expected = gradients(transformer, arguments)
    out, found = gradients(transformer, arguments)
    assert found.keys() == expected.keys(), name
    for gradient in found.values():
        dist.all_reduce(gradient)
    errors = {n: distance(found[n], expected[n]) for n in found}
    worst = max(errors, key=errors.__getitem__)
    return {
        "output": distance(out, expected_out),
        "tensors": len(errors),
        "gradient": errors[worst],
        "name": worst,
    }


def distance(found, expected):
    return float((found - expected).norm() / expected.norm().clamp_min(1e-9))


def fail_in_a_pass(transformer, arguments, context):
    """Return the error of each rank, if the last rank is out of memory after its first block."""

    def fail(*_):
        raise torch.OutOfMemoryError("out of memory")

    if context.rank == context.size - 1:
        transformer.transformer_blocks[0].register_forward_hook(fail)
    try:
        with context.fail_together():
            gradients(transformer, arguments)
    except PeerFailedError:
        return "told"
    except torch.OutOfMemoryError:
        return "failed"
    return "nothing"


if __name__ == "__main__":
    dist.init_process_group("gloo")
    ranks = connect_ranks(timeout_s=60)
    context = connect_context_group(Layout(ranks, context_size=ranks.world_size), "cpu")
    results, first = {}, None
    for name, transformer, arguments in models():
        results[name] = compare(name, transformer, arguments, context)
        first = first or (transformer, arguments)
    results["failure"] = ranks.gather(fail_in_a_pass(*first, context))
    if ranks.is_main:
        Path(sys.argv[1]).write_text(json.dumps(results))
    dist.destroy_process_group()
