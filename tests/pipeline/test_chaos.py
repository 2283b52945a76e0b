"""The short form of `make chaos`: one round in a process of its own, with a cluster of two nodes."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from common import ROOT


@pytest.mark.timeout(1300)
def test_a_driver_an_actor_and_a_node_are_killed() -> None:
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | {"PYTHONPATH": paths}
    command = [sys.executable, str(ROOT / "tests" / "chaos.py"), "--rounds", "1", "--rows", "120", "--head-cpus", "2"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    told = json.loads(ended.stdout.strip().splitlines()[-1])
    assert told["whole"] == told["rounds"] == 1
    assert told["kills"] == {"driver": 1, "actor": 1, "raylet": 1}
