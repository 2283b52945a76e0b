"""One decode step: the blocks of all running sequences in one forward pass, and what the model answers behind them.

R rows in all, V vocabulary, k masks, K best tokens of a row.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch

from esp_worker.block import Block
from esp_worker.cache import SlotCache
from esp_worker.drafters.base import Seen, Watch
from esp_worker.model import CausalModel
from esp_worker.sampling import NoTokenError, Ranked, select_token, token_logprobs, why_no_token
from esp_worker.sequence import ActiveSequence
from esp_worker.tree import Draft, TokenTree
from esp_worker.types import TokenLogprobs
from esp_worker.verify import Verdict, accept_walk

# So many rows, over all sequences, pass lm_head once: a second pass reads its weight again, which takes as long as
# about 15 more rows on a CPU, and as hundreds on a GPU.
ONE_PASS_ROWS = 32


class Step:
    """sequences: those of the slots 0.., each with its draft. What they hold is as it was in front of the step until
    the caller commits; verify, then, is to be asked before, the rest at any time."""

    def __init__(
        self, model: CausalModel, cache: SlotCache, sequences: Sequence[ActiveSequence], drafts: Sequence[Draft]
    ) -> None:
        self._model, self._sequences, self._drafts = model, sequences, drafts
        shapes = [draft.shape for draft in drafts]
        self._firsts = [0, *itertools.accumulate(shape.rows for shape in shapes)]  # of each one's rows
        self._roots = [sequence.output[-1] for sequence in sequences]
        block = Block(
            0,
            [sequence.length for sequence in sequences],
            [shape.offsets for shape in shapes],
            [shape.visible for shape in shapes],
            model.device,
        )
        self._hidden = model.forward_block(cache, block, self._embeds())
        self._whole = block.rows <= ONE_PASS_ROWS or not any(draft.owners for draft in drafts)
        counts = [shape.rows if self._whole else shape.token_rows for shape in shapes]
        ends = list(itertools.accumulate(counts))
        self._answered = [slice(end - count, end) for end, count in zip(ends, counts, strict=True)]
        self._logits = model.logits(self._hidden if self._whole else self._hidden[self._token_rows()])
        self._ranked = Ranked(self._logits)

    def _embeds(self) -> torch.Tensor:
        """[R, H]"""
        ids: list[int] = []
        for root, draft in zip(self._roots, self._drafts, strict=True):
            ids += [root, *draft.tree.tokens, *[0] * (draft.shape.rows - draft.shape.token_rows)]
        embeds = self._model.embed(torch.tensor(ids, device=self._model.device))
        for first, sequence, draft in zip(self._firsts, self._sequences, self._drafts, strict=False):
            if draft.owners:
                masks = sequence.drafter.mask_embeds(sequence.state)[: draft.masks]
                probes = slice(first + draft.shape.token_rows, first + draft.shape.rows)
                embeds[probes] = masks.to(embeds.dtype).repeat(len(draft.owners), 1)
        return embeds

    def _token_rows(self) -> torch.Tensor:
        """Roots and nodes among all rows."""
        rows: list[int] = []
        for first, draft in zip(self._firsts, self._drafts, strict=False):
            rows += range(first, first + draft.shape.token_rows)
        return torch.tensor(rows, device=self._model.device)

    def verify(self) -> tuple[list[Verdict], list[list[TokenLogprobs]]]:
        """Each sequence's accept walk, and the log-probabilities of its tokens where they are asked for."""
        greedy = self._ranked.argmax()
        verdicts, found = [], []
        for sequence, draft, rows in zip(self._sequences, self._drafts, self._answered, strict=True):
            verdict, each = verify(sequence, draft.tree, self._logits[rows], greedy[rows])
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
