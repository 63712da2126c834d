"""Comparisons as tables: for a terminal, Markdown, LaTeX, a spreadsheet, or another program."""

from __future__ import annotations

import csv
import io
import json
import math
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from sylvester.app.config import kind_of
from sylvester.app.experiments import paper
from sylvester.app.experiments.comparison import METRICS, Comparison, Difference, Entry, Group, Summary, plural
from sylvester.app.experiments.paper import Published, Row

__all__ = ["FORMATS", "Table", "beside_published", "comparison_csv", "comparison_json", "comparison_table", "render"]

NAMES = {"neg_elbo": "−ELBO", "nll": "NLL"}


@dataclass(frozen=True)
class Table:
    """Cells as text, and sentences that belong below them."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()


def comparison_table(found: Comparison, *, published: bool = False, details: bool = False) -> Table:
    """A row for each group: what was run, how much of it is finished, mean ± standard deviation, differences.

    With ``published`` the paper's figures stand beside those of its models; with ``details`` the share of images whose
    NLL is not to be trusted and what training took.
    """
    varying = found.varying()
    untested = _any_untested(found)
    validation = ["validation −ELBO"] if untested else []
    beside = ["published"] if published else []
    header = ["dataset", "flow", *varying, "runs", *validation]
    for name in NAMES.values():
        header += [name, *beside]
    if found.baseline is not None:
        header += [f"{name} less {found.baseline}'s" for name in NAMES.values()]
    header += _DETAILS if details else ()
    rows = []
    for group in found.groups:
        sizes = [_setting(group, name) for name in varying]
        bits = " bits/dim" if group.unit != "nats" else ""
        row = [group.dataset, group.flow, *sizes, _runs(group)]
        if untested:
            row.append(_summary(group.summary("valid_neg_elbo")))
        for metric in METRICS:
            row.append(_summary(group.summary(metric)) + (bits if group.summary(metric) else ""))
            if published:
                row.append(_published(_of_the_paper(group, metric)))
        if found.baseline is not None:
            row += [_difference(group.against.get(metric)) for metric in METRICS]
        if details:
            row += _details(group)
        rows.append(tuple(row))
    notes = [*_notes(found), *(_machines(found) if details else ())]
    if published:
        notes.insert(1, "Published figures are the paper's, mean ± standard deviation over three runs.")
    return Table(tuple(header), tuple(rows), tuple(notes))


def _of_the_paper(group: Group, metric: str) -> Published | None:
    """The paper's figure for the same model, however it was trained; of several tables, the first."""
    rows = paper.published(group.config)
    return getattr(rows[0], metric) if rows else None


_DETAILS = ("k̂ > 0.7", "images seen", "minutes")  # the limit of sylvester.diagnostics, which would import torch


def _details(group: Group) -> list[str]:
    if not group.finished:
        return [""] * len(_DETAILS)
    share = group.summary("khat_share")
    seen, minutes = _cost(group)
    return ["" if share is None else f"{100 * share.mean:.1f} %", f"{seen:,.0f}", f"{minutes:.1f}"]


def _cost(group: Group) -> tuple[float, float]:
    """Means over the finished runs of the images seen in training, and of its minutes."""
    seen = fmean(entry.images_seen for entry in group.finished)
    return seen, fmean(entry.result["timing"]["train_seconds"] for entry in group.finished if entry.result) / 60


def _machines(found: Comparison) -> Iterator[str]:
    machines = Counter(entry.machine for group in found.groups for entry in group.finished if entry.machine)
    for machine, count in machines.items():
        yield f"Trained on {machine}: {plural(count, 'run')}."


def _any_untested(found: Comparison) -> bool:
    return any(entry.untested for group in found.groups for entry in group.finished)


