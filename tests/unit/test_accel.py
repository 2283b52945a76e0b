"""Swapped-in kernels give what the modules that they replace give."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence

import pytest
import torch
from tiny import FAMILIES, tiny_config
from torch import nn
from transformers import AutoModelForCausalLM

from esp_worker.accel import accelerate, layers, norms, packed
from esp_worker.block import Block
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
        residual = torch.randn(*shape[:-1], 80)
        got = packed.PackedLinear(linear)(x, residual)
        torch.testing.assert_close(got, residual + linear(x), rtol=1e-5, atol=1e-5)


@needs_packing
@pytest.mark.parametrize("family", FAMILIES)
def test_a_whole_model_keeps_its_logits(family: str) -> None:
    torch.manual_seed(0)
    model = CausalModel(AutoModelForCausalLM.from_config(tiny_config(family)))
    for name, parameter in model.module.named_parameters():
        if name.endswith("bias"):  # they start as zeros
            parameter.data.normal_()
    ids = torch.arange(3, 12)[None]
    linears = [m for m in model.module.modules() if type(m) is nn.Linear]
    weights = [weakref.ref(linear.weight) for linear in linears if linear is not model.module.get_output_embeddings()]
    with torch.inference_mode(), model.stock() as hf:
        before = hf(input_ids=ids).logits
        assert accelerate(model).startswith(f"{len(linears)} linear layers packed")
        del linears
        assert not [m for m in hf.modules() if type(m) is nn.Linear]
        assert not [ref for ref in weights if ref() is not None], "a weight exists once, packed"
        torch.testing.assert_close(hf(input_ids=ids).logits, before, rtol=1e-5, atol=1e-5)


@needs_packing
@pytest.mark.parametrize(
    ("family", "products"),
    # A layer: q+k+v, o, gate+up, down. Phi 3 stores its siblings joined, so it has as many.
    [("llama", 4), ("qwen2", 4), ("qwen3", 4), ("gemma3", 4), ("phi3", 4), ("starcoder2", 4)],
)
def test_siblings_are_one_product(family: str, products: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = CausalModel(AutoModelForCausalLM.from_config(tiny_config(family)))
    accelerate(model)
    calls: list[int] = []
    linear = packed._linear
    monkeypatch.setattr(packed, "_linear", lambda *given: calls.append(1) or linear(*given))
    with torch.inference_mode(), model.stock() as hf:
        hf(input_ids=torch.arange(3, 12)[None])
    assert len(calls) == products * model.config.num_hidden_layers + 1  # lm_head


@pytest.mark.parametrize(
    ("family", "count"),
    # In a layer 2, 4 with those of queries and keys, 6 with both sides; 1 at the end. GPT-2 and Cohere have others.
    [("llama", 7), ("qwen3", 13), ("gemma", 7), ("gemma3", 19), ("olmo2", 13), ("gpt2", 0), ("cohere", 0)],
)
def test_rms_norms_are_fused(family: str, count: int) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(family)).requires_grad_(False)
    before = {name: module for name, module in model.named_modules() if type(module).__name__.endswith("RMSNorm")}
    for norm in before.values():
        norm.weight.uniform_(-0.5, 1.5)
    assert norms.fuse_norms(model) == count
    fused = {name: module for name, module in model.named_modules() if type(module) is nn.RMSNorm}
    assert fused.keys() == before.keys()
    for name, norm in fused.items():
        x = torch.randn(2, 5, *norm.normalized_shape)
        torch.testing.assert_close(norm(x), before[name](x), rtol=1e-6, atol=1e-6)


def test_a_norm_of_another_kind_stays() -> None:
    class CubeRMSNorm(nn.Module):
        eps = 1e-6

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.weight * x * (x.pow(2).mean(-1, keepdim=True) + self.eps).pow(-1 / 3)

    model = nn.Sequential(CubeRMSNorm())
    assert norms.fuse_norms(model) == 0
    assert type(model[0]) is CubeRMSNorm


@needs_packing
@pytest.mark.parametrize("biases", [(True, True, True), (False, False, False), (False, True, False)])
def test_parts_equal_their_layers(biases: tuple[bool, ...]) -> None:
    """In any order, called twice, on a tensor written over in place, and with inputs of their own."""
    torch.manual_seed(0)
    layers = [nn.Linear(48, size, bias=bias) for size, bias in zip((64, 32, 16), biases, strict=True)]
    shared = packed.SharedProduct(layers)
    parts = [packed.LinearPart(shared, index) for index in range(3)]

    def check(index: int, x: torch.Tensor) -> None:
        torch.testing.assert_close(parts[index](x), layers[index](x), rtol=1e-5, atol=1e-5)

    with torch.inference_mode():
        x, y = torch.randn(2, 5, 48), torch.randn(1, 1, 48)
        for index in (0, 1, 2, 2, 1, 0, 0):
            check(index, x)
        for index, rows in ((0, x), (1, y), (2, x), (1, x), (0, y), (0, y)):
            check(index, rows)
        check(0, x)
        check(1, x)
        check(2, x)
        x.neg_()
        for index in (2, 0, 1):
            check(index, x)


# Of FAMILIES, those whose layers are a Llama's. Granite and SmolLM 3 have the same parts, but do more.
LLAMA_LIKE = {
    *("llama", "llama3-rope", "llama-linear-rope", "llama-yarn-rope", "mistral", "mistral-full", "mistral-narrow"),
    *("ministral", "qwen2", "qwen2-hybrid", "qwen3", "gemma"),
}


def random_model(family: str) -> CausalModel:
    torch.manual_seed(0)
    model = CausalModel(AutoModelForCausalLM.from_config(tiny_config(family)))
    for name, parameter in model.module.named_parameters():
        if name.endswith("bias") or "norm" in name:  # they start as zeros and ones
            parameter.data.normal_()
    return model


@torch.inference_mode()
def chains(model: CausalModel, lengths: Sequence[int] = (3, 12, 30), rows: Sequence[int] = (4, 1, 3)) -> torch.Tensor:
    """Hidden states of a chain of `rows` behind each slot's context."""
    cache, draw = model.new_cache(len(lengths)), torch.Generator().manual_seed(1)

    def embeds(count: int) -> torch.Tensor:
        return model.embed(torch.randint(model.vocab_size, (count,), generator=draw))

    for slot, length in enumerate(lengths):
        model.forward_block(cache, Block.chain(slot, 0, length, model.device), embeds(length))
    visible = [torch.ones(count, count, dtype=torch.bool).tril() for count in rows]
    block = Block(0, lengths, [torch.arange(count) for count in rows], visible, model.device)
    return model.forward_block(cache, block, embeds(sum(rows)))


