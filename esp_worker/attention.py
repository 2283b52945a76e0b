"""Tree attention on stock Hugging Face models: one registered function, and the masks that it reads.

B sequences, N rows of a block, T cache columns, H heads, G key/value heads, g = H/G, D head size.
Columns of a slot: [0, L) its context, [L, L + N) the block's own rows. Column c of the context holds position c.
The grouped queries are folded into the query axis ([B, G, g*N, D]) so that the cache is never copied per head.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

ATTENTION_NAME = "esp_tree"

# Per-layer arguments that change the result and that this function does not implement: attention sinks under their two
# names, added biases, and choices of columns that a layer makes itself.
_UNSUPPORTED = ("s_aux", "sinks", "position_bias", "indices", "block_indices")


class BlockMask:
    """Who sees whom in one forward pass, as the additive mask of each window that the model's layers use.

    lengths: [B] context columns of each slot; positions: [B, N]; visible: [B, N, N] bool, within the block.
    """

    def __init__(
        self, lengths: torch.Tensor, positions: torch.Tensor, visible: torch.Tensor, columns: int, dtype: torch.dtype
    ) -> None:
        self._lengths, self._positions, self._visible = lengths, positions, visible
        self._columns, self._dtype = columns, dtype
        self._cache: dict[tuple[int | None, int], torch.Tensor | None] = {}

    def additive(self, window: int | None, group: int) -> torch.Tensor | None:
        """[B, 1, group*N, T] with 0 where a row sees a column and -inf elsewhere; None when all see all."""
        key = (window, group)
        if key not in self._cache:
            self._cache[key] = self._build(window, group)
        return self._cache[key]

    def _build(self, window: int | None, group: int) -> torch.Tensor | None:
        allowed = self._allowed(window)
        if bool(allowed.all()):
            return None
        mask = torch.zeros(allowed.shape, dtype=self._dtype, device=allowed.device)
        mask.masked_fill_(~allowed, -torch.inf)
        batch, rows, columns = mask.shape
        return mask[:, None].expand(batch, group, rows, columns).reshape(batch, 1, group * rows, columns)

    def _allowed(self, window: int | None) -> torch.Tensor:
        """[B, N, T] bool."""
        batch, rows, _ = self._visible.shape
        columns = torch.arange(self._columns, device=self._lengths.device)
        in_block = columns[None] - self._lengths[:, None]  # [B, T]; negative: context
        own = in_block.clamp(0, rows - 1)[:, None].expand(batch, rows, self._columns)
        allowed = torch.where(in_block[:, None] < 0, True, self._visible.gather(2, own) & (in_block[:, None] < rows))
        if window is None:
            return allowed
        # By position id, never by column: a node's column in the block says nothing of its distance.
        block_positions = self._positions.gather(1, in_block.clamp(0, rows - 1))
        column_positions = torch.where(in_block < 0, columns[None], block_positions)  # [B, T]
        return allowed & (self._positions[:, :, None] - column_positions[:, None] < window)


def tree_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    block: BlockMask,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of query [B, H, N, D] over key, value [B, G, T, D] under `block`; returns ([B, N, H, D], None).

    The model hands each layer's own sliding_window, so a hybrid model cannot lose it to a shared mask. Raises
    ValueError when it hands an argument that is not implemented here.
    """
    assert attention_mask is None, "the block carries the mask"
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise ValueError(f"tree attention does not implement {name}, which this model's layers ask for")
    batch, heads, rows, size = query.shape
    groups = key.shape[1]
    folded = query.reshape(batch, groups, heads // groups * rows, size)
    mask = block.additive(sliding_window, heads // groups)
    if softcap is None:
        out = F.scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scaling)
    else:
        out = _capped_attention(folded, key, value, mask, size**-0.5 if scaling is None else scaling, softcap)
    return out.reshape(batch, heads, rows, size).transpose(1, 2), None  # the caller's reshape copies


def _capped_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scaling: float, cap: float
) -> torch.Tensor:
    """Attention of scores capped by cap * tanh(score / cap), which PyTorch's fused kernels do not have.

    Cap, mask, softmax in this order: capped after the mask, a hidden column would come back with -cap. 16 bits are
    weighed in float32, as Hugging Face's eager attention does.
    """
    scores = torch.tanh(query @ key.transpose(2, 3) * scaling / cap) * cap
    if mask is not None:
        scores = scores + mask
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))
    return weights.to(value.dtype) @ value
