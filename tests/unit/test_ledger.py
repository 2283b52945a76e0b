"""Which row is blamed for the death of a process, and which is not."""

from __future__ import annotations

from pipeline.ledger import Claim, Ledger, Process, RowKey

A, B, C = (1, 0), (2, 0), (2, 1)


class Cluster:
    """A ledger, and Ray actors that start again and again."""

    def __init__(self) -> None:
        self.nodes = {"head", "second"}
        self.ledger = Ledger(lambda: self.nodes)
        self._starts = 0

    def start(self, actor: str = "one", node: str = "head") -> Process:
        self._starts += 1
        self.last = Process(actor, f"start-{self._starts}", node)
        self.deaths = self.ledger.started(self.last)
        return self.last

    def die_alone(self, row: RowKey) -> None:
        """A suspect is decoded alone, and its process dies and starts again."""
        process = self.last
        self.ledger.claim(process, [row])
        self.ledger.alone(process, row)
        self.start(process.actor, process.node)


def claim(suspects: set[RowKey] | None = None, condemned: set[RowKey] | None = None) -> Claim:
    return Claim(frozenset(suspects or ()), frozenset(condemned or ()))


def test_rows_in_hand_at_a_death_are_suspects_until_they_end() -> None:
    cluster = Cluster()
    process = cluster.start()
    assert cluster.ledger.claim(process, [A, B]) == claim()
    cluster.ledger.ended(process, A)
    process = cluster.start()
    assert cluster.ledger.claim(process, [A, B, C]) == claim(suspects={B})
    cluster.ledger.ended(process, B)
    assert cluster.ledger.claim(process, [B]) == claim()


def test_two_deaths_alone_condemn_and_blame_nobody_else() -> None:
    cluster = Cluster()
    cluster.ledger.claim(cluster.start(), [A, B])
    cluster.start()
    assert cluster.ledger.claim(cluster.last, [A, B, C]) == claim(suspects={A, B})
    cluster.die_alone(A)
    assert cluster.ledger.claim(cluster.last, [A, B, C]) == claim(suspects={A, B}), "C only waited for its turn"
    cluster.die_alone(A)
    for _ in range(2):  # Ray may bring it again, with its batch
        assert cluster.ledger.claim(cluster.last, [A, B]) == claim(suspects={B}, condemned={A})


def test_an_outside_kill_condemns_nobody() -> None:
    cluster = Cluster()
    cluster.ledger.claim(cluster.start(), [A])
    cluster.start()
    cluster.die_alone(A)
    cluster.ledger.claim(cluster.last, [A])
    cluster.ledger.alone(cluster.last, A)
    cluster.ledger.ended(cluster.last, A)
    cluster.start()
    assert cluster.ledger.claim(cluster.last, [A]) == claim()


def test_a_death_with_its_node_blames_nobody() -> None:
    cluster = Cluster()
    cluster.ledger.claim(cluster.start(node="second"), [A, B])
    cluster.nodes.remove("second")
    cluster.start()
    assert cluster.deaths == 0
    assert cluster.ledger.claim(cluster.last, [A, B]) == claim()


def test_actors_have_ledgers_of_their_own() -> None:
    cluster = Cluster()
    first, second = cluster.start("one"), cluster.start("two")
    cluster.ledger.claim(first, [A])
    cluster.ledger.claim(second, [B])
    cluster.start("one")
    assert cluster.ledger.claim(cluster.last, [A]) == claim(suspects={A})
    assert cluster.ledger.claim(second, [B]) == claim()


def test_a_late_word_of_a_dead_process_clears_its_row_and_takes_nothing_from_the_living() -> None:
    cluster = Cluster()
    dead = cluster.start()
    cluster.ledger.claim(dead, [A, B])
    process = cluster.start()
    cluster.ledger.ended(dead, A)
    assert cluster.ledger.claim(process, [A, B]) == claim(suspects={B})
    cluster.ledger.ended(dead, B)
    cluster.start()
    assert cluster.ledger.claim(cluster.last, [B]) == claim(suspects={B}), "the living process had it in hand"


def test_deaths_in_a_row_count_until_a_row_ends_or_is_condemned() -> None:
    cluster = Cluster()
    cluster.start()
    assert cluster.deaths == 0
    for expected in (1, 2, 3):
        cluster.start()
        assert cluster.deaths == expected
    cluster.ledger.claim(cluster.last, [A])
    cluster.ledger.ended(cluster.last, A)
    cluster.ledger.claim(cluster.last, [B])
    seen = []
    for kill in (cluster.start, lambda: cluster.die_alone(B), lambda: cluster.die_alone(B), cluster.start):
        kill()
        seen.append(cluster.deaths)
    assert seen == [1, 2, 0, 1]


def test_nothing_is_kept_of_rows_that_ended() -> None:
    cluster = Cluster()
    cluster.start()
    for row in range(1000):
        cluster.ledger.claim(cluster.last, [(row, 0)])
        if row % 10 == 0:
            cluster.start()
            cluster.ledger.claim(cluster.last, [(row, 0)])
        cluster.ledger.ended(cluster.last, (row, 0))
    assert not cluster.ledger._deaths
    assert not cluster.ledger._actors["one"].rows
