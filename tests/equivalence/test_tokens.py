"""The engine's tokens are the reference's, for every family, tree, number of masks and number of slots, in fp64."""

from __future__ import annotations

import random
from functools import cache
from itertools import product
from typing import Any

import pytest
from tiny import CONTEXT, CORE, FAMILIES, VOCAB, mixed_requests, prompt, request, tiny_model

from esp_worker import reference
from esp_worker.drafters.none import NoDrafter
from esp_worker.drafters.probe import ProbeDrafter
from esp_worker.engine import Engine
from esp_worker.types import Completion, FinishReason, Request, SamplingParams, StopMatch

TREES = {
    ("dynamic", 1): {"masks": 1, "block_complexity": 20},
    ("dynamic", 2): {"masks": 2, "block_complexity": 30},
    ("dynamic", 3): {"masks": 3, "block_complexity": 40},
    ("static", 1): {"masks": 1, "tree": "static", "branches": [9]},
    ("static", 2): {"masks": 2, "tree": "static", "branches": [7, 2]},
    ("static", 3): {"masks": 3, "tree": "static", "branches": [6, 3, 2]},
}
SAMPLING = [{}, {"top_k": 5}, {"top_p": 0.8}, {"top_k": 6, "top_p": 0.7}]
# Logits are compared for every family and tree row (test_logits.py); here the others run one tree and one sampling.
OTHERS = [family for family in FAMILIES if family not in CORE]


@cache
def expected(family: str, item: Request, max_length: int | None = None) -> reference.ReferenceCompletion:
    return reference.decode(tiny_model(family), item, max_length)


ENGINE_OPTIONS = {"max_length", "prefill_tokens", "prefix_reuse", "cache_bytes"}


def esp(family: str, slots: int = 3, **options: object) -> Engine:
    """An engine with ESP and plain decoding; options are the engine's or the drafter's."""
    model = tiny_model(family)
    engine = {name: value for name, value in options.items() if name in ENGINE_OPTIONS}
    drafter = {name: value for name, value in options.items() if name not in ENGINE_OPTIONS}
    probe = ProbeDrafter(model.embed, **(drafter or {"masks": 2, "block_complexity": 30}))
    return Engine(model, [probe, NoDrafter()], slots=slots, **engine)


def assert_equal(family: str, requests: list[Request], done: list[Completion], max_length: int | None = None) -> None:
    assert sorted(c.request_id for c in done) == sorted(r.request_id for r in requests)
    by_id = {completion.request_id: completion for completion in done}
    for item in requests:
        want, got = expected(family, item, max_length), by_id[item.request_id]
        assert got.token_ids == want.token_ids, item
        assert got.finish_reason == want.finish_reason, item
        assert len(got.token_ids) == 1 + sum(got.stats.accept_lengths)
        assert got.stats.decode_calls == len(got.stats.accept_lengths)


@pytest.mark.parametrize(
    ("family", "tree", "slots"),
    [*product(CORE, TREES, (1, 3, 8)), *product(OTHERS, [("dynamic", 2)], [3])],
    ids=lambda part: f"{part[0]}-k{part[1]}" if isinstance(part, tuple) else str(part),
)
def test_greedy(family: str, tree: tuple[str, int], slots: int) -> None:
    requests = mixed_requests()
    done = list(esp(family, slots, **TREES[tree]).generate(requests))
    assert_equal(family, requests, done)
    # The trees must have been worth verifying, or nothing was shown.
    assert sum(c.stats.accepted_tokens for c in done) > 0.05 * sum(c.stats.decode_calls for c in done)


@pytest.mark.parametrize("family", CORE)
def test_plain_decoding_is_the_same_engine_without_drafts(family: str) -> None:
    requests = mixed_requests()
    done = list(esp(family).generate(requests, "ar"))
    assert_equal(family, requests, done)
    for completion in done:
        assert set(completion.stats.accept_lengths) == {1}
        assert completion.stats.rows_computed == completion.stats.decode_calls
        assert completion.stats.drafted_tokens == 0


@pytest.mark.parametrize(
    ("family", "sampling"),
    [*product(["llama", "gemma3"], SAMPLING), *product([f for f in FAMILIES if f not in ("llama", "gemma3")], [{}])],
)
def test_sampled(family: str, sampling: dict[str, float]) -> None:
    requests = [
        request(f"s{i}", 4 + 5 * i, temperature=temperature, seed=i, **sampling)
        for i, temperature in enumerate((0.3, 0.7, 1.0, 1.5, 0.0))
    ]
    for method in ("esp", "ar"):
        assert_equal(family, requests, list(esp(family).generate(requests, method)))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_does_not_depend_on_its_neighbours(temperature: float) -> None:
    """16 rows alone, together, shuffled, in 1, 4 and 16 slots, in chunks, by either method: the same tokens."""
    requests = [request(f"row{i}", 1 + 3 * i, temperature=temperature, seed=i) for i in range(16)]
    alone = {item.request_id: next(iter(esp("gemma3", 1).generate([item]))).token_ids for item in requests}
    shuffled = random.Random(1).sample(requests, len(requests))
    for slots, order in ((1, requests), (4, requests), (4, shuffled), (16, shuffled), (16, requests[::-1])):
        for method in ("esp", "ar"):
            engine = esp("gemma3", slots, prefill_tokens=7 if order is shuffled else 512)
            assert {c.request_id: c.token_ids for c in engine.generate(order, method)} == alone


