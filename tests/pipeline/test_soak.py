"""The short form of `make soak`: the same run, of few rows, read back by all readers."""

from __future__ import annotations

from pathlib import Path

from soak import soak_job

ROWS = 2000


def test_a_short_soak_counts_every_row_and_every_kind_of_process(tmp_path: Path) -> None:
    result = soak_job(ROWS, tmp_path)  # raises where a reader does not find all rows
    peaks = result["peak_mib"]
    assert {"driver", "ray::MapWorker", "gcs_server"} <= peaks.keys()
    assert peaks["driver"]["private"] > 100
    assert len(list((tmp_path / "out" / "data").iterdir())) == -(-ROWS // 512)
