"""What a run of the benchmarks leaves behind: one JSON document, and from it a table, a figure and a page."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO

from rich.table import Table

from benchmarks.runner import Row
from benchmarks.scaling import Curve
from benchmarks.workloads import GROUPS, PEERS, Allocator
from sylvester.app.runs import replacing, write_json, write_text

TITLES = {
    "training": "Training step",
    "nll": "Importance-sampled log-likelihood",
    "flow": "The flow alone, a batch of contexts",
    "samples": "The flow alone, many samples of one context",
    "linalg": "Linear algebra",
    "inverse": "The inverse, in forward passes (at most)",
    "throughput": "Throughput, as a share of a matrix product's",
    "memory": "Peak memory, where there is more to do, over peak memory (at most)",
    "peers": "Peers",
    "epoch": "End to end",
}
assert tuple(TITLES) == GROUPS

ALLOCATORS: dict[Allocator, str] = {"kept": "keep freed memory", "system": "leave freed memory to the system"}

Document = dict[str, Any]


def document(
    rows: Sequence[Row], curves: Sequence[Curve], *, size: str, repetitions: int, allocator: Allocator
) -> Document:
    return circumstances(size=size, repetitions=repetitions, allocator=allocator) | {
        "versions": {name: _version(name) for name in ("sylvester", "torch", *PEERS.values())},
        "rows": [asdict(row) | {"met": row.met} for row in rows],
        "scaling": [asdict(curve) for curve in curves],
    }


def circumstances(*, size: str, repetitions: int, allocator: Allocator) -> Document:
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "size": size,
        "repetitions": repetitions,
        "allocator": allocator,
        "machine": machine(),
        "versions": {"torch": _version("torch")},
    }


def machine() -> dict[str, Any]:
    model = platform.processor()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"cpu": model, "cores": os.cpu_count(), "memory_gib": round(memory / 2**30), "system": platform.platform()}


def save(found: Document, path: Path) -> None:
    """The document, and beside it a page and a figure of the same name."""
    picture = path.with_suffix(".svg")
    write_json(path, found)
    write_text(path.with_suffix(".md"), page(found, picture.name))
    if _measured(found):
        with replacing(picture) as file:
            figure(found, file)


def _measured(found: Document) -> list[dict[str, Any]]:
    return [row for row in found["rows"] if row["ratio"] is not None]


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def tables(found: Document) -> list[Table]:
    """For the terminal: the rows, and how things scale."""
    return [make(found) for key, make in (("rows", _rows), ("scaling", _scaling)) if found[key]]


def note(found: Document) -> str:
    return f"The library's processes {ALLOCATORS[found['allocator']]} (--allocator {found['allocator']})."


def _rows(found: Document) -> Table:
    result = Table("", "against", "ours", "other", "ratio", "target", box=None)
    for group, rows in groupby(found["rows"], key=lambda row: row["group"]):
        result.add_section()
        result.add_row(f"[bold]{TITLES[group]}[/bold]")
        for row in rows:
            style = {True: "green", False: "red", None: ""}[row["met"]]
            cells = _cells(row)
            result.add_row(
                row["name"], row["against"], *cells[:2], f"[{style}]{cells[2]}[/]" if style else cells[2], cells[3]
            )
    return result


def version_table(found: Document) -> Table:
    """Of a document about two versions, for the terminal."""
    titles = TITLES | {"inverse": "The inverse"}
    result = Table("", found["this"]["name"], found["other"]["name"], "ratio", box=None)
    for group, rows in groupby(found["rows"], key=lambda row: row["group"]):
        result.add_section()
        result.add_row(f"[bold]{titles[group]}[/bold]")
        for row in rows:
            seconds = (_quantity(row[side], "s") for side in ("this", "other"))
            result.add_row(row["name"], *seconds, f"{row['ratio']:.2f}")
    return result


def version_note(found: Document) -> str:
    """How to read that table."""
    this, other = found["this"], found["other"]
    return (
        f"Ratio: seconds of {other['name']} ({other['commit'][:12]}) over those of {this['name']}"
        f" ({this['commit'][:12]}{', changed' * this['changed']}); above 1, {this['name']} is faster."
        f" The fastest of up to {found['repetitions']} repetitions counts. Both {ALLOCATORS[found['allocator']]}"
        f" (--allocator {found['allocator']})."
    )


def _scaling(found: Document) -> Table:
    result = Table("", "sizes", "seconds grow like", "memory grows like", box=None)
    for curve in found["scaling"]:
        result.add_row(*_curve_cells(curve))
    return result


def _curve_cells(curve: Mapping[str, Any]) -> tuple[str, str, str, str]:
    name, values = curve["variable"], ", ".join(f"{value:,}" for value in curve["values"])
    return (
        f"{name}: {curve['measures']}",
        values,
        f"{name}^{curve['seconds_exponent']:.2f}",
        f"{name}^{curve['megabytes_exponent']:.2f}",
    )


def _cells(row: Mapping[str, Any]) -> tuple[str, str, str, str]:
    target = "" if row["target"] is None else f"{'≤' if row['kind'] == 'cost' else '≥'} {row['target']:g}"
    if row["ratio"] is None:
        return "", "not installed", "", target
    return _quantity(row["ours"], row["unit"]), _quantity(row["other"], row["unit"]), f"{row['ratio']:.2f}", target


def _quantity(value: float, unit: str) -> str:
    if unit != "s":
        return f"{value:.0f} {unit}"
    return f"{value:.2f} s" if value >= 1 else f"{1000 * value:.3g} ms"


def page(found: Document, figure_name: str) -> str:
    """The page of the documentation."""
    at = found["machine"]
    versions = ", ".join(f"{name} {number}" for name, number in found["versions"].items() if number)
    lines = [
        "# Benchmarks",
        "",
        f"Measured on {found['date'][:10]} by `python -m benchmarks --size {found['size']}` on {at['cpu']},"
        f" {at['cores']} cores, {at['memory_gib']} GiB ({versions}). Both sides of a row take turns in processes of"
        f" their own, and the fastest of up to {found['repetitions']} repetitions counts."
        f" The library's processes {ALLOCATORS[found['allocator']]} (`--allocator {found['allocator']}`)."
        " *Reference* is a plain implementation of how the paper's experiments were run (`benchmarks/reference.py`),"
        " with torch's default settings; it computes the same numbers from the same weights. Ratios are how many times"
        " faster the library is, unless a heading says otherwise. A target was set before the measurement; a ratio in"
        " bold misses it.",
    ]
    if _measured(found):
        lines += ["", f"![Ratios of all rows, with their targets]({figure_name})"]
    for group, rows in groupby(found["rows"], key=lambda row: row["group"]):
        lines += ["", f"## {TITLES[group]}", "", "| | measures | against | ours | other | ratio | target |"]
        lines += ["|---|---|---|---|---|---|---|"]
        for row in rows:
            ours, other, ratio, target = _cells(row)
            ratio = f"**{ratio}**" if row["met"] is False else ratio
            lines.append(
                f"| {row['name']} | {row['measures']} | {row['against']} | {ours} | {other} | {ratio} | {target} |"
            )
    if found["scaling"]:
        lines += ["", "## Scaling", "", "| | sizes | seconds grow like | memory grows like |", "|---|---|---|---|"]
        lines += [f"| {' | '.join(_curve_cells(curve))} |" for curve in found["scaling"]]
    return "\n".join(lines) + "\n"


def figure(found: Document, file: BinaryIO) -> None:
    """Horizontal bars of all ratios, a panel a group, with the targets marked; as SVG."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    measured = _measured(found)
    groups = [(group, list(rows)) for group, rows in groupby(measured, key=lambda row: row["group"])]
    heights = [len(rows) + 2.0 for _, rows in groups]
    drawing, panels = pyplot.subplots(
        len(groups),
        1,
        figsize=(8, 0.6 + 0.26 * sum(heights)),
        gridspec_kw={"height_ratios": heights},
        layout="constrained",
        squeeze=False,
    )
    colours = {True: "#2a7f62", False: "#c1443c", None: "#7b8794"}
    for (group, rows), panel in zip(groups, panels[:, 0], strict=True):
        places = range(len(rows))
        panel.barh(places, [row["ratio"] for row in rows], height=0.66, color=[colours[row["met"]] for row in rows])
        for row, place in zip(rows, places, strict=True):
            target = row["target"]
            if target is not None:
                panel.plot([target, target], [place - 0.45, place + 0.45], color="black", linewidth=1.6)
            panel.annotate(f" {row['ratio']:.2f}", (max(row["ratio"], target or 0), place), va="center", fontsize=7)
        panel.set_yticks(places, [row["name"] for row in rows], fontsize=8)
        panel.set_ylim(len(rows) - 0.4, -0.6)
        panel.set_xlim(0, 1.12 * max(max(row["ratio"], row["target"] or 0) for row in rows))
        panel.tick_params(axis="x", labelsize=7)
        panel.set_title(TITLES[group], fontsize=9, loc="left", fontweight="bold")
        panel.spines[["top", "right"]].set_visible(False)
    drawing.suptitle("Ratios; a black mark is the target, green met, red missed", fontsize=9, x=0.01, ha="left")
    drawing.savefig(file, format="svg")
    pyplot.close(drawing)
