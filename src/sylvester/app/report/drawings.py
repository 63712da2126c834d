"""Matplotlib's figures as SVG inside a page, where they take the page's colours and so follow its light and dark.

Each colour is drawn as a stand-in that no figure uses otherwise, and replaced by the name of a style variable. Text
stays text. Identifiers get the figure's own name in front, because all figures share one page.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from sylvester.names import FLOWS

__all__ = ["Line", "against_steps", "training_curves"]

INK = "#010203"
_VARIABLES = {INK: "var(--ink)"} | {f"#0102{16 + index:02x}": f"var(--line-{index})" for index in range(6)}
_LINES = [name for name in _VARIABLES if name != INK]
# The paper's six posteriors have a colour and a marker each; the others share the colours, and are dashed.
_FIRST = ("gaussian", "planar", "iaf", "orthogonal-sylvester", "householder-sylvester", "triangular-sylvester")
_MARKERS = ("o", "v", "s", "D", "^", "P")

_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "sylvester",  # the same figure is the same text
    "font.family": "sans-serif",
    "font.size": 10,
    "text.parse_math": False,  # a dollar in a name is a dollar
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.15,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    **dict.fromkeys(
        ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color", "grid.color"), INK
    ),
}


@dataclass(frozen=True)
class Line:
    """What one line shows: points, their errors where there are any, and the flow that gives it its colour."""

    label: str
    flow: str
    x: Sequence[float]
    y: Sequence[float]
    error: Sequence[float] | None = None
    published: bool = False


def training_curves(name: str, lines: Sequence[Line], *, unit: str, from_epoch: int) -> Markup:
    """Validation −ELBO over the epochs; the scale is that of the epochs from ``from_epoch`` on.

    Before the end of the warm-up the bound is not what is trained, and would take up most of the figure.
    """

    def draw(axes: Axes) -> None:
        labelled: set[str] = set()
        for line in lines:
            label = "_" if line.label in labelled else line.label
            axes.plot(line.x, line.y, label=label, linewidth=1.2, **_look(line.flow, marker=False))
            labelled.add(line.label)
        shown = [y for line in lines for x, y in zip(line.x, line.y, strict=True) if x >= from_epoch]
        shown = shown or [y for line in lines for y in line.y]
        low, high = min(shown), max(shown)
        room = 0.05 * (high - low) or 1.0
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set(xlabel="epoch", ylabel=f"validation −ELBO ({unit})", ylim=(low - room, high + room))

    return _svg(name, draw)


def against_steps(name: str, lines: Sequence[Line], *, unit: str) -> Markup:
    """Test −ELBO over the number of steps; published values are hollow and dotted."""

    def draw(axes: Axes) -> None:
        for line in lines:
            look = _look(line.flow, marker=True)
            if line.published:
                look |= {"linestyle": ":", "markerfacecolor": "none", "linewidth": 1.0}
            axes.errorbar(line.x, line.y, yerr=line.error, label=line.label, capsize=3, **look)
        steps = sorted({int(x) for line in lines for x in line.x})
        axes.set_xscale("log", base=2)
        axes.set_xticks(steps, [str(step) for step in steps])
        axes.minorticks_off()
        axes.set(xlabel="steps of the flow", ylabel=f"test −ELBO ({unit})")

    return _svg(name, draw)


def _look(flow: str, *, marker: bool) -> dict[str, Any]:
    order = [*_FIRST, *(other for other in FLOWS if other not in _FIRST)]
    place = order.index(flow)
    index = place % len(_FIRST)
    look: dict[str, Any] = {"color": _LINES[index], "linestyle": "-" if place < len(_FIRST) else "--"}
    return look | ({"marker": _MARKERS[index], "markersize": 6} if marker else {})


def _svg(name: str, draw: Callable[[Axes], None], *, size: tuple[float, float] = (5.6, 3.6)) -> Markup:
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.add_subplot()
        draw(axes)
        handles, labels = axes.get_legend_handles_labels()
        if handles:
            figure.legend(handles, labels, loc="outside lower center", ncols=2, fontsize=9)
        content = io.StringIO()
        empty: Mapping[str, None] = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(content, format="svg", transparent=True, metadata=empty)
    return Markup(_embedded(name, content.getvalue()))


def _embedded(name: str, text: str) -> str:
    """The svg element alone, sized by the page, with identifiers and colours of its own."""
    text = text[text.index("<svg") :]
    head, body = text.split(">", 1)
    head = re.sub(r' (width|height|xmlns:xlink)="[^"]*"', "", head)
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL).replace("xlink:href", "href")
    body = re.sub(r'\b(id="|href="#|url\(#)', rf"\g<1>{name}-", body)
    for stand_in, variable in _VARIABLES.items():
        body = body.replace(stand_in, variable)
    return f'{head} aria-hidden="true">{body}'
