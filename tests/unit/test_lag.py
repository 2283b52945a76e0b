"""Decoders wait for writers, and nobody waits for ever."""

from __future__ import annotations

from pipeline.lag import PATIENCE_S, Lag


def rows(*numbers: int) -> list[tuple[int, int]]:
    return [(number, 0) for number in numbers]


def test_decoders_wait_while_too_much_is_unwritten() -> None:
    lag = Lag(3)
    assert lag.take(rows(1, 2))
    assert lag.take(rows(3, 4)), "a batch is taken whole"
    assert not lag.take(rows(5))
    lag.written(rows(1))
    assert not lag.take(rows(5))
    lag.written(rows(2, 3))
    assert lag.take(rows(5))


def test_rows_that_come_again_are_not_counted_twice_and_never_wait() -> None:
    lag = Lag(2)
    assert lag.take(rows(1, 2))
    for _ in range(3):  # their process died
        assert lag.take(rows(1, 2))
    assert not lag.take(rows(2, 3))
    lag.written(rows(1, 2))
    lag.written(rows(1, 2))  # a writer's task that ran again
    assert lag.take(rows(3))


def test_rows_that_come_again_after_they_were_written_take_no_room() -> None:
    """A node went, and with it blocks whose rows are in a shard already."""
    lag = Lag(2)
    assert lag.take(rows(1, 2))
    lag.written(rows(1, 2))
    assert lag.take(rows(1, 2))
    assert lag.take(rows(3, 4))
    assert not lag.take(rows(2, 5)), "one of them is new"
    for number in range(10, 30):
        lag.written(rows(number))
    lag.written(rows(3, 4))
    assert lag.take(rows(1, 2))
    assert not lag.take(rows(5)), "what was written long ago is not remembered: 1 and 2 count"


def test_where_nobody_writes_nobody_waits() -> None:
    lag = Lag(None)
    assert all(lag.take(rows(number)) for number in range(100))


def test_nobody_waits_for_ever_for_a_shard_that_does_not_come() -> None:
    now = [0.0]
    lag = Lag(1, lambda: now[0])
    assert lag.take(rows(1))
    assert not lag.take(rows(2))
    now[0] = PATIENCE_S + 1
    assert lag.take(rows(2))
    assert lag.take(rows(3))
    lag.written(rows(9))
    assert not lag.take(rows(4)), "shards come again"
