"""Plain state that crosses the decoder's border: what is asked (Request), what comes back (Completion, DecodeStats)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

MIN_TEMPERATURE = 1e-4  # below, logits / temperature can overflow; 0 is greedy


class FinishReason(StrEnum):
    """Why a sequence ended: `stop` (EOS or a stop condition), `length` (token limit or the context's end)."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class StopMatch:
    """Where a stop condition cuts: the first `keep` output tokens stay, `text` is theirs, `reason` what matched.

    `keep` is the fewest tokens whose text covers `text`: where the stop begins on a token's border, they decode to just
    that; where it begins inside a token, that token stays and `text` ends within it.
    """

    keep: int
    text: str
    reason: str


class StopCondition(Protocol):
    """Decides, after each committed token, whether the sequence ends there (stop strings are one such condition)."""

    def match(self, token_ids: Sequence[int], after: int = 0) -> StopMatch | None:
        """The cut when the newest of the output tokens `token_ids` (all of them, in order) completes a stop.

        What is complete within the first `after` tokens (min_new_tokens) does not count.
        """
        ...


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen and when a sequence ends. Defaults are plain greedy decoding.

    temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 are off. Above temperature 0 the draw at output position t
    uses noise keyed by (seed, sample_index, t) alone: a row's tokens do not depend on its batch or on the method.

    repetition_penalty (1: off; Keskar et al. 2019, as Hugging Face and vLLM) divides positive and multiplies negative
    logits of every token that the prompt or the output holds. presence_penalty and frequency_penalty (0: off; OpenAI's)
    are subtracted once, and once per occurrence, for tokens of the output. logit_bias: (token, added to its logit).
    bad_words: token sequences that the output must not contain. min_new_tokens: output tokens that come before an EOS
    or a stop condition can end the row.

    logprobs: None, or how many of the most probable tokens to return at each position, beside the chosen one's.
    """

    max_new_tokens: int
    min_new_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    seed: int = 0
    sample_index: int = 0
    eos_token_ids: frozenset[int] = frozenset()
    logprobs: int | None = None

    def __post_init__(self) -> None:
        def expect(name: str, fits: bool, what: str) -> None:
            if not fits:
                raise ValueError(f"{name} must {what}, got {getattr(self, name)}")

        expect("max_new_tokens", self.max_new_tokens >= 0, "not be negative")
        expect("min_new_tokens", 0 <= self.min_new_tokens <= self.max_new_tokens, "lie in 0..max_new_tokens")
        cold = self.temperature == 0
        expect("temperature", cold or MIN_TEMPERATURE <= self.temperature < math.inf, f"be 0 or >= {MIN_TEMPERATURE}")
        expect("top_k", self.top_k >= 0, "not be negative (0 is off)")
        expect("top_p", 0 < self.top_p <= 1, "lie in (0, 1]")
        expect("min_p", 0 <= self.min_p <= 1, "lie in [0, 1]")
        expect("repetition_penalty", 0 < self.repetition_penalty < math.inf, "be positive and finite")
        expect("presence_penalty", math.isfinite(self.presence_penalty), "be finite")
        expect("frequency_penalty", math.isfinite(self.frequency_penalty), "be finite")
        expect("logit_bias", all(math.isfinite(bias) for _, bias in self.logit_bias), "hold finite numbers")
        expect("bad_words", all(self.bad_words), "hold no empty sequence")
        expect("seed", 0 <= self.seed < 2**64, "fit in 64 unsigned bits")
        expect("sample_index", 0 <= self.sample_index < 2**32, "fit in 32 unsigned bits")
        expect("logprobs", self.logprobs is None or self.logprobs >= 0, "be None or not negative")

    @property
    def edits_logits(self) -> bool:
        """Whether a token's logit depends on anything but the model (so that greedy is not the model's argmax)."""
        return bool(
            self.min_new_tokens
            or self.repetition_penalty != 1
            or self.presence_penalty
            or self.frequency_penalty
            or self.logit_bias
            or self.bad_words
        )


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to decode. `request_id` comes back on its completion and means nothing to the decoder."""

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    stop: StopCondition | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of one output position under the model's own distribution: its raw logits, before temperature,
    filters and penalties (as vLLM and OpenAI return them).

    logprob: the chosen token's; top: the most probable (token, log-probability), best first.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class DecodeStats:
    """What one sequence cost.

    accept_lengths has one entry a decode call: the tokens of the output that it gave, bonus included, after any cut, so
    that output tokens = 1 + sum(accept_lengths) (the first token is prefill's; an empty output has none). Where a stop
    string is cut off, the calls that gave its tokens count as less, down to 0. accepted_tokens are the drafted tokens
    that were committed, whatever is cut later. plain_steps are the decode calls that drafted nothing.

    prefill_tokens: prompt tokens that were computed; cached_tokens: those whose KV another row had left (their sum is
    the prompt's length, more where a row was preempted and its context computed again). rows_computed counts decode
    rows (root, tree nodes, probes), prefill not. engine_s is the sequence's share of engine time: a pass's time is
    divided by rows between decoding and each prefilled chunk, and decoding's part alike among those that decode; over
    all sequences it adds up to the engine's busy time.
    """

    prefill_calls: int = 0
    prefill_tokens: int = 0
    cached_tokens: int = 0
    decode_calls: int = 0
    plain_steps: int = 0
    rows_computed: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    accept_lengths: list[int] = field(default_factory=list)
    engine_s: float = 0.0
    batch_sum: int = 0

    @property
    def tau(self) -> float | None:
        """Mean acceptance length: committed tokens per decode call, None without decode calls."""
        return sum(self.accept_lengths) / self.decode_calls if self.decode_calls else None

    @property
    def mean_batch(self) -> float | None:
        """Mean number of sequences that decoded in the steps that this sequence did."""
        return self.batch_sum / self.decode_calls if self.decode_calls else None


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished sequence. token_ids hold the EOS when it ended the row, and are cut where a stop condition says
    (`stop`: its cut). latency_s runs from slot to end. logprobs: one entry a token, None unless asked for."""

    request_id: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stats: DecodeStats
    latency_s: float
    stop: StopMatch | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
