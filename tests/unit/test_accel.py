"""Packed linear layers give what nn.Linear gives, in place of it."""

from __future__ import annotations

import pytest
import torch
from tiny import tiny_config
from torch import nn
from transformers import AutoModelForCausalLM

from esp_worker.accel import accelerate, packed
from esp_worker.model import CausalModel

needs_packing = pytest.mark.skipif(
    packed.unavailable(torch.device("cpu"), torch.float32) is not None, reason="this CPU or PyTorch cannot pack"
)


@needs_packing
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 48), (7, 48), (2, 5, 48), (3, 1, 48)])
def test_packed_equals_linear(shape: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(48, 80, bias=bias)
    x = torch.randn(shape)
    with torch.inference_mode():
        torch.testing.assert_close(packed.PackedLinear(linear)(x), linear(x), rtol=1e-5, atol=1e-5)
        strided = torch.randn(4, shape[-1], 6).transpose(1, 2)
        torch.testing.assert_close(packed.PackedLinear(linear)(strided), linear(strided), rtol=1e-5, atol=1e-5)


@needs_packing
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_whole_model_keeps_its_logits(family: str) -> None:
    torch.manual_seed(0)
    model = CausalModel(AutoModelForCausalLM.from_config(tiny_config(family)))
    ids = torch.arange(3, 12)[None]
    with torch.inference_mode(), model.stock() as hf:
        before = hf(input_ids=ids).logits
        assert "linear layers packed" in accelerate(model)
        assert not [m for m in model.module.modules() if type(m) is nn.Linear]
        torch.testing.assert_close(hf(input_ids=ids).logits, before, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("device", "dtype", "words"), [("cuda", torch.float32, "for CPUs"), ("cpu", torch.float64, "for float32")]
)
def test_elsewhere_the_stock_kernels_stay(device: str, dtype: torch.dtype, words: str) -> None:
    assert words in (packed.unavailable(torch.device(device), dtype) or "")


def test_float64_is_left_alone() -> None:
    model = CausalModel(AutoModelForCausalLM.from_config(tiny_config("llama")).double())
    assert accelerate(model).startswith("stock kernels (packing is for float32")
    assert [m for m in model.module.modules() if type(m) is nn.Linear]
