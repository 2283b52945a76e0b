"""Whose output a folder holds, and what of it is already done.

run.json binds a folder to a fingerprint of everything that changes its rows. The same fingerprint continues: rows whose
keys are in the shards are not decoded again. Another one is refused, with the difference shown.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.config import OutputConfig
from pipeline.errors import ConfigError
from pipeline.plan import difference
from pipeline.sink import DATA_FOLDER, RUN_FILE, shards
from pipeline.storage import Place, open_place

REPORT_FILES = ("report.json", "report.html")


class RunFolder:
    """OUT: its run.json, its shards, and the rules for using it again."""

    def __init__(self, uri: str) -> None:
        self.place = open_place(uri)
        self.data = self.place.child(DATA_FOLDER)

    def read_run(self) -> dict[str, Any] | None:
        """run.json, None where there is none. Raises ConfigError when it is no JSON object with a fingerprint."""
        file = self.place.child(RUN_FILE)
        if not file.exists():
            return None
        try:
            run = json.loads(file.read_bytes())
        except ValueError as error:
            raise ConfigError(f"output.path: {file.uri} is not valid JSON ({error}); move it away") from error
        if not isinstance(run, dict) or not isinstance(run.get("fingerprint"), dict):
            raise ConfigError(f"output.path: {file.uri} is not a run's record (it has no fingerprint); move it away")
        return run

    def write_run(self, run: Mapping[str, Any]) -> None:
        self.place.child(RUN_FILE).write_atomic(json.dumps(run, indent=2, ensure_ascii=False).encode())

    def write_report(self, report_json: bytes, report_html: bytes) -> None:
        for name, content in zip(REPORT_FILES, (report_json, report_html), strict=True):
            self.place.child(name).write_atomic(content)

    def check(self, output: OutputConfig, fingerprint: Mapping[str, Any]) -> None:
        """Raise ConfigError unless this folder may be written to under `fingerprint`."""
        check_writable(self.place)
        run, written = self.read_run(), bool(shards(self.data))
        if run is None:
            foreign = [name for name in REPORT_FILES if self.place.child(name).exists()]
            if foreign:
                raise ConfigError(
                    f"output.path: {self.place.uri} holds {foreign[0]} and no {RUN_FILE}: it is not this project's and "
                    "would be replaced; choose another folder"
                )
        if output.overwrite:
            return
        if run is None:
            if written:
                raise ConfigError(
                    f"output.path: {self.data.uri} holds shards but there is no {RUN_FILE} to say whose; "
                    "choose another folder or set output.overwrite: true"
                )
            return
        changed = difference(run["fingerprint"], fingerprint)
        if changed:
            raise ConfigError(
                f"output.path: {self.place.uri} holds another run's data; it differs in\n  "
                + "\n  ".join(changed)
                + "\nchoose another folder or set output.overwrite: true"
            )
        if written and not output.resume:
            raise ConfigError(
                f"output.path: {self.place.uri} holds this run's data already; set output.resume: true to continue it "
                "or output.overwrite: true to start over"
            )

    def claim(self, run: Mapping[str, Any]) -> dict[str, Any]:
        """Write `run` as run.json with a new attempt, which ends the writing of every earlier start; returns it."""
        claimed = {**run, "attempt": uuid.uuid4().hex}
        self.write_run(claimed)
        return claimed

    def clear(self) -> None:
        """Delete the shards and reports, after a claim (an earlier start's writers are locked out by then)."""
        for file in [*shards(self.data), *map(self.place.child, REPORT_FILES)]:
            if file.exists():
                file.delete()

    def finished_keys(self) -> np.ndarray:
        """Sorted row keys (uint64) of all rows in the shards; reads that column only."""
        columns = []
        for shard in shards(self.data):
            with shard.open_input() as stream:
                columns.append(pq.read_table(stream, columns=["row_key"])["row_key"].to_numpy())
        return np.unique(np.concatenate(columns)) if columns else np.empty(0, np.uint64)


def check_writable(place: Place) -> None:
    """Raise ConfigError when a folder cannot be made or written at `place`; creates nothing."""
    try:
        place.list_files()
    except (OSError, pa.ArrowException) as error:
        raise ConfigError(f"output.path: {place.uri} cannot be used as a folder: {error}") from error
    if not place.is_local:
        return
    folder = Path(place.path)
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"output.path: {place.uri}: {folder} is not a folder that can be written to")
    data = Path(place.path, DATA_FOLDER)
    if data.exists() and not data.is_dir():
        raise ConfigError(f"output.path: {data} is in the way: a folder of that name is needed")
