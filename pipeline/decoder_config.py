"""The configuration's `decoder` section: a method, and the settings that it has.

Block complexity is derived here where other settings fix it, so that `run.json` shows what really ran.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from esp_worker.drafters.lade import PAPERS_LOOKAHEADS, lookahead_rows
from esp_worker.tree import block_complexity
from pipeline.section import Section


def _owner_count(value: object) -> object:
    """In place of a union's own messages, which would name its branches and not the setting."""
    if not _is_owner_count(value):
        raise ValueError(f"give all, or how many rows own probes, at least 1 (got {value!r})")
    return value


def _is_owner_count(value: object) -> bool:
    return value == "all" or (isinstance(value, int) and not isinstance(value, bool) and value >= 1)


def _row_budget(value: object) -> object:
    if value is None or value == AUTO or (isinstance(value, int) and not isinstance(value, bool) and value >= 2):
        return value
    raise ValueError(f"give auto, or the rows of a decode call, at least 2 (got {value!r})")


AUTO: Final = "auto"

# Each method's own settings.
_ESP = ("masks", "tree", "branches", "probe_owners", "prune", "ema", "init", "init_offset", "init_moments", "impl")
SETTINGS_OF = {
    "esp": _ESP,
    "hybrid": (),
    "ar": (),
    "pld": ("ngram", "depth"),
    "lade": ("lookahead",),
    "stand": ("ngram",),
    "recycle": (),
}


def _rows_of(method: str, data: dict[str, Any]) -> dict[str, Any]:
    """block_complexity, and lookahead, of a method other than esp: the one that is given settles the other."""
    given = data.get("block_complexity")
    if given == AUTO and method != "hybrid":
        raise ValueError(f"block_complexity: auto is for esp and hybrid; give method: {method} a number, or none")
    if method == "pld":
        depth = data.get("depth", DecoderConfig.model_fields["depth"].default)
        return data | _derived_rows(given, "depth", depth, lambda: 1 + depth, "1 + depth")
    if method == "hybrid":
        return {**data, "block_complexity": AUTO if given is None else given}
    rows = 30 if given is None else given
    if method == "lade" and data.get("lookahead") is not None:
        three = data["lookahead"]
        return data | _derived_rows(given, "lookahead", three, lambda: lookahead_rows(*three), "(L-1)(W+G)")
    if method == "lade" and rows not in list(PAPERS_LOOKAHEADS):
        known = ", ".join(str(each) for each in PAPERS_LOOKAHEADS)
        wanted = f"none of the paper's for lade, {known}; give lookahead: [L, W, G]"
        raise ValueError(f"block_complexity: {rows} is {wanted}")
    if method == "lade":
        data = {**data, "lookahead": list(PAPERS_LOOKAHEADS[rows])}
    return {**data, "block_complexity": rows}


def _derived_rows(given: Any, name: str, value: Any, rows: Callable[[], int], formula: str) -> dict[str, Any]:
    """What `value` of the setting `name` makes of block_complexity; nothing where it is no valid value, which its own
    check says."""
    try:
        derived = rows()
    except TypeError:
        return {}
    if derived < 2:
        return {}
    if given is not None and given != derived:
        raise ValueError(
            f"block_complexity: {given} is not that of {name}: {value}, {formula} = {derived}; "
            "leave block_complexity out"
        )
    return {"block_complexity": derived}


