"""The queue of one drafting method: which of its sequences gets the next free slot."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Iterator, Sequence

from esp_worker.drafters.base import Drafter
from esp_worker.sequence import ActiveSequence


class Lane:
    """Sequences that have lost their slots come first, in their own order. Then the new ones: the largest token limit
    first, equal ones as they came. A long one that is begun last runs on beside empty slots, and limits are all that is
    known of lengths.

    A short one may wait until no longer one does. That is not for ever: a job's rows come to an end, and only so many
    batches are in an actor at once, so that those with a row still waiting keep others from coming.
    """

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self._back: deque[ActiveSequence] = deque()
        self._new: list[tuple[int, int, ActiveSequence]] = []  # a heap of -limit, arrival (no two have the same)
        self._arrivals = itertools.count()

    def __len__(self) -> int:
        return len(self._back) + len(self._new)

    def __iter__(self) -> Iterator[ActiveSequence]:
        """All that wait, in no order."""
        yield from self._back
        yield from (sequence for _, _, sequence in self._new)

    def add(self, sequence: ActiveSequence) -> None:
        heapq.heappush(self._new, (-sequence.limit, next(self._arrivals), sequence))

    def put_back(self, sequences: Sequence[ActiveSequence]) -> None:
        """To the head, in order."""
        self._back.extendleft(reversed(sequences))

    @property
    def head(self) -> ActiveSequence:
        """The next one. Raises IndexError where none waits."""
        return self._back[0] if self._back else self._new[0][-1]

    def pop(self) -> ActiveSequence:
        """Take the head out."""
        return self._back.popleft() if self._back else heapq.heappop(self._new)[-1]
