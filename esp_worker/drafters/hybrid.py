"""Hybrid: one tree a step from all that can be known without training, by how often each source has been right.

Sources, of a candidate behind a path of drafted tokens:
- recall: the model's newest answers behind the path's last 3, 2 and 1 tokens, by any sequence of this engine and also
  where that row was rejected (after Token Recycling, arXiv 2408.08696, and STAND, arXiv 2506.04708);
- model: the model's own successors of the path's last token, known before any text (prime.py);
- text: what followed the path's last tokens in this sequence's own prompt and output (after prompt lookup);
- probe: the model's own, of a mask row that stood in the root's place, where the last step's deepest accepted row owned
  one (ESP, arXiv 2603.17942);
- passed: what the model named for the text's last tokens, whether or not it took it: much of it comes a little later;
- age: of whatever the others name, how long ago it stood in this sequence.

Each source's opinion is a code, the codes' weights are learned online (odds.py), and the tree holds the most probable
paths. Probes go to the rows most likely to end the accepted path. A probe stands in the place of the token behind its
owner, and of that token the sources have an opinion already: so its embedding is the mean of what they name there, each
by its probability. ESP's own mask, a mean of the text, stands behind prompts and where they name nothing.

Sampled rows: the noise of each output position is known before its logits are (sampling.gumbel_noise), so an answer
is weighed as it will be drawn from: where it is right, its candidate ranked first is the token that will be drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from esp_worker.drafters.base import Prompt, Room, Seen, Turn, Watch
from esp_worker.drafters.ngrams import History
from esp_worker.drafters.probe import ProbeDrafter, ProbeState
from esp_worker.drafters.recall import BEST, Context, Recall
from esp_worker.odds import BINS, NAMED, NOT_NAMED, SILENT, Answer, Odds, Opinion, Place, named_codes
from esp_worker.rows import Rows
from esp_worker.sampling import gumbel_noise
from esp_worker.tree import EMPTY_TREE, Candidates, Draft, TokenTree, block_shape, grow_best_first, most_probable
from esp_worker.types import SamplingParams

LONGEST = 4  # tokens of an n-gram of the text, and of the tail that is kept of a path
MASKS = 1
PROBED = 16  # of a probe's candidates
EXPECTED = 16  # candidates of a place that a probe's embedding is the mean of
PASSED = 3  # of the text's last tokens
ROWS_PER_PROBE = 15
LESSONS = 4  # places of a step that are learned from, at most: more teach no better

# The text's codes: for each size of n-gram it followed alone, once or more often; newest of several; another of these.
_KINDS = 4

# Weights that learning begins with, by source and code: a fit to what SmolLM2-135M took at 30 rows, greedily and drawn
# at temperature 1, behind 51 questions of Spec-Bench: none of README's 52 that tau is measured on, but its table of
# speeds is of prompts that they were not kept from. NAMED itself (P of 1) did not occur: it has the next code's weight.
_PRIOR_BIAS = 0.1
_PRIOR_RECALL = (  # by ORDERS
    (-0.5, -0.6, 1.3, 1.3, 0.6, 0.3, -0.1, -0.3, -0.4),
    (-0.4, -0.8, 1.2, 1.2, 0.8, 0.3, 0.1, -0.5, -0.6),
    (0.0, -0.9, 1.5, 1.5, 0.2, 0.2, -0.2, -0.1, -0.6),
)
_PRIOR_MODEL = (-0.4, -0.5, 1.2, 1.2, 0.7, 0.2, -0.1, -0.4, -0.7)
_PRIOR_TEXT = (
    *(-2.1, -2.6),
    *(0.2, 0.4, -1.0, -1.5),
    *(0.6, 0.9, -0.7, -0.8),
    *(1.2, 0.7, -0.9, -0.6),
    *(3.0, 2.9, 0.5, -0.1),
)
_PRIOR_PROBE = (-0.4, -0.8, 1.4, 1.4, 0.7, 0.3, 0.0, -0.3, -0.9)
_PRIOR_PASSED = (-0.3, -0.4, 0.7, 0.7, 0.3, 0.4, 0.1, -0.2, -0.6)
_PRIOR_AGE = (0.0, -0.6, -1.0, -0.6, 0.2, 0.5, 0.6, 0.5, 0.3)  # NAMED: the newest token, 2 or 3 ago, 4 to 7, ..

_NOTHING = Draft(EMPTY_TREE, block_shape((), (), 0))


@dataclass(slots=True)
class HybridState:
    """text: prompt and output, the root last; drawn: output tokens; passed: the model's answers that gave the newest of
    these, newest first; proposed: of the tree drafted last, what may follow each path; paths: those of its rows."""

    sampling: SamplingParams
    probe: ProbeState
    text: History
    drawn: int = 0
    passed: list[Answer] = field(default_factory=list)
    proposed: dict[tuple[int, ...], Place] = field(default_factory=dict)
    paths: list[tuple[int, ...]] = field(default_factory=list)

    @property
    def tail(self) -> Context:
        return tuple(self.text.tokens[-LONGEST:])


class HybridDrafter:
    """rows: how many rows a step takes (rows.FixedRows, or what pays most here: rows.BestRows); successors: the model's
    own, of each token (None: they are not known)."""

    name = "hybrid"

    def __init__(
        self,
        embed: Callable[[torch.Tensor], torch.Tensor],
        rows: Rows,
        successors: Callable[[int], Answer | None] = lambda token: None,
    ) -> None:
        self._embed = embed
        self._rows = rows
        self._successors = successors
        self._probe = ProbeDrafter(embed, masks=MASKS, block_complexity=2 * (PROBED + 1), probe_owners=1)
        self._recall = Recall()
        sources = (*_PRIOR_RECALL, _PRIOR_MODEL, _PRIOR_PROBE, _PRIOR_PASSED, _PRIOR_TEXT, _PRIOR_AGE)
        self._odds = Odds(sources, _PRIOR_BIAS)
        self._steps = 0
        self._watch = Watch(best=BEST, probs="best")
        self.watch: Watch | None = self._watch
        self.masks = MASKS

    def start(self, prompt: Prompt) -> HybridState:
        return HybridState(prompt.sampling, self._probe.start(prompt), History(prompt.ids, LONGEST))

    def mask_embeds(self, state: HybridState) -> torch.Tensor:
        return self._probe.mask_embeds(state.probe)

    def probe_embeds(self, state: HybridState, draft: Draft) -> torch.Tensor:
        """What is expected behind each owner; ESP's mask where nothing is."""
        assert draft.masks == 1, "what is expected further on is not known"
        tokens = np.zeros((len(draft.owners), EXPECTED), np.int64)
        probs = np.zeros(tokens.shape, np.float32)
        for row, owner in enumerate(draft.owners):
            place = state.proposed.get(state.paths[owner])
            for column, candidate in enumerate(place.candidates[:EXPECTED] if place else ()):
                tokens[row, column], probs[row, column] = candidate
        mass = probs.sum(1, keepdims=True)
        weights = probs / np.where(mass, mass, 1)
        masks = state.probe.masks
        embeds = self._embed(torch.from_numpy(tokens).to(masks.device)).to(masks.dtype)
        expected = (torch.from_numpy(weights).to(masks)[:, None] @ embeds)[:, 0]
        unknown = np.flatnonzero(mass[:, 0] == 0)
        if len(unknown):
            expected[unknown] = self._probe.mask_embeds(state.probe)
        return expected

    def draft_all(self, turns: Sequence[Turn], waiting: bool) -> list[Draft]:
        left, context = [turn.room.tokens for turn in turns], max(turn.length for turn in turns)
        floors = self._rows.floors(left, context, waiting)
        # Where nothing pays, neither do looking at the answers and probing behind a prompt.
        self.watch, self.masks = (self._watch, MASKS) if any(floors) else (None, 0)
        trees = [self._grow(turn.state, turn.room, own) for turn, own in zip(turns, floors, strict=True)]
        rows = self._rows.choose(trees)
        return [self._draft(*each) for each in zip(turns, trees, rows, strict=True)]

    def saw(self, states: Sequence[HybridState], seen: Sequence[Seen]) -> None:
        tokens, logprobs = np.concatenate([each.best for each in seen]), _logprobs(seen)
        codes = named_codes(np.exp(logprobs))
        contexts: list[Context] = []
        kept: list[int] = []
        for state, each in zip(states, seen, strict=True):
            path = [len(contexts) + row for row in each.path]
            kept += path
            tail = state.tail
            contexts += [(*tail, *nodes)[-LONGEST:] for nodes in state.paths]
            newest = [
                Answer(tokens[row].tolist(), codes[row].tolist(), logprobs[row]) for row in reversed(path[-PASSED:])
            ]
            state.passed = (newest + state.passed)[:PASSED]
        # Of equal contexts, one that a sequence keeps has the last word.
        order = sorted(range(len(contexts)), key=set(kept).__contains__)
        self._recall.learn([contexts[row] for row in order], tokens[order], logprobs[order], codes[order])

    def observe(
        self,
        states: Sequence[HybridState],
        committed: Sequence[Sequence[int]],
        probe_logits: Sequence[torch.Tensor],
    ) -> None:
        lessons: list[tuple[Place, int]] = []
        for state, run in zip(states, committed, strict=True):
            for place, token in enumerate(run if state.proposed else ()):
                proposed = state.proposed.get(tuple(run[:place]))
                if proposed is not None:
                    lessons.append((proposed, token))
            state.text.extend(run)
            state.drawn += len(run)
        self._steps += 1
        apart = -(-len(lessons) // LESSONS) or 1
        self._odds.learn(lessons[self._steps % apart :: apart])
        self._probe.observe([state.probe for state in states], committed, probe_logits)

    def spent(self, seconds: float | None, drafting: float, tokens: Sequence[int]) -> None:
        self._rows.spent(seconds, drafting, tokens)

    # ---- the tree

    def _grow(self, state: HybridState, room: Room, floors: Sequence[float]) -> TokenTree:
        state.proposed = {}
        if not floors:
            state.passed = []  # this step's answers will not be seen
            return EMPTY_TREE
        tail = state.tail

        def children(path: tuple[int, ...]) -> Sequence[tuple[int, float]]:
            place = state.proposed[path] = self._place(state, tail, path)
            return place.candidates

        return grow_best_first(children, floors, room.max_depth)

    def _draft(self, turn: Turn, tree: TokenTree, rows: int) -> Draft:
        """The best nodes for `rows` rows; those that no node takes own probes."""
        if self.watch is None:
            return _NOTHING
        probes = rows // ROWS_PER_PROBE if turn.room.masks(self.masks) else 0
        tree = most_probable(tree, rows - 1 - probes)
        turn.state.paths = _paths(tree)
        spare = rows - 1 - len(tree) if probes else 0
        return self._probe.block(tree, turn.room, min(spare, 1 + len(tree)))

    def _place(self, state: HybridState, tail: Context, path: tuple[int, ...]) -> Place:
        """What may follow `path`, with every source's opinion."""
        context = (*tail, *path)[-LONGEST:]
        answers = [*self._recall.answers(context), self._successors(context[-1])]
        answers += [_probed(state.probe.levels, path), None if path else _merged(state.passed)]
        if state.sampling.temperature > 0:
            answers = _as_drawn(answers, state.sampling, state.drawn + len(path))
        opinions = [SILENT if each is None else _opinion(each) for each in answers]
        opinions.append(_text_opinion(state.text.after(context)))
        ages = state.text.ages({token for opinion in opinions for token in opinion.named})
        return self._odds.place([*opinions, _age_opinion(ages)])


def _opinion(answer: Answer) -> Opinion:
    return Opinion(NOT_NAMED, dict(zip(answer.tokens, answer.codes, strict=True)))


def _logprobs(seen: Sequence[Seen]) -> np.ndarray:
    """[R, K] of all sequences' rows."""
    found = [each.logprobs for each in seen if each.logprobs is not None]
    assert len(found) == len(seen), "Watch asks for them"
    return np.concatenate(found)


def _merged(answers: Sequence[Answer]) -> Answer | None:
    """All that they name, as the newest that names it does. answers: newest first."""
    if not answers:
        return None
    named: dict[int, tuple[int, float]] = {}
    for answer in reversed(answers):
        named.update(zip(answer.tokens, zip(answer.codes, answer.logprobs.tolist(), strict=True), strict=True))
    return Answer(list(named), [code for code, _ in named.values()], np.array([each for _, each in named.values()]))


def _as_drawn(answers: Sequence[Answer | None], params: SamplingParams, position: int) -> list[Answer | None]:
    """The same answers by how likely each token is what the row itself draws at that output position."""
    tokens = [token for answer in answers if answer is not None for token in answer.tokens]
    if not tokens:
        return list(answers)
    noise = gumbel_noise(params.seed, params.sample_index, position, torch.tensor(tokens)).numpy()
    drawn: list[Answer | None] = []
    for answer in answers:
        if answer is None:
            drawn.append(None)
            continue
        scores = answer.logprobs / params.temperature + noise[: len(answer.tokens)]
        noise = noise[len(answer.tokens) :]
        chances = np.exp(scores - scores.max())
        drawn.append(answer._replace(codes=named_codes(chances / chances.sum()).tolist()))
    return drawn


def _probed(levels: Sequence[Candidates], path: tuple[int, ...]) -> Answer | None:
    """What the probes say of the place behind `path`."""
    if len(path) >= len(levels):
        return None
    level = levels[len(path)]
    probs = np.asarray(level.probs[:PROBED])
    return Answer(list(level.tokens[:PROBED]), named_codes(probs).tolist(), np.log(probs + 1e-30))


def _text_opinion(followed: Iterable[tuple[int, list[int]]]) -> Opinion:
    """Of what has followed, by the longest n-gram that it followed; followed: longest first."""
    codes: dict[int, int] = {}
    for size, tokens in followed:
        first, newest = NAMED + _KINDS * (size - 1), tokens[-1]
        distinct = set(tokens)
        if len(distinct) == 1:
            codes.setdefault(newest, first if len(tokens) == 1 else first + 1)
            continue
        for token in distinct:
            codes.setdefault(token, first + 2 if token == newest else first + 3)
    return Opinion(NOT_NAMED, codes) if codes else SILENT


def _age_opinion(ages: Mapping[int, int]) -> Opinion:
    return Opinion(NOT_NAMED, {token: NAMED + min(age.bit_length(), BINS) - 1 for token, age in ages.items()})


def _paths(tree: TokenTree) -> list[tuple[int, ...]]:
    """Of root and nodes."""
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        paths.append((*paths[parent], token))
    return paths
