"""Tree attention on stock Hugging Face models: one registered function.

B sequences, R rows in all, N of the widest block, T cache columns, H heads, G key/value heads, g = H/G, D head size.
The grouped queries are folded into the query axis ([B, G, g*N, D]) so that the cache is never copied per head.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from esp_worker.block import Block

ATTENTION_NAME = "esp_tree"

# A CPU's products of 1 to 3 queries with many keys take longer than those of 4 (AMD EPYC with AVX-512, 16 sequences of
# SmolLM2 with 160 keys: 305, 352, 395 us a layer, filled up 280 to 295); with few keys, filling up takes more time than
# that saves.
FEWEST_QUERIES, FILLED_FROM = 4, 200_000  # numbers in the keys

# Per-layer arguments that change the result and that this function does not implement: attention sinks under their two
# names, added biases, and choices of columns that a layer makes itself.
_UNSUPPORTED = ("s_aux", "sinks", "position_bias", "indices", "block_indices")


def tree_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    block: Block,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of query [1, H, R, D] over key, value [B, G, T, D] under `block`; returns ([1, R, H, D], None).

    The model hands each layer's own sliding_window, so a hybrid model cannot lose it to a shared mask. Raises
    ValueError when it hands an argument that is not implemented here.
    """
    assert attention_mask is None, "the block carries the mask"
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise ValueError(f"tree attention does not implement {name}, which this model's layers ask for")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    settings = sliding_window, scaling, softcap
    if not block.parts:
        return _attention(block, query, key, value, *settings), None
    outs = [
        _attention(part, query[:, :, rows], key[slots, :, : part.columns], value[slots, :, : part.columns], *settings)
        for slots, rows, part in block.parts
    ]
    return torch.cat(outs, 1), None


def reads_keys_by_dimension(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether few queries are weighed by two products here, for which keys of one dimension should lie side by side.

    They take less time than PyTorch's fused kernel on a CPU; in 16 bits only that one sums in float32.
    """
    return device.type == "cpu" and dtype.itemsize >= 4


def _attention(
    block: Block,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    window: int | None,
    scaling: float,
    cap: float | None,
) -> torch.Tensor:
    """[1, H, R, D] -> [1, R, H, D]"""
    query = block.apart(query)
    batch, heads, rows, size = query.shape
    groups = key.shape[1]
    folded = query.reshape(batch, groups, heads // groups * rows, size)
    mask = block.additive(window, heads // groups, query.dtype)
    if cap is None and not _few_queries(folded):
        key = key if key.stride(-1) == 1 else key.contiguous()  # as the fused kernels want it
        out = F.scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scaling)
    else:
        out = _explicit_attention(folded, key, value, mask, scaling, cap)
    return block.together(out.reshape(batch, heads, rows, size))


def _few_queries(query: torch.Tensor) -> bool:
    return query.shape[2] <= 48 and reads_keys_by_dimension(query.device, query.dtype)


def _explicit_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    cap: float | None,
) -> torch.Tensor:
    """Attention whose scores are held, capped by cap * tanh(score / cap) where there is a cap.

    Cap, mask, softmax in this order: capped after the mask, a hidden column would come back with -cap. 16 bits are
    weighed in float32, as Hugging Face's eager attention does.
    """
    batch, groups, rows, size = query.shape
    query = query * scaling
    if rows < FEWEST_QUERIES and key.numel() >= FILLED_FROM and key.device.type == "cpu":
        query = F.pad(query, (0, 0, 0, FEWEST_QUERIES - rows))
    scores = torch.bmm(query.flatten(0, 1), key.flatten(0, 1).transpose(1, 2))
    if cap is not None:
        scores = torch.tanh(scores / cap) * cap
    if mask is not None:
        scores.view(batch, groups, query.shape[2], -1)[:, :, :rows].add_(mask)
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))
    out = torch.bmm(weights.to(value.dtype), value.flatten(0, 1))
    return out.view(batch, groups, query.shape[2], size)[:, :, :rows]
