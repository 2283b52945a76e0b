"""Token choice: edits and filters as Hugging Face's, noise that only its key decides, draws that follow the
distribution."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from esp_worker.sampling import (
    NoTokenError,
    Ranked,
    edited_logits,
    filtered_logits,
    gumbel_noise,
    select_token,
    token_logprobs,
)
from esp_worker.types import SamplingParams

LOGITS = torch.randn(50, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 3
PROMPT = (3, 7, 7, 11)
OUTPUT = [7, 20, 21, 20, 20]
SOME_LOGITS = torch.randn(20, generator=torch.Generator().manual_seed(2), dtype=torch.float64) * 1.5


def params(**options: Any) -> SamplingParams:
    return SamplingParams(**{"max_new_tokens": 100, **options})


def test_temperature_zero_is_argmax() -> None:
    assert select_token(LOGITS, params(), PROMPT, []) == int(LOGITS.argmax())


# ------------------------------------------------------------------------------------------------------------ filters


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize("top_k", [0, 1, 5, 50, 80])
@pytest.mark.parametrize("top_p", [0.1, 0.6, 0.95, 1.0])
@pytest.mark.parametrize("min_p", [0.0, 0.02, 0.4, 1.0])
def test_filters_equal_hugging_faces(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    want = LOGITS[None].clone()
    if temperature != 1:
        want = TemperatureLogitsWarper(temperature)(None, want)
    if top_k:
        want = TopKLogitsWarper(top_k)(None, want)
    if top_p < 1:
        want = TopPLogitsWarper(top_p)(None, want)
    if min_p:
        want = MinPLogitsWarper(min_p)(None, want)
    got = filtered_logits(LOGITS, params(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p))
    torch.testing.assert_close(got, want[0])


# -------------------------------------------------------------------------------------------------------------- edits


def edited(output: Sequence[int] = OUTPUT, prompt: tuple[int, ...] = PROMPT, **options: Any) -> torch.Tensor:
    given = LOGITS.clone()
    scores = edited_logits(given, params(**options), prompt, output)
    assert torch.equal(given, LOGITS), "the model's logits stay as they are"
    return scores


def ids(output: Sequence[int] = OUTPUT) -> torch.Tensor:
    return torch.tensor([[*PROMPT, *output]])


@pytest.mark.parametrize("penalty", [0.5, 1.3, 4.0])
@pytest.mark.parametrize("output", [[], OUTPUT])
def test_repetition_penalty_equals_hugging_faces(penalty: float, output: list[int]) -> None:
    want = RepetitionPenaltyLogitsProcessor(penalty)(ids(output), LOGITS[None].clone())
    torch.testing.assert_close(edited(output, repetition_penalty=penalty), want[0])
    assert (want[0] != LOGITS).sum() == len({*PROMPT, *output})


@pytest.mark.parametrize(("presence", "frequency"), [(0.7, 0.0), (0.0, 0.4), (1.5, -0.3), (-2.0, 2.0)])
def test_presence_and_frequency_penalties_count_the_output_alone(presence: float, frequency: float) -> None:
    counts = Counter(OUTPUT)
    want = torch.tensor(
        [score - presence * (counts[t] > 0) - frequency * counts[t] for t, score in enumerate(LOGITS.tolist())],
        dtype=torch.float64,
    )
    penalties = {"presence_penalty": presence, "frequency_penalty": frequency}
    torch.testing.assert_close(edited(**penalties), want)
    torch.testing.assert_close(edited([], **penalties), LOGITS)


def test_logit_bias_equals_hugging_faces() -> None:
    bias = {0: 2.5, 20: -1.0, 49: 100.0}
    want = SequenceBiasLogitsProcessor([[[token], value] for token, value in bias.items()])(ids(), LOGITS[None].clone())
    torch.testing.assert_close(edited(logit_bias=tuple(bias.items())), want[0])


@pytest.mark.parametrize(
    "words",
    [
        [(5,)],
        [(5,), (8, 9)],
        [(20, 30), (20, 20, 31), (21, 20, 20, 32), (20, 21, 33), (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 34)],
        [(20, 20, 20, 20, 35), (7, 20, 21, 20, 20, 36)],
    ],
)
@pytest.mark.parametrize("output", [[], [20], OUTPUT])
def test_bad_words_equal_hugging_faces(words: list[tuple[int, ...]], output: list[int]) -> None:
    """Hugging Face counts the prompt's end too; this prompt is the start of no word."""
    want = NoBadWordsLogitsProcessor([list(word) for word in words], eos_token_id=None)(
        ids(output), LOGITS[None].clone()
    )
    torch.testing.assert_close(edited(output, bad_words=tuple(words)), want[0])