@needs_packing
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("fewest", [1, 6])
def test_straight_layers_give_what_the_modules_give(monkeypatch: pytest.MonkeyPatch, family: str, fewest: int) -> None:
    """Of slots at different lengths, past a window where there is one, with blocks of different widths and of one, and
    of fewer or more rows than have kernels of their own."""
    monkeypatch.setattr(packed, "_FEWEST_ROWS", fewest)
    model = random_model(family)
    blocks = [((3, 12, 30), (4, 1, 3)), ((9,), (5,)), ((8, 8), (1, 1)), ((3, 12), (40, 27))]
    before = [chains(model, *each) for each in blocks]
    assert ("straightened" in accelerate(model)) == (family in LLAMA_LIKE)
    for each, wanted in zip(blocks, before, strict=True):
        got = chains(model, *each)
        torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-4)


def test_kernels_are_made_for_few_numbers_of_rows() -> None:
    sizes = [packed.kernel_rows(rows) for rows in range(1, 2049)]
    fewest = sizes[0]
    assert sizes[:32] == [max(rows, fewest) for rows in range(1, 33)]
    assert all(rows <= size <= max(rows * 17 / 16, fewest) for rows, size in enumerate(sizes, start=1))
    assert len(set(sizes)) <= 32 + 16 * 6  # 16 an octave, of six


@needs_packing
@pytest.mark.parametrize("shape", [(5,), (1, 5), (2, 5), (2, 2, 5), (7, 5), (0, 5)])
def test_few_rows_are_filled_up_and_nothing_of_that_is_seen(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]
) -> None:
    monkeypatch.setattr(packed, "_FEWEST_ROWS", 6)
    linear, x = nn.Linear(5, 3), torch.randn(shape)
    given = packed.PackedLinear(linear)(x)
    assert given.shape == (*shape[:-1], 3)
    torch.testing.assert_close(given, linear(x))


@needs_packing
def test_layers_that_compute_something_else_stay() -> None:
    model = random_model("llama")
    mlp = model.module.base_model.layers[1].mlp
    forward = mlp.forward
    mlp.forward = lambda x: 1.01 * forward(x)
    before = chains(model)
    assert "straightened" not in accelerate(model)
    torch.testing.assert_close(chains(model), before, rtol=1e-3, atol=1e-4)


@needs_packing
def test_layers_that_give_no_numbers_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model("llama")
    monkeypatch.setattr(layers.StraightLayers, "__call__", lambda self, x, *given: torch.full_like(x, torch.nan))
    assert "straightened" not in accelerate(model)
    assert chains(model).isfinite().all()


@needs_packing
def test_a_model_that_goes_takes_its_packed_weights_along() -> None:
    model = random_model("llama")
    accelerate(model)
    weight = weakref.ref(model.module.base_model.layers[0].self_attn.q_proj.product)
    assert weight() is not None
    del model
    gc.collect()
    assert weight() is None


@needs_packing
def test_layers_with_more_parts_stay() -> None:
    model = random_model("llama")
    model.module.base_model.layers[2].mlp.extra = nn.Identity()
    packed.pack_linears(model.module)
    assert not layers.straighten(model)


@pytest.mark.parametrize(
    ("device", "dtype", "words"), [("cuda", torch.float32, "for CPUs"), ("cpu", torch.float64, "for float32")]
)
def test_elsewhere_the_stock_kernels_stay(device: str, dtype: torch.dtype, words: str) -> None:
    assert words in (packed.unavailable(torch.device(device), dtype) or "")


def test_float64_is_left_alone() -> None:
    model = CausalModel(AutoModelForCausalLM.from_config(tiny_config("llama")).double())
    assert accelerate(model).startswith("stock kernels (packing is for float32")
    assert [m for m in model.module.modules() if type(m) is nn.Linear]
