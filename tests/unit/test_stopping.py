"""Where a sequence ends: at an EOS, a stop condition or the limit, on any token of an accepted run."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from esp_worker.stopping import REPLACEMENT, Ending, StopStrings, commit_until_end, token_limit
from esp_worker.types import FinishReason, Request, SamplingParams, StopCondition, StopMatch

STOP, EOS, FAR = 99, 2, 1000


def cut(token_ids: Sequence[int], keep: int | None = None) -> StopMatch:
    """A match that keeps all tokens, or `keep` of them."""
    return StopMatch(len(token_ids) if keep is None else keep, "text", "reason")


class StopsAt:
    """Stop condition: the newest token is `token`."""

    def __init__(self, token: int) -> None:
        self.token = token

    def match(self, token_ids: Sequence[int], after: int = 0) -> StopMatch | None:
        return cut(token_ids) if token_ids[-1] == self.token else None


class Pair:
    """Stop condition: the newest two tokens are 7, 8."""

    def __init__(self, keep: int | None = None) -> None:
        self.keep = keep

    def match(self, token_ids: Sequence[int], after: int = 0) -> StopMatch | None:
        return cut(token_ids, self.keep) if list(token_ids[-2:]) == [7, 8] else None


def request_of(
    *,
    eos: Sequence[int] = (EOS,),
    stop: StopCondition | None = None,
    max_new_tokens: int = FAR,
    min_new_tokens: int = 0,
    prompt: int = 4,
) -> Request:
    params = SamplingParams(max_new_tokens=max_new_tokens, min_new_tokens=min_new_tokens, eos_token_ids=frozenset(eos))
    return Request("r", tuple(range(prompt)), params, stop)


def commit(
    output: list[int], tokens: Sequence[int], request: Request, limit: int = FAR
) -> tuple[list[int], FinishReason | None]:
    ending = commit_until_end(output, tokens, request, limit)
    return output, ending and ending.reason


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
    output: list[int] = []
    assert commit_until_end(output, [6, 7], request_of(stop=Pair()), FAR) is None
    assert commit_until_end(output, [8, 9], request_of(stop=Pair()), FAR) == Ending(FinishReason.STOP, cut([6, 7, 8]))
    assert output == [6, 7, 8]


@pytest.mark.parametrize("keep", range(4))
def test_a_stop_condition_cuts_the_output_also_before_this_run(keep: int) -> None:
    output = [6, 7]
    ending = commit_until_end(output, [8, 9], request_of(stop=Pair(keep)), FAR)
    assert ending == Ending(FinishReason.STOP, cut([], keep))
    assert output == [6, 7, 8][:keep]


def test_a_stop_condition_is_not_asked_within_min_new_tokens() -> None:
    request = request_of(stop=StopsAt(STOP), min_new_tokens=2)
    assert commit([], [STOP, STOP, 5, STOP], request) == ([STOP, STOP, 5, STOP], FinishReason.STOP)
    assert commit([], [5, STOP, 6], request) == ([5, STOP, 6], None)


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
            output, reason = commit(output, run, request, limit)
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
    return next((n for n in range(1, len(token_ids) + 1) if stop.match(token_ids[:n])), None)


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
    assert stop.match([0] * 100_000) is None
    assert words.longest_decoded < 20
    assert stop.match([*[0] * 1000, 1]) == StopMatch(999, "a" * 999, "ab")


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


def ends_of(
    words: Vocabulary, token_ids: Sequence[int], strings: Sequence[str], keep: bool, after: int
) -> tuple[int, StopMatch] | None:
    """Tokens decoded and the cut, by looking through the whole text after each token."""
    for count in range(after + 1, len(token_ids) + 1):
        text = words.decode(token_ids[:count])
        early = len(words.decode(token_ids[:after]).rstrip(REPLACEMENT))
        places = [(at, s) for s in strings for at in range(len(text)) if text.startswith(s, at) and at + len(s) > early]
        if places:
            at, reason = min(places)
            kept = text[: at + len(reason)] if keep else text[:at]
            tokens = next(n for n in range(count + 1) if words.decode(token_ids[:n]).startswith(kept))
            return count, StopMatch(tokens, kept, reason)
    return None


@given(
    token_ids=st.lists(st.integers(0, len(PIECES) - 1), max_size=60),
    strings=st.lists(st.sampled_from(["ab", "aab", "ü", "bab", "üb", "\U0001f600a", "aü\U0001f600"]), min_size=1),
    keep=st.booleans(),
    after=st.integers(0, 8),
)
@example(token_ids=[0, 1, 0, 1], strings=["ab"], keep=False, after=2)
@example(token_ids=[0, 1, 0, 1], strings=["ab"], keep=True, after=1)
@example(token_ids=[4, 5, 0, 6, 1], strings=["üb"], keep=False, after=0)
@example(token_ids=[5, 6], strings=["ü"], keep=False, after=1)  # the first token is half of it
def test_text_tokens_and_reason_are_cut_at_the_same_place(
    token_ids: list[int], strings: list[str], keep: bool, after: int
) -> None:
    words = Vocabulary(*PIECES)
    stop = StopStrings(strings, words.decode, keep=keep)
    request = request_of(eos=(), stop=stop, min_new_tokens=after)
    output: list[int] = []
    ending = None
    decoded = 0
    for token in token_ids:
        ending = commit_until_end(output, [token], request, FAR)
        decoded += 1
        if ending is not None:
            break
    want = ends_of(words, token_ids, strings, keep, after)
    if want is None:
        assert ending is None
        assert output == token_ids
    else:
        assert ending == Ending(FinishReason.STOP, want[1])
        assert decoded == want[0]
        assert output == token_ids[: want[1].keep]
        assert words.decode(output).startswith(want[1].text)


def test_the_cut_at_the_earliest_of_several() -> None:
    words = Vocabulary("text END of\n\n", "text\n\nEND", "ENDEND", "xabx", "text ", "EN", "D of", "ND")

    def text(*token_ids: int, keep: bool = False, strings: Sequence[str] = ("END", "\n\n", "ND o")) -> StopMatch | None:
        return StopStrings(strings, words.decode, keep=keep).match(token_ids)

    assert text(0) == StopMatch(1, "text ", "END")
    assert text(0, keep=True) == StopMatch(1, "text END", "END")
    assert text(1) == StopMatch(1, "text", "\n\n")
    assert text(2) == StopMatch(0, "", "END")
    assert text(3, strings=["ab", "b"]) == StopMatch(1, "x", "ab")
    assert text(4, 5, 6) == StopMatch(1, "text ", "END"), "the stop begins on a token's border: that token goes"
    assert text(4, 5, 6, keep=True) == StopMatch(3, "text END", "END"), "it ends inside a token: that token stays"
    assert text(4, 7, 3) is None


def test_a_string_that_begins_early_and_ends_behind_counts() -> None:
    words = Vocabulary("a", "b", "EN", "D")
    stop = StopStrings(["END", "a"], words.decode)
    assert stop.match([0, 2, 3], after=2) == StopMatch(1, "a", "END"), "the a of the first two tokens does not count"
    assert stop.match([0, 2, 1], after=2) is None
    assert stop.match([0, 2, 1, 0], after=2) == StopMatch(3, "aENb", "a")


def test_empty_stop_strings_are_our_own_mistake() -> None:
    for strings in ([], ["a", ""]):
        with pytest.raises(AssertionError):
            StopStrings(strings, Vocabulary().decode)