def test_bad_words_may_begin_in_the_output_only() -> None:
    assert edited([], prompt=(7, 11), bad_words=((11, 5),))[5] == LOGITS[5], "the prompt's end starts no word"
    assert edited([11], prompt=(7, 11), bad_words=((11, 5),))[5] == -torch.inf


@pytest.mark.parametrize("length", range(4))
def test_min_new_tokens_equals_hugging_faces(length: int) -> None:
    output, eos = OUTPUT[:length], [2, 40]
    processor = MinNewTokensLengthLogitsProcessor(len(PROMPT), 2, eos)
    want = processor(ids(output), LOGITS[None].clone())
    got = edited(output, min_new_tokens=2, eos_token_ids=frozenset([*eos, 1000]))  # 1000: outside the vocabulary
    torch.testing.assert_close(got, want[0])
    assert (got[2] == -torch.inf) == (length < 2)


def test_edits_come_in_order() -> None:
    """Bias, then repetition, then presence and frequency, then exclusions."""
    logits = torch.tensor([4.0, 1.0, -2.0, 0.0], dtype=torch.float64)
    options = {
        "repetition_penalty": 2.0,
        "presence_penalty": 0.25,
        "frequency_penalty": 0.5,
        "logit_bias": ((0, 1.0), (3, 9.0)),
        "bad_words": ((3,),),
    }
    scores = edited_logits(logits, params(**options), (2,), [0, 0])
    assert scores.tolist() == [(4 + 1) / 2 - 0.25 - 2 * 0.5, 1.0, -4.0, -torch.inf]


def test_greedy_and_sampled_choice_use_the_edits() -> None:
    best = int(LOGITS.argmax())
    assert select_token(LOGITS, params(bad_words=((best,),)), PROMPT, []) == int(LOGITS.topk(2).indices[1])
    for seed in range(50):
        assert select_token(LOGITS, params(temperature=1, seed=seed, logit_bias=((4, 1e6),)), PROMPT, []) == 4


def test_no_token_is_left() -> None:
    all_banned = {"bad_words": tuple((token,) for token in range(3))}
    for temperature in (0.0, 1.0):
        with pytest.raises(NoTokenError, match="every token is excluded"):
            select_token(torch.zeros(3), params(temperature=temperature, **all_banned), (), [])
        for broken in ([float("nan"), 1.0], [float("inf"), 1.0], [-float("inf")] * 2):
            with pytest.raises(NoTokenError):
                select_token(torch.tensor(broken), params(temperature=temperature), (), [])


# -------------------------------------------------------------------------------------------------------------- noise


def test_noise_is_a_function_of_its_key() -> None:
    tokens = torch.arange(100)
    base = gumbel_noise(1, 0, 5, tokens)
    assert torch.equal(base, gumbel_noise(1, 0, 5, tokens))
    for key in ((2, 0, 5), (1, 1, 5), (1, 0, 6), (0, 1, 5), (2**64 - 1, 3, 5), (5, 0, 1), (1, 5, 0)):
        assert not (base == gumbel_noise(*key, tokens)).any()
    some = torch.tensor([99, 3, 50])
    assert torch.equal(gumbel_noise(1, 0, 5, some), base[some]), "a token's noise does not depend on the others"


