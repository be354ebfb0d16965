"""Training and validation give a transformer the inputs that its diffusers pipeline gives it.

Every argument of the pipeline's first call of the transformer is compared, for a whole pipeline
that diffusers loads from the same folder and that starts from a prompt and an image file.
"""

from types import SimpleNamespace

import diffusers
import pytest
import torch
from blake3 import blake3
from fakes.miniatures import QwenProcessor
from PIL import Image

from gracetune.cache.encode import EncodeItem, decode_item
from gracetune.config.schema import ModelSection
from gracetune.data.augment import DEFAULT_TRANSFORM, render_control
from gracetune.data.images import PILLOW
from gracetune.data.sample import Companion, Sample
from gracetune.models import qwen_image
from gracetune.models.diffusers_family import unpack_latents, without_progress_bars
from gracetune.models.family import SampleRequest, load_family

PROMPT = "a red ring on the box"
LONG = "a red ring on the box of the blue star " * 80  # 720 tokens
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


class FirstCallError(Exception):
    """Ends a pipeline at its first call of the transformer."""


def capture(transformer, monkeypatch):
    """Let the transformer's calls end in FirstCallError; return a dict of their arguments."""
    seen = {}

    def forward(*args, **arguments):
        assert not args
        seen.update(arguments)
        raise FirstCallError

    monkeypatch.setattr(transformer, "forward", forward)
    return seen


def pipeline_inputs(pipeline, monkeypatch, **arguments):
    """Return the arguments of the pipeline's first call of its transformer."""
    pipeline.set_progress_bar_config(disable=True)
    with monkeypatch.context() as patch, pytest.raises(FirstCallError), torch.no_grad():
        seen = capture(pipeline.transformer, patch)
        generator = torch.Generator().manual_seed(3)
        pipeline(num_inference_steps=2, generator=generator, **arguments)
    return seen


def sampling_inputs(family, transformer, monkeypatch, **request):
    """Return the arguments of the transformer's first call in a validation."""
    with monkeypatch.context() as patch, pytest.raises(FirstCallError), torch.no_grad():
        seen = capture(transformer, patch)
        given = {"empty_text": request["texts"][0], **request}  # without guidance, it is not read
        family.sample(SampleRequest(seed=3, steps=2, guidance=1.0, **given))
    return seen


def training_inputs(family, noisy, sigma, text, conditions):
    """Return the arguments that a training step gives the transformer."""
    seen = {}

    def forward(**arguments):
        seen.update(arguments)
        raise FirstCallError

    with pytest.raises(FirstCallError), torch.no_grad():
        family.predict(forward, noisy, sigma, {**family.stack_text([text]), **conditions})
    return seen


def assert_same(ours, theirs):
    """Compare arguments. One that is not given is None; so is a mask of a batch without padding."""
    for name in ours.keys() | theirs.keys():
        one, other = ours.get(name), theirs.get(name)
        if name.endswith("_mask"):
            assert all(mask is None or mask.all() for mask in (one, other)), name
        elif isinstance(one, torch.Tensor):
            torch.testing.assert_close(one, other, **CLOSE, msg=lambda text, n=name: f"{n}: {text}")
        elif not name.endswith("attention_kwargs"):  # of LoRA files and attention processors
            assert one == other, name


def read_pipeline(cls, folder, **components):
    with without_progress_bars():
        return cls.from_pretrained(folder, local_files_only=True, **components)


# Qwen-Image-Edit: the image to edit has a size of its own


def photo(size, seed=0):
    pixels = torch.rand(
        size[1] // 4, size[0] // 4, 3, generator=torch.Generator().manual_seed(seed)
    )
    return Image.fromarray(pixels.mul(255).byte().numpy()).resize(size)


