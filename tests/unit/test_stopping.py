"""Where a sequence ends: at an EOS, a stop condition or the limit, on any token of an accepted run."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from esp_worker.stopping import StopStrings, commit_until_end, token_limit
from esp_worker.types import FinishReason, Request, SamplingParams, StopCondition

STOP, EOS, FAR = 99, 2, 1000


class StopsAt:
    """Stop condition: the newest token is `token`."""

    def __init__(self, token: int) -> None:
        self.token = token

    def met(self, token_ids: Sequence[int]) -> bool:
        return token_ids[-1] == self.token


def request_of(
    *, eos: Sequence[int] = (EOS,), stop: StopCondition | None = None, max_new_tokens: int = FAR, prompt: int = 4
) -> Request:
    params = SamplingParams(max_new_tokens=max_new_tokens, eos_token_ids=frozenset(eos))
    return Request("r", tuple(range(prompt)), params, stop)


def commit(
    output: list[int], tokens: Sequence[int], request: Request, limit: int = FAR
) -> tuple[list[int], FinishReason | None]:
    reason = commit_until_end(output, tokens, request, limit)
    return output, reason


# ------------------------------------------------------------------------------------------------------------- runs


def test_a_run_without_an_end_is_committed_whole() -> None:
    assert commit([5], [10, 11, 12], request_of()) == ([5, 10, 11, 12], None)
    assert commit([5], [], request_of()) == ([5], None)
    assert commit([5], [EOS], request_of(eos=())) == ([5, EOS], None), "no EOS is wanted"


@pytest.mark.parametrize("at", range(4))
def test_eos_inside_a_run_cuts_after_it(at: int) -> None:
    run = [10, 11, 12, 13]
    run[at] = 3
    assert commit([5], run, request_of(eos=(EOS, 3))) == ([5, *run[: at + 1]], FinishReason.STOP)


@pytest.mark.parametrize("at", range(4))
def test_stop_inside_a_run_cuts_after_it(at: int) -> None:
    run = [10, 11, 12, 13]
    run[at] = STOP
    assert commit([5], run, request_of(stop=StopsAt(STOP))) == ([5, *run[: at + 1]], FinishReason.STOP)


def test_the_first_end_of_a_run_counts() -> None:
    request = request_of(stop=StopsAt(STOP))
    assert commit([], [10, STOP, EOS], request) == ([10, STOP], FinishReason.STOP)
    assert commit([], [10, EOS, STOP], request) == ([10, EOS], FinishReason.STOP)


@pytest.mark.parametrize(("limit", "kept"), [(2, 1), (3, 2), (5, 4)])
def test_the_limit_cuts_a_run(limit: int, kept: int) -> None:
    run = [10, 11, 12, 13]
    assert commit([5], run, request_of(), limit) == ([5, *run[:kept]], FinishReason.LENGTH)


def test_a_stop_before_the_limit_wins_in_the_same_run() -> None:
    request = request_of(stop=StopsAt(STOP))
    run = [10, 11, STOP, 20, 21, 22]
    assert commit([], run, request, limit=5) == ([10, 11, STOP], FinishReason.STOP)
    assert commit([], run, request, limit=3) == ([10, 11, STOP], FinishReason.STOP), "one token meets both"
    assert commit([], run, request, limit=2) == ([10, 11], FinishReason.LENGTH)
    assert commit([], [10, EOS], request, limit=2) == ([10, EOS], FinishReason.STOP)


def test_a_stop_may_span_runs() -> None:
    class Pair:
        def met(self, token_ids: Sequence[int]) -> bool:
            return list(token_ids[-2:]) == [7, 8]

    output: list[int] = []
    assert commit_until_end(output, [6, 7], request_of(stop=Pair()), FAR) is None
    assert commit_until_end(output, [8, 9], request_of(stop=Pair()), FAR) == FinishReason.STOP
    assert output == [6, 7, 8]


@given(
    tokens=st.lists(st.integers(0, 6), max_size=30),
    cuts=st.lists(st.integers(1, 5), min_size=30, max_size=30),
    limit=st.integers(1, 20),
)
def test_runs_end_where_single_tokens_would(tokens: list[int], cuts: list[int], limit: int) -> None:
    """However the tokens are cut into accepted runs, output and reason are those of one token a step."""
    request = request_of(eos=(0,), stop=StopsAt(1))

    def decode(sizes: list[int]) -> tuple[list[int], FinishReason | None]:
        output: list[int] = []
        left = list(tokens)
        for size in sizes:
            run, left = left[:size], left[size:]
            reason = commit_until_end(output, run, request, limit)
            if reason is not None:
                return output, reason
        return output, None

    assert decode(cuts) == decode([1] * len(tokens))


def test_token_limit() -> None:
    assert token_limit(request_of(max_new_tokens=10, prompt=4), max_length=100) == 10
    assert token_limit(request_of(max_new_tokens=10, prompt=4), max_length=14) == 10
    assert token_limit(request_of(max_new_tokens=10, prompt=4), max_length=9) == 5, "what the context leaves"
    assert token_limit(request_of(max_new_tokens=10, prompt=4), max_length=5) == 1


# ----------------------------------------------------------------------------------------------------- stop strings


class Vocabulary:
    """Tokens that are pieces of UTF-8; decodes as tokenizers do: a cut character shows as replacement characters."""

    def __init__(self, *pieces: str | bytes) -> None:
        self.pieces = [piece.encode() if isinstance(piece, str) else piece for piece in pieces]
        self.longest_decoded = 0

    def decode(self, token_ids: Sequence[int]) -> str:
        self.longest_decoded = max(self.longest_decoded, len(token_ids))
        return b"".join(self.pieces[token] for token in token_ids).decode(errors="replace")


def first_met(stop: StopStrings, token_ids: Sequence[int]) -> int | None:
    """Tokens up to the one that completes a stop, asked after each token as the engine does."""
    return next((n for n in range(1, len(token_ids) + 1) if stop.met(token_ids[:n])), None)


def test_stop_string_within_a_token() -> None:
    words = Vocabulary("Hello", " wor", "ld END of", " it")
    stop = StopStrings(["END"], words.decode)
    assert first_met(stop, [0, 1, 2, 3]) == 3
    assert first_met(stop, [0, 1, 3]) is None


def test_stop_string_split_over_tokens() -> None:
    words = Vocabulary("text", "\n", "E", "N", "D\n", "and")
    assert first_met(StopStrings(["\nEND"], words.decode), [0, 1, 2, 3, 4, 5]) == 5
    assert first_met(StopStrings(["\nEND"], words.decode), [0, 2, 3, 4, 5]) is None
    assert first_met(StopStrings(["\n\n"], words.decode), [0, 1, 0, 1, 1]) == 5
    assert first_met(StopStrings(["XX", "\nE", "nothing"], words.decode), [0, 1, 2, 3]) == 3


@pytest.mark.parametrize("empties", [1, 5, 50])
def test_tokens_that_print_nothing(empties: int) -> None:
    words = Vocabulary("long text before it ", "E", "N", "D", "")
    gap = [4] * empties
    stop = StopStrings(["END"], words.decode)
    assert first_met(stop, [0, 1, *gap, 2, *gap, 3]) == 4 + 2 * empties
    assert first_met(stop, gap) is None
    assert first_met(stop, [*gap, 1, 2, *gap]) is None


@pytest.mark.parametrize("empties", [1, 5, 50])
def test_nothing_printed_before_a_token_that_prints_much(empties: int) -> None:
    words = Vocabulary("E", "ND and a long rest", "")
    assert first_met(StopStrings(["END"], words.decode), [0, *[2] * empties, 1]) == 2 + empties


def test_characters_of_several_tokens() -> None:
    emoji = "\U0001f600".encode()
    words = Vocabulary("a", emoji[:1], emoji[1:2], emoji[2:3], emoji[3:], "ü", "Ende")
    stop = StopStrings(["\U0001f600"], words.decode)
    assert first_met(stop, [0, 1, 2, 3, 4, 0]) == 5
    assert first_met(stop, [0, 1, 2, 3, 0, 4]) is None, "not the character"
    assert first_met(StopStrings(["\U0001f600\U0001f600a"], words.decode), [0, *[1, 2, 3, 4] * 2, 0]) == 10
    assert first_met(StopStrings(["üEnde"], words.decode), [5, 0, 5, 6]) == 4


def test_long_outputs_are_not_decoded_again_and_again() -> None:
    words = Vocabulary("a", "b")
    stop = StopStrings(["ab"], words.decode)
    assert not stop.met([0] * 100_000)
    assert words.longest_decoded < 20
    assert stop.met([*[0] * 100_000, 1])


PIECES = ["a", "b", "ab", "ba a long rest", "", "ü".encode()[:1], "ü".encode()[1:], "\U0001f600"]


@given(
    token_ids=st.lists(st.integers(0, len(PIECES) - 1), max_size=60),
    strings=st.lists(st.sampled_from(["ab", "aab", "ü", "bab", "üb", "\U0001f600a", "aü\U0001f600"]), min_size=1),
)
@example(token_ids=[0, *[4] * 20, 3], strings=["ab"])
def test_stops_equal_a_search_in_the_whole_text(token_ids: list[int], strings: list[str]) -> None:
    words = Vocabulary(*PIECES)
    whole = next(
        (n for n in range(1, len(token_ids) + 1) if any(s in words.decode(token_ids[:n]) for s in strings)), None
    )
    assert first_met(StopStrings(strings, words.decode), token_ids) == whole


def test_trim_cuts_at_the_earliest_of_several() -> None:
    stop = StopStrings(["END", "\n\n", "ND o"], Vocabulary().decode)
    assert stop.trim("text END of\n\n") == "text "
    assert stop.trim("text\n\nEND") == "text"
    assert stop.trim("ENDEND") == ""
    assert stop.trim("nothing of it") == "nothing of it"
    assert stop.trim("") == ""
    assert StopStrings(["ab", "b"], Vocabulary().decode).trim("xabx") == "x"


def test_empty_stop_strings_are_our_own_mistake() -> None:
    for strings in ([], ["a", ""]):
        with pytest.raises(AssertionError):
            StopStrings(strings, Vocabulary().decode)