def test_noise_is_splitmix64s() -> None:
    """Against the published recurrence in plain integers; seed 0's first output is a known one."""

    def outputs(state: int) -> Iterator[int]:
        mask = 2**64 - 1
        while True:
            state = (state + 0x9E3779B97F4A7C15) & mask
            z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
            z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
            yield z ^ (z >> 31)

    assert next(outputs(0)) == 0xE220A8397B1DCDAF
    stream = next(outputs(next(outputs(next(outputs(2**63 + 11)) ^ 2)) ^ 9))
    bits = list(itertools.islice(outputs(stream), 1000))
    want = [-math.log(-math.log(((b >> 12) + 0.5) / 2**52)) for b in bits]
    got = gumbel_noise(2**63 + 11, 2, 9, torch.arange(1000))
    assert got.tolist() == pytest.approx(want, rel=1e-12)


def test_noise_is_gumbels_distribution_and_independent_between_positions() -> None:
    """Kolmogorov-Smirnov over 200,000 values (0.1 % point 1.95 / sqrt n), and correlation with the next position's."""
    noise = gumbel_noise(3, 1, 4, torch.arange(200_000))
    cdf = torch.exp(-torch.exp(-noise)).sort().values
    assert (cdf - (torch.arange(200_000) + 0.5) / 200_000).abs().max() < 1.95 / 200_000**0.5
    for key in ((3, 1, 5), (3, 2, 4), (4, 1, 4)):
        other = gumbel_noise(*key, torch.arange(200_000))
        assert abs(float(torch.corrcoef(torch.stack([noise, other]))[0, 1])) < 0.01


def test_a_nucleus_wider_than_what_is_looked_at_first() -> None:
    logits = torch.randn(3000, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    for top_p in (0.2, 0.9, 0.999, 1 - 1e-12):
        want = TopPLogitsWarper(top_p)(None, logits[None].clone())[0]
        got = filtered_logits(logits, params(temperature=1.0, top_p=top_p))
        assert torch.equal(got, want)


def draws(count: int = 40, **options: Any) -> list[int]:
    return [select_token(SOME_LOGITS, params(temperature=1.0, **options), (), [0] * at) for at in range(count)]


def test_the_same_seed_repeats_and_others_differ() -> None:
    assert draws(seed=5) == draws(seed=5)
    keys = [(5, 0), (6, 0), (5, 1), (6, 1), (2**64 - 1, 0)]
    others = [draws(seed=seed, sample_index=sample) for seed, sample in keys]
    assert len({tuple(other) for other in others}) == len(others)


DRAWS = 20_000
# The 0.1 % points of chi-square, by degrees of freedom. The keys are fixed, so a pass stays a pass.
CRITICAL = [
    *(0.0, 10.83, 13.82, 16.27, 18.47, 20.52, 22.46, 24.32, 26.12, 27.88, 29.59, 31.26, 32.91, 34.53, 36.12, 37.70),
    *(39.25, 40.79, 42.31, 43.82),
]


def check_draws(logits: torch.Tensor, probs: np.ndarray, output: Sequence[int] = (), **options: Any) -> None:
    """Chi-square of DRAWS draws, by seeds and sample indices, against `probs` [V]."""
    drawn = [
        select_token(logits, params(seed=draw, sample_index=draw % 3, **options), (1,), output) for draw in range(DRAWS)
    ]
    counts = np.bincount(drawn, minlength=len(logits))
    assert (counts[probs == 0] == 0).all(), "an excluded token was drawn"
    want = probs[probs > 0] * DRAWS
    statistic = ((counts[probs > 0] - want) ** 2 / want).sum()
    assert statistic < CRITICAL[len(want) - 1]


def softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


THREE = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"temperature": 1.0}, [0.5, 0.3, 0.2]),
        ({"temperature": 0.5}, [0.25 / 0.38, 0.09 / 0.38, 0.04 / 0.38]),
        ({"temperature": 1.0, "top_p": 0.6}, [0.625, 0.375, 0.0]),
        ({"temperature": 1.0, "min_p": 0.5}, [0.625, 0.375, 0.0]),
        # Output 0, 0, 1: the logits fall by 2 x 0.3 + 0.2 and 0.3 + 0.2.
        (
            {"temperature": 1.0, "presence_penalty": 0.2, "frequency_penalty": 0.3},
            softmax(np.log([0.5, 0.3, 0.2]) - [0.8, 0.5, 0]),
        ),
    ],
)
def test_draws_of_three_tokens_follow_the_distribution(options: dict[str, float], expected: Any) -> None:
    check_draws(THREE, np.array(expected), [0, 0, 1], **options)


