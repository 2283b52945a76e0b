"""What users of other decoders have complained about in public, with each complaint's own kind of input.

Every test names the thread whose symptom it would show. Complaints about pipelines stand in tests/pipeline and
tests/unit; what a tree row may see, and windows counted by position, in test_logits.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import VOCAB, WINDOW, mixed_requests, request, tiny_config, tiny_model
from tiny_checkpoint import tiny_tokenizer
from transformers import AutoModelForCausalLM, MambaConfig

from equivalence.test_tokens import assert_equal, esp, expected
from esp_worker import reference
from esp_worker.checkpoint import ModelError
from esp_worker.drafters.none import NoDrafter
from esp_worker.drafters.probe import ProbeDrafter
from esp_worker.engine import Engine
from esp_worker.model import CausalModel, check_supported, load_model
from esp_worker.sampling import select_token
from esp_worker.service import EngineService
from esp_worker.stopping import StopStrings, commit_until_end
from esp_worker.types import Completion, FinishReason, Request, SamplingParams, StopMatch

WIDE = {"masks": 3, "block_complexity": 48}  # trees that are often accepted two and three deep


def only(engine: Engine, item: Request, method: str = "esp") -> Completion:
    (done,) = engine.generate([item], method)
    return done


@pytest.mark.parametrize("limit", [1, 2, 3, 5])
def test_no_output_beyond_the_limit(limit: int) -> None:
    """lattice#242: max_new_tokens=1 gives two; vllm#1655: long and short prompts together give one too many."""
    requests = [request(f"o{i}", length, max_new_tokens=limit) for i, length in enumerate((1, 60, 2, 45, 3, 70))]
    done = list(esp("llama", 6, **WIDE).generate(requests))
    assert [len(completion.token_ids) for completion in done] == [limit] * 6
    assert_equal("llama", requests, done)


def test_a_stop_inside_an_accepted_run_cuts_what_follows() -> None:
    """HF PR#31301, HF#47912: tokens accepted behind an EOS are kept."""
    free = expected("llama", request("run", 12)).token_ids
    runs = only(esp("llama", 1, **WIDE), request("run", 12)).stats.accept_lengths
    starts = np.cumsum([1, *runs[:-1]])
    tried = 0
    for start, length in zip(starts, runs, strict=True):
        if length < 2 or free[start] in free[:start]:
            continue
        done = only(esp("llama", 1, **WIDE), request("run", 12, eos_token_ids=frozenset([free[start]])))
        assert done.token_ids == free[: start + 1]
        assert done.finish_reason is FinishReason.STOP
        tried += 1
    assert tried


@pytest.mark.parametrize("length_first", [False, True])
def test_the_length_cap_does_not_hide_an_earlier_stop(length_first: bool) -> None:
    """sglang#31599: accepted [10, 11, STOP, 20, 21, 22] under a limit of 5 must give [10, 11, STOP]."""
    stop, output = 9, []
    item = Request("r", (1,), SamplingParams(max_new_tokens=5, eos_token_ids=frozenset([stop])))
    ending = commit_until_end(output, [10, 11, stop, 20, 21, 22], item, limit=2 if length_first else 5)
    assert ending is not None
    assert (output, ending.reason) == (
        ([10, 11], FinishReason.LENGTH) if length_first else ([10, 11, stop], FinishReason.STOP)
    )


@pytest.mark.parametrize(
    "penalties", [{"repetition_penalty": 1.6}, {"presence_penalty": 2.0}, {"frequency_penalty": 1.5}]
)
def test_penalties_follow_each_nodes_own_path(penalties: dict[str, float]) -> None:
    """vllm#18902, TensorRT-LLM PR#17701: penalties are ignored with speculation, or count only committed tokens."""
    requests = mixed_requests(**penalties)
    done = list(esp("llama", **WIDE).generate(requests))
    assert_equal("llama", requests, done)
    assert any(
        expected("llama", r).token_ids != expected("llama", p).token_ids
        for r, p in zip(requests, mixed_requests(), strict=True)
    )
    # Within one run the second token's penalty must know the first: some runs are longer than one token.
    assert max(max(completion.stats.accept_lengths) for completion in done) > 1


