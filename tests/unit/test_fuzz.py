"""Damaged files to the readers: no crash, no hang, and every row is done or an error row.

`make test` reads a few hundred; `make fuzz` as many as ESPSTREAM_FUZZ_FILES says (5,000 unless set).
"""

import os

import fuzz_readers
import pytest

SHORT = 300


def test_damaged_files() -> None:
    assert fuzz_readers.run(0, SHORT) == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_damaged_files() -> None:
    assert fuzz_readers.run(SHORT, int(os.environ.get("ESPSTREAM_FUZZ_FILES", "5000")) - SHORT) == []
