import json
from dataclasses import replace

import pytest
import torch
from PIL import Image

from gracetune.events.run_control import RunControl
from gracetune.train import validate as validating
from gracetune.train.build import build, start_accelerator
from gracetune.train.run import SignalHandler
from gracetune.train.validate import ValidationWriteError, image_grid, held_out_loss, sample, validate

SECTION = {"every": 1, "sample_steps": 2, "holdout": 0.2}


@pytest.fixture
def session(tiny_run, told, tmp_path):
    def make(**validation):
        run = tiny_run(validation=SECTION | validation)
        (tmp_path / "run").mkdir(exist_ok=True)
        return build(run, start_accelerator(run), told, RunControl(tmp_path), SignalHandler()).session

    return make


def test_pictures_are_the_same_every_time_and_do_not_touch_the_weights(session):
    s = session(prompts=["a red circle on a black background", "a blue box"])
    before = {n: p.detach().clone() for n, p in s.state.parameters.items()}
    state = torch.get_rng_state()
    first = validate(s.state, s.validation, 0)
    again = validate(s.state, s.validation, 7)
    assert torch.equal(torch.get_rng_state(), state)
    assert first.losses == again.losses
    files = [s.validation.folder / f"step-00000{n}" / "000.png" for n in (0, 7)]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert s.state.transformer.training
    for name, parameter in s.state.parameters.items():
        assert torch.equal(parameter, before[name])


def test_a_picture_does_not_depend_on_the_other_prompts(session):
    alone = session(prompts=["a red circle"])
    together = session(prompts=["a red circle", "a blue box on a white background"])
    with torch.no_grad():
        first = sample(alone.state, alone.validation)[0]
        second = sample(together.state, together.validation)[0]
    assert first.kind == "image"
    assert first.data.std() > 0
    torch.testing.assert_close(first.data, second.data)  # sums in another order round differently


def test_a_sheet_is_whole_or_not_there(session, monkeypatch):
    class Torn:
        def save(self, file, format):
            file.write_bytes(b"half")
            raise OSError("no room")

    monkeypatch.setattr(validating, "grid", lambda *_: Torn())
    s = session(prompts=["a red circle"])
    with pytest.raises(ValidationWriteError, match=r"step-000003\.png cannot be written: no room"):
        validate(s.state, s.validation, 3)
    assert [path.name for path in s.validation.folder.iterdir()] == ["step-000003"]


def test_prompts_of_the_data_set_are_named_where_none_are_given(session, told):
    s = session(num_prompts=3)
    assert len(s.validation.prompts) == 3
    (text,) = [t for t in told.texts() if t.startswith("validation.prompts")]
    assert all(repr(prompt) in text for prompt in s.validation.prompts)


def test_folders_are_made_and_the_step_is_in_every_name(session):
    s = session(prompts=["one", "two"])
    event = validate(s.state, s.validation, 12)
    assert event.grid == str(s.validation.folder / "step-000012.png")
    folder = s.validation.folder / "step-000012"
    assert json.loads((folder / "prompts.json").read_text()) == ["one", "two"]
    with Image.open(folder / "001.png") as picture:
        assert picture.size == (24, 24)


def test_the_average_is_pictured_where_one_is_kept(session):
    s = session(prompts=["one"])
    before = validate(s.state, s.validation, 0).losses["held_out"]
    for parameter in s.state.parameters.values():
        parameter.data.mul_(1.5)
    assert validate(s.state, s.validation, 1).losses["held_out"] == before


def test_the_held_out_loss_is_a_mean_over_samples_with_fixed_noise(session):
    s = session(prompts=["one"])
    with torch.no_grad():
        first = held_out_loss(s.state, s.validation.held_out)
        second = held_out_loss(s.state, s.validation.held_out)
    assert first == second
    assert 0.5 < first["held_out"] < 3.0
    assert held_out_loss(s.state, []) == {}


@pytest.mark.parametrize(("width", "height"), [(26, 24), (24, 200)])
def test_sizes_that_the_model_cannot_make_are_refused(session, width, height):
    with pytest.raises(Exception, match=r"validation\.width and height"):
        session(width=width, height=height)


def test_a_grid_has_room_for_every_picture_and_caption():
    pictures = [Image.new("RGB", (24, 24), (index * 40, 0, 0)) for index in range(5)]
    sheet = image_grid(pictures, ["a rather long caption " * 3] * 5, "step 3")
    assert sheet.width >= 3 * 24 * 6
    colours = {
        sheet.getpixel((x, y)) for x in range(0, sheet.width, 9) for y in range(0, sheet.height, 9)
    }
    assert {(index * 40, 0, 0) for index in range(5)} <= colours


def test_a_held_out_loss_is_no_rougher_for_latents_that_another_tool_has_rounded(session):
    s = session()
    rounded = [replace(b, latents=b.latents.bfloat16()) for b in s.validation.held_out]
    widened = [replace(b, latents=b.latents.float()) for b in rounded]
    with torch.no_grad():
        losses = [held_out_loss(s.state, batches) for batches in (rounded, widened)]
    assert losses[0] == losses[1]
