"""The paper's ablation tables as data: which decoder settings each compares, and what the paper prints for them.

Source: arXiv 2603.17942, "Efficient Training-Free Multi-Token Prediction via Embedding-Space Probing". A figure is a
mean acceptance length (tau), or a speed-up over plain decoding where a line says so; None is a cell that the text which
these were taken from lacks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

SOURCE = "arXiv 2603.17942"
TAU, SPEEDUP = "tau", "speedup_vs_ar"  # figures of a result of jobs.bench
_3B, _8B = "LLaMA3.2-3B-Instruct", "LLaMA3.1-8B-Instruct"


@dataclass(frozen=True)
class Line:
    """A method of a table: decoder settings that it adds to each column's, and the figure that it shows."""

    label: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    figure: str = TAU


@dataclass(frozen=True)
class Column:
    """Decoder settings, of all prompts or of those of some of Spec-Bench's categories."""

    label: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    categories: tuple[str, ...] = ()


@dataclass(frozen=True)
class AblationTable:
    """paper: by model, its figures of each line (lines beyond these are ours) in the columns' order, and behind them
    the mean of columns that are categories. note: what the paper leaves open, and how it is settled here."""

    number: int
    title: str
    columns: Sequence[Column]
    paper: Mapping[str, Sequence[Sequence[float | None]]]
    lines: Sequence[Line] = (Line("tau"),)
    note: str = ""

    @property
    def by_category(self) -> bool:
        return any(column.categories for column in self.columns)


def _tree(*widths: int) -> dict[str, Any]:
    """A static tree, one mask a width: (masks + 1)(1 + sum of the widths) rows."""
    return {"masks": len(widths), "tree": "static", "branches": list(widths)}


def _dynamic(rows: int) -> dict[str, Any]:
    return {"masks": 2, "tree": "dynamic", "block_complexity": rows}


# Table 4's caption gives the trees of two masks. One mask's tree is its best candidates, whatever its kind.
_M1_10 = Column("m1 (10)", _tree(4))
_M1_30 = Column("m1 (30)", _tree(14))
_M2_30 = Column("m1,m2 (30)", _tree(7, 2))
_M1_60 = Column("m1 (60)", _tree(29))
_M2_60 = Column("m1,m2 (60)", _tree(15, 4))

# The paper's names of Spec-Bench's categories.
_CATEGORIES = {
    "WRIT": ("writing",),
    "ROLE": ("roleplay",),
    "CODE": ("coding",),
    "TRANS": ("translation",),
    "SUMM": ("summarization",),
    "QA": ("qa",),
    "RAG": ("rag",),
    "M/R": ("math", "reasoning", "math_reasoning"),
}

