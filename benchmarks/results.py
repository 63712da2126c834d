"""``python -m benchmarks.results FOLDER``: figures of the runs in a folder, drawn beside them.

``training.svg`` has the validation −ELBO over the minutes of training, one line per run: the mean of the validations of
the last five epochs, as single ones jump. ``nll.svg`` has what `sylvester evaluate RUN --images N` found with more and
more importance samples, and with annealing, for every run that has several such evaluations.

Minutes depend on what else the machine did. ``--epoch RUN=SECONDS`` counts the epochs of a run at a pace that was
measured apart from it, under the conditions of the other runs.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sylvester.app.experiments.comparison import find
from sylvester.app.experiments.paper import MODELS
from sylvester.app.runs import Run, replacing

COLOURS = {"gaussian": "#0072b2", "triangular-sylvester": "#d55e00"}
OTHERS = {"planar": "#009e73", "iaf": "#cc79a7", "orthogonal-sylvester": "#56b4e9", "householder-sylvester": "#e69f00"}
STYLES = {"fast": "-", "paper": "--"}
SMOOTHED = 5  # epochs
STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "sylvester",  # the same figure is the same text
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
}


def smoothed(metrics: Sequence[Mapping[str, float]], pace: float | None = None) -> list[tuple[float, float]]:
    """Minutes of training and mean −ELBO of the validations in the last epochs, after each validation."""
    points, seconds = [], 0.0
    for end, line in enumerate(metrics, start=1):
        seconds += line["seconds"] if pace is None else pace
        if "valid_neg_elbo" in line:
            last = metrics[max(0, end - SMOOTHED) : end]
            points.append((seconds / 60, fmean(m["valid_neg_elbo"] for m in last if "valid_neg_elbo" in m)))
    return points


def draw_training(axes: Axes, runs: Sequence[Run], paces: Mapping[str, float]) -> None:
    shown: list[float] = []
    labelled: set[str] = set()
    for run in runs:
        points = smoothed(run.metrics, paces.get(run.path.name))
        annealed = points[next((i for i, line in enumerate(run.metrics) if line["beta"] == 1), 0) :]
        shown += [bound for _, bound in annealed]
        label = f"{MODELS[run.config.flow]}, {run.config.preset}"
        axes.plot(
            *zip(*points, strict=True),
            color=(COLOURS | OTHERS)[run.config.flow],
            linestyle=STYLES.get(run.config.preset, ":"),
            linewidth=1.4,
            label="_" if label in labelled else label,
        )
        labelled.add(label)
    low, high = min(shown), max(shown)
    room = 0.04 * (high - low) or 1.0
    axes.set(
        xlabel="minutes of training", ylabel="validation −ELBO (nats), smoothed", ylim=(low - room, high + room), xlim=0
    )
    axes.legend()


def evaluations(run: Run) -> list[dict[str, Any]]:
    """Of a part of the test images, by the number of samples; annealed ones last."""
    found = [json.loads(file.read_text()) for file in run.path.glob("evaluation-*-first*-seed*.json")]
    return sorted(found, key=lambda one: (one.get("anneal", 0), one["nll_samples"]))


def draw_nll(axes: Axes, trust: Axes, found: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    for flow, some in found.items():
        plain = [one for one in some if "anneal" not in one]
        samples, colour = [one["nll_samples"] for one in plain], (COLOURS | OTHERS)[flow]
        axes.plot(samples, [one["nll"] for one in plain], marker="o", color=colour, label=MODELS[flow])
        trust.plot(samples, [100 * one["khat_share"] for one in plain], marker="o", color=colour, label=MODELS[flow])
        for one in some:
            if "anneal" in one:
                label = f"{MODELS[flow]}, {one['nll_samples']} samples annealed by {one['anneal']:,} transitions"
                axes.axhline(one["nll"], color=colour, linestyle=":", label=label)
                trust.axhline(100 * one["khat_share"], color=colour, linestyle=":")
    axes.set(xscale="log", xlabel="importance samples per image", ylabel="NLL (nats)")
    trust.set(xscale="log", xlabel="importance samples per image", ylabel="images with k̂ > 0.7 (%)", ylim=(-3, 103))


def save(figure: Figure, path: Path) -> None:
    with replacing(path) as file:
        figure.savefig(file, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    print(path)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.results", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--epoch", action="append", default=[], metavar="RUN=SECONDS")
    given = parser.parse_args(arguments)
    paces = {name: float(seconds) for name, _, seconds in (text.partition("=") for text in given.epoch)}
    runs = [Run.open(path) for path in find(given.folder)]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7, 4.4), layout="constrained")
        drawn = [run for run in runs if run.config.flow in COLOURS]
        draw_training(figure.add_subplot(), drawn, paces)
        save(figure, given.folder / "training.svg")
        found = {run.config.flow: some for run in runs if len(some := evaluations(run)) > 1}
        if found:
            figure = Figure(figsize=(9, 3.8), layout="constrained")
            axes, trust = figure.subplots(1, 2)
            draw_nll(axes, trust, found)
            figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2)
            save(figure, given.folder / "nll.svg")


if __name__ == "__main__":
    main()
