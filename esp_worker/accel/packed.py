"""Linear layers with weights packed once for oneDNN: on a CPU, one kernel that is fast for one row and for many.

PyTorch's own path reorders the weight in every call, and changes kernels between one row and two. R rows, I inputs,
O outputs. The operators are private to PyTorch's inductor backend, so they are tried before they are used.
"""

from __future__ import annotations

import torch
from torch import nn

_ROWS_HINT = 16  # rows that the packed layout is chosen for; it serves every number of them


def unavailable(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why weights cannot be packed here; None when they can."""
    if device.type != "cpu":
        return f"packing is for CPUs, this is {device.type}"
    if dtype is not torch.float32:
        return f"packing is for float32, this is {str(dtype).removeprefix('torch.')}"
    if not torch.backends.mkldnn.is_available():
        return "this PyTorch has no oneDNN"
    try:
        weight, rows = torch.eye(32), torch.arange(64.0).reshape(2, 32)
        works = torch.equal(_linear(rows, _pack(weight), None), rows)
    except (AttributeError, RuntimeError) as error:
        return f"this PyTorch's packing operators differ: {str(error).splitlines()[0]}"
    return None if works else "this PyTorch's packing operators give wrong results"


def pack_linears(model: nn.Module) -> int:
    """Replace every nn.Linear below `model` by a packed one; how many. A weight that nothing else holds is freed."""
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear
    ]
    for parent, name, child in found:
        setattr(parent, name, PackedLinear(child))
    return len(found)


class PackedLinear(nn.Module):
    """x [..., I] -> [..., O], as nn.Linear."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self._packed = _pack(linear.weight.detach())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, self.in_features)
        return _linear(rows, self._packed, self.bias).reshape(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def _pack(weight: torch.Tensor) -> torch.Tensor:
    """[O, I] -> the same in oneDNN's own blocked layout."""
    return torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS_HINT)


def _linear(rows: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """[R, I] -> [R, O]."""
    return torch.ops.mkldnn._linear_pointwise(rows, packed, bias, "none", [], "")
