"""The text of a sequence, prompt and output, and where its n-grams have stood: what lookup methods draft from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence


class History:
    """A sequence's tokens, with every place of every n-gram of 1..`longest` tokens that something follows.
    They are found when first asked for: a text that nothing is drafted from costs nothing."""

    NEWEST = 8  # places of an n-gram that `after` tells

    def __init__(self, tokens: Iterable[int], longest: int) -> None:
        self.tokens = list(tokens)
        self._longest = longest
        self._places: dict[tuple[int, ...], list[int]] = {}  # n-gram -> indices of the tokens that followed it
        self._newest: dict[int, int] = {}  # token -> where it stood last
        self._indexed = 0  # of the tokens

    def extend(self, tokens: Iterable[int]) -> None:
        self.tokens.extend(tokens)

    def continuation(self, count: int) -> Sequence[int]:
        """Up to `count` tokens that followed the longest n-gram the text ends with, where that stood first before;
        empty where even its last token is new."""
        for _, places in self._known(tuple(self.tokens[-self._longest :])):
            return self.tokens[places[0] : places[0] + count]
        return ()

    def after(self, text: tuple[int, ...]) -> Iterator[tuple[int, list[int]]]:
        """For each n-gram that `text` ends with and that has stood before, longest first: its size, and the tokens
        that followed it, oldest first, of its newest places."""
        for size, places in self._known(text):
            yield size, [self.tokens[place] for place in places[-self.NEWEST :]]

    def ages(self, tokens: Iterable[int]) -> dict[int, int]:
        """How many tokens ago each of `tokens` stood last, 1 for the newest; those that never did are left out."""
        self._index()
        newest, end = self._newest, len(self.tokens)
        return {token: end - newest[token] for token in tokens if token in newest}

    def _known(self, text: tuple[int, ...]) -> Iterator[tuple[int, list[int]]]:
        self._index()
        for size in range(min(self._longest, len(text)), 0, -1):
            places = self._places.get(text[-size:])
            if places is not None:
                yield size, places

    def _index(self) -> None:
        for end in range(self._indexed, len(self.tokens)):
            self._newest[self.tokens[end]] = end
            for size in range(1, min(self._longest, end) + 1):
                self._places.setdefault(tuple(self.tokens[end - size : end]), []).append(end)
        self._indexed = len(self.tokens)