def twenty(temperature: float, *, top_p: float = 1.0, min_p: float = 0.0, edits: Any = 0.0) -> np.ndarray:
    """[20] probabilities of SOME_LOGITS + edits: written apart from the code under test, token by token."""
    probs = softmax((SOME_LOGITS.numpy() + edits) / temperature)
    kept, mass = set(), 0.0
    for token in sorted(range(20), key=lambda token: -probs[token]):
        if mass < top_p:
            kept.add(token)
        mass += probs[token]
    probs = np.array([prob if token in kept else 0.0 for token, prob in enumerate(probs)])
    probs[probs < min_p * probs.max()] = 0.0
    return probs / probs.sum()


SEEN = [0, 5, 5, 5, 19]
PENALTY = np.array([{0: 0.6, 5: 1.0, 19: 0.6}.get(token, 0.0) for token in range(20)])
REPEATED = np.array(
    [
        0.0 if token not in (1, 0, 5, 19) else (score / 1.5 if score > 0 else score * 1.5) - score
        for token, score in enumerate(SOME_LOGITS.tolist())
    ]
)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"temperature": 1.0}, twenty(1.0)),
        ({"temperature": 0.6}, twenty(0.6)),
        ({"temperature": 1.4, "top_p": 0.8}, twenty(1.4, top_p=0.8)),
        ({"temperature": 1.0, "min_p": 0.1}, twenty(1.0, min_p=0.1)),
        (
            {"temperature": 1.0, "presence_penalty": 0.4, "frequency_penalty": 0.2},
            twenty(1.0, edits=-PENALTY),
        ),
        ({"temperature": 0.9, "repetition_penalty": 1.5}, twenty(0.9, edits=REPEATED)),
    ],
)
def test_draws_of_twenty_tokens_follow_the_distribution(options: dict[str, float], expected: np.ndarray) -> None:
    check_draws(SOME_LOGITS, expected, SEEN, **options)


# ----------------------------------------------------------------------------------------------------------- logprobs


@pytest.mark.parametrize("top", [0, 1, 5, 80])
def test_logprobs_are_those_of_the_raw_logits(top: int) -> None:
    chosen = 17
    got = token_logprobs(LOGITS, chosen, top)
    weights = [np.exp(score) for score in LOGITS.tolist()]
    want = {token: float(np.log(weight / sum(weights))) for token, weight in enumerate(weights)}
    best = sorted(want, key=lambda token: -want[token])[:top]
    assert got.logprob == pytest.approx(want[chosen], abs=1e-12)
    assert [token for token, _ in got.top] == best
    assert [logprob for _, logprob in got.top] == pytest.approx([want[token] for token in best], abs=1e-12)


def test_logprobs_of_16_bits_are_taken_in_32() -> None:
    half = LOGITS.to(torch.bfloat16)
    assert token_logprobs(half, 0, 2) == token_logprobs(half.float(), 0, 2)


