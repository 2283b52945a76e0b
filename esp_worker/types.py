"""Plain state that crosses the decoder's border: what is asked (Request), what comes back (Completion, DecodeStats)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol


class FinishReason(StrEnum):
    """Why a sequence ended: `stop` (EOS or a stop condition), `length` (token limit or the context's end)."""

    STOP = "stop"
    LENGTH = "length"


class StopCondition(Protocol):
    """Decides, after each committed token, whether the sequence ends there (stop strings are one such condition)."""

    def met(self, token_ids: Sequence[int]) -> bool:
        """True when the output tokens `token_ids` (all of them, the newest last) complete a stop."""
        ...


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen and when a sequence ends.

    temperature 0 is greedy; top_k 0 and top_p 1 are off. Above temperature 0 the draw at output position t uses noise
    keyed by (seed, sample_index, t) alone, so that a row's tokens do not depend on its batch or on the method.
    """

    max_new_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    sample_index: int = 0
    eos_token_ids: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if self.temperature < 0:
            raise ValueError(f"temperature must not be negative, got {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"top_k must not be negative (0 is off), got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1], got {self.top_p}")
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"seed must fit in 64 unsigned bits, got {self.seed}")


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to decode. `request_id` comes back on its completion and means nothing to the decoder."""

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    stop: StopCondition | None = None


@dataclass(slots=True)
class DecodeStats:
    """What one sequence cost.

    accept_lengths has one entry a decode call: the tokens it committed, bonus included, counted after any cut, so that
    output tokens = 1 + sum(accept_lengths) (the first token is prefill's). rows_computed counts decode rows (root, tree
    nodes, probes), prefill not. engine_s is the sequence's share of engine time: its own prefill, and each step's time
    divided by the sequences in that step; over all sequences it adds up to the engine's busy time.
    """

    prefill_calls: int = 0
    decode_calls: int = 0
    rows_computed: int = 0
    drafted_tokens: int = 0
    accept_lengths: list[int] = field(default_factory=list)
    engine_s: float = 0.0
    batch_sum: int = 0

    @property
    def accepted_tokens(self) -> int:
        """What the decode calls gave beyond one token each (of a run that was cut, one less than its tokens)."""
        return sum(self.accept_lengths) - len(self.accept_lengths)

    @property
    def tau(self) -> float | None:
        """Mean acceptance length: committed tokens per decode call, None without decode calls."""
        return sum(self.accept_lengths) / self.decode_calls if self.decode_calls else None

    @property
    def mean_batch(self) -> float | None:
        """Mean number of sequences in the steps that this sequence took part in."""
        return self.batch_sum / self.decode_calls if self.decode_calls else None


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished sequence. token_ids hold the EOS when it ended the row; latency_s runs from slot to end."""

    request_id: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stats: DecodeStats
    latency_s: float
