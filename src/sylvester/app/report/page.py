"""What a page is made of: sections of text, facts, tables, figures and pictures. The template turns it into HTML."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Literal

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

__all__ = ["Cell", "Column", "Drawing", "Facts", "Pictures", "Section", "Table", "Text", "html", "number"]


@dataclass(frozen=True)
class Text:
    text: str
    kind: Literal["text"] = "text"


@dataclass(frozen=True)
class Facts:
    facts: Mapping[str, str]
    kind: Literal["facts"] = "facts"


@dataclass(frozen=True)
class Column:
    name: str
    number: bool = True
    long: bool = False


@dataclass(frozen=True)
class Cell:
    """What a person reads, and the value to sort it by where that is not the text."""

    text: str = "–"
    value: float | None = None
    tone: Literal["", "good", "bad"] = ""


@dataclass(frozen=True)
class Table:
    caption: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    kind: Literal["table"] = "table"


@dataclass(frozen=True)
class Drawing:
    caption: str
    svg: Markup
    kind: Literal["figure"] = "figure"


@dataclass(frozen=True)
class Pictures:
    """PNG files by their captions."""

    title: str
    files: Mapping[str, bytes]
    kind: Literal["pictures"] = "pictures"

    @property
    def images(self) -> dict[str, str]:
        return {
            caption: f"data:image/png;base64,{base64.b64encode(content).decode()}"
            for caption, content in self.files.items()
        }


Block = Text | Facts | Table | Drawing | Pictures


@dataclass(frozen=True)
class Section:
    anchor: str
    title: str
    blocks: list[Block] = field(default_factory=list)


def number(value: float | None, *, digits: int = 2, error: float | None = None, signed: bool = False) -> Cell:
    """A figure with its error, to be sorted by its value; an empty cell where there is none."""
    if value is None or not math.isfinite(value):
        return Cell()
    text = f"{value:{'+' if signed else ''}.{digits}f}".replace("-", "−")
    return Cell(text if error is None else f"{text} ± {error:.{digits}f}", value)


def html(title: str, subtitle: str, sections: Sequence[Section]) -> str:
    """One self-contained page. Everything but our own figures is escaped."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.globals["zip"] = zip
    source = files("sylvester.app.report").joinpath("template.html").read_text(encoding="utf-8")
    shown = [section for section in sections if section.blocks]
    return environment.from_string(source).render(title=title, subtitle=subtitle, sections=shown) + "\n"
