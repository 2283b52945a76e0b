"""Where a sequence ends: EOS, a stop condition or the token limit, on any token of an accepted run."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from esp_worker.types import FinishReason, Request

Decode = Callable[[Sequence[int]], str]

CUT_CHARACTER = 3  # most replacement characters that a cut character leaves at the start of a decoded text


def token_limit(request: Request, max_length: int) -> int:
    """Most output tokens: max_new_tokens, or what the context of max_length (prompt + output) leaves."""
    return min(request.sampling.max_new_tokens, max_length - len(request.prompt_ids))


def commit_until_end(output: list[int], tokens: Sequence[int], request: Request, limit: int) -> FinishReason | None:
    """Append `tokens` to `output` one by one and cut exactly at the first that ends the sequence.

    A stop wins over the length limit when one token meets both. Returns None while the sequence goes on.
    """
    for token in tokens:
        output.append(token)
        if token in request.sampling.eos_token_ids or (request.stop is not None and request.stop.met(output)):
            return FinishReason.STOP
        if len(output) >= limit:
            return FinishReason.LENGTH
    return None


class StopStrings:
    """Stop condition: the decoded output contains one of `strings`, which may span tokens and accepted runs.

    Only the newest tokens are decoded: a token that prints at all prints at least one byte (a character has at most
    four), so a window of 4 x (longest string) + 4 tokens holds what the newest token can complete. Where tokens print
    nothing (special ones), the window grows until a string's length stands before what the newest token prints.
    """

    def __init__(self, strings: Sequence[str], decode: Decode) -> None:
        assert strings
        assert all(strings)
        self.strings = tuple(strings)
        self._decode = decode
        self._longest = max(len(string) for string in strings)

    def met(self, token_ids: Sequence[int]) -> bool:
        window = 4 * self._longest + 4
        tail = self._decode(token_ids[-window:])
        if window < len(token_ids):
            needed = self._longest + len(self._decode(token_ids[-1:])) + CUT_CHARACTER
            while len(tail) < needed and window < len(token_ids):
                window *= 2
                tail = self._decode(token_ids[-window:])
        return any(string in tail for string in self.strings)

    def trim(self, text: str) -> str:
        """`text` up to the first stop string."""
        return text[: min((at for string in self.strings if (at := text.find(string)) >= 0), default=len(text))]
