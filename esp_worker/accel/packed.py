"""Linear layers with weights packed once for oneDNN: on a CPU, kernels that are fast for few rows and for many.

PyTorch's own path reorders the weight in every call, and changes kernels between one row and two. I inputs, O outputs.
The operators are private to PyTorch's inductor backend, so they are tried before they are used.

Layers that multiply the same rows (query, key and value; gate and up) become one product: one weight to stream, and one
start and end of all threads in place of two or three.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

_ROWS_HINT = 16  # rows that the packed layout is chosen for; it serves every number of them
_EXACT_ROWS = 32
# With AVX-512, oneDNN's products of fewer rows take up to a third longer than those of 6 (SmolLM2's layers on an AMD
# EPYC, 1 to 7 rows: 24, 26, 23, 22, 20, 20, 22 ms; its lm_head gains half as much); with AVX2 each row costs more than
# the one before.
_FEWEST_ROWS = 6 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 1
# Hugging Face's names of sibling layers that take the same input.
_SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def unavailable(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why weights cannot be packed here; None when they can."""
    if device.type != "cpu":
        return f"packing is for CPUs, this is {device.type}"
    if dtype is not torch.float32:
        return f"packing is for float32, this is {str(dtype).removeprefix('torch.')}"
    if not torch.backends.mkldnn.is_available():
        return "this PyTorch has no oneDNN"
    try:
        weight, rows = torch.eye(32), torch.arange(64.0).reshape(1, 2, 32)
        packed = _pack(weight)
        works = torch.equal(_linear(rows, packed, None), rows) and torch.equal(
            _linear(rows, packed, None, rows), 2 * rows
        )
    except (AttributeError, RuntimeError) as error:
        return f"this PyTorch's packing operators differ: {str(error).splitlines()[0]}"
    return None if works else "this PyTorch's packing operators give wrong results"


def kernel_rows(rows: int) -> int:
    """`rows`, or up to a sixteenth more; few rows are filled up to the fewest that are fast.

    For each number of rows that a layer has not met, oneDNN makes a kernel: 0.6 ms and half a megabyte, and it keeps no
    more than 1,024. Prompts are of all lengths, so it would make four for nearly every pass. Whoever holds the rows of
    all layers fills them up: here, each product would have to copy them, which it does with few rows only.
    """
    step = 1
    while rows > _EXACT_ROWS * step:
        step *= 2
    return max(-(-rows // step) * step, _FEWEST_ROWS)


def pack_linears(model: nn.Module) -> int:
    """Replace every nn.Linear below `model` by a packed one; how many. A weight that nothing else holds is freed."""
    replaced = 0
    for parent in list(model.modules()):
        children = {name: child for name, child in parent.named_children() if type(child) is nn.Linear}
        for names in _SIBLINGS:
            if children.keys() >= set(names):
                product = SharedProduct([children.pop(name) for name in names])
                for index, name in enumerate(names):
                    setattr(parent, name, LinearPart(product, index))
                replaced += len(names)
        for name, child in children.items():
            setattr(parent, name, PackedLinear(child))
        replaced += len(children)
    return replaced


class PackedLinear(nn.Module):
    """x [..., I] -> [..., O], as nn.Linear; of several layers with the same I, their outputs side by side. residual
    [..., O]: is added, at no cost of its own."""

    def __init__(self, *linears: nn.Linear) -> None:
        super().__init__()
        self.in_features = linears[0].in_features
        self.out_features = sum(linear.out_features for linear in linears)
        self.bias = _joined_bias(linears)
        weights = [linear.weight.detach() for linear in linears]
        self._packed = _pack(weights[0] if len(weights) == 1 else torch.cat(weights))  # cat would copy even one

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        if residual is None and 0 < x.numel() < _FEWEST_ROWS * self.in_features:
            rows = x.reshape(-1, self.in_features)
            product = _linear(filled_up(rows, _FEWEST_ROWS), self._packed, self.bias)
            return product[: len(rows)].view(*x.shape[:-1], self.out_features)
        return _linear(x, self._packed, self.bias, residual)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class SharedProduct:
    """One PackedLinear in place of siblings. Whichever is called first computes all; each of the others then takes its
    own output, once, if it is called with that very tensor, and computes anew if it is not.
    """

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        self.product = PackedLinear(*linears)
        self.sizes = [linear.out_features for linear in linears]
        self._waiting: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # input and output of parts not yet taken

    def part(self, index: int, x: torch.Tensor) -> torch.Tensor:
        """[..., I] -> [..., O] of sibling `index`, a view."""
        given, output = self._waiting.pop(index, (None, None))
        if output is not None and given is x:
            return output
        outputs = self.product(x).split(self.sizes, dim=-1)
        self._waiting = {other: (x, each) for other, each in enumerate(outputs) if other != index}
        return outputs[index]


class LinearPart(nn.Module):
    """A sibling's place in its parent: x [..., I] -> [..., O]."""

    def __init__(self, shared: SharedProduct, index: int) -> None:
        super().__init__()
        self._shared, self._index = shared, index
        self.out_features = shared.sizes[index]

    @property
    def product(self) -> PackedLinear:
        """Of all siblings, their outputs side by side."""
        return self._shared.product

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._shared.part(self._index, x)


def filled_up(x: torch.Tensor, rows: int) -> torch.Tensor:
    """[R, ..] -> [rows, ..], with zeros."""
    return x if len(x) == rows else F.pad(x, (0, 0, 0, rows - len(x)))


def _joined_bias(linears: Sequence[nn.Linear]) -> torch.Tensor | None:
    """[O] of all layers, 0 where one has none; None where none has."""
    if all(linear.bias is None for linear in linears):
        return None
    return torch.cat(
        [
            linear.weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias.detach()
            for linear in linears
        ]
    )


def _pack(weight: torch.Tensor) -> torch.Tensor:
    """[O, I] -> the same in oneDNN's own blocked layout."""
    return torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS_HINT)


def _linear(
    x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """[..., I] -> [..., O]."""
    if residual is not None:
        return torch.ops.mkldnn._linear_pointwise.binary(x, residual, packed, bias, "add")
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