_ALL = (
    AblationTable(
        2,
        "Branch configurations with two masks (tau)",
        [
            Column("dynamic (30)", _dynamic(30)),
            *(Column(f"[{a},{b}] (30)", _tree(a, b)) for a, b in ((7, 2), (5, 4), (3, 6))),
            Column("dynamic (60)", _dynamic(60)),
            *(Column(f"[{a},{b}] (60)", _tree(a, b)) for a, b in ((15, 4), (12, 7), (10, 9), (8, 11), (6, 13))),
        ],
        {
            _3B: [[1.506, 1.504, 1.476, 1.417, 1.630, 1.631, 1.620, 1.602, 1.574, 1.540]],
            _8B: [[1.571, 1.570, 1.540, 1.479, 1.712, 1.708, 1.701, 1.687, 1.665, 1.624]],
        },
    ),
    AblationTable(
        3,
        "Number of masks at BC 60 (tau)",
        [
            Column("m1 [29]", _tree(29)),
            Column("m1,m2 [15,4]", _tree(15, 4)),
            Column("m1,m2,m3 [7,5,3]", _tree(7, 5, 3)),
        ],
        {_3B: [[1.65, 1.63, 1.51]], _8B: [[1.73, 1.71, 1.57]]},
        note="[7,5,3] has 64 rows, not 60",
    ),
    AblationTable(
        4,
        "Naive and efficient implementation (speed-up over plain decoding)",
        [_M1_30, _M2_30, _M1_60, _M2_60],
        {
            _3B: [[1.56, 1.50, 1.65, 1.63], [0.99, 0.99, 0.95, 0.96], [1.22, 1.08, 1.20, 1.22]],
            _8B: [[1.63, 1.57, 1.73, 1.71], [None] * 4, [None] * 4],
        },
        [
            Line("tau", {"impl": "efficient"}),
            Line("Naive", {"impl": "naive"}, SPEEDUP),
            Line("Efficient", {"impl": "efficient"}, SPEEDUP),
        ],
        note="naive builds a step's mask and positions anew; efficient keeps those of every shape of tree",
    ),
    AblationTable(
        5,
        "Mask initialisation (tau)",
        [_M1_10, _M1_30, _M2_60],
        {
            _3B: [[1.36, 1.53, 1.62], [1.39, 1.57, 1.65], [1.41, 1.59, 1.67]],
            _8B: [[1.38, 1.56, 1.67], [1.41, 1.60, 1.69], [1.42, 1.62, 1.71]],
        },
        [
            Line("Last K (hard init)", {"init": "last_k"}),
            Line("Sample (embedding distribution)", {"init": "sample"}),
            Line("Mean (soft init)", {"init": "mean"}),
        ],
    ),
    AblationTable(
        9,
        "Number of masks, each with twice the rows (tau)",
        [_M1_30, _M2_60, Column("m1,m2,m3 (120)", _tree(13, 10, 6))],
        {_3B: [[1.561, 1.631, 1.669]], _8B: [[1.632, 1.708, 1.756]]},
        # 29 nodes in the shares of table 3's [7, 5, 3], rounded by largest remainder.
        note="the paper does not print its tree of 120 rows; here [13,10,6], the shares of table 3's [7,5,3]",
    ),
    AblationTable(
        13,
        "Tree pruning (tau)",
        [_M1_10, _M1_30, _M2_30, _M2_60],
        {
            _3B: [[1.41, 1.59, 1.50, 1.63], [1.41, 1.59, 1.55, 1.67]],
            _8B: [[1.42, 1.62, 1.51, 1.66], [1.42, 1.62, 1.57, 1.71]],
        },
        [
            Line("w/o tree pruning", {"prune": "none"}),
            Line("w/ tree pruning", {"prune": "all"}),
            Line("w/ tree pruning, from depth 2 on", {"prune": "deep"}),
        ],
        note="the paper's columns of one mask do not move: it seems to spare depth 1, as the third line does",
    ),
    AblationTable(
        14,
        "Offset of the initial masks, by Spec-Bench category at BC 60 (tau)",
        [Column(name, _tree(15, 4), categories) for name, categories in _CATEGORIES.items()],
        {
            _3B: [
                [1.60, 1.58, 1.65, 1.61, 1.72, 1.59, 1.64, 1.79, 1.65],
                [1.56, 1.55, 1.60, 1.60, 1.67, 1.55, 1.61, 1.75, 1.61],
                [1.54, 1.55, 1.61, 1.60, 1.69, 1.55, 1.61, 1.75, 1.61],
            ]
        },
        [
            Line("mu + epsilon sigma", {"init": "sample"}),
            *(
                Line(f"mu + {offset} sigma", {"init": "offset", "init_offset": offset, "init_moments": "table"})
                for offset in (5, 10)
            ),
        ],
        # Both print 1.65 as the mean at BC 60.
        note="epsilon ~ N(0, 1) makes the first line table 5's Sample, so mu and sigma are the embedding table's",
    ),
    AblationTable(
        15,
        "Update rate of the masks (tau)",
        [
            Column("lambda 0.01", {"ema": 0.01}),
            Column("lambda 0.1 (default)", {"ema": 0.1}),
            Column("lambda 0.5", {"ema": 0.5}),
        ],
        {
            _3B: [[1.53, 1.59, 1.43], [1.63, 1.67, 1.52]],
            _8B: [[1.60, 1.62, 1.47], [1.69, 1.71, 1.57]],
        },
        [Line("BC 30", _M1_30.settings), Line("BC 60", _M2_60.settings)],
        note="the trees are those of table 5, whose Mean has the same figures: [14] and [15,4]",
    ),
)
TABLES = {table.number: table for table in _ALL}
