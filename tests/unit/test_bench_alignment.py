"""`jobs.bench alignment`: similarities and acceptance are those of the stock model, run over each mask by itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from tiny import request, tiny_model

from esp_worker import reference
from esp_worker.drafters.probe import ProbeDrafter
from esp_worker.model import CausalModel
from jobs.bench import main
from jobs.bench_alignment import Alignment, align, alignment_results, followed_masks, measure_alignment

EMA = 0.1  # the default


def stock_states(model: CausalModel, embeds: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[S, R, H] and logits [R, V] of the stock model over embeddings [R, H]."""
    with model.stock() as hf:
        out = hf(inputs_embeds=embeds[None], output_hidden_states=True)
    return torch.cat(out.hidden_states), out.logits[0]


@torch.inference_mode()
def by_hand(model: CausalModel, prompt: tuple[int, ...], output: tuple[int, ...], k: int, top: int) -> list[Any]:
    """(cosines [S], accepted) of every mask of every row: the text up to the row, the masks behind it, no cache."""
    ids = torch.tensor([*prompt, *output])
    embeds = model.embed(ids)
    truth, _ = stock_states(model, embeds)
    mask, found = embeds[: len(prompt)].mean(0), []
    for row in range(len(output) - k):
        if row:
            mask = mask + EMA * (embeds[len(prompt) + row - 1] - mask)
        end = len(prompt) + row
        states, logits = stock_states(model, torch.cat([embeds[:end], mask.expand(k, -1)]))
        for j in range(k):
            cosines = torch.cosine_similarity(states[:, end + j], truth[:, end + j], dim=-1)
            accepted = ids[end + j + 1] in logits[end + j].topk(top).indices
            found.append((cosines, accepted))
    return found


@pytest.mark.parametrize(("k", "top"), [(1, 1), (2, 3)])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3-narrow", "qwen3", "gpt2", "cohere"])
@pytest.mark.parametrize("length", [1, 9])
def test_against_the_stock_model(family: str, k: int, top: int, length: int) -> None:
    model, asked = tiny_model(family), request("a", length, max_new_tokens=14)
    output = reference.decode(model, asked).token_ids
    masks = followed_masks(ProbeDrafter(model.embed, masks=k), model, asked, output)
    found = align(model, asked.prompt_ids, output, masks, top)
    want = by_hand(model, asked.prompt_ids, output, k, top)
    cosines = torch.stack([each for each, _ in want], 1).unflatten(1, (-1, k))
    assert cosines.shape == (model.config.num_hidden_layers + 1, len(output) - k, k)
    torch.testing.assert_close(found.similarity, cosines, rtol=0, atol=1e-5)
    assert found.accepted.flatten().tolist() == [bool(accepted) for _, accepted in want]


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("k", [1, 3])
def test_a_mask_that_is_the_true_token_is_like_it_at_every_layer_and_always_accepted(family: str, k: int) -> None:
    model, asked = tiny_model(family), request("a", 14, max_new_tokens=14)
    output = reference.decode(model, asked).token_ids
    assert 0 not in output, "the padding token's embedding is zero: it has no direction"
    truth = torch.tensor([output[row : row + k] for row in range(len(output) - k)])
    found = align(model, asked.prompt_ids, output, model.embed(truth))
    torch.testing.assert_close(found.similarity, torch.ones_like(found.similarity), rtol=0, atol=1e-9)
    assert found.accepted.all()
    other = align(model, asked.prompt_ids, output, model.embed(truth.roll(1, 0)))
    assert (other.similarity[-1].mean(), other.accepted.double().mean()) < (0.9, 1)


def test_means_are_of_all_prompts_by_mask_layer_and_acceptance() -> None:
    similarity = torch.tensor([[[0.1, 0.5], [0.3, 0.7], [0.8, 0.9]], [[0.2, 1.0], [0.4, 0.0], [0.0, 0.5]]])
    accepted = torch.tensor([[True, False], [False, False], [True, False]])
    first, second, third, fourth = alignment_results(Alignment(similarity, accepted))
    assert (first["mask"], first["layer"], first["accepted"], first["rejected"]) == (1, 0, 0.45, 0.3)
    assert (second["mask"], second["layer"], second["accepted"], second["rejected"]) == (1, 1, 0.1, 0.4)
    assert (third["mask"], third["layer"], third["accepted"], third["rejected"]) == (2, 0, None, 0.7)
    assert (fourth["mask"], fourth["layer"], fourth["accepted"], fourth["rejected"]) == (2, 1, None, 0.5)
    assert (first["accepted_count"], first["rejected_count"], third["accepted_count"]) == (2, 1, 0)


def test_prompts_are_put_together_and_those_too_short_left_out() -> None:
    model = tiny_model("llama")
    requests = [request("a", 5, max_new_tokens=9), request("b", 7, max_new_tokens=2), request("c", 3, max_new_tokens=6)]
    found = measure_alignment(model, requests, masks=2, top=1)
    want = []
    for each in (requests[0], requests[2]):
        output = reference.decode(model, each).token_ids
        want += [cosines for cosines, _ in by_hand(model, each.prompt_ids, output, 2, 1)]
    torch.testing.assert_close(found.similarity.flatten(1), torch.stack(want, 1), rtol=0, atol=1e-5)


@pytest.fixture
def files(tiny_checkpoint: Path, tmp_path: Path) -> list[str]:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "abc"}\n{"prompt": "Write"}\n{"prompt": "42"}\n', encoding="utf-8")
    return ["alignment", "--model", str(tiny_checkpoint), "--prompts", str(prompts), "--threads", "1"]


def test_the_command(files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    documents = {}
    for dtype in ("float64", "float32"):  # stock and packed kernels
        out = tmp_path / dtype
        assert main([*files, "--new", "12", "--masks", "2", "--top", "4", "--dtype", dtype, "--out", str(out)]) == 0
        text = capsys.readouterr().out
        document = documents[dtype] = json.loads(text.splitlines()[-1])
        assert json.loads((out / "alignment.json").read_text(encoding="utf-8")) == document
        assert [(each["mask"], each["layer"]) for each in document["results"]] == [
            (mask, layer) for mask in (1, 2) for layer in (0, 1, 2)
        ]
        assert len([line for line in text.splitlines() if line.startswith("│")]) == 6
        svg = (out / "alignment.svg").read_bytes()
        assert ElementTree.fromstring(svg).tag.endswith("svg")
        assert all(color.encode() in svg for color in ("#2e8b57", "#c0392b"))
    assert documents["float64"]["kernels"] != documents["float32"]["kernels"]
    assert (document["prompts"], document["masks"], document["top"]) == (3, 2, 4)
    for exact, packed in zip(*(document["results"] for document in documents.values()), strict=True):
        assert exact["accepted_count"] == packed["accepted_count"] > 0
        assert exact["accepted_count"] + exact["rejected_count"] == 3 * 10
        assert packed["accepted"] == pytest.approx(exact["accepted"], abs=1e-4)
        assert packed["rejected"] == pytest.approx(exact["rejected"], abs=1e-4)


def test_outputs_shorter_than_the_masks_are_refused(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*files, "--new", "2", "--masks", "2"]) == 2
    assert "no prompt gave more than 2 tokens" in capsys.readouterr().err
