import pytest

from gracetune.config.schema import RunFile
from gracetune.data.sample import Sample
from gracetune.errors import CheckpointError
from gracetune.train.run_identity import check_same_run, run_identity

SAMPLES = [Sample("a", "1.png", "one", "d1", 8, 8), Sample("a", "2.png", "two", "d2", 8, 8)]


def identity(samples=SAMPLES, weights="w", precision="no", **sections):
    sections.setdefault("datasets", [{"id": "a", "instance_data_dir": "x"}])
    return run_identity(RunFile.model_validate(sections), samples, weights, precision)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"seed": 1}, "seed was 0 and is now 1"),
        ({"train": {"batch_size": 2}}, "train.batch_size was 1 and is now 2"),
        ({"optimizer": {"lr": 0.5}}, "optimizer.lr"),
        ({"adapter": {"rank": 4}}, "adapter"),
        ({"datasets": [{"id": "a", "resolution": 64}]}, r"datasets\[0\].resolution"),
        ({"samples": SAMPLES[:1]}, "the training samples and captions"),
        ({"weights": "other"}, "the model's weights at the start"),
        ({"precision": "bf16"}, "train.mixed_precision"),
        (
            {"gh200_optimizations": {"batch_rampup_steps": 5}},
            "gh200_optimizations.batch_rampup_steps",
        ),
    ],
)
def test_a_changed_setting_that_shapes_the_weights_is_named(change, name):
    with pytest.raises(CheckpointError, match=name):
        check_same_run(identity(), identity(**change))


@pytest.mark.parametrize(
    "change",
    [
        {"output_dir": "elsewhere"},
        {"train": {"max_train_steps": 5000, "checkpoint_every": 1}},
        {"datasets": [{"id": "a", "instance_data_dir": "moved", "type": "in_memory"}]},
        {"validation": {"every": 3}},
        {"logging": {"every": 3}},
    ],
)
def test_other_settings_may_change(change):
    check_same_run(identity(), identity(**change))


def test_more_steps_are_another_run_if_the_schedule_depends_on_them():
    short = {"optimizer": {"schedule": "cosine"}, "train": {"max_train_steps": 10}}
    long = {"optimizer": {"schedule": "cosine"}, "train": {"max_train_steps": 20}}
    with pytest.raises(CheckpointError, match=r"train\.max_train_steps was 10 and is now 20"):
        check_same_run(identity(**short), identity(**long))


def test_a_changed_caption_is_noticed():
    changed = [SAMPLES[0], Sample("a", "2.png", "zwei", "d2", 8, 8)]
    with pytest.raises(CheckpointError, match="captions"):
        check_same_run(identity(), identity(samples=changed))


def test_mask_settings_are_compared_only_with_masks():
    plain = {"datasets": [{"instance_data_dir": "d", "resolution": 32}]}
    masked = {"datasets": [{"instance_data_dir": "d", "resolution": 32, "mask_data_dir": "m"}]}
    assert not any("mask" in key for key in identity(**plain))
    assert "datasets[0].mask_normalize" in identity(**masked)
