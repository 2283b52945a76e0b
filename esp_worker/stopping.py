"""Where a sequence ends: EOS, a stop condition or the token limit, on any token of an accepted run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from esp_worker.types import FinishReason, Request, StopMatch

Decode = Callable[[Sequence[int]], str]

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # what a cut character decodes to
CUT_CHARACTER = 3  # most replacement characters that a cut character leaves at the start of a decoded text


def token_limit(request: Request, max_length: int) -> int:
    """Most output tokens: max_new_tokens, or what the context of max_length (prompt + output) leaves."""
    return min(request.sampling.max_new_tokens, max_length - len(request.prompt_ids))


@dataclass(frozen=True, slots=True)
class Ending:
    """Why and, after a stop condition, where a sequence ended."""

    reason: FinishReason
    stop: StopMatch | None = None


def commit_until_end(output: list[int], tokens: Sequence[int], request: Request, limit: int) -> Ending | None:
    """Append `tokens` to `output` one by one up to the first that ends the sequence; a stop condition then cuts output.

    A stop wins over the length limit when one token meets both. Returns None while the sequence goes on.
    """
    sampling = request.sampling
    for token in tokens:
        output.append(token)
        if token in sampling.eos_token_ids:
            return Ending(FinishReason.STOP)
        if request.stop is not None and len(output) > sampling.min_new_tokens:
            match = request.stop.match(output, sampling.min_new_tokens)
            if match is not None:
                del output[match.keep :]
                return Ending(FinishReason.STOP, match)
        if len(output) >= limit:
            return Ending(FinishReason.LENGTH)
    return None


class StopStrings:
    """Stop condition: the decoded output contains one of `strings`, which may span tokens and accepted runs.

    The output ends before the stop string, or behind it with `keep`.

    Only the newest tokens are decoded: a token that prints at all prints at least one byte (a character has at most
    four), so a window of 4 x (longest string) + 4 tokens holds what the newest token can complete. Where tokens print
    nothing (special ones), the window grows until a string's length stands before what the newest token prints.
    """

    def __init__(self, strings: Sequence[str], decode: Decode, *, keep: bool = False) -> None:
        assert strings
        assert all(strings)
        self.strings = tuple(strings)
        self._decode = decode
        self._keep = keep
        self._longest = max(len(string) for string in strings)

    def match(self, token_ids: Sequence[int], after: int = 0) -> StopMatch | None:
        if not any(string in self._tail(token_ids) for string in self.strings):
            return None
        text = self._decode(token_ids)
        ignored = len(self._decode(token_ids[:after]).rstrip(REPLACEMENT)) if after else 0
        found = [(at, string) for string in self.strings if (at := self._find(text, string, ignored)) is not None]
        if not found:
            return None
        at, string = min(found)
        text = text[: at + len(string)] if self._keep else text[:at]
        return StopMatch(self._covering(token_ids, text), text, string)

    def _tail(self, token_ids: Sequence[int]) -> str:
        """The end of the text: all of it that the newest token can have a part in."""
        window = 4 * self._longest + 4
        tail = self._decode(token_ids[-window:])
        if window < len(token_ids):
            needed = self._longest + len(self._decode(token_ids[-1:])) + CUT_CHARACTER
            while len(tail) < needed and window < len(token_ids):
                window *= 2
                tail = self._decode(token_ids[-window:])
        return tail

    @staticmethod
    def _find(text: str, string: str, ignored: int) -> int | None:
        """Where `string` first begins in `text`, ending behind the first `ignored` characters."""
        at = text.find(string, max(ignored - len(string) + 1, 0))
        return None if at < 0 else at

    def _covering(self, token_ids: Sequence[int], text: str) -> int:
        """The fewest leading tokens whose text begins with `text`."""
        count = len(token_ids)
        while count and self._decode(token_ids[: count - 1]).startswith(text):
            count -= 1
        return count
