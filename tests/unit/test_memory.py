"""What the KV cache may take."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from esp_worker import memory

CPU = torch.device("cpu")


def test_free_memory_is_what_the_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_CGROUPS", ())
    lines = dict(line.split()[:2] for line in Path("/proc/meminfo").read_text().splitlines())
    total = int(lines["MemTotal:"]) << 10
    assert 0 < memory.free_memory(CPU) < total


@pytest.mark.parametrize(
    ("limit", "used", "room"), [("3000", "1000", 2000), ("3000", "4000", 0), ("max", "1000", None)]
)
def test_a_containers_limit_counts(
    limit: str, used: str, room: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "max").write_text(limit)
    (tmp_path / "current").write_text(used)
    monkeypatch.setattr(memory, "_CGROUPS", ((tmp_path / "max", tmp_path / "current"),))
    monkeypatch.setattr(memory, "_available", lambda: 5000)
    assert memory.free_memory(CPU) == (5000 if room is None else room)


def test_engines_on_one_device_share_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda device: 8000)
    assert memory.cache_budget(CPU) == 3200
    assert memory.cache_budget(CPU, engines=4) == 800