def _notes(found: Comparison) -> Iterator[str]:
    images = {entry.result.get("images") for group in found.groups for entry in group.finished if entry.result}
    of = "".join(f" of the first {count} images" for count in images if count)
    by = f" The runs' evaluations {found.evaluation}{of}." if found.evaluation is not None else ""
    yield f"Test figures in nats per image, mean ± standard deviation over seeds.{by}"
    if _any_untested(found):
        yield "Validation −ELBO in nats per image, at the epochs that were chosen by it."
    if found.baseline is not None and any(group.against for group in found.groups):
        yield "Differences are paired by seed and test image: mean ± error over images ± error over seeds."
    for entry in (entry for group in found.groups for entry in group.unfinished):
        yield f"{entry.path} is unfinished: {entry.epochs} of at most {entry.config.epochs_at_most} epochs."
    for entry in found.repeated:
        yield f"{entry.path} is left out: it repeats another run."
    for entry in found.without:
        yield f"{entry.path} is left out: it has no such evaluation."
    for entry in found.damaged:
        yield f"{entry.path} is left out. {entry.problem}"


def beside_published(rows: Sequence[Row], found: Comparison, groups: Mapping[Row, Group | None] | None = None) -> Table:
    """Runs beside the paper's figures, with the difference and its error.

    The error is that of two means: √(s²/n + s'²/3), where ours are over n ≥ 2 runs and the paper's over three.
    ``groups`` says which runs stand beside a row, where those are not the runs with the row's own sizes.
    """
    header = ["dataset", "model", "runs"]
    for name in NAMES.values():
        header += [name, "published", "difference"]
    body, notes = [], ["In nats per image, Freyfaces in bits per dimension; mean ± standard deviation over runs."]
    for row in rows:
        if groups is not None:
            group = groups.get(row)
        else:
            group = next((group for group in found.groups if paper.published(group.config, [row])), None)
        dataset = paper.DATASETS[row.dataset]
        cells = [dataset, row.model, "0" if group is None else _runs(group)]
        for metric in METRICS:
            theirs = getattr(row, metric)
            ours = None if group is None else group.summary(metric)
            cells += [_summary(ours), _published(theirs), _gap(ours, theirs)]
        body.append(tuple(cells))
        for other in paper.published_like(row):
            table, value = other.table.replace("table", "table "), _published(other.neg_elbo)
            notes.append(f"{row.model} on {dataset}: the paper's {table} has −ELBO {value} for the same model.")
    for dataset in dict.fromkeys(row.dataset for row in rows):
        later = _published(paper.FFJORD[dataset])
        body.append((paper.DATASETS[dataset], "FFJORD (later)", "", "", later, "", "", "", ""))
    notes += list(_notes(found))[1:]
    return Table(tuple(header), tuple(body), tuple(notes))


def _runs(group: Group) -> str:
    done, total = len(group.finished), len(group.entries)
    return str(done) if done == total else f"{done} of {total}"


def _setting(group: Group, name: str) -> str:
    value = getattr(group.config, name)
    if isinstance(value, tuple):
        return (":" if kind_of(name) is list else " to ").join(f"{part:g}" for part in value)
    return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _summary(summary: Summary | None) -> str:
    if summary is None:
        return ""
    return f"{summary.mean:.2f}" + (f" ± {summary.std:.2f}" if summary.std is not None else "")


def _difference(found: Difference | None) -> str:
    if found is None:
        return ""
    errors = [error for error in (found.std_error, found.seed_error) if error is not None]
    return _signed(found.mean) + "".join(f" ± {error:.2f}" for error in errors)


def _signed(value: float) -> str:
    return f"{value:+.2f}".replace("-", "−")


def _published(figure: Published | None) -> str:
    if figure is None:
        return ""
    return f"{figure.mean:.2f}" + (f" ± {figure.std:.3g}" if figure.std is not None else "")


def _gap(ours: Summary | None, theirs: Published | None) -> str:
    if ours is None or theirs is None:
        return ""
    gap = _signed(ours.mean - theirs.mean)
    if ours.std is None or theirs.std is None:
        return gap
    return f"{gap} ± {math.sqrt(ours.std**2 / ours.count + theirs.std**2 / 3):.2f}"


def comparison_json(found: Comparison) -> dict[str, Any]:
    """All there is, with every finished run's result.json, its test figures those that the runs are compared by."""
    return {
        "baseline": found.baseline,
        "evaluation": found.evaluation,
        "groups": [
            {
                "dataset": group.dataset,
                "flow": group.flow,
                "settings": group.settings,
                "unit": group.unit,
                "valid_neg_elbo": _or_none(group.summary("valid_neg_elbo")),  # in nats
                **{metric: _or_none(group.summary(metric)) for metric in METRICS},
                "against": {metric: asdict(difference) for metric, difference in group.against.items()},
                "runs": [_entry(entry) for entry in group.entries],
            }
            for group in found.groups
        ],
        "repeated": [str(entry.path) for entry in found.repeated],
        "without": [str(entry.path) for entry in found.without],
        "damaged": [{"path": str(entry.path), "problem": entry.problem} for entry in found.damaged],
    }


