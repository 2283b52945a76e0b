"""The reading stage on a running Ray."""

from __future__ import annotations

import numpy as np
import ray
from helpers import Command, prompts, write_jsonl

from pipeline.census import Census
from pipeline.config import load_config
from pipeline.graph import BLOCK_BYTES, read
from pipeline.run import check_job
from pipeline.scan import Found


def test_a_reader_hands_on_small_blocks(command: Command) -> None:
    """Else the decoders wait for most of a long file, and the reader holds it."""
    rows = [{**row, "prompt": row["prompt"] + "ab" * 500} for row in prompts(3000)]
    write_jsonl(command.work / "in.jsonl", rows)
    command("--print-config")  # writes config.yaml
    job = check_job(load_config(command.work / "config.yaml", ["input.keep_columns=[prompt]"]))
    census = ray.remote(num_cpus=0)(Census).remote()
    blocks = read(job.scan, job.plan, ray.put(np.empty(0, np.uint64)), census).materialize().get_internal_block_refs()
    sizes = [block.nbytes for block in ray.get(blocks)]
    assert len(sizes) > 1
    assert max(sizes) < 2 * BLOCK_BYTES
    assert ray.get(census.total.remote()) == Found(asked=3000, owed=3000)
