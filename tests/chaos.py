"""SIGKILL at random moments to the driver, to actors and to the raylet of a second node; what is left must be whole.

    python tests/chaos.py --rounds 20 --rows 500         with the fake decoder
    python tests/chaos.py --rounds 3 --rows 48 --real    with SmolLM2

A round decodes all rows from an empty folder, is killed in three ways at moments that its seed draws (so many rows
begun), and runs again until it ends by itself. Then each row stands there once, with the tokens of an undisturbed run.
Prints a line a round and, as its last line, one JSON document. Exits 1 where a round is not whole, or decoded more rows
twice than kills x (rows of a shard + rows in flight).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["RAY_AUTH_MODE"] = "disabled"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import pyarrow.parquet as pq
import yaml
from common import SMOLLM2
from fake_decoder import events
from processes import FakeJob
from ray.cluster_utils import Cluster
from tiny_checkpoint import save_tiny_checkpoint

ACTORS, SLOTS, SHARD_ROWS = 2, 4, 20
BATCHES_PER_ACTOR = 8  # Ray batches that an actor has in hand or in its queue, each of half the slots
IN_FLIGHT = ACTORS * BATCHES_PER_ACTOR * SLOTS // 2
KINDS = ("driver", "actor", "raylet")
ROUND_LIMIT_S = 600


@dataclass(frozen=True)
class Outcome:
    """What a round came to. twice: decodings that were begun beyond one a row."""

    seed: int
    kills: list[str]
    rows: int
    doubled: int
    changed: int
    twice: int
    seconds: float

    @property
    def bound(self) -> int:
        return len(self.kills) * (SHARD_ROWS + IN_FLIGHT)

    def is_whole(self, rows: int) -> bool:
        return (self.rows, self.doubled, self.changed) == (rows, 0, 0) and self.twice <= self.bound


class Nodes:
    """A head and a second node, on this machine."""

    def __init__(self, head_cpus: int) -> None:
        # A folder of its own (short: Ray puts sockets there), or every ray.init on this machine would join these nodes.
        self._folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
        head = {"num_cpus": head_cpus, "include_dashboard": False, "temp_dir": self._folder}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self.address = self._cluster.address
        self._second: Any = None
        self.mend()

    def mend(self) -> None:
        """Start the second node where there is none."""
        if self._second is None:
            self._second = self._cluster.add_node(num_cpus=2)

    def kill_second(self) -> None:
        if self._second is not None:
            os.kill(self._second.all_processes["raylet"][0].process.pid, signal.SIGKILL)
            self._cluster.remove_node(self._second, allow_graceful=False)
            self._second = None

    def stop(self) -> None:
        self._cluster.shutdown()
        shutil.rmtree(self._folder, ignore_errors=True)


class Chaos:
    """One workplace: input, configuration, nodes, and the tokens of an undisturbed run."""

    def __init__(self, work: Path, nodes: Nodes, rows: int, seconds: float, real: bool) -> None:
        self._work, self._nodes, self._rows = work, nodes, rows
        self._takes: float | str = "real" if real else seconds
        lines = [json.dumps({"id": f"row-{i}", "prompt": f"Tell me about the number {i}."}) for i in range(rows)]
        (work / "in.jsonl").write_text("\n".join(lines) + "\n")
        self._config = {
            "input": {"path": str(work / "in.jsonl"), "id_column": "id"},
            "model": {"path": SMOLLM2 if real else str(save_tiny_checkpoint(work / "model"))},
            "sampling": {"max_new_tokens": 16, "temperature": 0.8},
            "engine": {"slots": SLOTS, "threads": 1},
            "cluster": {"actors": ACTORS, "num_cpus": 1},
            "compare": {"fraction": 0.0},
        }
        self._wanted = self._tokens(self._undisturbed())

    def _undisturbed(self) -> Path:
        folder = self._folder("whole")
        code = self._job(folder).wait(ROUND_LIMIT_S)
        assert code == 0, (folder / "printed").read_text()
        return folder

    def round(self, seed: int) -> Outcome:
        dice = random.Random(seed)
        moments = sorted(dice.sample(range(1, self._rows), len(KINDS)))
        kills = dice.sample(KINDS, len(KINDS))
        folder, began, done = self._folder(f"round-{seed}"), time.monotonic(), []
        job = self._job(folder)
        for kind, moment in zip(kills, moments, strict=True):
            ended = _until(lambda moment=moment: self._begun(folder) >= moment, job, began)
            if ended:
                break
            job = self._kill(kind, job, folder, dice)
            done.append(kind)
        while (code := job.wait(ROUND_LIMIT_S)) == 1:
            job = self._job(folder)
        self._nodes.mend()
        assert code == 0, (folder / "printed").read_text()
        return self._outcome(seed, done, folder, time.monotonic() - began)

    def _kill(self, kind: str, job: FakeJob, folder: Path, dice: random.Random) -> FakeJob:
        """Kill, and start again what a user would."""
        if kind == "driver":
            job.signal(signal.SIGKILL)
            job.wait(30)
            return self._job(folder)
        if kind == "raylet":
            self._nodes.kill_second()
            return job
        pids = [int(file.name.rpartition("-")[2]) for file in (folder / "log").iterdir()]
        alive = [pid for pid in pids if Path(f"/proc/{pid}").exists()]
        if alive:
            os.kill(dice.choice(alive), signal.SIGKILL)
        return job

    def _outcome(self, seed: int, kills: list[str], folder: Path, seconds: float) -> Outcome:
        got = self._tokens(folder)
        count = pq.read_table(folder / "out" / "data", columns=["row_id"]).num_rows
        begun = Counter(event.row for event in events(folder / "log") if event.kind == "began")
        changed = sum(self._wanted[row] != tokens for row, tokens in got.items())
        twice = sum(begun.values()) - len(begun)
        return Outcome(seed, kills, len(got), count - len(got), changed, twice, round(seconds, 1))

    def _folder(self, name: str) -> Path:
        folder = self._work / name
        (folder / "log").mkdir(parents=True)
        output = {"path": str(folder / "out"), "rows_per_file": SHARD_ROWS}
        (folder / "config.yaml").write_text(yaml.safe_dump(self._config | {"output": output}))
        return folder

    def _job(self, folder: Path) -> FakeJob:
        self._nodes.mend()
        environment = {"RAY_ADDRESS": self._nodes.address}
        return FakeJob(folder / "config.yaml", folder / "log", folder / "printed", self._takes, environment)

    def _begun(self, folder: Path) -> int:
        return len({event.row for event in events(folder / "log")})

    def _tokens(self, folder: Path) -> dict[str, list[int]]:
        rows = pq.read_table(folder / "out" / "data", columns=["row_id", "token_ids"]).to_pylist()
        return {row["row_id"]: row["token_ids"] for row in rows}


def _until(reached: Callable[[], bool], job: FakeJob, began: float) -> bool:
    """Wait for a moment; whether the job ended before it."""
    while not reached():
        if job.process.poll() is not None:
            return True
        assert time.monotonic() - began < ROUND_LIMIT_S, "the round hangs"
        time.sleep(0.02)
    return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--rows", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0, help="of the first round")
    parser.add_argument("--seconds", type=float, default=0.1, help="what a row takes with the fake decoder")
    parser.add_argument("--head-cpus", type=int, default=3, help="2: the head alone cannot hold both actors")
    parser.add_argument("--real", action="store_true", help="decode with SmolLM2")
    options = parser.parse_args()
    work, nodes = Path(tempfile.mkdtemp(prefix="chaos-")), Nodes(options.head_cpus)
    outcomes = []
    try:
        chaos = Chaos(work, nodes, options.rows, options.seconds, options.real)
        for seed in range(options.seed, options.seed + options.rounds):
            outcome = chaos.round(seed)
            outcomes.append(outcome)
            print(
                f"seed {seed}: killed {', '.join(outcome.kills) or 'nothing'}; {outcome.rows} of {options.rows} rows, "
                f"{outcome.doubled} doubled, {outcome.changed} changed; {outcome.twice} decoded twice (at most "
                f"{outcome.bound}); {outcome.seconds} s",
                flush=True,
            )
    finally:
        nodes.stop()
    whole = sum(outcome.is_whole(options.rows) for outcome in outcomes)
    print(
        json.dumps(
            {
                "rounds": len(outcomes),
                "whole": whole,
                "rows": options.rows,
                "decoder": "SmolLM2" if options.real else "fake",
                "kills": dict(Counter(kind for outcome in outcomes for kind in outcome.kills)),
                "twice": [outcome.twice for outcome in outcomes],
                "twice_bound": [outcome.bound for outcome in outcomes],
                "seconds": [outcome.seconds for outcome in outcomes],
            }
        )
    )
    shutil.rmtree(work, ignore_errors=True)
    return 0 if whole == options.rounds else 1


if __name__ == "__main__":
    sys.exit(main())