# --------------------------------------------------------------------------------------------------------- validation


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": -1}, "max_new_tokens must not be negative, got -1"),
        ({"min_new_tokens": -1}, "min_new_tokens must lie in 0..max_new_tokens, got -1"),
        ({"min_new_tokens": 101}, "min_new_tokens must lie in 0..max_new_tokens, got 101"),
        ({"temperature": -1.0}, "temperature must be 0 or >= 0.0001, got -1.0"),
        ({"temperature": 1e-5}, "temperature must be 0 or >= 0.0001, got 1e-05"),
        ({"temperature": float("inf")}, "temperature must be"),
        ({"temperature": float("nan")}, "temperature must be"),
        ({"top_k": -1}, "top_k must not be negative (0 is off), got -1"),
        ({"top_p": 0.0}, "top_p must lie in (0, 1], got 0.0"),
        ({"top_p": 1.1}, "top_p must lie in (0, 1], got 1.1"),
        ({"top_p": float("nan")}, "top_p must"),
        ({"min_p": -0.1}, "min_p must lie in [0, 1], got -0.1"),
        ({"min_p": 1.1}, "min_p must lie in [0, 1], got 1.1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be positive and finite, got 0.0"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty must be positive and finite"),
        ({"presence_penalty": float("nan")}, "presence_penalty must be finite, got nan"),
        ({"frequency_penalty": float("inf")}, "frequency_penalty must be finite, got inf"),
        ({"logit_bias": ((1, 2.0), (3, float("inf")))}, "logit_bias must hold finite numbers"),
        ({"bad_words": ((1,), ())}, "bad_words must hold no empty sequence"),
        ({"seed": -1}, "seed must fit in 64 unsigned bits, got -1"),
        ({"seed": 2**64}, "seed must fit in 64 unsigned bits"),
        ({"sample_index": -1}, "sample_index must fit in 32 unsigned bits"),
        ({"sample_index": 2**32}, "sample_index must fit in 32 unsigned bits"),
        ({"logprobs": -1}, "logprobs must be None or not negative, got -1"),
    ],
)
def test_impossible_settings_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        params(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": 0},
        {"min_new_tokens": 100},
        {"temperature": 0.0001},
        {"top_p": 1.0, "min_p": 1.0},
        {"repetition_penalty": 0.01, "presence_penalty": -2.0, "frequency_penalty": -2.0},
        {"seed": 2**64 - 1, "sample_index": 2**32 - 1},
        {"logprobs": 0},
    ],
)
def test_the_border_is_allowed(options: dict[str, Any]) -> None:
    params(**options)


@pytest.mark.parametrize(
    ("options", "edits"),
    [
        ({}, False),
        ({"temperature": 1.0, "top_k": 1, "top_p": 0.5, "min_p": 0.5, "seed": 3, "logprobs": 1}, False),
        ({"min_new_tokens": 1}, True),
        ({"repetition_penalty": 0.9}, True),
        ({"presence_penalty": -1.0}, True),
        ({"frequency_penalty": 0.1}, True),
        ({"logit_bias": ((1, 0.5),)}, True),
        ({"bad_words": ((1,),)}, True),
    ],
)
def test_what_edits_logits(options: dict[str, Any], edits: bool) -> None:
    assert params(**options).edits_logits is edits


@pytest.mark.parametrize(("rows", "size", "count"), [(3, 5000, 8), (1, 1024, 8), (2, 1023, 8), (4, 1025, 8), (2, 9, 8)])
def test_top_k_by_chunks_is_top_k(rows: int, size: int, count: int) -> None:
    logits = torch.randn(rows, size, generator=torch.Generator().manual_seed(size))
    logits[0, : size // 2] = -torch.inf
    values, tokens = Ranked(logits).top(count)
    want, _ = logits.topk(count)
    assert torch.equal(values, want)
    assert torch.equal(logits.gather(1, tokens), want)
    assert all(len(set(row)) == count for row in tokens.tolist())


@pytest.mark.parametrize("size", [1, 127, 128, 300, 1024])
def test_the_best_of_equals_is_the_first(size: int) -> None:
    logits = torch.randint(0, 3, (50, size), generator=torch.Generator().manual_seed(size)).float()
    logits[0] = -5.0
    want = [row.index(max(row)) for row in logits.tolist()]
    assert Ranked(logits).argmax() == want
    assert size == 1 or any(row.count(max(row)) > 1 for row in logits.tolist())


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_row_whose_best_is_no_number_has_none(bad: float) -> None:
    logits = torch.zeros(3, 300)
    logits[0, 299], logits[1] = bad, -torch.inf
    assert Ranked(logits).argmax() == [-1, -1, 0]