def edit_pipeline(folder, family):
    """Return diffusers' pipeline, with the positions of image tokens that it should pass on.

    See `qwen_image.encode_edit`: the pipeline forgets them with transformers 5.
    """
    encoder = family.text_encoders[0]

    def encode(input_ids, **inputs):
        is_image = (input_ids == encoder.config.image_token_id).int()
        return encoder(input_ids=input_ids, mm_token_type_ids=is_image, **inputs)

    pipeline = diffusers.QwenImageEditPipeline(
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


@pytest.fixture(scope="module")
def edit(miniature):
    folder = miniature("qwen-image-edit")
    family = load_family(ModelSection(family="qwen_image", path=str(folder)))
    return SimpleNamespace(family=family, pipeline=edit_pipeline(folder, family))


@pytest.mark.parametrize(
    ("size", "file_size", "prompt"),
    [
        ((96, 64), (1536, 1024), PROMPT),
        ((512, 496), (1024, 992), PROMPT),  # resizing twice would give another size
        ((32, 64), (50, 100), LONG),
    ],
)
def test_an_edit_trains_on_the_pipelines_inputs(
    edit, monkeypatch, tmp_path, size, file_size, prompt
):
    family, image = edit.family, photo(file_size)
    image.save(tmp_path / "a.png")
    digest = blake3((tmp_path / "a.png").read_bytes()).hexdigest()
    control_image = Companion("control", "a.png", digest)
    sample = Sample("d", "a.png", PROMPT, digest, *file_size, companions=(control_image,))
    source = SimpleNamespace(read=lambda key: (tmp_path / key).read_bytes())
    control_size = family.control_size(*size)
    item = EncodeItem(sample, size, source, control_size=control_size)
    encoded = family.encode(decode_item(item, PILLOW)[None])
    assert encoded.shape[1:] == family.latent_shape(*size)
    x0, conditions = family.split_encoded(encoded)
    control = render_control(source.read("a.png"), DEFAULT_TRANSFORM, size, control_size)
    (text,) = family.encode_text([prompt], [control])

    theirs = pipeline_inputs(
        edit.pipeline, monkeypatch, image=image, prompt=prompt, width=size[0], height=size[1]
    )
    noisy = unpack_latents(theirs["hidden_states"][:, : x0[0, 0].numel() // 4], *x0.shape[-2:])
    assert_same(training_inputs(family, noisy, theirs["timestep"], text, conditions), theirs)
    validated = sampling_inputs(
        family, family.transformer, monkeypatch, texts=[text], shape=size, images=[control]
    )
    assert_same(validated, theirs)


def test_the_size_of_an_image_to_edit_is_the_pipelines():
    from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit import calculate_dimensions

    for width in range(16, 4096, 48):
        for height in (width // 4 + 16, 1024, width, 4 * width):
            theirs = calculate_dimensions(1024 * 1024, width / height)[:2]
            assert qwen_image.reference_size(width, height) == theirs


def test_an_edits_cached_entries_are_not_those_of_earlier_versions(edit, miniature):
    plain = load_family(ModelSection(family="qwen_image", path=str(miniature("qwen-image"))))
    for kind, identity in edit.family.identity().items():
        assert identity != plain.identity()[kind]
        assert identity.startswith("qwen-image-edit-1048576-")
    assert plain.identity()["latents"].startswith("qwen-image-mode-")
    assert plain.identity()["text"].startswith("qwen-image-512-")


# Models that read a caption, and perhaps a first frame


@pytest.mark.parametrize("prompt", [PROMPT, LONG, ""])
@pytest.mark.parametrize(
    ("name", "family_name"),
    [
        ("flux", "flux"),
        ("qwen-image", "qwen_image"),
        ("wan21-t2v", "wan22"),
        ("wan22-t2v", "wan22"),
        ("wan22-5b", "wan22"),
    ],
)
def test_text_to_image_and_video_train_on_the_pipelines_inputs(
    name, family_name, prompt, miniature, monkeypatch
):
    folder = miniature(name)
    family = load_family(ModelSection(family=family_name, path=str(folder)))
    is_video = "video" in family.kinds
    size = (2 * family.pixel_step, 3 * family.pixel_step)
    options = {"num_frames": 5} if is_video else {}
    if family_name != "qwen_image":
        options["guidance_scale"] = 1.0
    pipeline = read_pipeline(diffusers.DiffusionPipeline, folder)
    theirs = pipeline_inputs(
        pipeline, monkeypatch, prompt=prompt, width=size[0], height=size[1], **options
    )
    (text,) = family.encode_text([prompt])
    shape = (*size, 5) if is_video else size
    noisy, sigma = theirs["hidden_states"], theirs["timestep"]
    if is_video:
        sigma = sigma.flatten()[:1] / 1000
    else:
        noisy = unpack_latents(noisy, *family.latent_shape(*shape)[-2:])
    assert_same(training_inputs(family, noisy, sigma, text, {}), theirs)
    transformer = getattr(family.transformer, "high", family.transformer)
    validated = sampling_inputs(family, transformer, monkeypatch, texts=[text], shape=shape)
    assert_same(validated, theirs)


@pytest.mark.parametrize(("name", "task"), [("wan22-i2v", "auto"), ("wan22-5b", "image")])
def test_image_to_video_trains_on_the_pipelines_inputs(name, task, miniature, monkeypatch):
    folder = miniature(name)
    family = load_family(ModelSection(family="wan22", path=str(folder), task=task))
    size = (2 * family.pixel_step, 3 * family.pixel_step)
    clip = torch.rand(1, 3, 5, size[1], size[0], generator=torch.Generator().manual_seed(0))
    pipeline = read_pipeline(diffusers.WanImageToVideoPipeline, folder)
    options = {"num_frames": 5, "guidance_scale": 1.0}
    theirs = pipeline_inputs(
        pipeline,
        monkeypatch,
        image=clip[:, :, 0],
        prompt=PROMPT,
        width=size[0],
        height=size[1],
        **options,
    )
    (text,) = family.encode_text([PROMPT])
    x0, conditions = family.split_encoded(family.encode(clip * 2 - 1))
    noisy = theirs["hidden_states"][:, : x0.shape[1]]
    sigma = theirs["timestep"].flatten()[-1:] / 1000
    assert_same(training_inputs(family, noisy, sigma, text, conditions), theirs)
    transformer = getattr(family.transformer, "high", family.transformer)
    images = [clip[0, :, 0] * 2 - 1]
    validated = sampling_inputs(
        family, transformer, monkeypatch, texts=[text], shape=(*size, 5), images=images
    )
    assert_same(validated, theirs)
