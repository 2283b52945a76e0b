"""ESP's masks and candidates: initialisation, the mean's update in closed form, top candidates."""

from __future__ import annotations

import pytest
import torch

from esp_worker.drafters.base import Room, probing_owners
from esp_worker.drafters.probe import ProbeDrafter, ema_update, initial_masks, top_candidates
from esp_worker.tree import EMPTY_TREE, TokenTree


def embeds(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("rate", [0.0, 0.01, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("count", [1, 2, 7])
def test_ema_closed_form_equals_the_loop(rate: float, count: int) -> None:
    """Eq. 4 token by token against Eq. 5 in one go."""
    masks, tokens = embeds(3, 16), embeds(count, 16)
    loop = masks.clone()
    for token in tokens:
        loop = loop + rate * (token - loop)
    torch.testing.assert_close(ema_update(masks, tokens, rate), loop, rtol=1e-12, atol=1e-12)


def test_mean_init() -> None:
    prompt = embeds(5, 16)
    masks = initial_masks(prompt, 3, "mean")
    torch.testing.assert_close(masks, prompt.mean(0).expand(3, 16))


def test_last_k_init_ends_with_the_last_token() -> None:
    prompt = embeds(5, 16)
    assert torch.equal(initial_masks(prompt, 3, "last_k"), prompt[2:])
    assert torch.equal(initial_masks(prompt[:1], 3, "last_k"), prompt[[0, 0, 0]])


def test_masks_of_a_16_bit_model_are_kept_in_fp32() -> None:
    assert initial_masks(embeds(5, 16).to(torch.bfloat16), 1, "mean").dtype is torch.float32


def test_top_candidates_are_softmax_probabilities_best_first() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, -1.0]])
    (candidates,) = top_candidates(logits, 3)
    assert candidates.tokens == [1, 2, 0]
    assert candidates.probs == pytest.approx(logits.softmax(-1)[0, [1, 2, 0]].tolist())
    assert len(top_candidates(logits, 99)[0].tokens) == 4


def test_room_bounds_the_draft() -> None:
    assert Room(tokens=1, positions=9).max_depth == 0
    assert Room(tokens=5, positions=2).max_depth == 2
    assert Room(tokens=2, positions=9).masks(3) == 0  # the next step can commit one token at most
    assert Room(tokens=4, positions=9).masks(3) == 2
    tree = TokenTree((1, 2), (0, 1))
    assert probing_owners(tree, 2, Room(9, 9)) == (0, 1, 2)
    assert probing_owners(tree, 2, Room(9, 3)) == (0, 1)
    assert probing_owners(EMPTY_TREE, 0, Room(9, 9)) == ()


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="one width a mask"):
        ProbeDrafter(lambda ids: ids, masks=2, branches=[4])
    with pytest.raises(ValueError, match="leaves no draft row"):
        ProbeDrafter(lambda ids: ids, masks=2, block_complexity=5)
