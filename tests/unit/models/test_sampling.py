import pytest
import torch

from gracetune.models.tiny import euler

TEXT = {"tokens": torch.ones(2, 1)}
EMPTY = {"tokens": torch.zeros(2, 1)}


def test_a_straight_path_is_solved_exactly_in_one_step():
    x0, noise = torch.randn(2, 3), torch.randn(2, 3)
    out = euler(lambda x, s, text: noise - x0, noise, TEXT, EMPTY, steps=1, guidance=1.0)
    torch.testing.assert_close(out, x0)


def test_levels_fall_from_one_and_never_reach_zero():
    seen = []

    def predict(x, s, text):
        seen.append(s[0].item())
        return torch.zeros_like(x)

    euler(predict, torch.zeros(2, 3), TEXT, EMPTY, steps=4, guidance=1.0)
    assert seen == [1.0, 0.75, 0.5, 0.25]


@pytest.mark.parametrize("guidance", [0.0, 2.0, 5.0])
def test_guidance_goes_from_the_empty_caption_through_the_caption(guidance):
    def predict(x, s, text):
        return text["tokens"].expand_as(x)  # 1 with the caption, 0 without

    out = euler(predict, torch.zeros(2, 3), TEXT, EMPTY, steps=5, guidance=guidance)
    torch.testing.assert_close(out, torch.full((2, 3), -guidance))