def test_a_rows_seed_is_its_own() -> None:
    """vllm#6038: a row's seed is ignored in a batch; vllm#13196: the seed changes nothing."""
    same = [replace(request("s", 9, temperature=1.0, seed=5), request_id=f"same{i}") for i in range(4)]
    other = [replace(request("s", 9, temperature=1.0, seed=6 + i), request_id=f"other{i}") for i in range(4)]
    mixed = [item for pair in zip(same, other, strict=True) for item in pair]
    done = {c.request_id: c.token_ids for c in esp("llama", 5, **WIDE).generate(mixed)}
    assert len({done[item.request_id] for item in same}) == 1
    assert len({done[item.request_id] for item in [same[0], *other]}) == 5


def test_temperature_is_not_argmax() -> None:
    """mistral.rs PR#2424: temperature set, argmax returned. 300 draws on three tokens; 13.8 is chi-square's 0.1 %."""
    model = three_token_model()
    item = Request("t", (0, 1, 2), SamplingParams(max_new_tokens=1, temperature=1.0))
    want = reference.decode(model, item).logits[0].softmax(-1).numpy() * 300
    assert want.max() < 250, "a distribution that argmax would miss"
    engine = Engine(model, [ProbeDrafter(model.embed), NoDrafter()], slots=8)
    draws = [replace(item, request_id=str(i), sampling=replace(item.sampling, seed=i)) for i in range(300)]
    got = np.bincount([c.token_ids[0] for c in engine.generate(draws)], minlength=3)
    assert ((got - want) ** 2 / want).sum() < 13.8


def three_token_model() -> CausalModel:
    config = tiny_config("llama")
    config.vocab_size = 3
    torch.manual_seed(3)
    return CausalModel(AutoModelForCausalLM.from_config(config).double())


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_a_sequence_past_the_sliding_window(family: str) -> None:
    """HF PR#48280: output changes once a sequence is longer than the window (here 7)."""
    requests = [request(f"w{length}", length, max_new_tokens=40) for length in (WINDOW - 1, WINDOW, WINDOW + 1, 50)]
    assert_equal(family, requests, list(esp(family, 4, **WIDE).generate(requests)))


def test_the_second_use_of_an_engine_loses_nothing() -> None:
    """transformers PR#45943: the second call on one object loses results."""
    engine = esp("llama", **WIDE)
    first, second = mixed_requests(), [request(f"again{i}", 3 + i, temperature=1.0, seed=i) for i in range(5)]
    for requests in (first, second, first):
        assert_equal("llama", requests, list(engine.generate(requests)))


@pytest.mark.parametrize("slots", [2, 5, 8])
def test_a_batch_above_one(slots: int) -> None:
    """EAGLE#250: right for one sequence, wrong for several of different lengths."""
    requests = mixed_requests()
    assert_equal("qwen3", requests, list(esp("qwen3", slots, **WIDE).generate(requests)))


def test_an_invalid_row_in_mid_batch() -> None:
    """vllm#10777: one row that cannot be decoded takes its neighbours with it."""
    requests = mixed_requests()
    with EngineService(esp("llama", 4)) as service:
        futures = [service.submit(item) for item in requests[:4]]
        bad = service.submit(Request("bad", (3, VOCAB + 5), SamplingParams(max_new_tokens=4)))
        futures += [service.submit(item) for item in requests[4:]]
        assert "outside the model's vocabulary" in str(bad.exception(timeout=60))
        done = [future.result(timeout=60) for future in futures]
    assert_equal("llama", requests, done)


def test_a_model_without_a_pad_token() -> None:
    """transformers#22312: batches need a pad token that many models lack."""
    config = tiny_config("llama")
    config.pad_token_id = None
    torch.manual_seed(7)
    model = CausalModel(AutoModelForCausalLM.from_config(config).double())
    requests = mixed_requests()
    done = {c.request_id: c for c in Engine(model, [ProbeDrafter(model.embed)], slots=4).generate(requests)}
    for item in requests:
        assert done[item.request_id].token_ids == reference.decode(model, item).token_ids


def test_recurrent_layers_are_refused_by_name() -> None:
    """vllm#39273: recurrent state cannot be rolled back, and is silently corrupted by rejected drafts."""
    with pytest.raises(ModelError, match="mamba"):
        check_supported(MambaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=8))


