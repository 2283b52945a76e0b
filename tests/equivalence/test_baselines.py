"""The baselines: their tokens are plain decoding's, and prompt lookup makes Hugging Face's own calls.

Hugging Face's `generate(prompt_lookup_num_tokens=...)` drafts in its first call too, which is our prefill. It is given
the prompt with the first output token, so that its first call is our first decode call and every later one has its
counterpart.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch
from common import ROOT, SMOLLM2
from tiny import mixed_requests, tiny_model

from esp_worker import reference
from esp_worker.checkpoint import resolve
from esp_worker.drafters.base import Drafter
from esp_worker.drafters.lade import Lookahead
from esp_worker.drafters.pld import PromptLookup
from esp_worker.drafters.recycle import TokenRecycling
from esp_worker.drafters.stand import Stand
from esp_worker.engine import Engine
from esp_worker.model import CausalModel
from esp_worker.types import Request, SamplingParams
from pipeline.prepare import load_tokenizer

NGRAM, DEPTH = 3, 10
BASELINES: dict[str, Callable[[CausalModel], Drafter]] = {
    "pld": lambda model: PromptLookup(ngram=NGRAM, depth=DEPTH),
    "lade": lambda model: Lookahead(lookahead=(4, 5, 5)),
    "stand": lambda model: Stand(block_complexity=30),
    "recycle": lambda model: TokenRecycling(model.vocab_size, block_complexity=30),
}


def smollm2_requests(tokens: int) -> list[Request]:
    """Four of the demo's prompts; one asks for its own words again, where lookup drafts much."""
    tokenizer = load_tokenizer(resolve(SMOLLM2).folder)
    lines = (ROOT / "configs" / "demo_prompts.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines[:3]]
    prompts.append(f"Repeat this text word for word: {' '.join(prompts)}")
    sampling = SamplingParams(max_new_tokens=tokens, eos_token_ids=frozenset([tokenizer.eos_token_id]))
    requests = []
    for number, prompt in enumerate(prompts):
        chat = [{"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        requests.append(Request(f"p{number}", tuple(ids), sampling))
    return requests


def hf_prompt_lookup(model: CausalModel, request: Request, first: int) -> tuple[tuple[int, ...], int]:
    """The output tokens that begin with `first`, and Hugging Face's forward calls for the others."""
    prompt = torch.tensor([[*request.prompt_ids, first]])
    calls: list[object] = []
    with model.stock() as hf:
        hook = hf.register_forward_hook(lambda *call: calls.append(call[0]))
        try:
            text = hf.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=request.sampling.max_new_tokens - 1,
                do_sample=False,
                prompt_lookup_num_tokens=DEPTH,
                max_matching_ngram_size=NGRAM,
                eos_token_id=sorted(request.sampling.eos_token_ids) or None,
                pad_token_id=0,
            )
        finally:
            hook.remove()
    return tuple(text[0, len(request.prompt_ids) :].tolist()), len(calls)


def compare_with_hf(model: CausalModel, requests: list[Request]) -> float:
    """Our output and calls are theirs, request for request; the mean acceptance length of both."""
    engine = Engine(model, [BASELINES["pld"](model)], slots=3)
    done = {completion.request_id: completion for completion in engine.generate(requests)}
    for request in requests:
        ours = done[request.request_id]
        assert hf_prompt_lookup(model, request, ours.token_ids[0]) == (ours.token_ids, ours.stats.decode_calls)
    stats = [completion.stats for completion in done.values()]
    return sum(sum(each.accept_lengths) for each in stats) / sum(each.decode_calls for each in stats)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_prompt_lookup_makes_hugging_faces_calls(family: str) -> None:
    assert compare_with_hf(tiny_model(family), mixed_requests(max_new_tokens=40)[::2]) > 1.05


@pytest.mark.usefixtures("two_threads")
def test_prompt_lookup_makes_hugging_faces_calls_on_the_real_model(smollm2: CausalModel) -> None:
    assert compare_with_hf(smollm2, smollm2_requests(40)) > 1.2


@pytest.mark.usefixtures("two_threads")
def test_the_real_models_tokens_are_plain_decodings(smollm2: CausalModel) -> None:
    requests = smollm2_requests(32)
    want = {request.request_id: reference.decode(smollm2, request).token_ids for request in requests}
    for name, make in BASELINES.items():
        done = list(Engine(smollm2, [make(smollm2)], slots=4).generate(requests))
        assert {completion.request_id: completion.token_ids for completion in done} == want, name
        tokens, calls = sum(sum(c.stats.accept_lengths) for c in done), sum(c.stats.decode_calls for c in done)
        assert tokens > 1.15 * calls, name
