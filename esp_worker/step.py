"""One step: the blocks of all running sequences, and chunks of contexts that are being prefilled, in one forward pass,
and what the model answers behind them.

R rows in all, V vocabulary, k masks, K best tokens of a row.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from esp_worker.block import Block, in_order
from esp_worker.cache import SlotCache
from esp_worker.drafters.base import Seen, Watch
from esp_worker.model import CausalModel
from esp_worker.sampling import NoTokenError, Ranked, select_token, token_logprobs, why_no_token
from esp_worker.sequence import ActiveSequence
from esp_worker.tree import EMPTY_TREE, Draft, TokenTree
from esp_worker.types import TokenLogprobs
from esp_worker.verify import Verdict, accept_walk

# So many rows, over all sequences, pass lm_head once: a second pass reads its weight again, which takes as long as
# about 15 more rows on a CPU, and as hundreds on a GPU.
ONE_PASS_ROWS = 32
WATCHED_ROWS = 64  # of a prompt: their logits are computed at once, where a method asks for them


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next tokens of a context, from column `first` on. ends_prompt: the last row gives the output's first token.

    `masks` mask tokens follow a prompt: mask j stands at position P - 1 + j and serves depth j of the first tree, as a
    probe of a root at P - 1 would.
    """

    sequence: ActiveSequence
    first: int
    tokens: int
    ends_prompt: bool
    masks: int

    @property
    def rows(self) -> int:
        return self.tokens + self.masks


class Step:
    """sequences: those of slots 0.., each with its draft; chunks: those of the slots behind. Until the caller commits,
    what they hold is as it was in front of the step: verify and prompt_seen are to be asked before."""

    def __init__(
        self,
        model: CausalModel,
        cache: SlotCache,
        sequences: Sequence[ActiveSequence],
        drafts: Sequence[Draft],
        chunks: Sequence[Chunk] = (),
    ) -> None:
        self._model, self._drafts, self._chunks = model, drafts, chunks
        self._ending = [chunk for chunk in chunks if chunk.ends_prompt]
        self._sequences = [*sequences, *(chunk.sequence for chunk in self._ending)]  # that a token is chosen for
        self._roots = [sequence.output[-1] for sequence in sequences]
        shapes, chains = [draft.shape for draft in drafts], [in_order(chunk.rows) for chunk in chunks]
        # Of each one's rows, and the end.
        counts = [*(shape.rows for shape in shapes), *(chunk.rows for chunk in chunks)]
        self._firsts = list(itertools.accumulate(counts, initial=0))
        block = Block(
            0,
            [*(sequence.length for sequence in sequences), *(chunk.first for chunk in chunks)],
            [*(shape.offsets for shape in shapes), *(offsets for offsets, _ in chains)],
            [*(shape.visible for shape in shapes), *(visible for _, visible in chains)],
            model.device,
        )
        self._hidden = model.forward_block(cache, block, self._embeds())
        self._whole = self._firsts[len(drafts)] <= ONE_PASS_ROWS or not any(draft.owners for draft in drafts)
        # Of blocks all rows, or root and nodes; of prompts the last, and the masks behind it.
        asked = [
            range(first, first + (shape.rows if self._whole else shape.token_rows))
            for first, shape in zip(self._firsts, shapes, strict=False)
        ]
        asked += [
            range(rows.start + chunk.tokens - 1, rows.stop)
            for chunk, rows in self._rows_of_chunks()
            if chunk.ends_prompt
        ]
        ends = itertools.accumulate(map(len, asked))
        self._asked = list(itertools.chain.from_iterable(asked))
        self._answered = [slice(end - len(each), end) for end, each in zip(ends, asked, strict=True)]

    @cached_property
    def _logits(self) -> torch.Tensor:
        """Of the rows whose answers are asked for, V each."""
        every = len(self._asked) == len(self._hidden)
        rows = self._hidden if every else self._hidden[torch.tensor(self._asked, device=self._model.device)]
        return self._model.logits(rows)

    @cached_property
    def _ranked(self) -> Ranked:
        return Ranked(self._logits)

    def _embeds(self) -> torch.Tensor:
        """[R, H]"""
        ids: list[int] = []
        for root, draft in zip(self._roots, self._drafts, strict=True):
            ids += [root, *draft.tree.tokens, *[0] * (draft.shape.rows - draft.shape.token_rows)]
        for chunk in self._chunks:
            ids += [*chunk.sequence.context[chunk.first : chunk.first + chunk.tokens], *[0] * chunk.masks]
        embeds = self._model.embed(torch.tensor(ids, device=self._model.device))
        for first, sequence, draft in zip(self._firsts, self._sequences, self._drafts, strict=False):
            if draft.owners:
                probes = embeds[first + draft.shape.token_rows : first + draft.shape.rows]
                probes.copy_(sequence.drafter.probe_embeds(sequence.state, draft))
        for chunk, rows in self._rows_of_chunks():
            if chunk.masks:
                masks = chunk.sequence.drafter.mask_embeds(chunk.sequence.state)
                embeds[rows.start + chunk.tokens : rows.stop].copy_(masks[: chunk.masks])
        return embeds

    def _rows_of_chunks(self) -> Iterator[tuple[Chunk, slice]]:
        for chunk, first in zip(self._chunks, self._firsts[len(self._drafts) :], strict=False):
            yield chunk, slice(first, first + chunk.rows)

    def verify(self) -> tuple[list[Verdict], list[list[TokenLogprobs]]]:
        """The accept walk of each sequence, and of each prompt that ends here (no tree: its first token), and the
        log-probabilities of its tokens where they are asked for. Raises NoTokenError."""
        if not self._sequences:
            return [], []
        greedy = self._ranked.argmax()
        trees = [*(draft.tree for draft in self._drafts), *(EMPTY_TREE for _ in self._ending)]
        verdicts, found = [], []
        for sequence, tree, rows in zip(self._sequences, trees, self._answered, strict=True):
            verdict, each = verify(sequence, tree, self._logits[rows], greedy[rows])
            verdicts.append(verdict)
            found.append(each)
        return verdicts, found

    def seen(self, slots: Sequence[int], verdicts: Sequence[Verdict], watch: Watch) -> list[Seen]:
        """What the model answers behind root and nodes of some slots' sequences."""
        best, found = answers(self._ranked, watch)
        seen = []
        for slot in slots:
            tokens = (self._roots[slot], *self._drafts[slot].tree.tokens)
            rows = slice(self._answered[slot].start, self._answered[slot].start + len(tokens))
            seen.append(Seen(tokens, verdicts[slot].path, best[rows], None if found is None else found[rows]))
        return seen

    def probed(self, slots: Sequence[int], verdicts: Sequence[Verdict]) -> list[torch.Tensor]:
        """Logits [<= k, V] of the probes of some slots' deepest accepted rows; no rows where these own none."""
        probes = [self._drafts[slot].shape.probe_rows(verdicts[slot].path[-1]) for slot in slots]
        firsts = [self._firsts[slot] for slot in slots]
        if self._whole:
            return [
                self._logits[first + rows.start : first + rows.stop] for first, rows in zip(firsts, probes, strict=True)
            ]
        picked = [first + row for first, rows in zip(firsts, probes, strict=True) for row in rows]
        logits = self._model.logits(self._hidden[torch.tensor(picked, dtype=torch.long, device=self._model.device)])
        return list(logits.split([len(rows) for rows in probes]))

    def prompt_probed(self) -> list[torch.Tensor]:
        """Logits [<= k, V] of the masks behind each prompt that ends here."""
        return [self._logits[rows.start + 1 : rows.stop] for rows in self._answered[len(self._drafts) :]]

    def prompt_seen(self, watch: Watch) -> Iterator[tuple[ActiveSequence, Seen]]:
        """What the model answers behind prompts' tokens, some at a time."""
        for chunk, rows in self._rows_of_chunks():
            if chunk.sequence.output:
                continue  # a context that is computed again
            tokens = chunk.sequence.context[chunk.first : chunk.first + chunk.tokens]
            for start in range(0, len(tokens), WATCHED_ROWS):
                part = tokens[start : start + WATCHED_ROWS]
                first = rows.start + start
                ranked = Ranked(self._model.logits(self._hidden[first : first + len(part)]))
                yield chunk.sequence, Seen(part, range(len(part)), *answers(ranked, watch))


