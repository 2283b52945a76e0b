"""What operators see of a job: Prometheus metrics from the node's own endpoint, and one log line a failed row."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import ray
from helpers import prompts

from pipeline.actor import DecodeActor
from pipeline.board import Board, on_this_node
from pipeline.config import parse_config
from pipeline.errors import failure_line
from pipeline.nodes import cluster_nodes
from pipeline.parse import RowParser
from pipeline.plan import make_plan
from pipeline.prepare import Preparer, load_tokenizer, rows_from_mappings

PATIENCE_S = 120


@pytest.fixture
def actor_and_rows(ray_session: None, tiny_checkpoint: Path) -> Iterator[tuple[Any, pa.Table]]:
    """An engine actor of its own, and twelve good rows and two bad ones for it."""
    config = parse_config(
        {
            "input": {"path": "unused", "prompt_column": "prompt", "id_column": "id"},
            "output": {"path": "unused"},
            "model": {"path": str(tiny_checkpoint), "dtype": "float64", "device": "cpu"},
            "sampling": {"max_new_tokens": 16},
            "engine": {"slots": 4, "threads": 1},
            "compare": {"fraction": 0.0},
        }
    )
    plan = make_plan(config, cluster_nodes())
    bad = [{"id": "empty", "prompt": ""}, {"id": "long", "prompt": "secret " * 100}]
    table = pa.Table.from_pylist([*prompts(12), *bad])
    preparer = Preparer(load_tokenizer(tiny_checkpoint), config.input, config.sampling, plan.max_length - 1)
    prepared = preparer.prepare(rows_from_mappings(table, RowParser(config.input), 1))
    actor = ray.remote(num_cpus=1)(DecodeActor).options(name="metrics-test").remote(plan, on_this_node(Board))
    yield actor, prepared
    ray.kill(actor)


def exposed(actor: str) -> dict[str, float]:
    """The node's espstream metrics of one method's actors: name, with the error type where it has one -> sum."""
    node = ray.nodes()[0]
    address = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    text = urllib.request.urlopen(address, timeout=30).read().decode()
    found: dict[str, float] = {}
    for name, tags, value in re.findall(r"^ray_espstream_(\w+)\{(.*)\} (\S+)$", text, flags=re.MULTILINE):
        kind = re.search(r'error_type="(\w+)"', tags)
        if not name.endswith("_bucket") and f'WorkerId="{actor}"' in tags:
            found[f"{name}:{kind[1]}" if kind else name] = float(value)
    return found


def wait_for(holds: Callable[[], bool]) -> None:
    """Ray brings metrics to the endpoint every second here; what then is there, the caller looks at itself."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.5)


def worker_of(actor: Any) -> str:
    """The worker id that Ray tags the actor's metrics with."""
    return str(ray.get(actor.__ray_call__.remote(lambda _: ray.get_runtime_context().get_worker_id())))


def test_metrics_and_failures(actor_and_rows: tuple[Any, pa.Table]) -> None:
    actor, prepared = actor_and_rows
    out = ray.get(actor.__call__.remote(prepared))
    done = [row for row in out.to_pylist() if row["error_type"] is None]
    calls = sum(row["decode_calls"] for row in done)
    want = {
        "rows_total": 14.0,
        "failed_rows_total:empty_prompt": 1.0,
        "failed_rows_total:prompt_too_long": 1.0,
        "prompt_tokens_total": float(sum(row["prompt_tokens"] for row in done)),
        "output_tokens_total": float(sum(row["output_tokens"] for row in done)),
        "committed_tokens_total": float(sum(sum(row["accept_lengths"]) for row in done)),
        "decode_calls_total": float(calls),
        "rows_in_hand": 0.0,
        "step_seconds_count": 12.0,
    }
    assert len(done) == 12
    assert calls > 0
    worker = worker_of(actor)
    wait_for(lambda: want.items() <= exposed(worker).items())
    found = exposed(worker)
    assert {name: found.get(name) for name in want} == want
    assert found["step_seconds_sum"] > 0

    logs = Path("/tmp/ray", ray.get_runtime_context().get_session_name(), "logs")
    (log,) = logs.glob(f"worker-{worker}-*.err")
    lines = re.findall(r"^row_failed (.*)$", log.read_text(), flags=re.MULTILINE)
    failures = [json.loads(line) for line in lines]
    assert [(row["row_id"], row["error_type"]) for row in failures] == [
        ("empty", "empty_prompt"),
        ("long", "prompt_too_long"),
    ]
    assert all(set(row) == {"source_file", "row_id", "error_type", "message"} for row in failures)
    assert "secret" not in "".join(lines)


def test_a_failure_is_one_line_whatever_the_row_is_called() -> None:
    line = failure_line("a\n.jsonl", 'x"\n', "malformed", "line 1\nline 2")
    assert "\n" not in line
    assert json.loads(line.removeprefix("row_failed "))["row_id"] == 'x"\n'
