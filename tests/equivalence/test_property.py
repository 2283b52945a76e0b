"""Whatever is asked, in whatever batch, with whatever tree: the engine's tokens are the reference's, in fp64.

ESPSTREAM_PROPERTY_CASES sets the number of cases (each a batch of requests on an engine of its own); with more than the
default, other cases are drawn at each run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny import FAMILIES, VOCAB, prompt, tiny_model

from esp_worker import block, reference
from esp_worker.drafters.base import Drafter
from esp_worker.drafters.hybrid import HybridDrafter
from esp_worker.drafters.lade import Lookahead
from esp_worker.drafters.none import NoDrafter
from esp_worker.drafters.pld import PromptLookup
from esp_worker.drafters.probe import ProbeDrafter
from esp_worker.drafters.recycle import TokenRecycling
from esp_worker.drafters.stand import Stand
from esp_worker.engine import Engine
from esp_worker.model import CausalModel
from esp_worker.rows import FixedRows
from esp_worker.types import Request, SamplingParams, StopMatch

DEFAULT_CASES = 400
CASES = int(os.environ.get("ESPSTREAM_PROPERTY_CASES", DEFAULT_CASES))
MAX_LENGTH = 72

tokens = st.integers(0, VOCAB - 1)


@dataclass(frozen=True)
class EndsWith:
    """A stop condition on token ids; it keeps or cuts what it matched, which may reach into earlier runs."""

    tail: tuple[int, ...]
    keep: bool

    def match(self, token_ids: Sequence[int], after: int = 0) -> StopMatch | None:
        if tuple(token_ids[-len(self.tail) :]) != self.tail:
            return None
        kept = len(token_ids) - (0 if self.keep else len(self.tail))
        return StopMatch(kept, "", str(self.tail))


@st.composite
def sampling_params(draw: st.DrawFn) -> SamplingParams:
    most = draw(st.integers(0, 24))
    return SamplingParams(
        max_new_tokens=most,
        min_new_tokens=draw(st.sampled_from([0, 0, min(most, 3), most])),
        temperature=draw(st.sampled_from([0.0, 0.0, 0.4, 1.0, 2.5])),
        top_k=draw(st.sampled_from([0, 0, 1, 5, 50])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.9, 0.3])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.05, 0.5])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.3, 0.8])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 1.5, -0.5])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, 0.7, -0.2])),
        logit_bias=tuple(draw(st.dictionaries(tokens, st.floats(-6, 6), max_size=2)).items()),
        bad_words=tuple(draw(st.lists(st.lists(tokens, min_size=1, max_size=3).map(tuple), max_size=2))),
        seed=draw(st.integers(0, 2**64 - 1)),
        sample_index=draw(st.integers(0, 3)),
        eos_token_ids=frozenset(draw(st.lists(tokens, max_size=2))),
    )


@st.composite
def requests(draw: st.DrawFn) -> list[Request]:
    """Up to six; some prompts begin alike, some nearly fill the context."""
    head = prompt(draw(st.integers(0, 40)), seed=draw(st.integers(0, 3)))
    asked = []
    for number in range(draw(st.integers(1, 6))):
        own = prompt(draw(st.sampled_from([1, 2, 3, 7, 12, 20, MAX_LENGTH - 3])), seed=draw(st.integers(0, 3)))
        ids = ((head if draw(st.booleans()) else ()) + own)[: MAX_LENGTH - 1]
        tail = tuple(draw(st.lists(tokens, max_size=3)))
        stop = EndsWith(tail, draw(st.booleans())) if tail else None
        asked.append(Request(f"r{number}", ids, draw(sampling_params()), stop))
    return asked


@st.composite
def drafters(draw: st.DrawFn) -> Callable[[CausalModel], Drafter]:
    """What makes the drafter of a model: of ESP every other time."""
    probe = draw(probe_settings())
    ngram, rows = draw(st.integers(1, 4)), draw(st.integers(2, 40))
    makers: dict[str, Callable[[CausalModel], Drafter]] = {
        "esp": lambda model: ProbeDrafter(model.embed, table=model.embedding_moments, **probe),
        "ar": lambda model: NoDrafter(),
        "pld": lambda model: PromptLookup(ngram=ngram, depth=rows),
        "lade": lambda model: Lookahead(lookahead=(1 + ngram, 1 + rows % 7, 1 + rows % 5)),
        "stand": lambda model: Stand(ngram=ngram, block_complexity=rows),
        "hybrid": lambda model: HybridDrafter(model.embed, FixedRows(rows)),
        "recycle": lambda model: TokenRecycling(model.vocab_size, block_complexity=rows),
    }
    return makers[draw(st.sampled_from(["esp"] * 4 + ["hybrid"] * 2 + ["ar", "pld", "lade", "stand", "recycle"]))]


@st.composite
def probe_settings(draw: st.DrawFn) -> dict[str, Any]:
    masks = draw(st.integers(1, 3))
    tree = draw(st.sampled_from(["dynamic", "static", "best_first"]))
    owners = draw(st.sampled_from([None, None, 1, 3]))
    chosen: dict[str, Any] = {
        "masks": masks,
        "tree": tree,
        "probe_owners": owners,
        "prune": draw(st.sampled_from(["all", "deep", "none"])),
        "ema": draw(st.sampled_from([0.0, 0.1, 0.5, 1.0])),
        "init": draw(st.sampled_from(["mean", "last_k", "sample", "offset"])),
        "impl": draw(st.sampled_from(["efficient", "naive"])),
    }
    if tree == "static":
        chosen["branches"] = draw(st.lists(st.integers(1, 9), min_size=masks, max_size=masks))
    else:
        chosen["block_complexity"] = draw(st.integers(1 + masks * (owners or 2) + 2, 48))
    return chosen


@st.composite
def engine_settings(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "slots": draw(st.integers(1, 6)),
        "max_length": draw(st.sampled_from([MAX_LENGTH, MAX_LENGTH, None])),
        "prefill_tokens": draw(st.sampled_from([512, 16, 5])),
        "prefix_reuse": draw(st.booleans()),
    }


@pytest.mark.timeout(0 if CASES > DEFAULT_CASES else 600)
@settings(
    max_examples=CASES,
    derandomize=CASES <= DEFAULT_CASES,
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(
    family=st.sampled_from(FAMILIES),
    drafter=drafters(),
    engine=engine_settings(),
    asked=requests(),
    part_start=st.sampled_from([block.PART_START, 100, 0]),  # attention of all slots together, of some, of each alone
)
def test_the_engine_equals_the_reference(
    family: str,
    drafter: Callable[[CausalModel], Drafter],
    engine: dict[str, Any],
    asked: list[Request],
    part_start: int,
) -> None:
    model = tiny_model(family)
    with mock.patch.object(block, "PART_START", part_start):
        completions = list(Engine(model, [drafter(model)], **engine).generate(asked))
    done = {completion.request_id: completion for completion in completions}
    assert len(done) == len(asked)
    for item in asked:
        want, got = reference.decode(model, item, engine["max_length"]), done[item.request_id]
        assert (got.token_ids, got.finish_reason, got.stop) == (want.token_ids, want.finish_reason, want.stop)
        assert len(got.token_ids) == sum(got.stats.accept_lengths) + bool(got.token_ids) or not got.token_ids
        assert got.stats.decode_calls == len(got.stats.accept_lengths)
