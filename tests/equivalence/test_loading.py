"""A checkpoint that lacks weights is refused: random numbers in their place would differ from worker to worker."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from esp_worker.checkpoint import ModelError
from esp_worker.model import load_model


@pytest.mark.parametrize(("change", "error"), [("missing", ModelError), ("reshaped", RuntimeError)])
def test_incomplete_weights(tiny_checkpoint: Path, tmp_path: Path, change: str, error: type[Exception]) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_checkpoint, folder)
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    weight = weights.pop(name)
    if change == "reshaped":
        weights[name] = weight[:, :-1].contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(error) as raised:
        load_model(folder, dtype="float32", device="cpu")
    if change == "missing":
        assert str(raised.value).endswith(f"1 weights are missing or of another shape, such as {name}")


def test_whole_weights(tiny_checkpoint: Path) -> None:
    assert load_model(tiny_checkpoint, dtype="float32", device="cpu").num_parameters > 0
