"""What every part of the configuration shares: its strictness, and how its mistakes are told to users."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from pydantic import BaseModel, ConfigDict, ValidationError


class Section(BaseModel):
    """A group of settings: unknown keys are errors, and nothing changes after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)


def as_list(value: object) -> object:
    """One string stands for a list of one."""
    return [value] if isinstance(value, str) else value


def problems(error: ValidationError, names: Sequence[str], *within: str) -> Iterable[tuple[str, str]]:
    """(setting, what is wrong with it) for each mistake; an unknown one is told the nearest of `names`.

    within: the sections around what was validated.
    """
    for problem in error.errors(include_url=False):
        location = ".".join(str(part) for part in (*within, *problem["loc"]) if part != "[key]")
        if problem["type"] == "extra_forbidden" and "parallel" in location:
            yield (
                location,
                "not supported: a model is not split over devices, each actor holds a whole one on one device",
            )
        elif problem["type"] == "extra_forbidden":
            yield location, f"unknown setting{nearest(location, names)}"
        else:
            message = problem["msg"].removeprefix("Value error, ")
            shown = "" if problem["type"] in ("missing", "value_error") else f" (got {problem['input']!r})"
            yield location, f"{message}{shown}"


def nearest(name: str, names: Sequence[str]) -> str:
    matches = difflib.get_close_matches(name[:80], names, n=1, cutoff=0.0)
    return f"; the nearest valid key is {matches[0]}" if matches else ""
