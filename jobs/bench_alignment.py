"""`python -m jobs.bench alignment`: how like a mask becomes, layer by layer, the token in whose place it stands (the
paper's figure 2).

Each prompt is decoded greedily and plainly. Then one block holds its last token, its output as a chain below it, and
behind every row the k probes that ESP would put there, with the masks that have followed the text so far. Mask j of the
row at depth d stands in the place of the row at depth d + j, and its logits propose the token after that one: accepted
where the model's own is among its best.

P prompt length, n output tokens, k masks, D = n - k rows that own probes, R rows of the block, H hidden size, V
vocabulary, S hidden states of a row: the embeddings, what each layer gives, the last behind the final norm (as Hugging
Face's output_hidden_states).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from esp_worker.block import Block
from esp_worker.drafters.base import Prompt
from esp_worker.drafters.none import NoDrafter
from esp_worker.drafters.probe import ProbeDrafter
from esp_worker.engine import Engine
from esp_worker.model import CausalModel
from esp_worker.tree import BlockShape
from esp_worker.types import Request
from jobs.ceiling import machine_line
from pipeline.pagekit import new_figure, svg_of

SLOTS = 4  # of plain decoding, which is not what is measured
ACCEPTED_COLOR, REJECTED_COLOR = "#2e8b57", "#c0392b"  # the paper's green and red


@dataclass(frozen=True)
class Alignment:
    """similarity: [S, D, k], cosine of a mask's and the true token's state; accepted: [D, k]."""

    similarity: torch.Tensor
    accepted: torch.Tensor


def measure_alignment(model: CausalModel, requests: Sequence[Request], masks: int, top: int) -> Alignment:
    """Of all greedy requests, each decoded plainly first. top: how many of a mask's best tokens count as drafted.

    Raises ValueError where no output is longer than there are masks.
    """
    drafter = ProbeDrafter(model.embed, masks=masks)
    outputs = {done.request_id: done.token_ids for done in Engine(model, [NoDrafter()], slots=SLOTS).generate(requests)}
    found = []
    for request in requests:
        output = outputs[request.request_id]
        if len(output) > masks:
            followed = followed_masks(drafter, model, request, output)
            found.append(align(model, request.prompt_ids, output, followed, top))
    if not found:
        raise ValueError(f"no prompt gave more than {masks} tokens, so no mask has a token to be compared with")
    return Alignment(torch.cat([each.similarity for each in found], 1), torch.cat([each.accepted for each in found]))


@torch.inference_mode()
def followed_masks(drafter: ProbeDrafter, model: CausalModel, request: Request, output: Sequence[int]) -> torch.Tensor:
    """[D, k, H]: the masks behind the prompt's last token, then behind each output token, that token followed."""
    state = drafter.start(Prompt(request.prompt_ids, request.sampling, model.embed, model.device))
    masks = [drafter.mask_embeds(state)]
    for token in output[: len(output) - drafter.masks - 1]:
        state.committed.append(token)
        masks.append(drafter.mask_embeds(state))
    return torch.stack(masks)


@torch.inference_mode()
def align(
    model: CausalModel, prompt: Sequence[int], output: Sequence[int], masks: torch.Tensor, top: int = 1
) -> Alignment:
    """Of one prompt and its greedy output. masks [D, k, H]: what stands behind each of the first D rows."""
    owners, k, _ = masks.shape
    device, count = model.device, len(output)
    cache = model.new_cache(1)
    if len(prompt) > 1:
        context = model.embed(torch.tensor(prompt[:-1], device=device))
        model.forward_block(cache, Block.chain(0, 0, len(prompt) - 1, device), context)
    chain = torch.tensor([prompt[-1], *output[:-1]], device=device)  # the last output token is compared with nothing
    shape = BlockShape(tuple(range(count - 1)), tuple(range(owners)), k)
    embeds = model.embed(chain)
    states = model.forward_layers(
        cache,
        Block(0, [len(prompt) - 1], [shape.offsets], [shape.visible], device),
        torch.cat([embeds, masks.flatten(0, 1).to(embeds.dtype)]),
    )
    ahead = (torch.arange(owners)[:, None] + torch.arange(1, k + 1)).to(device)  # [D, k]: d + j
    exact = torch.promote_types(states.dtype, torch.float32)
    probes = states[:, count:].unflatten(1, (owners, k)).to(exact)  # [S, D, k, H]
    best = model.logits(states[-1, count:]).topk(min(top, model.vocab_size)).indices.unflatten(0, (owners, k))
    wanted = torch.tensor(output, device=device)[ahead]
    return Alignment(
        torch.cosine_similarity(probes, states[:, ahead].to(exact), dim=-1).cpu(),
        (best == wanted[..., None]).any(-1).cpu(),
    )


def alignment_results(alignment: Alignment) -> list[dict[str, Any]]:
    """An entry for each mask and hidden state: mean similarity of the accepted and of the rejected, None for none."""
    results = []
    for mask in range(alignment.accepted.shape[1]):
        accepted = alignment.accepted[:, mask]
        for layer, similarity in enumerate(alignment.similarity[:, :, mask]):
            results.append(
                {
                    "mask": mask + 1,
                    "layer": layer,
                    "accepted": _mean(similarity[accepted]),
                    "rejected": _mean(similarity[~accepted]),
                    "accepted_count": int(accepted.sum()),
                    "rejected_count": int((~accepted).sum()),
                }
            )
    return results


def _mean(values: torch.Tensor) -> float | None:
    return round(values.double().mean().item(), 6) if len(values) else None


def print_alignment(about: Mapping[str, Any], results: Sequence[Mapping[str, Any]]) -> None:
    console = Console(width=160)
    console.print(
        f"{machine_line(about)}; {about['prompts']} prompts x {about['new_tokens']} tokens, greedy; accepted: the true "
        f"token is among the mask's best {about['top']}; layer 0: embeddings, the last: behind the final norm",
        highlight=False,
    )
    table = Table("mask", "layer", "accepted", "rejected", "difference", title="cosine similarity, mask and true token")
    for result in results:
        pair = [result["accepted"], result["rejected"]]
        difference = None if None in pair else pair[0] - pair[1]
        cells = ["-" if figure is None else f"{figure:.4f}" for figure in [*pair, difference]]
        table.add_row(str(result["mask"]), str(result["layer"]), *cells)
    console.print(table)
    for mask, accepted, rejected in sorted({(r["mask"], r["accepted_count"], r["rejected_count"]) for r in results}):
        console.print(f"mask {mask}: {accepted} accepted, {rejected} rejected", highlight=False)


def save_alignment(folder: Path, document: Mapping[str, Any]) -> None:
    """alignment.json and alignment.svg."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "alignment.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    (folder / "alignment.svg").write_bytes(_figure(document["results"]))


def _figure(results: Sequence[Mapping[str, Any]]) -> bytes:
    figure, axes = new_figure(height=3.2)
    for mask in sorted({result["mask"] for result in results}):
        own = [result for result in results if result["mask"] == mask]
        for name, color in (("accepted", ACCEPTED_COLOR), ("rejected", REJECTED_COLOR)):
            points = [(result["layer"], result[name]) for result in own if result[name] is not None]
            label = f"mask {mask}, {name} ({own[0][f'{name}_count']:,})"
            axes.plot(
                [layer for layer, _ in points], [mean for _, mean in points], color=color, alpha=1 / mask, label=label
            )
    axes.set(xlabel="layer", ylabel="cosine similarity")
    axes.legend(frameon=False, fontsize=8)
    return svg_of(figure)