@pytest.mark.parametrize("eos", [[], [5], [4, 5, 6], list(range(VOCAB))])
def test_eos_ends_a_row_anywhere_in_an_accepted_run(eos: list[int]) -> None:
    requests = mixed_requests(eos_token_ids=frozenset(eos))
    done = list(esp("llama").generate(requests))
    assert_equal("llama", requests, done)
    for completion in done:
        stopped = completion.finish_reason is FinishReason.STOP
        assert stopped == (completion.token_ids[-1] in eos)
        assert not set(completion.token_ids[:-1]) & set(eos)


def test_eos_in_mid_run_cuts_what_was_accepted_behind_it() -> None:
    """Every token that plain decoding gives is tried as EOS, so that it falls on each place of an accepted run."""
    free = expected("llama", request("free", 9)).token_ids
    mid_run = 0
    for eos in set(free):
        item = request("free", 9, eos_token_ids=frozenset([eos]))
        (done,) = esp("llama", 1, masks=3, block_complexity=48).generate([item])
        assert done.token_ids == free[: free.index(eos) + 1]
        mid_run += len(done.stats.accept_lengths) > 0 and done.stats.accept_lengths[-1] > 1
    assert mid_run


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 7])
def test_max_new_tokens_is_exact(limit: int) -> None:
    requests = mixed_requests(max_new_tokens=limit)
    done = list(esp("qwen3").generate(requests))
    assert_equal("qwen3", requests, done)
    assert {len(completion.token_ids) for completion in done} == {limit}
    assert all(len(c.stats.accept_lengths) == 0 for c in done if limit == 1)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_rows_end_where_the_context_does(family: str) -> None:
    """Prompts up to one token short of it; tree and probes shrink, the row does not."""
    max_length = 30
    requests = [request(f"c{length}", length, max_new_tokens=99) for length in (1, 10, 20, 26, 27, 28, 29)]
    done = list(esp(family, max_length=max_length).generate(requests))
    assert_equal(family, requests, done, max_length)
    for item, completion in ((r, c) for r in requests for c in done if c.request_id == r.request_id):
        assert len(item.prompt_ids) + len(completion.token_ids) == max_length
        assert completion.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("family", ["mistral", "gpt2"])
def test_the_models_own_context_is_the_default_limit(family: str) -> None:
    """Learned positions end there: a node or probe beyond them would be an index error."""
    item = request("full", CONTEXT - 5, max_new_tokens=99)
    assert_equal(family, [item], list(esp(family).generate([item])))
    assert len(expected(family, item).token_ids) == 5


class EndsWith:
    """A stop condition on token ids."""

    def __init__(self, *tail: int) -> None:
        self.tail = tail

    def match(self, token_ids: list[int], after: int = 0) -> StopMatch | None:
        whole = tuple(token_ids[-len(self.tail) :]) == self.tail
        return StopMatch(len(token_ids), "", "tail") if whole else None


def test_stop_condition_over_several_tokens() -> None:
    free = expected("llama", request("stop", 9)).token_ids
    for at in range(1, 12):
        condition = EndsWith(*free[at : at + 2])
        item = Request("stop", prompt(9, 4), SamplingParams(max_new_tokens=24), condition)
        (done,) = esp("llama", 1).generate([item])
        want = reference.decode(tiny_model("llama"), item)
        assert done.token_ids == want.token_ids
        assert done.finish_reason is FinishReason.STOP
        assert done.token_ids[-2:] == free[at : at + 2]


def test_the_engine_can_be_used_again() -> None:
    engine = esp("llama")
    requests = mixed_requests()
    first = list(engine.generate(requests))
    assert not engine.busy
    assert_equal("llama", requests, first)
    assert_equal("llama", requests, list(engine.generate(requests)))


def test_long_prompts_prefill_in_chunks_and_the_cache_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("esp_worker.cache.COLUMN_STEP", 16)
    requests = mixed_requests()
    done = list(esp("gemma3", prefill_tokens=8, prefix_reuse=False).generate(requests))
    assert_equal("gemma3", requests, done)
    stats = {completion.request_id: completion.stats for completion in done}
    assert stats["r1"].prefill_calls == 1
    assert stats["r40"].prefill_calls >= 5
    for item in requests:
        assert (stats[item.request_id].prefill_tokens, stats[item.request_id].cached_tokens) == (
            len(item.prompt_ids),
            0,
        )


def test_the_drafter_sees_every_committed_token_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mask update runs over the first token, the accepted ones and each bonus; only the last run is not needed."""
    seen: list[int] = []
    observe = ProbeDrafter.observe

    def watched(self: ProbeDrafter, states: list[Any], committed: list[tuple[int, ...]], logits: Any) -> None:
        seen.extend(committed[0])
        assert len(states) == len(committed) == len(logits) == 1
        observe(self, states, committed, logits)

    monkeypatch.setattr(ProbeDrafter, "observe", watched)
    (done,) = esp("llama", 1).generate([request("all", 9)])
    assert done.stats.accepted_tokens > 0
    assert tuple(seen) == done.token_ids[: -done.stats.accept_lengths[-1]]
