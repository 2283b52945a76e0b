"""Optional kernel swaps, chosen by what the machine can do. The core never imports them: whoever loads a model may call
`accelerate`, and everything works without.
"""

from __future__ import annotations

from esp_worker.accel import layers, norms, packed
from esp_worker.model import CausalModel


def accelerate(model: CausalModel) -> str:
    """Swap in the fastest kernels for this model here; returns what was done, for the log.

    The swap changes how sums are rounded, never what is summed, and serves plain decoding, ESP and the reference alike.
    """
    reason = packed.unavailable(model.device, model.dtype)
    if reason is not None:
        return f"stock kernels ({reason})"
    linears, fused = packed.pack_linears(model.module), norms.fuse_norms(model.module)
    straight = ", layers straightened" if layers.straighten(model) else ""
    return f"{linears} linear layers packed for oneDNN, {fused} norms fused{straight}"
