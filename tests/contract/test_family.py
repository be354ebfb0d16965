"""The contract of model families, on every miniature that a family reads.

A new family needs a miniature in `fakes/miniatures.py` and no change here. The second half is
physical: a perfect predictor replaces the transformer, and the sampler of the diffusers pipeline
must then arrive at the encoded sample, with the inputs that training gives the transformer.
"""

import inspect
import math
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import diffusers
import pytest
import torch
from accelerate import Accelerator
from blake3 import blake3
from fakes.miniatures import MINIATURES, QwenProcessor, shrink_references
from PIL import Image

from gracetune.adapters.inject import matches
from gracetune.cache.encode import EncodeItem, decode_item
from gracetune.config.schema import ModelSection
from gracetune.data.augment import DEFAULT_TRANSFORM, render_control
from gracetune.data.images import PILLOW
from gracetune.data.sample import Companion, Sample
from gracetune.models import qwen_image
from gracetune.models.diffusers_family import to_pil
from gracetune.models.family import (
    EXPERTS,
    Experts,
    SampleRequest,
    bind_expert,
    load_family,
    transformers_of,
)
from gracetune.models.pipeline_folder import without_progress_bars
from gracetune.models.registry import FAMILIES
from gracetune.train import objective
from gracetune.train.validate import sampling_autocast

MODELS = {name: small.family for name, small in MINIATURES.items() if small.family} | {"tiny": None}
"""Tested model -> family that reads its miniature. None: the family needs no files."""
NOT_TILED = {"stable_audio", "tiny"}
"""Families that cannot encode in tiles."""


def test_every_family_is_tested():
    assert set(FAMILIES) == {family or name for name, family in MODELS.items()}


@pytest.fixture(scope="module")
def references():
    """Return a patch of the sizes of images to edit."""
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(autouse=True)
def _published_references(request, references):
    """Give images to edit their published sizes in tests without the fixture `family`."""
    if "family" not in request.fixturenames:
        references.undo()


@pytest.fixture(scope="module", params=sorted(MODELS))
def family(request, miniature, references):
    references.undo()
    if MODELS[request.param] and MINIATURES[request.param].kind == "edit":
        shrink_references(references)
    return load_model(request.param, miniature)


def load_model(name, miniature):
    if MODELS[name] is None:
        return load_family(ModelSection(family=name))
    return load_family(ModelSection(family=MODELS[name], path=str(miniature(name))))


@pytest.fixture(scope="module")
def shape(family):
    """Return the shape of a small bucket whose axes all differ."""
    if "audio" in family.kinds:
        return (2, 4096)
    size = (2 * family.pixel_step, 3 * family.pixel_step)
    return (*size, 5) if "video" in family.kinds else size


@pytest.fixture(scope="module")
def media(family, shape):
    generator = torch.Generator().manual_seed(0)
    if "audio" in family.kinds:
        return torch.rand(2, *shape, generator=generator) * 2 - 1
    return with_controls(
        family, torch.rand(2, 3, *shape[:1:-1], *shape[1::-1], generator=generator)
    )