class DecoderConfig(Section):
    """The method. See the README's table of settings; the terms are the paper's.

    hybrid drafts from all that can be known without training; it has no settings but its rows.

    block_complexity is the rows of a decode call. auto (the default of hybrid and esp) chooses them step by step, from
    what steps cost on this machine and from what is accepted, down to plain decoding's one row.

    esp: with probe_owners: all a block of n nodes has (masks+1)(1+n), with N
    owners 1 + n + masks * min(N, 1+n). A static tree has the rows of its branches; fewer owners only drop probes from
    it. The other kinds have the nodes that block_complexity leaves. auto chooses owners too: where they are given,
    block_complexity is 30 by default.

    init: offset is mu + init_offset * sigma, the moments of the `prompt` or of the whole embedding `table`.

    The baselines: pld (prompt lookup, a chain of `depth` tokens after the longest known n-gram of up to `ngram`), lade
    (lookahead decoding, lookahead: [L, W, G]), stand (ngram: its longest) and recycle (token recycling).
    """

    method: Literal["esp", "hybrid", "ar", "pld", "lade", "stand", "recycle"] = "hybrid"
    masks: int = Field(1, ge=1, le=8)
    block_complexity: Annotated[Literal["auto"] | int | None, BeforeValidator(_row_budget)] = None
    tree: Literal["dynamic", "static", "best_first"] = "dynamic"
    branches: list[Annotated[int, Field(ge=1)]] | None = None
    probe_owners: Annotated[Literal["all"] | int, BeforeValidator(_owner_count)] = "all"
    prune: Literal["all", "deep", "none"] = "all"
    ema: float = Field(0.1, ge=0, le=1)
    init: Literal["mean", "last_k", "sample", "offset"] = "mean"
    init_offset: float = 1.0
    init_moments: Literal["prompt", "table"] = "prompt"
    impl: Literal["efficient", "naive"] = "efficient"
    ngram: int = Field(3, ge=1, le=16)
    depth: int = Field(10, ge=1, le=128, strict=True)
    lookahead: Annotated[list[Annotated[int, Field(ge=1, strict=True)]], Field(min_length=3, max_length=3)] | None = (
        None
    )

    @field_validator("lookahead")
    @classmethod
    def _ngrams_of_two(cls, lookahead: list[int] | None) -> list[int] | None:
        if lookahead is not None and lookahead[0] < 2:
            raise ValueError(f"{lookahead}: L, the tokens of an n-gram, must be at least 2")
        return lookahead

    @model_validator(mode="before")
    @classmethod
    def _derive_block_complexity(cls, data: Any) -> Any:
        """A static tree's follows from its branches (paper, section 3)."""
        if not isinstance(data, dict):
            return data
        method = data.get("method", cls.model_fields["method"].default)
        if method in list(SETTINGS_OF) and method not in ("esp", "ar"):
            return _rows_of(method, data)
        tree, branches = data.get("tree", "dynamic"), data.get("branches")
        masks, given = data.get("masks", 1), data.get("block_complexity")
        if tree != "static" and branches is not None:
            raise ValueError(f"branches belong to tree: static; tree: {tree} takes block_complexity")
        if tree != "static":
            default = AUTO if data.get("probe_owners", "all") == "all" else 30
            return {**data, "block_complexity": default if given is None else given}
        if not isinstance(branches, list) or not all(isinstance(b, int) for b in branches):
            raise ValueError("tree: static needs branches, a list of widths, one a mask, such as [14] or [7, 2]")
        if len(branches) != masks:
            raise ValueError(f"branches {branches} has {len(branches)} widths for masks: {masks}; give one a mask")
        owners = data.get("probe_owners", "all")
        if not _is_owner_count(owners):
            return data  # the field's own check says so
        rows = block_complexity(masks, sum(branches), None if owners == "all" else owners)
        if given == AUTO:
            raise ValueError(
                "block_complexity: auto chooses the tree's size, and tree: static has one; take another tree"
            )
        if given is not None and given != rows:
            formula = "(masks+1)(1+sum)" if owners == "all" else "1 + sum + masks * min(probe_owners, 1+sum)"
            raise ValueError(
                f"block_complexity: {given} is not that of branches {branches} with {masks} masks, "
                f"{formula} = {rows}; leave block_complexity out"
            )
        return {**data, "block_complexity": rows}

    @model_validator(mode="after")
    def _settings_that_apply(self) -> Self:
        own = SETTINGS_OF[self.method]
        others = dict.fromkeys(name for names in SETTINGS_OF.values() for name in names if name not in own)
        idle = [name for name in others if self._is_changed(name)]
        if self.method == "ar":
            idle = [name for name in idle if name not in ("masks", "tree", "branches", "prune", "ema", "init")]
        if idle:
            why = "method: ar drafts nothing" if self.method == "ar" else f"no settings of method: {self.method}"
            having = [method for method, settings in SETTINGS_OF.items() if settings and {*idle} <= {*settings}]
            instead = f", or set method: {' or '.join(having)}" if having else ""
            raise ValueError(f"{', '.join(idle)}: {why}; leave them out{instead}")
        if self.block_complexity == AUTO and self.probe_owners != "all":
            raise ValueError("probe_owners: block_complexity: auto chooses them; leave probe_owners out")
        for name in ("init_offset", "init_moments"):
            if self.init != "offset" and self._is_changed(name):
                raise ValueError(f"{name} belongs to init: offset; leave it out of init: {self.init}")
        return self

    def _is_changed(self, name: str) -> bool:
        return bool(getattr(self, name) != type(self).model_fields[name].default)

    @model_validator(mode="after")
    def _room_for_a_node(self) -> Self:
        """The budget holds a node at least, and no fewer rows than owners: rows set aside for more would lie idle."""
        assert self.block_complexity is not None
        if self.method != "esp" or self.tree == "static" or self.block_complexity == "auto":
            return self
        rows = max(self.owner_count or 2, 2)
        least = block_complexity(self.masks, rows - 1, self.owner_count)
        if self.block_complexity < least:
            short = (
                f"leaves no row for a draft with {self.masks} masks"
                if self.owner_count is None
                else f"cannot hold probe_owners: {self.owner_count} with {self.masks} masks each, and a draft"
            )
            raise ValueError(
                f"block_complexity: {self.block_complexity} {short}; at least {least} is needed (or method: ar)"
            )
        return self

    @property
    def owner_count(self) -> int | None:
        """probe_owners as a number, None for all."""
        return None if self.probe_owners == "all" else self.probe_owners
