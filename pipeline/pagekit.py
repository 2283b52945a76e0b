"""What every page of ours is made of: names, number formats, figures as inline SVG, the template's surroundings.

Pages fetch nothing and escape every text. Their style is templates/page.css.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterable

import matplotlib
from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined, Template
from matplotlib.axes import Axes
from matplotlib.figure import Figure

DASH = "\u2013"  # the page's and the lines' mark for an absent figure: an en dash

METHOD_NAMES = {  # decoder.method -> what people call it
    "ar": "AR",
    "pld": "PLD",
    "stand": "STAND",
    "lade": "LADE",
    "esp": "ESP",
    "recycle": "recycle",
    "hybrid": "hybrid",
}


def method_names(methods: Iterable[str]) -> str:
    """For people: of all the methods that a resumed job's rows were decoded with."""
    return " + ".join(METHOD_NAMES[method] for method in methods)


def fixed(value: float | None, digits: int = 2) -> str:
    return DASH if value is None else f"{value:,.{digits}f}"


def integer(value: int | None) -> str:
    return DASH if value is None else f"{value:,}"


def percent(value: float | None) -> str:
    return DASH if value is None else f"{100 * value:.1f} %"


def times(value: float | None) -> str:
    return DASH if value is None else f"{value:.2f}x"


def usd(value: float | None) -> str:
    if value is None:
        return DASH
    return f"${value:,.2f}" if value >= 1 or value == 0 else f"${value:.3g}"


def margin(value: float | None) -> str:
    return DASH if value is None else f"{value:.3g}"


def duration(seconds: float | None) -> str:
    if seconds is None:
        return DASH
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 300:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02d} min"


# Templates


def template(package: str, name: str) -> Template:
    """A template of the package's; it may include this package's own."""
    environment = Environment(
        loader=ChoiceLoader([PackageLoader(package), PackageLoader("pipeline")]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters: dict[str, Callable[..., str]] = {
        "fixed": fixed,
        "integer": integer,
        "percent": percent,
        "times": times,
        "usd": usd,
        "duration": duration,
        "margin": margin,
    }
    environment.filters.update(filters)
    return environment.get_template(name)


# Figures

DRAFTED_COLOR, AR_COLOR, INK, GRID = "#2457d6", "#9aa6b8", "#46505f", "#e6e9ef"


def new_figure(width: float = 5.2, height: float = 2.7) -> tuple[Figure, Axes]:
    """Inches; one plot."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, plain_axes(figure.add_subplot())


def plain_axes(axes: Axes) -> Axes:
    """In the pages' style."""
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(AR_COLOR)
    axes.tick_params(colors=INK, length=0, labelsize=9)
    axes.xaxis.label.set_color(INK)
    axes.yaxis.label.set_color(INK)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    return axes


def chart(figure: Figure, title: str, caption: str) -> dict[str, str]:
    """title, caption and image (an SVG data URI)."""
    image = "data:image/svg+xml;base64," + base64.b64encode(svg_of(figure)).decode("ascii")
    return {"title": title, "caption": caption, "image": image}


def svg_of(figure: Figure) -> bytes:
    """Same figures, same bytes."""
    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "espstream"}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    return buffer.getvalue()
