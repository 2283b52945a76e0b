"""Slots come and go: chunks of prompts beside decoding, shared prefixes, a small cache, no memory, cancelled requests.

Whatever happens to a sequence's slot, its tokens are the reference's.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from tiny import mixed_requests, prompt, request, tiny_config, tiny_model
from transformers import AutoModelForCausalLM

from equivalence.test_tokens import assert_equal, esp, expected
from esp_worker import reference
from esp_worker.block import Block
from esp_worker.cache import SlotCache
from esp_worker.drafters.none import NoDrafter
from esp_worker.engine import Engine, RequestError
from esp_worker.model import CausalModel
from esp_worker.sampling import NoTokenError
from esp_worker.service import EngineService
from esp_worker.types import Completion, FinishReason, Request, SamplingParams

COLUMN_BYTES = tiny_model("llama").new_cache(1).column_bytes


def behind(system: int, count: int, **sampling: object) -> list[Request]:
    """Requests whose prompts begin with the same `system` tokens."""
    head, options = prompt(system, seed=99), {"max_new_tokens": 16, **sampling}
    return [
        Request(f"q{i}", (*head, *prompt(3 + i % 5, seed=i)), SamplingParams(**options, seed=i)) for i in range(count)
    ]


@pytest.mark.parametrize("slots", [1, 4])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_shared_prefix_is_computed_once(family: str, slots: int) -> None:
    requests = behind(system=40, count=12, temperature=0.8)
    done = {reuse: list(esp(family, slots, prefix_reuse=reuse).generate(requests)) for reuse in (True, False)}
    for completions in done.values():
        assert_equal(family, requests, completions)
    prompt_tokens = sum(len(item.prompt_ids) for item in requests)
    computed = {reuse: sum(c.stats.prefill_tokens for c in completions) for reuse, completions in done.items()}
    assert computed[False] == prompt_tokens
    assert computed[True] <= prompt_tokens - 11 * 40
    assert sum(c.stats.cached_tokens for c in done[True]) == prompt_tokens - computed[True]


def test_the_samples_of_a_prompt_share_all_of_it_but_its_last_token() -> None:
    base = request("n", 30, temperature=1.0)
    samples = [replace(base, request_id=f"n{i}", sampling=replace(base.sampling, sample_index=i)) for i in range(6)]
    done = list(esp("llama", 3).generate(samples))
    assert_equal("llama", samples, done)
    assert len({c.token_ids for c in done}) > 1
    assert sorted(c.stats.cached_tokens for c in done) == [0, 29, 29, 29, 29, 29]


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Rows of each slot in each forward pass from now on."""
    seen: list[list[int]] = []
    forward = CausalModel.forward_block

    def watched(self: CausalModel, cache: SlotCache, block: Block, embeds: torch.Tensor) -> torch.Tensor:
        seen.append(block.counts)
        return forward(self, cache, block, embeds)

    monkeypatch.setattr(CausalModel, "forward_block", watched)
    return seen


def test_a_long_prompt_does_not_stop_those_that_decode(passes: list[list[int]]) -> None:
    """At most 8 rows of it a pass, and a block of each running sequence beside them."""
    engine = esp("llama", 3, prefill_tokens=8, masks=1, block_complexity=20)
    short = [request("a", 5, max_new_tokens=40), request("b", 3, max_new_tokens=40)]
    for item in short:
        engine.submit(item)
    done = engine.step()
    assert passes == [[5 + 1, 3 + 1]]  # and a mask token each
    passes.clear()
    long = request("long", 60)
    engine.submit(long)
    while engine.busy:
        done += engine.step()
    assert_equal("llama", [*short, long], done)
    assert all(len(counts) == 3 for counts in passes[:8])  # ceil(60 / 8)
    assert [counts[2] for counts in passes[:8]] == [8] * 7 + [4 + 1]


