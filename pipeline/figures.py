"""Figures made of totals: ratios and settings. What cannot be computed is None, never 0."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def by_frequency(counts: Mapping[str, int]) -> dict[str, int]:
    """The most frequent first, ties by value."""
    return dict(sorted(counts.items(), key=lambda pair: (-pair[1], pair[0])))


def ratio(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole


def reduction(part: float | None, whole: float | None) -> float | None:
    left = ratio(part, whole)
    return None if left is None else 1 - left


def number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def setting(record: Mapping[str, Any], section: str, key: str) -> Any:
    part = (record.get("config") or {}).get(section)
    return part.get(key) if isinstance(part, Mapping) else None
