"""Fixtures of the tests that run the whole job."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers import Command

from esp_worker.model import CausalModel, load_model


@pytest.fixture
def command(ray_session: None, tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(tiny_checkpoint, tmp_path, capsys)


@pytest.fixture(scope="session")
def tiny_fp64(tiny_checkpoint: Path) -> CausalModel:
    return load_model(tiny_checkpoint, dtype="float64", device="cpu")