def test_prompts_are_prefilled_together(passes: list[list[int]]) -> None:
    requests = [request(f"r{length}", length, max_new_tokens=5) for length in (9, 4, 1, 8, 2)]
    engine = Engine(tiny_model("llama"), [NoDrafter()], slots=4, prefill_tokens=12, prefix_reuse=False)
    done = list(engine.generate(requests))
    assert_equal("llama", requests, done)
    # 8 do not fit behind 9 + 1 (of 4, 3 would: as much as a quarter of prefill_tokens); 2 wait for a slot
    assert passes[:3] == [[9, 3], [1, 1, 1, 8], [1, 1, 1, 1]]
    assert {c.request_id: c.stats.prefill_calls for c in done} == {"r9": 1, "r4": 2, "r1": 1, "r8": 1, "r2": 1}
    assert sum(map(sum, passes)) == sum(len(item.prompt_ids) for item in requests) + 5 * 4


def test_a_prompt_waits_for_what_another_is_about_to_compute(passes: list[list[int]]) -> None:
    """But not for a few tokens."""
    first, second, third = behind(system=40, count=3)
    alike = Request("alike", (*first.prompt_ids[:6], *prompt(4, seed=5)), first.sampling)
    requests = [first, alike, second, third]
    engine = esp("llama", 4, masks=1, block_complexity=6)
    assert_equal("llama", requests, list(engine.generate(requests)))
    assert passes[0] == [43 + 1, 10 + 1]
    assert passes[1][2:] == [4 + 1, 5 + 1]


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches that grow in small steps, so that tiny contexts go through the life of long ones."""
    monkeypatch.setattr("esp_worker.cache.COLUMN_STEP", 16)
    monkeypatch.setattr("esp_worker.engine.BLOCK_COLUMNS", 32)


@pytest.mark.usefixtures("small_steps")
def test_a_long_prompt_waits_until_its_context_fits() -> None:
    """And is computed once, beside as many as leave it room."""
    short = [request(name, 5, max_new_tokens=new) for name, new in (("a", 8), ("bb", 14), ("ccc", 20))]
    long = request("long", 60, max_new_tokens=4)
    engine = esp("llama", 4, prefill_tokens=8, cache_bytes=4 * 64 * COLUMN_BYTES)
    for item in short:
        engine.submit(item)
    done = engine.step()
    engine.submit(long)
    while engine.busy:
        done += engine.step()
    assert_equal("llama", [*short, long], done)
    stats = {completion.request_id: completion.stats for completion in done}
    assert {name: each.prefill_tokens for name, each in stats.items()} == {"a": 5, "bb": 5, "ccc": 5, "long": 60}
    assert stats["long"].prefill_calls == 8


@pytest.mark.usefixtures("small_steps")
@pytest.mark.parametrize("columns", [128, 200, 400])
def test_a_small_cache_takes_fewer_sequences_at_a_time(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[tuple[int, int]] = []
    resize = SlotCache.resize

    def watched(self: SlotCache, slots: int, columns: int) -> None:
        sizes.append((slots, columns))
        resize(self, slots, columns)

    monkeypatch.setattr(SlotCache, "resize", watched)
    lengths = (3, 5, 60, 4, 6, 7, 70, 2, 9, 8, 3)
    requests = [request(f"r{i}", length, temperature=0.5, seed=i) for i, length in enumerate(lengths)]
    engine = esp("llama", 6, cache_bytes=columns * COLUMN_BYTES)
    done = list(engine.generate(requests))
    assert_equal("llama", requests, done)
    assert all(slots * columns_ <= max(columns, columns_) for slots, columns_ in sizes)
    slots = [slots for slots, _ in sizes]
    assert min(slots) < 6  # the long ones took slots
    assert slots[slots.index(min(slots)) :] != [min(slots)] * len(slots)  # and gave them back
    assert all(len(c.token_ids) == 24 == 1 + sum(c.stats.accept_lengths) for c in done)


def test_outputs_of_very_different_lengths_leave_no_slot_idle() -> None:
    """Ray PR#52634: one batch of lengths 1 to 1024, which waits for its longest. Here the next request takes a slot as
    it falls free."""
    config = tiny_config("llama")
    config.max_position_embeddings = 1100
    torch.manual_seed(0)
    model = CausalModel(AutoModelForCausalLM.from_config(config).double())
    lengths = [1024, 1, 2, 512, 4, 1, 256, 8, 128, 3, 16, 64, 5, 32, 200, 300]
    requests = [request(f"r{i}", 4, max_new_tokens=length) for i, length in enumerate(lengths)]
    engine = Engine(model, [NoDrafter()], slots=4)
    for item in requests:
        engine.submit(item)
    done: list[Completion] = []
    steps = 0
    while engine.busy:
        done += engine.step()
        steps += 1
    by_id = {completion.request_id: completion.token_ids for completion in done}
    assert [len(by_id[item.request_id]) for item in requests] == lengths
    assert all(by_id[item.request_id] == reference.decode(model, item).token_ids for item in requests[1:])
    assert steps <= max(lengths) + len(lengths), "a batch at a time takes 1024 + 256 + 128 + 300"


@pytest.mark.usefixtures("small_steps")
def test_a_cache_too_small_for_one_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match=r"max_length 96 needs .* GiB of KV cache for one slot.*engine.cache_gib"):
        esp("llama", 2, cache_bytes=127 * COLUMN_BYTES)
    assert "128 tokens" in esp("llama", 2, cache_bytes=128 * COLUMN_BYTES).memory_plan


def failing_forward(monkeypatch: pytest.MonkeyPatch, error: type[Exception], calls: set[int]) -> Counter[str]:
    """Let the forward passes of these numbers fail."""
    count: Counter[str] = Counter()
    forward = CausalModel.forward_block

    def fragile(self: CausalModel, *arguments: object) -> torch.Tensor:
        count["calls"] += 1
        if count["calls"] in calls:
            count["failed"] += 1
            raise error("CUDA out of memory. Tried to allocate (injected)")
        return forward(self, *arguments)

    monkeypatch.setattr(CausalModel, "forward_block", fragile)
    return count


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, MemoryError])
@pytest.mark.parametrize("calls", [{1}, {3}, {12}, {12, 13}, {9, 20}])
def test_out_of_memory_halves_the_slots_and_loses_nothing(
    calls: set[int], error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = mixed_requests(temperature=0.7)
    count = failing_forward(monkeypatch, error, calls)
    engine = esp("llama", 8)
    done = list(engine.generate(requests))
    assert count["failed"] == len(calls)
    assert engine.slots == 8 >> len(calls)
    assert_equal("llama", requests, done)
    assert max(c.stats.mean_batch or 0 for c in done) > 1


def test_what_was_decoded_is_not_decoded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = mixed_requests()
    calls = sum(c.stats.decode_calls for c in esp("llama", 8).generate(requests, "ar"))
    failing_forward(monkeypatch, torch.OutOfMemoryError, {20})
    done = list(esp("llama", 8).generate(requests, "ar"))
    assert sum(c.stats.decode_calls for c in done) == calls
    assert sum(c.stats.prefill_tokens + c.stats.cached_tokens for c in done) > sum(len(r.prompt_ids) for r in requests)


def test_out_of_memory_with_one_slot_is_that_rows_error(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = mixed_requests()
    failing_forward(monkeypatch, torch.OutOfMemoryError, {30})
    with EngineService(esp("llama", 1)) as service:
        futures = [service.submit(item) for item in requests]
        errors = [future.exception(timeout=60) for future in futures]
        failed = [error for error in errors if error is not None]
        assert len(failed) == 1
        assert isinstance(failed[0], torch.OutOfMemoryError)
        done = [future.result() for future, error in zip(futures, errors, strict=True) if error is None]
    assert_equal("llama", [item for item, error in zip(requests, errors, strict=True) if error is None], done)


def test_cancelled_sequences_leave_their_slots() -> None:
    requests = mixed_requests(max_new_tokens=50)
    engine = esp("llama", 3)
    for item in requests:
        engine.submit(item)
    done = [*engine.step(), *engine.step()]
    cancelled = [engine.running[0], engine.running[2], "r31"]  # two that run, one that waits
    for name in cancelled:
        engine.cancel(name)
    engine.cancel("nobody")
    while engine.busy:
        done += engine.step()
    assert len(set(cancelled)) == 3
    assert_equal("llama", [item for item in requests if item.request_id not in cancelled], done)


def test_cancelling_a_future_takes_its_request_out_of_the_engine() -> None:
    want = expected("llama", request("wanted", 9)).token_ids
    with EngineService(esp("llama", 2)) as service:
        endless = [service.submit(request(f"e{i}", 5, max_new_tokens=90)) for i in range(6)]
        wanted = service.submit(request("wanted", 9))
        assert all(future.cancel() for future in endless[1:])
        assert wanted.result(timeout=60).token_ids == want
        assert endless[0].result(timeout=60).token_ids


def test_a_generator_that_is_closed_or_refused_leaves_nothing_behind() -> None:
    engine = esp("llama", 3)
    requests = mixed_requests()
    generator = engine.generate(requests)
    next(generator)
    generator.close()
    assert not engine.busy
    with pytest.raises(RequestError):
        list(engine.generate([*requests, Request("bad", (), SamplingParams(max_new_tokens=3))]))
    assert not engine.busy
    assert_equal("llama", requests, list(engine.generate(requests)))


@pytest.mark.parametrize("method", ["esp", "ar"])
@pytest.mark.parametrize("top", [0, 3, 99])
def test_logprobs_equal_the_references(top: int, method: str) -> None:
    requests = mixed_requests(temperature=0.9, logprobs=top, repetition_penalty=1.3)
    for done in esp("llama").generate(requests, method):
        item = next(each for each in requests if each.request_id == done.request_id)
        want = expected("llama", item)
        assert done.token_ids == want.token_ids
        assert done.logprobs is not None
        assert len(done.logprobs) == len(done.token_ids)
        for got, token, logits in zip(done.logprobs, done.token_ids, want.logits, strict=True):
            logprobs = logits.log_softmax(-1)
            assert got.logprob == pytest.approx(float(logprobs[token]), abs=1e-6)
            values, tokens = logprobs.topk(min(top, len(logprobs)))
            assert [t for t, _ in got.top] == tokens.tolist()
            assert [value for _, value in got.top] == pytest.approx(values.tolist(), abs=1e-6)


def test_no_logprobs_unless_asked_for() -> None:
    assert all(done.logprobs is None for done in esp("llama").generate(mixed_requests()))


def test_no_tokens_asked_for_cost_nothing() -> None:
    engine = esp("llama", 2)
    requests = [request("none", 9, max_new_tokens=0), *mixed_requests(), request("zero", 4, max_new_tokens=0)]
    done = {c.request_id: c for c in engine.generate(requests)}
    assert_equal("llama", requests[1:-1], [done[item.request_id] for item in requests[1:-1]])
    for name in ("none", "zero"):
        assert done[name].token_ids == ()
        assert done[name].finish_reason is FinishReason.LENGTH
        assert done[name].stats.prefill_calls == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_are_the_rows_error(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = CausalModel.logits

    def broken(self: CausalModel, hidden: torch.Tensor) -> torch.Tensor:
        return torch.full_like(logits(self, hidden), torch.nan)

    monkeypatch.setattr(CausalModel, "logits", broken)
    with pytest.raises(NoTokenError, match="not finite"):
        list(esp("llama").generate([request("nan", 5, temperature=temperature)]))


def test_a_row_that_excludes_every_token_fails_alone() -> None:
    everything = tuple((token,) for token in range(14))
    with EngineService(esp("llama", 4)) as service:
        bad = service.submit(request("bad", 5, bad_words=everything))
        good = [service.submit(item) for item in mixed_requests()]
        assert "every token is excluded" in str(bad.exception(timeout=60))
        done: list[Completion] = [future.result(timeout=60) for future in good]
    assert_equal("llama", mixed_requests(), done)


@pytest.mark.parametrize(
    ("sampling", "words"),
    [({"logit_bias": ((14, 1.0),)}, "logit_bias: token id 14"), ({"bad_words": ((3, -1),)}, "bad_words: token id -1")],
)
def test_tokens_outside_the_vocabulary_are_refused(sampling: dict[str, object], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        esp("llama").submit(request("x", 3, **sampling))


def test_two_drafters_of_one_name_are_refused() -> None:
    drafter = esp("llama")._lane.drafter
    with pytest.raises(ValueError, match="name of its own, got esp, esp"):
        Engine(tiny_model("llama"), [drafter, drafter])
