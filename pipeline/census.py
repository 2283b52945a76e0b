"""What the readers of a run came upon, file by file: one small Ray actor that they tell and that the driver asks.

So the input is read once: what is already done is known when reading ends, without a second pass that counts it.
"""

from __future__ import annotations

from pipeline.scan import Found


class Census:
    """The Ray actor's class (0 CPUs). A file that is read again, by a task that Ray repeats, counts once."""

    def __init__(self) -> None:
        self._files: dict[str, Found] = {}

    def note(self, file: str, found: Found) -> None:
        self._files[file] = found

    def total(self) -> Found:
        files = self._files.values()
        return Found(sum(each.asked for each in files), sum(each.owed for each in files))
