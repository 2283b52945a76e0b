"""Running the real command in this process, and reading what it wrote."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from esp_worker import reference
from esp_worker.model import CausalModel
from esp_worker.stopping import StopStrings
from esp_worker.types import Request, SamplingParams
from jobs.generate import main
from pipeline.decoder import Decoder, EngineDecoder
from pipeline.plan import Plan
from pipeline.prepare import load_tokenizer

NEW_TOKENS = 16


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any] | str]) -> Path:
    """Rows as JSON lines; a string is written as it stands (a bad line)."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def prompts(count: int, start: int = 0) -> list[dict[str, Any]]:
    return [{"id": f"row-{i}", "prompt": f"Prompt number {i}: " + "ab" * (i % 7)} for i in range(start, start + count)]


@dataclass
class Result:
    """An ended command: exit code, what it printed, and its output folder."""

    code: int
    out: str
    err: str
    folder: Path

    @property
    def table(self) -> pa.Table:
        return pq.read_table(self.folder / "data")

    @property
    def rows(self) -> list[dict[str, Any]]:
        rows = self.table.to_pylist()
        return sorted(rows, key=lambda row: (row["source_file"], row["row_index"], row["sample_index"]))

    def json(self, name: str) -> dict[str, Any]:
        return json.loads((self.folder / name).read_text(encoding="utf-8"))


class Command:
    """`python -m jobs.generate` on a tiny model, small and quick unless told otherwise."""

    def __init__(self, model: Path, work: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.work = work
        self._capsys = capsys
        self.config: dict[str, Any] = {
            "input": {"path": str(work / "in.jsonl"), "prompt_column": "prompt", "id_column": "id"},
            "output": {"path": str(work / "out"), "rows_per_file": 10},
            "model": {"path": str(model), "dtype": "float64", "device": "cpu"},
            "decoder": {"method": "esp", "block_complexity": 12},
            "sampling": {"max_new_tokens": NEW_TOKENS},
            "engine": {"slots": 4, "threads": 1},
            "compare": {"fraction": 0.0},
            "errors": {"max_fraction": 1.0},
        }

    def __call__(self, *arguments: str, decoder: Callable[[Plan], Decoder] = EngineDecoder, **settings: Any) -> Result:
        """settings: section__key=value."""
        config = {section: dict(keys) for section, keys in self.config.items()}
        for name, value in settings.items():
            section, _, key = name.partition("__")
            config.setdefault(section, {})[key] = value
        file = self.work / "config.yaml"
        file.write_text(yaml.safe_dump(config), encoding="utf-8")
        self._capsys.readouterr()
        code = main(["--config", str(file), *arguments], decoder=decoder)
        printed = self._capsys.readouterr()
        return Result(code, printed.out, printed.err, Path(config["output"]["path"]))


def expected_tokens(model: CausalModel, folder: Path, rows: Iterable[Mapping[str, Any]]) -> dict[str, tuple[int, ...]]:
    """What the reference gives for prompt rows under the chat template."""
    return {row["id"]: expected(model, folder, row["prompt"]).token_ids for row in rows}


def expected(
    model: CausalModel, folder: Path, prompt: str, stop: StopStrings | None = None, **sampling: Any
) -> reference.ReferenceCompletion:
    """What the reference gives for one prompt under the chat template."""
    tokenizer = load_tokenizer(folder)
    params = {"max_new_tokens": NEW_TOKENS, "eos_token_ids": frozenset([tokenizer.eos_token_id]), **sampling}
    chat = [{"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return reference.decode(model, Request(prompt, tuple(ids), SamplingParams(**params), stop))
