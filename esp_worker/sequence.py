"""One request on its way through the engine: plain state, and the arithmetic of where it stands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from esp_worker.drafters.base import Drafter, Room, Turn
from esp_worker.stopping import Ending, commit_until_end
from esp_worker.types import Completion, DecodeStats, Request, TokenLogprobs


@dataclass(slots=True, eq=False)
class ActiveSequence:
    """Waiting, being prefilled (`filled` of its context's columns are there) or running (its newest token is the next
    root, and all others are its context)."""

    request: Request
    drafter: Drafter
    limit: int  # most output tokens
    state: Any = None  # the drafter's
    output: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    stats: DecodeStats = field(default_factory=DecodeStats)
    filled: int = 0
    alone: bool = False  # must not share a step: a step failed with it and others
    cancelled: bool = False
    started: float | None = None
    ended: float | None = None
    ending: Ending | None = None

    @property
    def context(self) -> list[int]:
        """Tokens whose KV a block needs: the prompt's and the output's, but for the newest output token."""
        return [*self.request.prompt_ids, *self.output[:-1]]

    @property
    def length(self) -> int:
        """Context columns."""
        return len(self.request.prompt_ids) + max(len(self.output) - 1, 0)

    @property
    def room(self) -> Room:
        """What its next block may use."""
        return Room(self.limit - len(self.output))

    @property
    def turn(self) -> Turn:
        """What its drafter sees in front of a step."""
        return Turn(self.state, self.output[-1], self.room, self.length)

    def commit(self, tokens: Sequence[int]) -> int:
        """Append a run of tokens up to where the sequence ends; how many more the output has now.

        Negative where a stop condition cuts more than this run gave.
        """
        before = len(self.output)
        self.ending = commit_until_end(self.output, tokens, self.request, self.limit)
        return len(self.output) - before

    def commit_run(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> None:
        """Commit what one decode call gave (accepted drafts, then the bonus) and count it."""
        self.logprobs += logprobs
        kept = self.commit(tokens)
        lengths = self.stats.accept_lengths
        lengths.append(kept)
        call = len(lengths) - 1
        while call and lengths[call] < 0:  # a cut reaches into earlier calls
            lengths[call - 1] += lengths[call]
            lengths[call] = 0
            call -= 1
        lengths[0] = max(lengths[0], 0)  # and into the first token, which is prefill's
        self.stats.decode_calls += 1
        self.stats.accepted_tokens += max(min(kept, len(tokens) - 1), 0)

    def restart(self, alone: bool) -> None:
        """Begin again from the prompt; the time that it has had stays on its account."""
        self.state, self.output, self.logprobs = None, [], []
        self.stats = DecodeStats(engine_s=self.stats.engine_s)
        self.filled, self.started, self.alone = 0, None, alone

    def completion(self) -> Completion:
        assert self.ending is not None
        assert self.ended is not None
        return Completion(
            request_id=self.request.request_id,
            token_ids=tuple(self.output),
            finish_reason=self.ending.reason,
            stats=self.stats,
            latency_s=0.0 if self.started is None else self.ended - self.started,
            stop=self.ending.stop,
            logprobs=None if self.request.sampling.logprobs is None else tuple(self.logprobs[: len(self.output)]),
        )
