"""How the stages lie on Ray Data."""

from __future__ import annotations

import pyarrow as pa
import pytest
import ray

from pipeline.graph import LIGHT_CPUS, _regrouped


@pytest.mark.parametrize("strict", [True, False])
def test_regrouping_is_one_light_stage_with_the_map_before_it(ray_session: None, strict: bool) -> None:
    """With strict, each call gets the rows of one shard, however the blocks are cut: here 34 of three rows."""

    def sizes(table: pa.Table) -> pa.Table:  # in here, so that it goes to Ray's processes by value
        return table.append_column("call_rows", pa.array([table.num_rows] * table.num_rows))

    rows = ray.data.range(100, override_num_blocks=34)
    mapped = rows.map_batches(sizes, batch_format="pyarrow", batch_size=7, num_cpus=LIGHT_CPUS)
    regrouped = _regrouped(mapped, 7, strict=strict).materialize()
    assert "MapBatches(sizes)->StreamingRepartition" in regrouped.stats()
    found = regrouped.take_all()
    assert sorted(row["id"] for row in found) == list(range(100))
    if strict:
        assert sorted(row["call_rows"] for row in found) == [2] * 2 + [7] * 98