def with_controls(family, images):
    """Scale images or clips to [-1, 1] and append control images, as `decode_item` does."""
    if not family.takes_control:
        return images * 2 - 1
    height, width = images.shape[-2:]
    count = 3 * math.prod(family.control_size(width, height))
    padded = torch.zeros(len(images), -(-count // (width * height)), height, width)
    controls = torch.rand(len(images), count, generator=torch.Generator().manual_seed(1))
    padded.flatten(1)[:, :count] = controls
    return torch.cat([images, padded], dim=1) * 2 - 1


@pytest.fixture(scope="module")
def encoded(family, media):
    return family.encode(media)


def forward_of(family):
    return bind_expert(family.transformer, None if family.boundary is None else "high")


def encode_captions(family, captions):
    """Encode captions; a control image, if needed, is the same for all."""
    if not family.takes_control:
        return family.encode_text(captions)
    width, height = family.text_control_size(32, 32)
    return family.encode_text(captions, [[torch.zeros(3, height, width)]] * len(captions))


def conditions_for(family, captions, conditions):
    """Return all conditions of a batch: its captions and those from `split_encoded`."""
    return {**family.stack_text(encode_captions(family, captions)), **conditions}


def test_the_registry_names_the_classes_of_the_blocks(request, family):
    name = request.node.callspec.params["family"]
    info = FAMILIES[MODELS[name] or name]
    assert {type(block).__name__ for block in family.blocks()} == set(info.block_classes)


def test_encoded_samples_have_the_latent_shape(family, shape, encoded):
    assert encoded.shape == (2, *family.latent_shape(*shape))
    assert not encoded.requires_grad


def test_encoding_does_not_depend_on_other_samples_of_the_batch(family, media, encoded):
    torch.testing.assert_close(family.encode(media[1:]), encoded[1:], rtol=1e-4, atol=1e-5)


def test_images_have_the_latent_shape_too(family):
    if "image" in family.kinds:
        size = (2 * family.pixel_step, family.pixel_step)
        pixels = with_controls(family, torch.rand(1, 3, *reversed(size)))
        assert family.encode(pixels).shape == (1, *family.latent_shape(*size))


def test_the_prediction_has_the_latents_shape_and_gradients(family, encoded):
    x0, conditions = family.split_encoded(encoded)
    text = conditions_for(family, ["one two", ""], conditions)
    out = family.predict(forward_of(family), x0, torch.tensor([0.92, 0.97]), text)
    assert out.shape == x0.shape
    assert family.num_tokens(x0.shape[1:]) > 0
    out.square().mean().backward()
    assert any(p.grad is not None for p in family.transformer.parameters())
    family.transformer.zero_grad()


def test_the_prediction_does_not_depend_on_other_samples_of_the_batch(family, encoded):
    x0, conditions = family.split_encoded(encoded)
    text = conditions_for(family, ["one two", "three"], conditions)
    sigmas = torch.tensor([0.91, 0.98])
    with torch.no_grad():
        both = family.predict(forward_of(family), x0, sigmas, text)
        alone = family.predict(
            forward_of(family), x0[1:], sigmas[1:], {k: t[1:] for k, t in text.items()}
        )
    torch.testing.assert_close(both[1:], alone, rtol=1e-4, atol=1e-5)


def test_the_prediction_depends_on_the_caption_and_sigma(family, encoded):
    x0, conditions = family.split_encoded(encoded)
    sigmas = torch.tensor([0.91, 0.98])
    with torch.no_grad():
        one = family.predict(
            forward_of(family), x0, sigmas, conditions_for(family, ["a", "b"], conditions)
        )
        other = family.predict(
            forward_of(family), x0, sigmas, conditions_for(family, ["c", "d"], conditions)
        )
        later = family.predict(
            forward_of(family), x0, sigmas - 0.005, conditions_for(family, ["a", "b"], conditions)
        )
    assert not torch.equal(one, other)
    assert not torch.equal(one, later)


def test_text_does_not_depend_on_other_captions(family):
    alone = encode_captions(family, ["red box"])[0]
    together = encode_captions(family, ["", "red box"])[1]
    assert alone.keys() == together.keys()
    for key in alone:
        assert torch.equal(alone[key], together[key])


def test_captions_that_are_too_long_are_reported(family):
    words = "a red ring on a blue box " * 400
    assert family.truncated_captions(["a red box"]) == []
    assert family.truncated_captions(["a red box", words]) in ([], [words])


def test_blocks_belong_to_the_transformer(family):
    modules = set(map(id, family.transformer.modules()))
    assert family.blocks()
    assert all(id(block) in modules for block in family.blocks())


def test_only_models_with_experts_have_a_boundary(family):
    assert (family.boundary is not None) == isinstance(family.transformer, Experts)
    if family.boundary is not None:
        assert 0 < family.boundary < 1
        assert tuple(transformers_of(family.transformer)) == EXPERTS
        high = list(family.transformer.high.get_submodule("blocks").children())
        assert family.blocks()[: len(high)] == high


def test_adapter_targets_match_modules_of_every_transformer(family):
    for transformer in transformers_of(family.transformer).values():
        names = [name for name, _ in transformer.named_modules()]
        for target in family.adapter_targets:
            assert any(matches(name, target) for name in names), target


def test_the_prediction_type_is_known(family):
    assert family.prediction in ("flow", "epsilon", "v")


def sample_request(family, shape):
    """Return a request for two samples."""
    *texts, empty = encode_captions(family, ["one", "two", ""])
    image_sizes = [shape[:2]] * 2 if family.starts_from == "image" else []
    if family.takes_control:
        image_sizes = [family.control_size(*shape)] * 2
    return SampleRequest(
        texts=texts,
        empty_text=empty,
        shape=shape,
        seed=3,
        steps=1 if family.takes_control else 2,
        guidance=1.0 if family.takes_control else 2.0,
        images=[[torch.zeros(3, height, width)] for width, height in image_sizes],
    )


def test_sampling_gives_the_requested_shape_and_is_repeatable(family, shape):
    request = sample_request(family, shape)
    first = replace(request, texts=request.texts[:1], images=request.images[:1])
    with torch.no_grad():
        samples = family.sample(request)
        (again,) = family.sample(first)
    assert len(samples) == 2
    torch.testing.assert_close(samples[0].data, again.data)  # batch sizes round differently
    for sample in samples:
        if sample.kind == "audio":
            assert sample.data.shape == shape
        else:
            width, height, *frames = shape
            assert sample.data.shape == (3, *frames, height, width)
        assert sample.kind == (
            "image" if len(shape) == 2 and sample.kind != "audio" else sample.kind
        )
        assert torch.isfinite(sample.data).all()
    assert not torch.equal(samples[0].data, samples[1].data)
    if not family.takes_control:
        other = request.texts[1]
        with torch.no_grad():
            (negative,) = family.sample(replace(first, empty_text=other, has_negative=True))
        assert torch.equal(negative.data, again.data) != family.uses_negative_prompt


@pytest.mark.parametrize("name", ["flux", "sd15", "stable-audio", "wan22-t2v"])
def test_a_bf16_model_is_sampled_without_mixed_precision(name, miniature):
    section = ModelSection(family=MODELS[name], path=str(miniature(name)), dtype="bfloat16")
    family = load_family(section)
    size = (2 * family.pixel_step, 3 * family.pixel_step) if "audio" not in family.kinds else ()
    request = sample_request(family, size or (2, 4096))
    accelerator = Accelerator(mixed_precision="no", cpu=True)
    with torch.no_grad(), sampling_autocast(accelerator, family.transformer):
        (sample,) = family.sample(
            replace(request, texts=request.texts[:1], images=request.images[:1], steps=1)
        )
    assert sample.data.isfinite().all()


def test_an_exported_model_loads_again(family, tmp_path):
    family.export(tmp_path)
    back = load_family(ModelSection(family=family.name, path=str(tmp_path)))
    assert back.weights_hasher()() == family.weights_hasher()()
    assert back.identity() == family.identity()


def test_gradient_checkpointing_does_not_change_gradients(family, encoded):
    x0, conditions = family.split_encoded(encoded)
    text = conditions_for(family, ["one", "two"], conditions)
    family.transformer.train()
    gradients = []
    for recompute in (False, True):
        if recompute:
            family.enable_gradient_checkpointing()
        out = family.predict(forward_of(family), x0, torch.tensor([0.92, 0.95]), text)
        out.square().mean().backward()
        gradients.append([p.grad for p in family.transformer.parameters() if p.grad is not None])
        family.transformer.zero_grad()
    assert gradients[0]
    for kept, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(kept, recomputed)


def test_training_works_without_the_text_encoder(family, encoded):
    text = conditions_for(family, ["one", "two"], family.split_encoded(encoded)[1])
    family.release_text_encoder()
    x0, _ = family.split_encoded(encoded)
    with torch.no_grad():
        assert torch.isfinite(
            family.predict(forward_of(family), x0, torch.tensor([0.92, 0.95]), text)
        ).all()


def test_tiling_does_not_change_samples_smaller_than_a_tile(family, media, encoded):
    can_tile = family.set_tiling(enabled=True)
    tiled = family.encode(media)
    assert family.set_tiling(enabled=False) == can_tile
    if family.name in FAMILIES:  # other packages' families may or may not tile
        assert can_tile == (family.name not in NOT_TILED)
    assert torch.equal(tiled, encoded)
    assert torch.equal(family.encode(media), encoded)


# The physical half


PROMPT = "a red ring on the box"
LONG = "a red ring on the box of the blue star " * 80  # 720 tokens
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
SEED, STEPS = 3, 4
VARIANTS = {name: {} for name, family in MODELS.items() if family} | {
    "wan22-5b from an image": {"task": "image"},
    "qwen-image-edit-2511 with two references": {},
}
"""Model, then perhaps a remark -> settings of the run file's section `model`."""


class DecodedError(Exception):
    """Ends a pipeline when it decodes its latents, which are the exception's argument."""


class PerfectPredictor:
    """Stands in for a transformer: records its inputs, and predicts the latents `x0` exactly.

    `x0` has the layout of the transformer's first argument. `timestep(call)` returns the timesteps
    of a call: its place between `x0` and noise, as in `objective.py`. Without `x0`, the first call
    ends in DecodedError. `is_negated` is true if the transformer predicts the negative.
    """

    def __init__(self, family, x0, channels, timestep, is_negated=False):
        transformer = next(iter(transformers_of(family.transformer).values()))
        self.signature = inspect.signature(type(transformer).forward)
        self.family, self.x0, self.channels, self.timestep = family, x0, channels, timestep
        self.is_negated = is_negated
        self.calls = []

    def __call__(self, *args, **options):
        inputs = self.signature.bind(None, *args, **options).arguments
        inputs.pop("self")
        inputs = {**inputs, **inputs.pop("kwargs", {})}
        timestep = self.timestep(len(self.calls))
        self.calls.append(inputs)
        noisy = next(iter(inputs.values()))
        if self.x0 is None:
            raise DecodedError
        is_list, kind = isinstance(noisy, list), self.family.prediction
        x0, noisy = (torch.stack(x) if isinstance(x, list) else x for x in (self.x0, noisy))
        alpha, sigma = objective.alpha_sigma(
            timestep.view(-1, *[1] * (noisy.ndim - 1)).to(noisy), kind
        )
        exact = objective.target(x0, (noisy - alpha * x0) / sigma, timestep.to(noisy), kind)
        if noisy.ndim == 5:  # conditions of a video are more channels; of an image, more rows
            exact = exact[:, : self.channels]
        exact = -exact if self.is_negated else exact
        return (list(exact) if is_list else exact,)


@dataclass(frozen=True)
class PhysicalCase:
    """A loaded family, and the whole pipeline that diffusers loads from the same folder."""

    family: Any
    pipeline: Any
    references: int = 1
    """Number of images to edit, for families that edit images."""

    @property
    def shape(self):
        """The shape of a small sample whose axes all differ."""
        if "audio" in self.family.kinds:
            return (2, 4000)
        size = (2 * self.family.pixel_step, 3 * self.family.pixel_step)
        return (*size, 5) if "video" in self.family.kinds else size

    def media(self, count):
        shape = (3, *self.shape[:1:-1], *self.shape[1::-1])
        shape = self.shape if "audio" in self.family.kinds else shape
        return torch.rand(count, *shape, generator=torch.Generator().manual_seed(0)) * 2 - 1

    def options(self, text):
        """Return the pipeline's arguments that describe the sample to generate.

        Those of the encoded prompt, such as the scale without guidance, are the family's; tensors
        are left out, because the pipeline encodes the prompt itself.
        """
        width, height, *frames = self.shape
        options = {"width": width, "height": height}
        if "audio" in self.family.kinds:
            options = {"audio_end_in_s": (self.shape[1] + 0.5) / self.family.audio.sample_rate}
        options |= {"num_frames": frames[0]} if frames else {}
        known = inspect.signature(type(self.pipeline).__call__).parameters
        options |= {"guidance_scale": 1.0} if "guidance_scale" in known else {}
        stacked = self.family.stack_text([text])
        arguments = self.family.prompt_arguments(stacked, stacked, 1.0)
        tensors = (torch.Tensor, list)
        options |= {k: v for k, v in arguments.items() if not isinstance(v, tensors)}
        options.pop("prompt", None)
        return options


def open_case(name, miniature):
    small = name.partition(" ")[0]
    folder = miniature(small)
    section = ModelSection(family=MODELS[small], path=str(folder), **VARIANTS[name])
    family = load_family(section)
    if small.startswith("qwen-image-edit"):
        references = 2 if "two references" in name else 1
        return PhysicalCase(family, edit_pipeline(folder, family), references)
    is_image = family.starts_from == "image"
    cls = diffusers.WanImageToVideoPipeline if is_image else diffusers.DiffusionPipeline
    with without_progress_bars():
        return PhysicalCase(family, cls.from_pretrained(folder, local_files_only=True))


@pytest.fixture(scope="module")
def opened_cases():
    return {}


@pytest.fixture
def case(request, opened_cases, miniature):
    """Return a case, loaded once: pytest would load it for each test, as others are in between."""
    if request.param not in opened_cases:
        opened_cases[request.param] = open_case(request.param, miniature)
    return opened_cases[request.param]


def timestep_of(scheduler, call, prediction):
    """Return the timestep, as in `objective.py`, at which a sampler calls the model."""
    sigma = scheduler.sigmas[call].reshape(1)
    return sigma if prediction == "flow" else torch.atan(sigma) * 2 / math.pi


def capture(monkeypatch, vae, *transformers, predictor):
    """Let the predictor replace the transformers, and the pipeline end before it decodes."""
    for transformer in transformers:
        monkeypatch.setattr(transformer, "forward", predictor)

    def decode(_, latents, *args, **options):
        raise DecodedError(latents)

    # For images in channels-last memory, torch's group norm on the CPU is less precise.
    encode = type(vae).encode
    monkeypatch.setattr(
        type(vae), "encode", lambda self, x, *args: encode(self, x.contiguous(), *args)
    )
    monkeypatch.setattr(type(vae), "decode", decode)


def run_pipeline(case, predictor, monkeypatch, **options):
    """Return the latents that the pipeline's sampler hands to the VAE."""
    pipeline = case.pipeline
    pipeline.set_progress_bar_config(disable=True)
    names = (case.family.shapes.component, "transformer_2")
    transformers = [getattr(pipeline, name, None) for name in names]
    with monkeypatch.context() as patch, pytest.raises(DecodedError) as decoded, torch.no_grad():
        capture(patch, pipeline.vae, *filter(None, transformers), predictor=predictor)
        generator = torch.Generator().manual_seed(SEED)
        pipeline(num_inference_steps=STEPS, generator=generator, **options)
    return decoded.value.args[0]


def run_validation(case, predictor, monkeypatch, text, shape, images):
    """Return the latents that the sampler of a validation hands to the VAE."""
    family = case.family
    transformers = transformers_of(family.transformer).values()
    with monkeypatch.context() as patch, pytest.raises(DecodedError) as decoded, torch.no_grad():
        capture(patch, family.vae, *transformers, predictor=predictor)
        family.sample(SampleRequest([text], text, shape, SEED, STEPS, 1.0, images))
    return decoded.value.args[0]


def encode_and_record(case, media, monkeypatch):
    """Return the encoded media, and the VAE's own latents of it, before they are normalised."""
    encode, raw = type(case.family.vae).encode, []

    def recorded(*args, **options):
        out = encode(*args, **options)
        raw.append(out.latent_dist.mode())
        return out

    with monkeypatch.context() as patch:
        patch.setattr(type(case.family.vae), "encode", recorded)
        return case.family.encode(media), raw[0]


def training_inputs(family, noisy, timesteps, conditions):
    """Return the arguments that a training step gives the transformer, by name."""
    recorder = PerfectPredictor(family, None, 0, lambda _: timesteps)
    with pytest.raises(DecodedError), torch.no_grad():
        family.predict(recorder, noisy, timesteps, conditions)
    return recorder.calls[0]


def as_latents(family, value, x0, conditions):
    """Return the prediction for a transformer whose output is `value`."""
    if isinstance(value, torch.Tensor) and value.ndim == 5:
        value = value[:, : x0.shape[1]]
    with torch.no_grad():
        sigmas = torch.full((len(x0),), 0.5)
        return family.predict(lambda *_, **__: (value,), x0, sigmas, conditions)


def predicts_the_negative(family, x0, layout, conditions):
    """Return True if the family changes the sign of the transformer's output.

    `layout` is `x0` as the transformer reads it. The pipeline's sampler, which arrives at the
    sample or not, shows whether the sign is right.
    """
    return bool((as_latents(family, layout, x0, conditions) * x0).sum() < 0)


def assert_same(ours, theirs):
    """Compare arguments. One that is not given is None; so is a mask of a batch without padding.

    Embeddings of tokens that a boolean mask hides are not compared. A pipeline may give one
    timestep for all samples.
    """
    mask = theirs.get("encoder_attention_mask")
    if mask is not None and mask.dtype == torch.bool:
        ours, theirs = (
            one | {"encoder_hidden_states": one["encoder_hidden_states"][mask]}
            for one in (ours, theirs)
        )
    for name in ours.keys() | theirs.keys():
        one, other = ours.get(name), theirs.get(name)
        if name == "timestep" and other.ndim == 0:
            one, other = one.reshape(-1), other.expand(one.numel())
        if name.endswith("_mask") and (one is None or other is None):
            assert all(mask is None or mask.all() for mask in (one, other)), name
        elif isinstance(one, torch.Tensor | list | tuple | dict):
            torch.testing.assert_close(one, other, **CLOSE, msg=lambda text, n=name: f"{n}: {text}")
        elif not name.endswith("attention_kwargs"):  # of LoRA files and attention processors
            assert one == other, name


def assert_physical(case, monkeypatch, media, prompt, text, shape, images=(), **options):
    """Check one sample: sampler, validation and training agree when the predictor is perfect.

    `text` is the encoded prompt. `images` are those of the one prompt, for sampling.
    """
    family = case.family
    encoded, raw = encode_and_record(case, media, monkeypatch)
    x0, given = family.split_encoded(encoded)
    channels, *cells = family.latent_shape(*shape)
    added = case.references * (channels - x0.shape[1])
    assert encoded.shape[1:] == (x0.shape[1] + added, *cells)
    conditions = {**family.stack_text([text]), **given}
    layout = next(iter(training_inputs(family, x0, torch.ones(1), conditions).values()))
    is_negated = predicts_the_negative(family, x0, layout, conditions)

    timesteps = []

    def timestep(call):
        timesteps.append(timestep_of(case.pipeline.scheduler, call, family.prediction))
        return timesteps[-1]

    theirs = PerfectPredictor(family, layout, x0.shape[1], timestep, is_negated)
    decoded = run_pipeline(case, theirs, monkeypatch, prompt=prompt, **options)
    torch.testing.assert_close(decoded, raw, **CLOSE)
    assert len(theirs.calls) == len(timesteps) >= STEPS - 1

    ours = PerfectPredictor(family, layout, x0.shape[1], timesteps.__getitem__, is_negated)
    validated = run_validation(case, ours, monkeypatch, text, shape, images)
    torch.testing.assert_close(validated, raw, **CLOSE)
    start = as_latents(family, next(iter(theirs.calls[0].values())), x0, conditions)
    start = -start if is_negated else start
    noise = (start - (1 - timesteps[0]) * x0) / timesteps[0]  # samplers may start below sigma 1
    for number, (given_by_pipeline, sampled) in enumerate(
        zip(theirs.calls, ours.calls, strict=True)
    ):
        assert_same(sampled, given_by_pipeline)
        noisy = next(iter(given_by_pipeline.values()))
        if family.prediction == "flow":  # other samplers do not keep the noise that they start from
            noisy = objective.add_noise(x0, noise, timesteps[number])
        trained = training_inputs(family, noisy, timesteps[number], conditions)
        assert_same(trained, given_by_pipeline)


EDIT_IN_CI = {
    "flux-kontext": "",
    "qwen-image-edit": "",
    "qwen-image-edit-2511": None,
    "qwen-image-edit-2511 with two references": None,
}
"""Variant that edits -> the prompt, with a size of `EDIT_SIZES`, whose test is not slow, if any."""


def prompts(name):
    """Return the prompts for a variant.

    Stable Audio is left out for the empty one: the pipeline makes all inputs zero only in the half
    of a batch that guidance subtracts, and training does so for every empty caption.
    """
    return [PROMPT, LONG, *([] if name == "stable-audio" else [""])]


@pytest.mark.parametrize(
    ("case", "prompt"),
    [
        # A megapixel for each reference takes long, and one prompt shows how they are passed.
        pytest.param(
            name,
            prompt,
            marks=pytest.mark.slow if prompt != EDIT_IN_CI.get(name, prompt) else (),
        )
        for name in sorted(VARIANTS)
        for prompt in prompts(name)
    ],
    indirect=["case"],
    ids=lambda value: value[:24],
)
@pytest.mark.filterwarnings("ignore:Should have t[ab]")  # torchsde, of Stable Audio's sampler
def test_the_pipelines_sampler_arrives_at_the_encoded_sample(case, prompt, monkeypatch, tmp_path):
    """Every input of the transformer is the same in training, validation and the pipeline."""
    shape, media, images, text_images = case.shape, case.media(1), [], []
    if case.family.takes_control:
        media, images, text_images, files, shape = edit_sample(case, prompt, tmp_path)
    (text,) = case.family.encode_text([prompt], text_images)
    options = case.options(text)
    if case.family.takes_control:
        takes_several = case.family.max_controls > 1
        options |= {"image": files if takes_several else files[0]}
        options |= {"width": shape[0], "height": shape[1]}
        if case.family.name == "flux":  # it would generate a megapixel
            options["max_area"] = math.prod(shape)
    elif case.family.starts_from == "image":
        media = ((media + 1) * 127.5).round() / 127.5 - 1  # as read from a file
        images = [[media[0, :, 0]]]
        options["image"] = to_pil(images[0][0])
    assert_physical(case, monkeypatch, media, prompt, text, shape, images, **options)


@pytest.mark.parametrize(
    "case",
    [pytest.param(n, marks=[pytest.mark.slow] * ("2511" in n)) for n in sorted(VARIANTS)],
    indirect=True,
)
def test_a_perfect_prediction_has_no_loss(case):
    family = case.family
    width, height = case.shape[:2]
    media = case.media(2)
    if family.takes_control:
        count = -(-3 * math.prod(family.control_size(width, height)) // (width * height))
        controls = media.new_zeros(2, case.references * count, height, width)
        media = torch.cat([media, controls], dim=1)
    x0, given = family.split_encoded(family.encode(media))
    conditions = conditions_for(family, [PROMPT, "a box"], given)
    timesteps = torch.tensor([0.15, 0.8])
    layout = next(iter(training_inputs(family, x0, timesteps, conditions).values()))
    noise = torch.randn(x0.shape, generator=torch.Generator().manual_seed(SEED))
    predicted = family.predict(
        PerfectPredictor(
            family,
            layout,
            x0.shape[1],
            lambda _: timesteps,
            predicts_the_negative(family, x0, layout, conditions),
        ),
        objective.add_noise(x0, noise, timesteps, family.prediction),
        timesteps,
        conditions,
    )
    target = objective.target(x0, noise, timesteps, family.prediction)
    assert objective.sample_losses(predicted, target).max() < 1e-10


# Qwen-Image-Edit and FLUX.1 Kontext: the image to edit has a size of its own


EDIT_SIZES = {
    PROMPT: ((96, 64), (1536, 1024)),
    "": ((512, 496), (1024, 992)),  # resizing twice would give another size
    LONG: ((32, 64), (50, 100)),
}
"""Prompt -> size to generate, and size of the image file to edit."""


def edit_sample(case, prompt, folder):
    """Return the decoded media of a sample, its references in three forms, and its size.

    References are those of the one prompt for sampling, for the text encoder, and as files.
    """
    size, file_size = EDIT_SIZES[prompt]
    files, companions = [], []
    for number in range(case.references):  # each file is half as large as the one before
        name = f"{number}.png"
        files.append(photo([edge // 2**number for edge in file_size], seed=number))
        files[-1].save(folder / name)
        digest = blake3((folder / name).read_bytes()).hexdigest()
        companions.append(Companion("control", name, digest))
    digest = companions[0].digest
    sample = Sample("d", "0.png", prompt, digest, *file_size, companions=tuple(companions))
    source = SimpleNamespace(read=lambda key: (folder / key).read_bytes())
    control_size = case.family.control_size(*size)
    item = EncodeItem(sample, size, source, control_size=control_size)
    images, text_images = (
        [[render_control(source.read(c.key), DEFAULT_TRANSFORM, size, to) for c in companions]]
        for to in (control_size, case.family.text_control_size(*size))
    )
    return decode_item(item, PILLOW)[None], images, text_images, files, size


def photo(size, seed):
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.rand(size[1] // 4, size[0] // 4, 3, generator=generator)
    return Image.fromarray(pixels.mul(255).byte().numpy()).resize(size)


def edit_pipeline(folder, family):
    """Return diffusers' pipeline, with the positions of image tokens that it should pass on.

    See `qwen_image.encode_edit`: the pipeline forgets them with transformers 5.
    """
    family.restore_text_encoder(torch.device("cpu"))
    encoder = family.text_encoders[0]

    def encode(input_ids, **inputs):
        is_image = (input_ids == encoder.config.image_token_id).int()
        return encoder(input_ids=input_ids, mm_token_type_ids=is_image, **inputs)

    several = family.max_controls > 1
    cls = diffusers.QwenImageEditPlusPipeline if several else diffusers.QwenImageEditPipeline
    pipeline = cls(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler.from_pretrained(folder / "scheduler"),
        vae=family.vae,
        text_encoder=None,
        tokenizer=None,
        processor=None,
        transformer=family.transformer,
    )
    encode.dtype = encoder.dtype
    pipeline.text_encoder = encode
    pipeline.processor = QwenProcessor(family.image_processor, family.tokenizer)
    return pipeline


def test_the_size_of_an_image_to_edit_is_the_pipelines():
    from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus
    from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit import calculate_dimensions

    for width in range(16, 4096, 48):
        for height in (width // 4 + 16, 1024, width, 4 * width):
            for area in (qwen_image.REFERENCE_AREA, qwen_image.TEXT_REFERENCE_AREA):
                theirs = calculate_dimensions(area, width / height)[:2]
                assert qwen_image.reference_size(width, height, area) == theirs
    assert qwen_image.REFERENCE_AREA == pipeline_qwenimage_edit_plus.VAE_IMAGE_SIZE
    assert qwen_image.TEXT_REFERENCE_AREA == pipeline_qwenimage_edit_plus.CONDITION_IMAGE_SIZE


def test_an_edits_cached_entries_are_not_those_of_earlier_versions(miniature):
    plain, edit, plus = (
        load_family(ModelSection(family="qwen_image", path=str(miniature(name)))).identity()
        for name in ("qwen-image", "qwen-image-edit", "qwen-image-edit-2511")
    )
    assert plus["text"].startswith("qwen-image-edit-1048576-147456-")
    for kind, identity in edit.items():
        assert identity != plain[kind]
        assert identity.startswith("qwen-image-edit-1048576-")
    assert plain["latents"].startswith("qwen-image-mode-")
    assert plain["text"].startswith("qwen-image-512-")
