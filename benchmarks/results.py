"""``python -m benchmarks.results FOLDER``: figures of the runs in a folder, drawn beside them.

``training.svg`` has the validation −ELBO over the minutes of training, one line per run: the mean of the validations of
the last five epochs, as single ones jump. ``nll.svg`` has what `sylvester evaluate RUN --images N` found with more and
more importance samples, and by better ones, adapted or annealed, for every run that has several such evaluations of the
largest N.

Minutes depend on what else the machine did. ``--epoch RUN=SECONDS`` counts the epochs of a run at a pace that was
measured apart from it, under the conditions of the other runs.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sylvester.app.experiments.comparison import find
from sylvester.app.experiments.paper import MODELS
from sylvester.app.runs import Run, RunError, replacing

COLOURS = {
    "gaussian": "#0072b2",
    "planar": "#009e73",
    "iaf": "#cc79a7",
    "orthogonal-sylvester": "#56b4e9",
    "householder-sylvester": "#e69f00",
    "triangular-sylvester": "#d55e00",
}
OVER_TIME = ("gaussian", "triangular-sylvester")  # whose training is drawn: six would hide one another
STYLES = {"fast": "-", "paper": "--"}
SMOOTHED = 5  # epochs
# What an evaluation may have done to its samples: the line that it is drawn as, if not its run's, and its name.
BETTER = {
    "adapt": (None, "of a proposal fitted in {:,} rounds"),
    "anneal": ("-.", "annealed by {:,} transitions"),
}
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


def label(run: Run) -> str:
    return f"{MODELS[run.config.flow]}, {run.config.preset}"


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
    """The scale is that of the epochs at β = 1; before, the bound is not what is trained."""
    shown: list[float] = []
    labelled: set[str] = set()
    for run in runs:
        points = smoothed(run.metrics, paces.get(run.path.name))
        betas = [line["beta"] for line in run.metrics if "valid_neg_elbo" in line]
        shown += [bound for (_, bound), beta in zip(points, betas, strict=True) if beta == 1]
        axes.plot(
            *zip(*points, strict=True),
            color=COLOURS[run.config.flow],
            linestyle=STYLES.get(run.config.preset, ":"),
            linewidth=1.4,
            label="_" if label(run) in labelled else label(run),
        )
        labelled.add(label(run))
    if shown:
        room = 0.04 * (max(shown) - min(shown)) or 1.0
        axes.set_ylim(min(shown) - room, max(shown) + room)
    axes.set(xlabel="minutes of training", ylabel="validation −ELBO (nats), smoothed", xlim=0)
    axes.legend()


def evaluations(run: Run) -> list[dict[str, Any]]:
    """Of a part of the test images, the largest there is, by the number of samples; those of better samples last."""
    found = [json.loads(file.read_text()) for file in run.path.glob("evaluation-*-first*-seed*.json")]
    found = [one for one in found if one["images"] == max(other["images"] for other in found)]
    return sorted(found, key=lambda one: (one.get("anneal", 0), one.get("adapt", 0), one["nll_samples"]))


def draw_nll(axes: Axes, trust: Axes, runs: Sequence[Run]) -> None:
    for run in runs:
        some, colour = evaluations(run), COLOURS[run.config.flow]
        plain = [one for one in some if not BETTER.keys() & one.keys()]
        samples = [one["nll_samples"] for one in plain]
        look: Any = {"marker": "o", "color": colour, "linestyle": STYLES.get(run.config.preset, ":")}
        axes.plot(samples, [one["nll"] for one in plain], label=label(run), **look)
        trust.plot(samples, [100 * one["khat_share"] for one in plain], **look)
        for one in some:
            for way, (linestyle, how) in BETTER.items():
                if way in one:
                    said = f"{label(run)}, {one['nll_samples']} samples {how.format(one[way])}"
                    line: Any = {"color": colour, "linestyle": linestyle or look["linestyle"]}
                    axes.axhline(one["nll"], label=said, **line)
                    trust.axhline(100 * one["khat_share"], **line)
    axes.set(xscale="log", xlabel="importance samples per image", ylabel="NLL (nats)")
    trust.set(xscale="log", xlabel="importance samples per image", ylabel="images with k̂ > 0.7 (%)", ylim=(-3, 103))


def save(figure: Figure, path: Path) -> None:
    with replacing(path) as file:
        figure.savefig(file, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    print(path)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.results", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--epoch", action="append", default=[], metavar="RUN=SECONDS", type=_pace)
    given = parser.parse_args(arguments)
    try:
        runs = [Run.open(path) for path in find(given.folder)]
    except RunError as error:
        parser.error(str(error))
    paces = dict(given.epoch)
    unknown = paces.keys() - {run.path.name for run in runs}
    drawn = [run for run in runs if run.config.flow in OVER_TIME and smoothed(run.metrics)]
    scored = [run for run in runs if run.config.flow in COLOURS and len(evaluations(run)) > 1]
    if unknown:
        parser.error(f"Expected --epoch of a run in {given.folder}; got {min(unknown)}")
    if not drawn:
        parser.error(f"Expected a validated run of {' or '.join(OVER_TIME)} in {given.folder}; got none")
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7, 4.4), layout="constrained")
        draw_training(figure.add_subplot(), drawn, paces)
        save(figure, given.folder / "training.svg")
        if scored:
            figure = Figure(figsize=(9, 3.8), layout="constrained")
            axes, trust = figure.subplots(1, 2)
            draw_nll(axes, trust, scored)
            figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2)
            save(figure, given.folder / "nll.svg")


def _pace(text: str) -> tuple[str, float]:
    name, _, seconds = text.rpartition("=")
    try:
        pace = float(seconds)
    except ValueError:
        pace = 0.0
    if not name or not 0 < pace < math.inf:
        raise argparse.ArgumentTypeError(f"Expected RUN=SECONDS with a positive number; got {text}")
    return name, pace


if __name__ == "__main__":
    main()
