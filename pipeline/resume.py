"""Whose output a folder holds, and what of it is already done.

run.json binds a folder to a fingerprint of everything that changes its rows. The same fingerprint continues: rows whose
keys are in the shards are not decoded again. Another one is refused, with the difference shown.

A key is 64 bits and stands for its row, so two rows that shared one would be taken for one, and the second never be
decoded. For n rows the odds that any two do are n^2 / 2^65: 1.1e-5 at 20 million, 2.7 % at a billion.
"""

from __future__ import annotations

import json
import logging
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.config import OutputConfig
from pipeline.errors import ConfigError
from pipeline.plan import difference
from pipeline.sink import DATA_FOLDER, RETRIED_FOLDER, RUN_FILE, Keys, doubled, is_shard, put_in, read_shards, shards
from pipeline.storage import Place, open_place

logger = logging.getLogger(__name__)

REPORT_FILES = ("report.json", "report.html")


class RunFolder:
    """OUT: its run.json, its shards, and the rules for using it again."""

    def __init__(self, uri: str) -> None:
        self.place = open_place(uri)
        self.data = self.place.child(DATA_FOLDER)
        self.retried = self.place.child(RETRIED_FOLDER)

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
        reports = [file for file in map(self.place.child, REPORT_FILES) if file.exists()]
        for file in [*shards(self.data), *shards(self.retried), *reports]:
            file.delete()

    def tidy(self) -> None:
        """Finish what a killed start left half done, after a claim: its unfinished files go, and rows that it had
        decoded again take the places of their error rows."""
        left = sum(folder.sweep(_is_ours) for folder in (self.place, self.data, self.retried))
        if left:
            logger.info("%d unfinished files of an earlier, killed start deleted", left)
        self.put_in_retried()

    def put_in_retried(self) -> None:
        exchanged = put_in(self.place)
        if exchanged:
            logger.info("%d error rows exchanged for the rows that were decoded again", exchanged)

    def finished_keys(self) -> np.ndarray:
        """Sorted row keys (uint64), each once, of all rows in the shards; reads that column only.

        Memory: 8 bytes a row, and one more for a moment.
        """
        keys = Keys()
        for _, table in read_shards(self.data, ["row_key"]):
            keys.add(table["row_key"])
        found = keys.sorted()
        return np.unique(found) if len(doubled(found)) else found

    def failed_keys(self) -> np.ndarray:
        """Those of the error rows alone."""
        keys = Keys()
        for _, table in read_shards(self.data, ["row_key", "error_type"]):
            keys.add(table.filter(table["error_type"].is_valid())["row_key"])
        return np.unique(keys.sorted())


def _is_ours(name: str) -> bool:
    return is_shard(name) or name in (RUN_FILE, *REPORT_FILES)


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
