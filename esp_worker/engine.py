"""The step loop: draft, admit, one forward pass for all slots, verify, commit.

B running sequences in slots 0..B-1, H hidden size, V vocabulary, k masks.
A lane is a drafting method with its own queue. Sequences of two lanes never share a step: a lane runs until it has
nothing left, then the next one does, on the same model, kernels and slots. That is how plain decoding is compared.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Sequence

import torch

from esp_worker.cache import rounded
from esp_worker.drafters.base import Drafter, Prompt
from esp_worker.lane import Lane
from esp_worker.memory import cache_budget
from esp_worker.model import CausalModel
from esp_worker.sequence import ActiveSequence
from esp_worker.slots import SlotTable
from esp_worker.step import Chunk, Step
from esp_worker.stopping import Ending, token_limit
from esp_worker.tree import Draft
from esp_worker.types import Completion, FinishReason, Request, TokenLogprobs
from esp_worker.verify import Verdict

logger = logging.getLogger(__name__)

PREFILL_TOKENS = 512
BLOCK_COLUMNS = 256  # room for a block behind the longest context
# Tokens that a prompt waits for which another, that is being prefilled, will have computed: about what a CPU's reading
# the weights takes.
WORTH_WAITING = 16
_GIB = 1 << 30


class RequestError(ValueError):
    """A request that this engine can never decode (empty or too long prompt, token outside the vocabulary)."""


class Engine:
    """Decodes many requests in up to `slots` slots with one model. Not thread-safe: see service.EngineService.

    drafters: the lanes, by method name (`esp`, `ar`); the first is the default. max_length: prompt + output tokens of a
    sequence, at most the model's context. prefill_tokens: most prompt tokens that a step takes, beside the blocks of
    the sequences that decode. prefix_reuse: take over the KV of a prompt's beginning where a slot
    holds it. cache_bytes: most bytes of KV (None: worked out from the device's free memory).

    Contexts that outgrow the cache's budget leave fewer slots for a time. A device that runs out of memory leaves half
    the slots and half the budget, down to one slot: a sequence that fails there fails alone, and the engine has its
    slots back. A sequence that has to leave its slot waits at the head of its lane; its context is computed again and
    its output goes on where it was. Raises ValueError for settings that cannot work.
    """

    def __init__(
        self,
        model: CausalModel,
        drafters: Sequence[Drafter],
        *,
        slots: int = 8,
        max_length: int | None = None,
        prefill_tokens: int = PREFILL_TOKENS,
        prefix_reuse: bool = True,
        cache_bytes: int | None = None,
    ) -> None:
        if slots < 1:
            raise ValueError(f"slots must be at least 1, got {slots}")
        if max_length is not None and not 2 <= max_length <= model.context_length:
            raise ValueError(
                f"max_length must lie in 2..{model.context_length} (the model's context), got {max_length}"
            )
        if prefill_tokens < 1:
            raise ValueError(f"prefill_tokens must be at least 1, got {prefill_tokens}")
        names = [drafter.name for drafter in drafters]
        if len(set(names)) < len(names):
            raise ValueError(f"each method needs a name of its own, got {', '.join(names)}")
        self.model = model
        self.slots = slots
        self.max_length = max_length or model.context_length
        self.prefill_tokens = prefill_tokens
        self.prefix_reuse = prefix_reuse
        self._lanes = {drafter.name: Lane(drafter) for drafter in drafters}
        self._lane = next(iter(self._lanes.values()))
        self._table = SlotTable(model.new_cache(slots))
        self.cache_bytes = cache_budget(model.device) if cache_bytes is None else cache_bytes
        self._wanted = self.slots, self.cache_bytes
        self._check_budget()
        self._finished: list[ActiveSequence] = []  # given out by the next step that does not fail

    # ---- requests in, completions out

    def check(self, request: Request) -> None:
        """Raise RequestError for a request that can never be decoded here."""
        length, sampling = len(request.prompt_ids), request.sampling
        if not length:
            raise RequestError("the prompt has no tokens")
        if length >= self.max_length:
            raise RequestError(
                f"the prompt has {length} tokens; at most {self.max_length - 1} fit (engine.max_length "
                f"{self.max_length}, prompt and output together)"
            )
        named = {
            "": request.prompt_ids,
            "logit_bias: ": [token for token, _ in sampling.logit_bias],
            "bad_words: ": [token for word in sampling.bad_words for token in word],
        }
        for where, tokens in named.items():
            outside = [token for token in tokens if not 0 <= token < self.model.vocab_size]
            if outside:
                raise RequestError(
                    f"{where}token id {outside[0]} is outside the model's vocabulary of {self.model.vocab_size}"
                )

    def submit(self, request: Request, method: str | None = None) -> None:
        """Queue a request in the lane of `method`. Raises RequestError (see check)."""
        self._enqueue(request, method)

    def generate(self, requests: Iterable[Request], method: str | None = None) -> Iterator[Completion]:
        """Decode requests and yield their completions as they end (not in order).

        Raises RequestError before anything runs. Requests of a generator that is closed early leave the engine; those
        that others have submitted stay.
        """
        left: set[ActiveSequence] = set()
        try:
            for request in requests:
                left.add(self._enqueue(request, method))
            while left:
                ended = self._step()
                own = [sequence for sequence in ended if sequence in left]
                self._finished += [sequence for sequence in ended if sequence not in left]
                left.difference_update(own)
                yield from (sequence.completion() for sequence in own)
        finally:
            self._finished = [sequence for sequence in self._finished if sequence not in left]
            for sequence in left:
                sequence.cancelled = True

    def cancel(self, request_id: str) -> None:
        """Forget a request that waits or runs; nothing happens when it has ended."""
        for sequence in self._unfinished():
            if sequence.request.request_id == request_id:
                sequence.cancelled = True

    @property
    def methods(self) -> list[str]:
        """Names of the lanes, the default first."""
        return list(self._lanes)

    @property
    def busy(self) -> bool:
        return bool(self._finished) or any(not sequence.cancelled for sequence in self._unfinished())

    @property
    def running(self) -> list[str]:
        """Ids of the requests in slots."""
        return [sequence.request.request_id for sequence in self._table.sequences]

    @property
    def running_tokens(self) -> int:
        """Output tokens so far of the requests in slots."""
        return sum(len(sequence.output) for sequence in self._table.sequences)

    @property
    def memory_plan(self) -> str:
        """One line on the KV cache, for the log."""
        column = self._table.cache.column_bytes
        tokens = self.cache_bytes // column
        return (
            f"KV cache: {column / 1024:.4g} KiB a token, up to {self.cache_bytes / _GIB:.3g} GiB: {tokens} tokens, "
            f"{min(tokens // self.slots, self.max_length)} in each of {self.slots} slots at once; "
            "longer contexts leave fewer slots"
        )

    def drop_running(self) -> None:
        """Forget the sequences in slots (after a step that failed)."""
        self._settle(self._table.clear())

    def restart_alone(self) -> None:
        """Start the sequences in slots again from their prompts, one at a time, before any other (after a step that
        failed: the one that fails alone is the culprit)."""
        sequences = self._settle(self._table.clear())
        for sequence in sequences:
            sequence.restart(alone=True)
        self._lane.put_back(sequences)

    def step(self) -> list[Completion]:
        """Fill free slots, run one forward pass (a block of every running sequence, and chunks of contexts that are not
        whole), return those that ended."""
        return [sequence.completion() for sequence in self._step()]

    @torch.inference_mode()
    def _step(self) -> list[ActiveSequence]:
        reason = None
        try:
            self._release()  # what was cancelled since
            self._advance()
        except (RuntimeError, MemoryError) as error:
            reason = _out_of_memory(error)
            if reason is None:
                raise
            if self.slots == 1:
                self.slots, self.cache_bytes = self._wanted  # the others need not suffer for the one that fails now
                raise
        if reason is not None:  # here, where the error and all that it holds has gone
            self._shrink(reason)
        done, self._finished = self._finished, []
        if not self.busy:
            self._lane = self._lane_of(None)
        return done

    def _unfinished(self) -> Iterator[ActiveSequence]:
        yield from self._table.sequences
        for lane in self._lanes.values():
            yield from lane

    def _enqueue(self, request: Request, method: str | None) -> ActiveSequence:
        self.check(request)
        lane = self._lane_of(method)
        sequence = ActiveSequence(request, lane.drafter, token_limit(request, self.max_length))
        lane.add(sequence)
        return sequence

    def _lane_of(self, method: str | None) -> Lane:
        if method is None:
            return next(iter(self._lanes.values()))
        if method not in self._lanes:
            raise ValueError(f"method {method} is not one of this engine's: {', '.join(self._lanes)}")
        return self._lanes[method]

    # ---- slots

    def _next(self, begun: int) -> ActiveSequence | None:
        """The sequence to prefill behind `begun` others: one that has a slot, else the next of the lane where a slot is
        free."""
        table = self._table
        if begun < len(table.filling):
            return table.filling[begun]
        if not table.sequences and not self._lane:
            self._lane = next((lane for lane in self._lanes.values() if lane), self._lane)
        lane = self._lane
        while lane and (lane.head.cancelled or not lane.head.limit):
            skipped = lane.pop()
            if not skipped.cancelled:  # max_new_tokens 0
                skipped.ending = Ending(FinishReason.LENGTH)
                self._finish(skipped)
        if not lane or (table.sequences and (lane.head.alone or table.sequences[0].alone)):
            return None
        if not self._room_for(lane.head):
            return None
        if begun and self.prefix_reuse and table.coming(lane.head) >= WORTH_WAITING:
            return None
        table.place(lane.head, self.prefix_reuse)
        return lane.pop()

    def _release(self) -> None:
        """Take ended and cancelled sequences out of their slots."""
        for sequence in reversed(self._table.sequences.copy()):
            if sequence.ending is not None or sequence.cancelled:
                self._table.remove(sequence)
                self._settle([sequence])

    def _settle(self, sequences: Sequence[ActiveSequence]) -> list[ActiveSequence]:
        """Finish those that have ended and forget the cancelled; returns the others."""
        for sequence in sequences:
            if sequence.ending is not None and not sequence.cancelled:
                self._finish(sequence)
        return [sequence for sequence in sequences if sequence.ending is None and not sequence.cancelled]

    def _finish(self, sequence: ActiveSequence) -> None:
        sequence.ended = time.perf_counter()
        self._finished.append(sequence)

    def _wait_again(self, sequences: Sequence[ActiveSequence]) -> None:
        """Back to the head of the lane, in order; their context is computed again, their output stays."""
        for sequence in sequences:
            sequence.filled = 0
        self._lane.put_back(sequences)

    # ---- memory

    def _check_budget(self) -> None:
        needed = rounded(self.max_length + BLOCK_COLUMNS) * self._table.cache.column_bytes
        if needed > self.cache_bytes:
            raise ValueError(
                f"max_length {self.max_length} needs {needed / _GIB:.3g} GiB of KV cache for one slot, and "
                f"{self.cache_bytes / _GIB:.3g} GiB may be used; lower engine.max_length, or raise engine.cache_gib"
            )

    def _slots_of(self, columns: int) -> int:
        """How many slots of that many columns the budget allows."""
        return max(min(self.slots, self.cache_bytes // (columns * self._table.cache.column_bytes)), 1)

    def _make_columns(self, columns: int) -> None:
        """Grow the cache; where that leaves fewer slots, the last sequences wait again."""
        cache = self._table.cache
        if columns <= cache.columns:
            return
        least = rounded(columns)
        ample = max(least, min(2 * cache.columns, rounded(self.max_length + BLOCK_COLUMNS)))
        wanted = ample if self._slots_of(ample) == self.slots else least
        slots = self._slots_of(wanted)
        if slots < cache.slots:
            logger.info("contexts of %d tokens: %d slots for now", columns, slots)
        while len(self._table.sequences) > slots:
            last = self._table.sequences[-1]
            self._table.remove(last)
            self._wait_again([last])
        self._table.resize(slots, wanted)

    def _room_for(self, sequence: ActiveSequence) -> bool:
        """Whether it can have a slot without one that has to leave; gives slots back that longer contexts had taken,
        once these are gone."""
        table = self._table
        if not table.free and table.cache.slots == self.slots:
            return False
        needed = rounded(max(each.length for each in [*table.sequences, sequence]) + BLOCK_COLUMNS)
        slots = self._slots_of(needed)
        if slots > table.cache.slots:
            table.resize(slots, needed)
        return bool(table.free) and slots > len(table.sequences)

    def _shrink(self, reason: str) -> None:
        """Out of memory: half the slots, half the budget; the contexts of all in slots are computed again."""
        self._wait_again(self._settle(self._table.clear()))
        self.slots //= 2
        self.cache_bytes //= 2  # not below one slot: _slots_of gives one always
        self._table = SlotTable(self.model.new_cache(self.slots))
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()
        logger.warning("out of memory (%s): going on with %d slots", reason, self.slots)

    # ---- steps

    def _advance(self) -> None:
        """One forward pass: a block for each running sequence, and the next chunks of contexts that are not whole."""
        began = time.perf_counter()
        table = self._table
        drafts = self._draft()
        drafting, drafted = time.perf_counter() - began, len(drafts)
        chunks = self._chunks(began)
        prefills = bool(chunks)
        ends = [sequence.length + draft.shape.rows for sequence, draft in zip(table.running, drafts, strict=True)]
        ends += [chunk.first + chunk.rows for chunk in chunks]
        if not ends:
            return
        self._make_columns(max(ends))
        running = table.running.copy()
        drafts, chunks = drafts[: len(running)], chunks[: len(table.filling)]
        try:
            step = Step(self.model, table.cache, running, drafts, chunks)
            verdicts, found = step.verify()
            self._commit(drafts, verdicts[: len(drafts)], found)
            drafting += self._learn(step, verdicts)
            self._fill(step, chunks, verdicts[len(drafts) :], found[len(drafts) :])
        finally:
            seconds = time.perf_counter() - began
            _share(seconds, running, drafts, chunks)
        if drafts and len(drafts) == drafted:  # else it is not the step that the drafter chose
            tokens = [len(verdict.tokens) for verdict in verdicts[: len(drafts)]]
            self._lane.drafter.spent(None if prefills else seconds, drafting, tokens)
        self._release()

    def _draft(self) -> list[Draft]:
        turns = [sequence.turn for sequence in self._table.running]
        return self._lane.drafter.draft_all(turns, waiting=bool(self._lane)) if turns else []

    def _chunks(self, now: float) -> list[Chunk]:
        """What is prefilled beside the running sequences, at most prefill_tokens; fills free slots."""
        chunks: list[Chunk] = []
        left = self.prefill_tokens
        while sequence := self._next(len(chunks)):
            todo = sequence.length - sequence.filled
            if left < max(min(todo, self.prefill_tokens // 4), 1):
                break  # a shred of a chunk is not worth its place
            if sequence.started is None:
                self._start(sequence, now)
            tokens = min(todo, left)
            left -= tokens
            ends_prompt = tokens == todo and not sequence.output
            masks = sequence.room.masks(sequence.drafter.masks) if ends_prompt else 0
            chunks.append(Chunk(sequence, sequence.filled, tokens, ends_prompt, masks))
        return chunks

    def _start(self, sequence: ActiveSequence, now: float) -> None:
        request = sequence.request
        prompt = Prompt(request.prompt_ids, request.sampling, self.model.embed, self.model.device)
        sequence.state = sequence.drafter.start(prompt)
        sequence.started = now  # at the end: should this fail for want of memory, it is done again

    def _fill(
        self,
        step: Step,
        chunks: Sequence[Chunk],
        verdicts: Sequence[Verdict],
        logprobs: Sequence[Sequence[TokenLogprobs]],
    ) -> None:
        """Keep the KV of chunks; where they end a prompt, append its first token: verdicts and logprobs of these."""
        drafter = self._lane.drafter
        for chunk in chunks:
            self._table.fill(chunk.sequence, chunk.tokens)
            chunk.sequence.stats.prefill_calls += 1
            chunk.sequence.stats.prefill_tokens += chunk.tokens
        if drafter.watch is not None and drafter.watch.prompt:
            for sequence, seen in step.prompt_seen(drafter.watch):
                drafter.saw([sequence.state], [seen])
        ending = [chunk.sequence for chunk in chunks if chunk.ends_prompt]
        going: list[tuple[ActiveSequence, Verdict, torch.Tensor]] = []
        for sequence, verdict, own, probed in zip(ending, verdicts, logprobs, step.prompt_probed(), strict=True):
            sequence.logprobs += own
            sequence.commit(verdict.tokens)
            if sequence.ending is None:
                going.append((sequence, verdict, probed))
        if going:
            drafter.observe(
                [sequence.state for sequence, _, _ in going],
                [verdict.tokens for _, verdict, _ in going],
                [probed for _, _, probed in going],
            )
        self._table.start()

    def _commit(
        self, drafts: Sequence[Draft], verdicts: Sequence[Verdict], logprobs: Sequence[Sequence[TokenLogprobs]]
    ) -> None:
        """Append accepted tokens and keep their KV."""
        slots: list[int] = []
        sources: list[int] = []
        targets: list[int] = []
        running = self._table.running
        for slot, (sequence, draft, verdict) in enumerate(zip(running, drafts, verdicts, strict=True)):
            length = sequence.length
            sequence.commit_run(verdict.tokens, logprobs[slot])
            sequence.stats.plain_steps += not len(draft.tree)
            sequence.stats.drafted_tokens += len(draft.tree)
            sequence.stats.rows_computed += draft.shape.rows
            sequence.stats.batch_sum += len(running)
            if sequence.ending is not None:
                continue
            for target, row in enumerate(verdict.path):
                if row != target:
                    slots.append(slot)
                    sources.append(length + row)
                    targets.append(length + target)
        self._table.cache.compact(slots, sources, targets)

    def _learn(self, step: Step, verdicts: Sequence[Verdict]) -> float:
        """Show the drafter what became of its drafts, of the sequences that go on; seconds that this took."""
        began = time.perf_counter()
        drafter, running = self._lane.drafter, self._table.running
        going = [slot for slot, sequence in enumerate(running) if sequence.ending is None]
        if not going:
            return 0.0
        states = [running[slot].state for slot in going]
        if drafter.watch is not None:
            drafter.saw(states, step.seen(going, verdicts, drafter.watch))
        drafter.observe(states, [verdicts[slot].tokens for slot in going], step.probed(going, verdicts))
        return time.perf_counter() - began


def _share(seconds: float, running: Sequence[ActiveSequence], drafts: Sequence[Draft], chunks: Sequence[Chunk]) -> None:
    """Divide a pass's time among its sequences: by rows between each chunk and decoding, whose part all share alike."""
    decoding = sum(draft.shape.rows for draft in drafts)
    a_row = seconds / (decoding + sum(chunk.rows for chunk in chunks))
    for sequence in running:
        sequence.stats.engine_s += a_row * decoding / len(running)
    for chunk in chunks:
        chunk.sequence.stats.engine_s += a_row * chunk.rows


def _out_of_memory(error: BaseException) -> str | None:
    """The first line of an error that says that memory is out; None for others. A CPU's is a plain RuntimeError."""
    line = str(error).partition("\n")[0]
    out = isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in line
    return line if out else None
