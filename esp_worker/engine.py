"""The step loop: admit, draft, one forward pass for all slots, verify, commit.

B running sequences in slots 0..B-1, N rows of the widest block, H hidden size, V vocabulary, k masks.
A lane is a drafting method with its own queue. Sequences of two lanes never share a step: a lane runs until it has
nothing left, then the next one does, on the same model, kernels and slots. That is how plain decoding is compared.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from esp_worker.drafters.base import Drafter, Room
from esp_worker.model import CausalModel
from esp_worker.sampling import select_token
from esp_worker.stopping import Ending, commit_until_end, token_limit
from esp_worker.tree import Draft
from esp_worker.types import Completion, DecodeStats, Request
from esp_worker.verify import Verdict, accept_walk

PREFILL_CHUNK = 512


class RequestError(ValueError):
    """A request that this engine can never decode (empty or too long prompt, token outside the vocabulary)."""


@dataclass(slots=True)
class _Sequence:
    request: Request
    drafter: Drafter
    limit: int  # most output tokens
    state: Any = None
    output: list[int] = field(default_factory=list)
    stats: DecodeStats = field(default_factory=DecodeStats)
    started: float = 0.0
    ending: Ending | None = None

    @property
    def length(self) -> int:
        """Context columns: all tokens but the newest, which is the next root."""
        return len(self.request.prompt_ids) + len(self.output) - 1

    def commit(self, tokens: Sequence[int]) -> int:
        """Append tokens up to where the sequence ends; how many were kept."""
        before = len(self.output)
        self.ending = commit_until_end(self.output, tokens, self.request, self.limit)
        return len(self.output) - before


@dataclass(slots=True)
class _Lane:
    drafter: Drafter
    waiting: deque[_Sequence] = field(default_factory=deque)


class Engine:
    """Decodes many requests in `slots` slots with one model. Not thread-safe: see service.EngineService.

    drafters: the lanes, by method name (`esp`, `ar`); the first is the default. max_length: prompt + output tokens of a
    sequence, at most the model's context.
    """

    def __init__(
        self, model: CausalModel, drafters: Sequence[Drafter], *, slots: int = 8, max_length: int | None = None
    ) -> None:
        if slots < 1:
            raise ValueError(f"slots must be at least 1, got {slots}")
        if max_length is not None and not 2 <= max_length <= model.context_length:
            raise ValueError(
                f"max_length must lie in 2..{model.context_length} (the model's context), got {max_length}"
            )
        self.model = model
        self.slots = slots
        self.max_length = max_length or model.context_length
        self._lanes = {drafter.name: _Lane(drafter) for drafter in drafters}
        self._lane = next(iter(self._lanes.values()))
        self._cache = model.new_cache(slots)
        self._running: list[_Sequence] = []
        self._finished: list[Completion] = []  # given out by the next step that does not fail
        self._alone = 0  # sequences at the head of the lane that must not share a step

    # ---- requests in, completions out

    def check(self, request: Request) -> None:
        """Raise RequestError for a request that can never be decoded here."""
        length = len(request.prompt_ids)
        if not length:
            raise RequestError("the prompt has no tokens")
        if length >= self.max_length:
            raise RequestError(
                f"the prompt has {length} tokens; at most {self.max_length - 1} fit (engine.max_length "
                f"{self.max_length}, prompt and output together)"
            )
        outside = [token for token in request.prompt_ids if not 0 <= token < self.model.vocab_size]
        if outside:
            raise RequestError(f"token id {outside[0]} is outside the model's vocabulary of {self.model.vocab_size}")

    def submit(self, request: Request, method: str | None = None) -> None:
        """Queue a request in the lane of `method`. Raises RequestError (see check)."""
        self.check(request)
        lane = self._lane_of(method)
        lane.waiting.append(_Sequence(request, lane.drafter, token_limit(request, self.max_length)))

    def generate(self, requests: Iterable[Request], method: str | None = None) -> Iterator[Completion]:
        """Decode requests and yield completions as they end (not in order)."""
        for request in requests:
            self.submit(request, method)
        while self.busy:
            yield from self.step()

    @property
    def methods(self) -> list[str]:
        """Names of the lanes, the default first."""
        return list(self._lanes)

    @property
    def busy(self) -> bool:
        return bool(self._running or self._finished) or any(lane.waiting for lane in self._lanes.values())

    @property
    def running(self) -> list[str]:
        """Ids of the requests in slots."""
        return [sequence.request.request_id for sequence in self._running]

    def drop_running(self) -> None:
        """Forget the sequences in slots (after a step that failed)."""
        self._running = []
        self._alone = max(self._alone - 1, 0)

    def restart_alone(self) -> None:
        """Start the sequences in slots again from their prompts, one at a time, before any other (after a step that
        failed: the one that fails alone is the culprit)."""
        self._alone = len(self._running)
        fresh = [_Sequence(old.request, old.drafter, old.limit) for old in self._running]
        self._lane.waiting.extendleft(reversed(fresh))
        self._running = []

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        """Fill free slots, run one block for every running sequence, return those that ended."""
        self._admit()
        if self._running:
            self._decode()
            self._release()
        done, self._finished = self._finished, []
        if not self.busy:
            self._lane = self._lane_of(None)
        return done

    def _lane_of(self, method: str | None) -> _Lane:
        if method is None:
            return next(iter(self._lanes.values()))
        if method not in self._lanes:
            raise ValueError(f"method {method} is not one of this engine's: {', '.join(self._lanes)}")
        return self._lanes[method]

    # ---- slots

    def _admit(self) -> None:
        """Prefill waiting requests into free slots; one that its first token ends frees its slot at once."""
        if not self._running and not self._lane.waiting:
            self._lane = next((lane for lane in self._lanes.values() if lane.waiting), self._lane)
        while self._lane.waiting and len(self._running) < (1 if self._alone else self.slots):
            self._running.append(self._lane.waiting.popleft())
            self._prefill(self._running[-1], slot=len(self._running) - 1)
            self._release()

    def _release(self) -> None:
        """Take ended sequences out; the last running one moves into each gap, so that slots 0..B-1 stay filled."""
        now = time.perf_counter()
        for slot in range(len(self._running) - 1, -1, -1):
            sequence = self._running[slot]
            if sequence.ending is None:
                continue
            last = len(self._running) - 1
            if slot != last:
                self._cache.move(last, slot, self._running[last].length)
                self._running[slot] = self._running[last]
            self._running.pop()
            self._alone = max(self._alone - 1, 0)
            latency = now - sequence.started
            name = sequence.request.request_id
            ending = sequence.ending
            self._finished.append(
                Completion(name, tuple(sequence.output), ending.reason, sequence.stats, latency, ending.stop)
            )

    # ---- prefill

    def _prefill(self, sequence: _Sequence, slot: int) -> None:
        """Prompt in chunks, mask tokens behind the last one; gives the first token and the first candidates."""
        began = sequence.started = time.perf_counter()
        device = self.model.device
        drafter, prompt = sequence.drafter, torch.tensor(sequence.request.prompt_ids, device=device)
        embeds = self.model.embed(prompt)
        sequence.state = drafter.start(embeds)
        # Mask j stands at position P - 1 + j and serves depth j of the first tree, as a probe of a root at P - 1 would.
        masks = Room(sequence.limit).masks(drafter.masks)
        if masks:
            embeds = torch.cat([embeds, drafter.mask_embeds(sequence.state)[:masks].to(embeds.dtype)])
        start = 0
        for end in [*range(PREFILL_CHUNK, len(prompt), PREFILL_CHUNK), len(embeds)]:
            hidden = self._prefill_chunk(embeds[start:end], start, slot)
            sequence.stats.prefill_calls += 1
            start = end
        logits = self.model.logits(hidden[len(hidden) - masks - 1 :])
        token = select_token(logits[0], sequence.request.sampling, sequence.request.prompt_ids, [])
        sequence.commit([token])
        if sequence.ending is None:
            drafter.observe([sequence.state], [[token]], [logits[1:]])
        sequence.stats.engine_s += time.perf_counter() - began

    def _prefill_chunk(self, embeds: torch.Tensor, start: int, slot: int) -> torch.Tensor:
        """[n, H] -> hidden [n, H] of rows at positions start.., a chain."""
        rows, device = len(embeds), embeds.device
        positions = torch.arange(start, start + rows, device=device)[None]
        visible = torch.ones(1, rows, rows, dtype=torch.bool, device=device).tril()
        lengths = torch.tensor([start], device=device)
        return self.model.forward_block(self._cache, slot, lengths, embeds[None], positions, visible)[0]

    # ---- decode

    def _decode(self) -> None:
        began = time.perf_counter()
        running = self._running
        drafts = [
            sequence.drafter.draft(sequence.state, sequence.output[-1], self._room(sequence)) for sequence in running
        ]
        hidden = self._forward(drafts)
        verdicts = self._verify(drafts, hidden)
        self._commit(drafts, verdicts, hidden)
        seconds = (time.perf_counter() - began) / len(running)
        for sequence in running:
            sequence.stats.engine_s += seconds
            sequence.stats.batch_sum += len(running)

    def _room(self, sequence: _Sequence) -> Room:
        return Room(sequence.limit - len(sequence.output))

    def _forward(self, drafts: Sequence[Draft]) -> torch.Tensor:
        """Hidden states [B, N, H] of every sequence's block. Rows that pad a narrower block see only themselves."""
        device = self.model.device
        shapes = [draft.shape for draft in drafts]
        batch, rows = len(drafts), max(shape.rows for shape in shapes)
        ids = torch.zeros(batch, max(shape.token_rows for shape in shapes), dtype=torch.long)
        offsets = torch.zeros(batch, rows, dtype=torch.long)
        visible = torch.eye(rows, dtype=torch.bool).repeat(batch, 1, 1)
        for b, (draft, shape) in enumerate(zip(drafts, shapes, strict=True)):
            ids[b, : shape.token_rows] = torch.tensor([self._running[b].output[-1], *draft.tree.tokens])
            offsets[b, : shape.rows] = shape.offsets
            visible[b, : shape.rows, : shape.rows] = shape.visible
        token_embeds = self.model.embed(ids.to(device))
        embeds = token_embeds.new_zeros(batch, rows, token_embeds.shape[-1])
        for b, (draft, shape) in enumerate(zip(drafts, shapes, strict=True)):
            embeds[b, : shape.token_rows] = token_embeds[b, : shape.token_rows]
            if shape.masks:
                masks = self._running[b].drafter.mask_embeds(self._running[b].state)[: shape.masks]
                embeds[b, shape.token_rows : shape.rows] = masks.to(embeds.dtype).repeat(len(draft.owners), 1)
        lengths = torch.tensor([sequence.length for sequence in self._running], device=device)
        positions = lengths[:, None] + offsets.to(device)
        return self.model.forward_block(self._cache, 0, lengths, embeds, positions, visible.to(device))

    def _verify(self, drafts: Sequence[Draft], hidden: torch.Tensor) -> list[Verdict]:
        """lm_head on roots and nodes only, then each sequence's accept walk."""
        counts = [draft.shape.token_rows for draft in drafts]
        logits = self.model.logits(torch.cat([hidden[b, :count] for b, count in enumerate(counts)]))
        greedy = logits.argmax(-1).tolist()
        verdicts, first = [], 0
        for sequence, draft, count in zip(self._running, drafts, counts, strict=True):
            choose = _chooser(sequence, logits[first : first + count], greedy[first : first + count])
            verdicts.append(accept_walk(draft.tree, choose))
            first += count
        return verdicts

    def _commit(self, drafts: Sequence[Draft], verdicts: Sequence[Verdict], hidden: torch.Tensor) -> None:
        """Append accepted tokens, keep their KV, and hand the winners' probe logits to the drafter."""
        slots: list[int] = []
        sources: list[int] = []
        targets: list[int] = []
        going: list[int] = []
        for slot, (sequence, draft, verdict) in enumerate(zip(self._running, drafts, verdicts, strict=True)):
            length = sequence.length
            kept = sequence.commit(verdict.tokens)
            stats = sequence.stats
            stats.decode_calls += 1
            stats.rows_computed += draft.shape.rows
            stats.drafted_tokens += len(draft.tree)
            stats.accepted_tokens += min(kept, len(verdict.path) - 1)
            stats.accept_lengths.append(kept)
            if sequence.ending is not None:
                continue
            going.append(slot)
            for target, row in enumerate(verdict.path):
                if row != target:
                    slots.append(slot)
                    sources.append(length + row)
                    targets.append(length + target)
        self._cache.compact(slots, sources, targets)
        self._observe(going, drafts, verdicts, hidden)

    def _observe(
        self, going: Sequence[int], drafts: Sequence[Draft], verdicts: Sequence[Verdict], hidden: torch.Tensor
    ) -> None:
        probes = [drafts[slot].shape.probe_rows(verdicts[slot].path[-1]) for slot in going]
        counts = [len(rows) for rows in probes]
        if sum(counts):
            rows = torch.cat([hidden[slot, rows.start : rows.stop] for slot, rows in zip(going, probes, strict=True)])
            logits = list(self.model.logits(rows).split(counts))
        else:
            logits = [hidden.new_zeros(0, self.model.vocab_size) for _ in going]
        if going:
            states = [self._running[slot].state for slot in going]
            self._lane.drafter.observe(states, [verdicts[slot].tokens for slot in going], logits)


def _chooser(sequence: _Sequence, logits: torch.Tensor, greedy: Sequence[int]) -> Callable[[int, Sequence[int]], int]:
    """The model's own token after a row: argmax, or the draw of that output position. logits [rows, V]."""
    request = sequence.request
    if request.sampling.temperature == 0 and not request.sampling.edits_logits:
        return lambda row, accepted: greedy[row]
    return lambda row, accepted: select_token(
        logits[row], request.sampling, request.prompt_ids, [*sequence.output, *accepted]
    )
