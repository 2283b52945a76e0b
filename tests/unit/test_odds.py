"""Odds that are learned: sources that agree add up, probabilities follow what happens, siblings share one certainty."""

from __future__ import annotations

import random

import numpy as np
import pytest

from esp_worker.odds import BINS, NAMED, SILENT, Odds, Opinion, named_codes

ALIKE = [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]  # two sources of three codes each


def prob(odds: Odds, *codes: int) -> float:
    """Of one candidate, by its code of each source."""
    ((_, found),) = odds.place([Opinion(0, {1: code}) for code in codes]).candidates
    return found


def test_codes_are_halvings() -> None:
    probs = np.array([[1.0, 0.9, 0.5, 0.49, 0.25], [0.2, 0.1, 0.02, 1e-6, 0.0]])
    last = BINS - 1
    assert (named_codes(probs) - NAMED).tolist() == [[0, 1, 1, 2, 2], [3, 4, last, last, last]]


def test_candidates_come_best_first_and_share_one_certainty() -> None:
    odds = Odds([[-3.0, 0.0, 3.0], [-3.0, 0.0, 3.0]], bias=1.0)
    named = [Opinion(0, {6: 2, 7: 1, 8: 2}), Opinion(1, {5: 1, 6: 2, 7: 2, 8: 2})]
    found = odds.place(named).candidates
    assert [token for token, _ in found] == [6, 8, 7, 5]
    assert sum(each for _, each in found) == pytest.approx(1.0)
    assert prob(odds, 1, 1) == pytest.approx(1 / (1 + 2.718281828**-1))


def test_a_source_that_does_not_name_a_token_speaks_too() -> None:
    odds = Odds([[-3.0, -1.0, 2.0], [0.5, -2.0, 1.0]], bias=0.0)
    by_first = dict(odds.place([Opinion(1, {4: 2}), Opinion(1, {})]).candidates)
    assert by_first[4] == pytest.approx(1 / (1 + np.exp(0.0)))
    ((_, silent),) = odds.place([Opinion(1, {4: 2}), SILENT]).candidates
    assert silent == pytest.approx(1 / (1 + np.exp(-2.5)))


def test_probabilities_come_to_what_happens() -> None:
    """Independent codes with known chances: after some thousand lessons each code's candidates have theirs."""
    draw = random.Random(4)
    odds = Odds(ALIKE, bias=0.0)
    chance = {0: 0.1, 1: 0.3, 2: 0.9}
    for _ in range(6000):
        code = draw.randrange(3)
        right = draw.random() < chance[code]
        odds.learn([(odds.place([Opinion(0, {1: code}), Opinion(0, {1: draw.randrange(3)})]), 1 if right else 0)])
    for code, want in chance.items():
        probs = [prob(odds, code, other) for other in range(3)]
        assert sum(probs) / 3 == pytest.approx(want, abs=0.08)


def test_sources_that_agree_add_up() -> None:
    draw = random.Random(5)
    odds = Odds(ALIKE, bias=0.0)
    for _ in range(3000):
        truth = draw.randrange(4)
        first, second = (truth if draw.random() < 0.6 else draw.randrange(4) for _ in range(2))
        odds.learn([(odds.place([Opinion(1, {first: 2}), Opinion(1, {second: 2})]), truth)])
    by = {codes: prob(odds, *codes) for codes in ((2, 2), (2, 1), (1, 2))}
    assert by[2, 2] > by[2, 1] + 0.2
    assert by[2, 2] > by[1, 2] + 0.2