def _or_none(summary: Summary | None) -> dict[str, Any] | None:
    return None if summary is None else asdict(summary)


def _entry(entry: Entry) -> dict[str, Any]:
    about = {"path": str(entry.path), "seed": entry.config.seed, "state": entry.state, "epochs": entry.epochs}
    return {**about, "result": entry.result}


def comparison_csv(found: Comparison) -> str:
    """A line for each group, a number in each cell."""
    varying, lines = found.varying(), []
    for group in found.groups:
        line: dict[str, Any] = {"dataset": group.dataset, "flow": group.flow}
        line |= {name: _setting(group, name) for name in varying}
        line |= {"finished": len(group.finished), "unfinished": len(group.unfinished), "unit": group.unit}
        valid = group.summary("valid_neg_elbo")
        line |= {"valid_neg_elbo": valid and valid.mean, "valid_neg_elbo_std": valid and valid.std}  # in nats
        for metric in METRICS:
            summary, against = group.summary(metric), group.against.get(metric)
            line |= {metric: summary and summary.mean, f"{metric}_std": summary and summary.std}
            if found.baseline is not None:
                line[f"{metric}_difference"] = against and against.mean
                line[f"{metric}_difference_std_error"] = against and against.std_error
                line[f"{metric}_difference_seed_error"] = against and against.seed_error
            theirs = _of_the_paper(group, metric)
            line |= {f"{metric}_published": theirs and theirs.mean, f"{metric}_published_std": theirs and theirs.std}
        share, (seen, minutes) = group.summary("khat_share"), _cost(group) if group.finished else (None, None)
        line |= {"khat_share": share and share.mean, "images_seen": seen, "train_minutes": minutes}
        lines.append(line)
    return _csv([tuple(lines[0]), *(tuple(line.values()) for line in lines)] if lines else [])


def _csv(rows: Sequence[Sequence[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().rstrip("\n")


def render(table: Table, form: str) -> str:
    return FORMATS[form](table)


def _text(table: Table) -> str:
    """Columns as wide as they need to be: a table that wraps cannot be read, one that is cut off can be scrolled."""
    widths = [max(map(_width, column)) for column in zip(table.header, *table.rows, strict=True)]
    lines = [table.header, tuple("─" * width for width in widths), *table.rows]
    padded = [[c + " " * (w - _width(c)) for c, w in zip(line, widths, strict=True)] for line in lines]
    body = ["  ".join(line).rstrip() for line in padded]
    return "\n".join([*body, *([""] if table.notes else []), *table.notes])


def _width(text: str) -> int:
    """Columns of a terminal: the hat of k̂ takes none."""
    return sum(not unicodedata.combining(letter) for letter in text)


def _markdown(table: Table) -> str:
    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"

    body = [line(table.header), "|" + "---|" * len(table.header), *map(line, table.rows)]
    return "\n".join([*body, *(part for note in table.notes for part in ("", note))])


_TEX = {
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "−": "$-$",
}


def _latex(table: Table) -> str:
    def line(cells: Sequence[str]) -> str:
        return " & ".join(_escaped(cell) for cell in cells) + r" \\"

    return "\n".join(
        [
            r"\begin{tabular}{" + "l" * len(table.header) + "}",
            r"\hline",
            line(table.header),
            r"\hline",
            *map(line, table.rows),
            r"\hline",
            r"\end{tabular}",
            *(f"% {' '.join(note.split())}" for note in table.notes),
        ]
    )


def _escaped(text: str) -> str:
    return "".join(_TEX.get(letter, letter) for letter in text)


def _as_json(table: Table) -> str:
    return json.dumps([dict(zip(table.header, row, strict=True)) for row in table.rows], indent=2)


FORMATS: dict[str, Callable[[Table], str]] = {
    "table": _text,
    "md": _markdown,
    "csv": lambda table: _csv([table.header, *table.rows]),
    "tex": _latex,
    "json": _as_json,
}
