"""Odds that are learned: sources that agree add up, probabilities follow what happens, siblings share one certainty."""

from __future__ import annotations

import random

import pytest

from esp_worker.odds import Odds

NOTHING = [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]  # two sources of three codes each, all alike


def test_candidates_come_best_first_and_share_one_certainty() -> None:
    odds = Odds([[-3.0, 0.0, 3.0], [-3.0, 0.0, 3.0]], bias=1.0)
    found = odds.candidates({5: [0, 1], 6: [2, 2], 7: [1, 2], 8: [2, 2]})
    assert [each.token for each in found] == [6, 8, 7, 5]
    assert sum(each.prob for each in found) == pytest.approx(1.0)
    (alone,) = odds.candidates({5: [1, 1]})
    assert alone.prob == pytest.approx(1 / (1 + 2.718281828**-1))


def test_probabilities_come_to_what_happens() -> None:
    """Independent codes with known chances: after some thousand lessons each code's candidates have theirs."""
    draw = random.Random(4)
    odds = Odds(NOTHING, bias=0.0)
    chance = {0: 0.1, 1: 0.3, 2: 0.9}
    for _ in range(6000):
        code = draw.randrange(3)
        right = draw.random() < chance[code]
        odds.learn(odds.candidates({1: [code, draw.randrange(3)]}), 1 if right else 0)
    for code, want in chance.items():
        probs = [odds.candidates({1: [code, other]})[0].prob for other in range(3)]
        assert sum(probs) / 3 == pytest.approx(want, abs=0.08)


def test_sources_that_agree_add_up() -> None:
    draw = random.Random(5)
    odds = Odds(NOTHING, bias=0.0)
    for _ in range(3000):
        truth = draw.randrange(4)
        first, second = (truth if draw.random() < 0.6 else draw.randrange(4) for _ in range(2))
        opinions = {token: [1 + (token == first), 1 + (token == second)] for token in {first, second}}
        odds.learn(odds.candidates(opinions), truth)
    by = {tuple(codes): odds.candidates({1: list(codes)})[0].prob for codes in ((2, 2), (2, 1), (1, 2))}
    assert by[2, 2] > by[2, 1] + 0.2
    assert by[2, 2] > by[1, 2] + 0.2