def answers(ranked: Ranked, watch: Watch) -> tuple[np.ndarray, np.ndarray | None]:
    """The K best tokens of each row, best first, and their log-probabilities where they are asked for: [R, K] both.
    Nothing else leaves the device."""
    values, best = ranked.top(watch.best)
    tokens = best.cpu().numpy()
    if watch.probs == "none":
        return tokens, None
    exact = torch.promote_types(values.dtype, torch.float32)
    among = ranked.logits if watch.probs == "whole" else values
    return tokens, (values.to(exact) - among.to(exact).logsumexp(-1, keepdim=True)).cpu().numpy()


def verify(
    sequence: ActiveSequence, tree: TokenTree, logits: torch.Tensor, greedy: Sequence[int]
) -> tuple[Verdict, list[TokenLogprobs]]:
    """The accept walk by logits [n, V] behind root and nodes (greedy: their argmax), and the log-probabilities of its
    tokens where the request asks for them. Raises NoTokenError."""
    request, output = sequence.request, sequence.output
    sampling = request.sampling

    def best(row: int, accepted: Sequence[int]) -> int:
        if greedy[row] < 0:
            raise NoTokenError(why_no_token(logits[row]))
        return greedy[row]

    def draw(row: int, accepted: Sequence[int]) -> int:
        return select_token(logits[row], sampling, request.prompt_ids, [*output, *accepted])

    verdict = accept_walk(tree, best if sampling.temperature == 0 and not sampling.edits_logits else draw)
    if sampling.logprobs is None:
        return verdict, []
    chosen = zip(verdict.path, verdict.tokens, strict=True)
    return verdict, [token_logprobs(logits[row], token, sampling.logprobs) for row, token in chosen]
