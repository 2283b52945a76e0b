"""What readers tell of each file, added up."""

from __future__ import annotations

from pipeline.census import Census
from pipeline.scan import Found


def test_a_file_that_is_read_again_counts_once() -> None:
    census = Census()
    assert census.total() == Found()
    census.note("a", Found(asked=10, owed=4))
    census.note("b", Found(asked=5, owed=5))
    census.note("a", Found(asked=10, owed=3))
    assert census.total() == Found(asked=15, owed=8)
