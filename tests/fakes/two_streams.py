"""A model family with two outputs, video and audio, each with weights of its own in every block.

gracetune has no such family yet. Blocks and names are like those of LTX-2: `attn1` and `ff` are the
video's, `audio_attn1` and `audio_ff` the audio's, and both see the text. The latents of an image
are divided: its first channels are the video's, the others the audio's. `install_two_streams` adds
the family as another package does, through an entry point.
"""

import sys
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from gracetune.models.tiny import CELL, TEXT_WIDTH, Tiny

CHANNELS = {"video": 32, "audio": 16}
WIDTH = 64
VIDEO_TARGETS = ("attn1.to_q", "attn1.to_k", "attn1.to_v", "attn1.to_out", "ff")
AUDIO_TARGETS = tuple(f"audio_{name}" for name in VIDEO_TARGETS)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x, context):
        seen = torch.cat([x, context], 1)
        attended = functional.scaled_dot_product_attention(
            self.to_q(x), self.to_k(seen), self.to_v(seen)
        )
        return self.to_out(attended)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn1, self.audio_attn1 = Attention(), Attention()
        self.ff, self.audio_ff = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, video, audio, context):
        normed = [functional.layer_norm(x, (WIDTH,)) for x in (video, audio)]
        video = video + self.attn1(normed[0], context)
        audio = audio + self.audio_attn1(normed[1], context)
        return video + self.ff(functional.silu(video)), audio + self.audio_ff(
            functional.silu(audio)
        )


class TwoStreamTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj_in, self.audio_proj_in = (nn.Linear(n, WIDTH) for n in CHANNELS.values())
        self.proj_out, self.audio_proj_out = (nn.Linear(WIDTH, n) for n in CHANNELS.values())
        self.text, self.time = nn.Linear(TEXT_WIDTH, WIDTH), nn.Linear(1, WIDTH)
        self.transformer_blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, noisy, sigmas, tokens):
        streams = noisy.split(list(CHANNELS.values()), 1)
        video, audio = (x.flatten(2).transpose(1, 2) for x in streams)
        time = self.time(sigmas[:, None].to(noisy))[:, None]
        video, audio = self.proj_in(video) + time, self.audio_proj_in(audio) + time
        context = self.text(tokens)
        for block in self.transformer_blocks:
            video, audio = block(video, audio, context)
        both = torch.cat([self.proj_out(video), self.audio_proj_out(audio)], 2)
        return both.transpose(1, 2).reshape(noisy.shape)


@dataclass(frozen=True)
class TwoStreams(Tiny):
    name: str = "two_streams"
    adapter_targets: tuple[str, ...] = VIDEO_TARGETS + AUDIO_TARGETS

    def enable_gradient_checkpointing(self):
        """Do nothing: the model is small."""

    def predict(self, transformer, noisy, sigmas, conditions):
        return transformer(noisy, sigmas, conditions["tokens"])

    def part_losses(self, predicted, target):
        squared = (predicted.float() - target.float()).square()
        parts = squared.split(list(CHANNELS.values()), 1)
        return {name: part.flatten(1).mean(1) for name, part in zip(CHANNELS, parts, strict=True)}


def load(section):
    assert sum(CHANNELS.values()) == 3 * CELL * CELL
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(section.init_seed)
        return TwoStreams(TwoStreamTransformer())


def install_two_streams(site):
    """Make the family known in this process, as an installed package in the folder `site`."""
    about = site / "two_streams-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: two-streams\nVersion: 1.0\n")
    point = "two_streams = fakes.two_streams:load"
    (about / "entry_points.txt").write_text(f"[gracetune.family]\n{point}\n")
    sys.path.insert(0, str(site))
