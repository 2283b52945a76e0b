"""Token choice: filters as Hugging Face's, noise that only its key decides, draws that follow the distribution."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from esp_worker.sampling import filtered_logits, gumbel_noise, select_token
from esp_worker.types import SamplingParams

LOGITS = torch.randn(50, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 3


def params(**options: object) -> SamplingParams:
    return SamplingParams(max_new_tokens=1, **options)


def test_temperature_zero_is_argmax() -> None:
    assert select_token(LOGITS, params(), 0) == int(LOGITS.argmax())


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize("top_k", [0, 1, 5, 50, 80])
@pytest.mark.parametrize("top_p", [0.1, 0.6, 0.95, 1.0])
def test_filters_equal_hugging_faces(temperature: float, top_k: int, top_p: float) -> None:
    want = (
        TemperatureLogitsWarper(temperature)(None, LOGITS[None].clone()) if temperature != 1 else LOGITS[None].clone()
    )
    if top_k:
        want = TopKLogitsWarper(top_k)(None, want)
    if top_p < 1:
        want = TopPLogitsWarper(top_p)(None, want)
    got = filtered_logits(LOGITS, params(temperature=temperature, top_k=top_k, top_p=top_p))
    torch.testing.assert_close(got, want[0])


def test_noise_is_a_function_of_its_key() -> None:
    base = gumbel_noise(1, 0, 5, 100)
    assert np.array_equal(base, gumbel_noise(1, 0, 5, 100))
    for key in ((2, 0, 5), (1, 1, 5), (1, 0, 6), (2**64 - 1, 3, 5)):
        assert not np.array_equal(base, gumbel_noise(*key, 100))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"temperature": 1.0}, [0.5, 0.3, 0.2]),
        ({"temperature": 0.5}, [0.25 / 0.38, 0.09 / 0.38, 0.04 / 0.38]),
        ({"temperature": 1.0, "top_p": 0.6}, [0.625, 0.375, 0.0]),
        ({"temperature": 1.0, "top_k": 1}, [1.0, 0.0, 0.0]),
    ],
)
def test_draws_follow_the_distribution(options: dict[str, float], expected: list[float]) -> None:
    """Chi-square over 4,000 keys: 13.8 is the 0.1 % point at two degrees of freedom, and the keys are fixed."""
    logits = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log()
    draws = 4000
    counts = np.bincount(
        [select_token(logits, params(seed=seed, **options), seed % 7) for seed in range(draws)], minlength=3
    )
    want = np.array(expected) * draws
    assert (counts[want == 0] == 0).all()
    assert (((counts - want) ** 2)[want > 0] / want[want > 0]).sum() < 13.8


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"seed": -1}, "seed"),
    ],
)
def test_impossible_settings_are_named(options: dict[str, float], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        SamplingParams(**{"max_new_tokens": 1, **options})
