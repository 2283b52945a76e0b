"""What a folder of `jobs.bench specbench` holds: whose it is, and the units that are done.

A unit is one side on one shard of the questions, and one JSON file, whole or not there at all. specbench.json binds the
folder to a fingerprint of what changes tokens or makes times no longer comparable; methods and their settings are not
part of it, so that sides can be added.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import xxhash

from esp_worker.cost import CostTableError, StepCost
from jobs.sides import Side
from pipeline.errors import ConfigError
from pipeline.plan import difference
from pipeline.storage import open_place

FORMAT = 1
RUN_FILE, UNITS, STEPS_FILE = "specbench.json", "units", "step_cost.json"


def side_name(side: Side) -> str:
    """Unique among a run's sides, and fit for a file's name: esp-bc30-masks-2."""
    rows = [] if side.bc is None else [f"bc{side.bc}"]
    varied = [f"{key}-{text}" for key, text in side.varied.items()]
    return re.sub(r"[^\w.]+", "-", "-".join([side.config.method, *rows, *varied])).strip("-")


class Folder:
    def __init__(self, uri: str, fingerprint: Mapping[str, Any]) -> None:
        """Raises ConfigError where the folder holds something else, or a run of other settings."""
        self.place = open_place(uri)
        self._fingerprint = {"format": FORMAT, **fingerprint}
        self._digest = xxhash.xxh3_64_hexdigest(json.dumps(self._fingerprint, sort_keys=True).encode())
        run = self._read(RUN_FILE)
        if run is None and self.place.list_files(recursive=True):
            raise ConfigError(f"--out: {self.place.uri} holds files and no {RUN_FILE}; choose another folder")
        changed = [] if run is None else difference(run.get("fingerprint", {}), self._fingerprint)
        if changed:
            raise ConfigError(
                f"--out: {self.place.uri} holds a run of other settings; it differs in\n  "
                + "\n  ".join(changed)
                + "\nchoose another folder, or give those settings again"
            )
        self.about: dict[str, Any] | None = None if run is None else run["about"]

    def begin(self, about: Mapping[str, Any]) -> None:
        """Write whose folder this is. about: of the machine that decodes first."""
        self.about = dict(about)
        self._write(RUN_FILE, {"fingerprint": self._fingerprint, "about": self.about})

    def done(self) -> set[str]:
        """Names of the units that are there."""
        return {file.name.removesuffix(".json") for file in self.place.child(UNITS).list_files()}

    def write_unit(self, side: Side, shard: int, record: Mapping[str, Any]) -> None:
        unit = {"run": self._digest, "decoder": side.config.model_dump(mode="json"), **record}
        self._write(f"{UNITS}/{unit_name(side, shard)}.json", unit)

    def read_unit(self, side: Side, shard: int) -> dict[str, Any]:
        """Raises ConfigError for a unit of another run, or that was decoded with other settings of its method."""
        name = f"{UNITS}/{unit_name(side, shard)}.json"
        unit = self._read(name)
        assert unit is not None
        if unit.get("run") != self._digest:
            raise ConfigError(f"--out: {self.place.child(name).uri} is of another run; move it away")
        changed = difference(unit["decoder"], side.config.model_dump(mode="json"), "decoder.")
        if changed:
            raise ConfigError(
                f"--out: {self.place.child(name).uri} was decoded with another setting: {'; '.join(changed)}; choose "
                "another folder"
            )
        return unit

    def step_cost(self) -> StepCost | None:
        content = self._read(STEPS_FILE)
        try:
            return None if content is None else StepCost.from_content(content)
        except CostTableError as error:
            raise ConfigError(f"--out: {self.place.child(STEPS_FILE).uri}: {error}; move it away") from error

    def write_step_cost(self, cost: StepCost) -> None:
        self._write(STEPS_FILE, cost.content())

    def write(self, name: str, text: str) -> str:
        """A result's file, whole or not at all; where it is."""
        place = self.place.child(name)
        place.write_atomic(text.encode())
        return place.uri

    def _read(self, name: str) -> dict[str, Any] | None:
        place = self.place.child(name)
        if not place.exists():
            return None
        try:
            return dict(json.loads(place.read_bytes()))
        except (ValueError, TypeError) as error:
            raise ConfigError(f"--out: {place.uri} is no JSON object ({error}); move it away") from error

    def _write(self, name: str, content: Mapping[str, Any]) -> None:
        self.write(name, json.dumps(content))


def unit_name(side: Side, shard: int) -> str:
    return f"{side_name(side)}-{shard:04d}"
