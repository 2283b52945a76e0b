"""The layers of a Llama-like model as straight code: what Hugging Face's modules compute, in a third of the operations.

At a few rows, a layer's products take no longer than all that is around them: some 75 operators, and as many calls of
Python. Here queries and keys turn together, residuals are added inside the products, and no module calls another.
Norms, activations, products and attention are the model's own.

A model is taken for what it computes, not for its name: one that has the same parts, but gives anything else on trial
rows, keeps its own forward.

R rows, h hidden size, H heads, G key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from esp_worker.accel.packed import LinearPart, PackedLinear, filled_up, kernel_rows
from esp_worker.block import Block
from esp_worker.model import Attend, CausalModel, KeyValues

_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}
_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}
_SETTINGS = ("scaling", "sliding_window", "softcap")  # of a layer's attention
_TRIAL_ROWS = 6

# What a layer gives its attention function: itself and its settings.
Handed = tuple[nn.Module, Mapping[str, Any]]


def straighten(model: CausalModel) -> bool:
    """Swap StraightLayers in for the forward of a model whose linear layers are packed; whether that could be done."""
    backbone: Any = model.module.base_model
    if not _fits(backbone):
        return False
    cache, block = model.new_cache(1), Block.chain(0, 0, _TRIAL_ROWS, model.device)
    embeds = model.embed(torch.linspace(0, model.vocab_size - 1, _TRIAL_ROWS, device=model.device).long())
    handed: list[Handed] = []

    def recorded(attend: Attend) -> Attend:
        def record(module: nn.Module, *tensors: Any, block: Block, **settings: Any) -> Any:
            handed.append((module, {name: settings[name] for name in _SETTINGS if name in settings}))
            return attend(module, *tensors, block=block, **settings)

        return record

    with torch.inference_mode():
        with model.attention_within(recorded):
            wanted = model.forward_block(cache, block, embeds)
        if [module for module, _ in handed] != [layer.self_attn for layer in backbone.layers]:
            return False
        layers = StraightLayers(backbone, [settings for _, settings in handed])
        model.swap_layers(layers)
        given = model.forward_block(cache, block, embeds)
    if not torch.dist(given, wanted) <= 1e-4 * wanted.norm():  # nor where it is no number
        model.swap_layers(None)
        return False
    return True


def _fits(backbone: Any) -> bool:
    """Whether it has the parts of a Llama, packed, and no others."""
    parts = dict(backbone.named_children())
    if parts.keys() != {"embed_tokens", "layers", "norm", "rotary_emb"}:
        return False
    return all(_layer_fits(layer) for layer in parts["layers"])


def _layer_fits(layer: Any) -> bool:
    if dict(layer.named_children()).keys() != _LAYER:
        return False
    attention, mlp = (dict(part.named_children()) for part in (layer.self_attn, layer.mlp))
    return (
        attention.keys() in (_ATTENTION, _ATTENTION | _HEAD_NORMS)
        and mlp.keys() == _MLP
        and all(isinstance(attention[name], LinearPart) for name in ("q_proj", "k_proj", "v_proj"))
        and all(isinstance(mlp[name], LinearPart) for name in ("gate_proj", "up_proj"))
        and isinstance(attention["o_proj"], PackedLinear)
        and isinstance(mlp["down_proj"], PackedLinear)
    )


class StraightLayers:
    """All layers of a backbone, its rotary embedding and last norm. settings: of each layer's attention."""

    def __init__(self, backbone: Any, settings: list[Mapping[str, Any]]) -> None:
        self._rotary, self._norm = backbone.rotary_emb, backbone.norm
        self._layers = [
            _StraightLayer(layer, index, each)
            for index, (layer, each) in enumerate(zip(backbone.layers, settings, strict=True))
        ]

    def __call__(self, x: torch.Tensor, cache: KeyValues, block: Block, attend: Attend) -> torch.Tensor:
        """[R, h] -> [R, h]"""
        cos, sin = self._rotary(x[None], block.positions)
        cos, sin = cos[0, :, None], sin[0, :, None]
        near, far = sin.chunk(2, -1)
        sin = torch.cat((-near, far), -1)  # of both halves swapped, not of (-second, first)
        rows = len(x)
        x = filled_up(x, kernel_rows(rows))
        for layer in self._layers:
            x = layer(x, cos, sin, cache, block, attend)
        return self._norm(x[:rows])


class _StraightLayer:
    def __init__(self, layer: Any, index: int, settings: Mapping[str, Any]) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._index, self._module, self._settings = index, attention, settings
        self._norm, self._mlp_norm = layer.input_layernorm, layer.post_attention_layernorm
        self._qkv, self._o = attention.q_proj.product, attention.o_proj
        self._gate_up, self._down = mlp.gate_proj.product, mlp.down_proj
        self._activation = mlp.act_fn
        self._size = attention.head_dim
        self._queries, self._keys = (part.out_features // self._size for part in (attention.q_proj, attention.k_proj))
        self._inner = mlp.gate_proj.out_features
        self._head_norms: tuple[nn.Module, nn.Module] | None = None
        if hasattr(attention, "q_norm"):
            self._head_norms = attention.q_norm, attention.k_norm

    def __call__(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, cache: KeyValues, block: Block, attend: Attend
    ) -> torch.Tensor:
        """x: R rows, and those that fill a kernel up."""
        rows, turned = block.rows, self._queries + self._keys
        heads = self._qkv.forward(self._norm.forward(x))[:rows].view(rows, -1, self._size)  # [R, H + 2 G, D]
        queries_keys = heads[:, :turned]
        if self._head_norms is not None:
            of_queries, of_keys = self._head_norms
            parts = queries_keys.split((self._queries, self._keys), 1)
            queries_keys = torch.cat((of_queries(parts[0]), of_keys(parts[1])), 1)
        swapped = queries_keys.roll(self._size // 2, -1)
        queries_keys = torch.addcmul(queries_keys * cos, swapped, sin).transpose(0, 1)[None]  # [1, H + G, R, D]
        values = heads[:, turned:].transpose(0, 1)[None]
        keys, values = cache.update(queries_keys[:, self._queries :], values, self._index)
        queries = queries_keys[:, : self._queries]
        out, _ = attend(self._module, queries, keys, values, None, block=block, **self._settings)
        x = self._o.forward(filled_up(out.reshape(rows, -1), len(x)), x)
        gate, up = self._gate_up.forward(self._mlp_norm.forward(x)).split(self._inner, -1)
        return self._down.forward(self._activation.forward(gate) * up, x)