def test_sixteen_bits_are_compared_and_not_called_equal() -> None:
    """HF#39421, HF#30413: greedy assisted decoding differs in bf16. It may here too, at near ties and only there."""
    model = tiny_model("llama", torch.bfloat16)
    engine = Engine(model, [ProbeDrafter(model.embed, **WIDE), NoDrafter()], slots=4)
    requests = mixed_requests(logprobs=2)
    plain = {c.request_id: c for c in engine.generate(requests, "ar")}
    for done in engine.generate(requests):
        other = plain[done.request_id]
        at = next((i for i, (a, b) in enumerate(zip(done.token_ids, other.token_ids, strict=True)) if a != b), None)
        if at is not None:
            assert other.logprobs is not None
            (_, first), (_, second) = other.logprobs[at].top
            assert first - second < 0.2, "where they part, the two best tokens were close"


# Text against token ids: a byte-level tokenizer, its output kept to letters so that every text decodes.


@pytest.fixture(scope="module")
def byte_model(tiny_checkpoint: Path) -> CausalModel:
    return load_model(tiny_checkpoint, dtype="float64", device="cpu")


LETTERS = "abcdefgh "


def text_request(stop: StopStrings | None = None, **sampling: object) -> tuple[Request, object]:
    tokenizer = tiny_tokenizer()
    allowed = {tokenizer(letter, add_special_tokens=False)["input_ids"][0] for letter in LETTERS}
    others = tuple((token,) for token in range(len(tokenizer)) if token not in allowed)
    params = SamplingParams(max_new_tokens=40, temperature=1.0, seed=4, bad_words=others, **sampling)
    return Request("text", tuple(tokenizer("hello")["input_ids"]), params, stop), tokenizer


@pytest.mark.parametrize("method", ["esp", "ar"])
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("length", [1, 2, 4])
def test_text_and_token_ids_are_cut_at_the_same_place(
    length: int, keep: bool, method: str, byte_model: CausalModel
) -> None:
    """vllm PR#47616: text is trimmed at a stop string, token ids and counts are not."""
    item, tokenizer = text_request()
    engine = Engine(byte_model, [ProbeDrafter(byte_model.embed, **WIDE), NoDrafter()], slots=1)
    free = tokenizer.decode(only(engine, item, method).token_ids)
    assert len(free) == 40
    for at in range(0, 40 - length, 5):
        string = free[at : at + length]
        cut = free.index(string) + (length if keep else 0)
        stop = StopStrings([string], tokenizer.decode, keep=keep)
        item, _ = text_request(stop, logprobs=0)
        done = only(engine, item, method)
        assert done.stop == StopMatch(keep=cut, text=free[:cut], reason=string)
        assert tokenizer.decode(done.token_ids) == free[:cut]
        assert done.finish_reason is FinishReason.STOP
        assert done.logprobs is not None
        assert len(done.logprobs) == len(done.token_ids) == cut
        assert sum(done.stats.accept_lengths) == max(cut - 1, 0)
        assert min(done.stats.accept_lengths, default=0) >= 0
        want = reference.decode(byte_model, item)
        assert (done.token_ids, done.stop) == (want.token_ids, want.stop)


def test_a_stop_string_within_min_new_tokens_does_not_count(byte_model: CausalModel) -> None:
    """The same text, asked to be at least 12 tokens long: an early stop string stays, the next one ends it."""
    item, tokenizer = text_request()
    engine = Engine(byte_model, [ProbeDrafter(byte_model.embed, **WIDE)], slots=1)
    free = tokenizer.decode(only(engine, item).token_ids)
    letter = next(each for each in free[:6] if each in free[12:])
    stop = StopStrings([letter], tokenizer.decode)
    done = only(engine, text_request(stop, min_new_tokens=12)[0])
    assert tokenizer.decode(done.token_ids) == free[: free.index(letter, 12)]


def test_engine_and_reference_share_the_choice_and_nothing_else() -> None:
    """A draw belongs to its output position: the reference's own logits and the row's key give the engine's tokens."""
    item = request("key", 9, temperature=1.2, seed=11, min_p=0.01, presence_penalty=0.4)
    done = only(esp("gemma3", 1, **WIDE), item)
    rows = expected("gemma3", item).logits
    again = [select_token(rows[i], item.sampling, item.prompt_ids, done.token_ids[:i]) for i in range(len(rows))]
    assert tuple(again) == done.token_ids
