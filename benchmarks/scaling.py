"""How cost and peak memory grow with S, K, D, M and B: the library's flows, size by size, with fitted exponents."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.runner import Progress, Start, contestant, peak
from benchmarks.sizes import Size
from benchmarks.workloads import Job

_FACTORS = (0.5, 1, 2, 4)


@dataclass(frozen=True)
class Curve:
    """Seconds and megabytes at each value of one size; they grow like value^exponent."""

    variable: str
    measures: str
    values: list[int]
    seconds: list[float]
    megabytes: list[float]
    seconds_exponent: float
    megabytes_exponent: float


@dataclass(frozen=True)
class Sweep:
    variable: str
    measures: str
    points: list[tuple[int, Size, Job]]


def sweeps(size: Size) -> list[Sweep]:
    """One size varies, the others stay; M cannot exceed D, so its values end there."""

    def points(name: str, flow: str, factors: Sequence[float] = _FACTORS) -> list[tuple[int, Size, Job]]:
        values = [int(factor * getattr(size, name)) for factor in factors]
        job = Job("library", "flow", {"flow": flow, "backward": True})
        return [(value, replace(size, **{name: value}), job) for value in values]

    def samples(count: int) -> Job:
        arguments: dict[str, Any] = {"flow": "triangular-sylvester", "samples": count, "batch": 1}
        return Job("library", "flow", arguments)

    counts = [int(4 * factor * size.samples) for factor in _FACTORS]
    return [
        Sweep("S", "T-SNF, samples of one context, forward", [(count, size, samples(count)) for count in counts]),
        Sweep("K", "T-SNF, steps, forward + backward", points("transforms", "triangular-sylvester")),
        Sweep("D", "T-SNF, features, forward + backward", points("features", "triangular-sylvester", (0.5, 1, 2))),
        Sweep("M", "O-SNF, columns of Q, forward + backward", points("rank", "orthogonal-sylvester", (0.5, 1, 2))),
        Sweep("B", "T-SNF, contexts, forward + backward", points("batch", "triangular-sylvester")),
    ]


def scale(
    chosen: Sequence[Sweep],
    *,
    repetitions: int = 5,
    progress: Progress = lambda name: None,
    start: Start = contestant,
) -> Iterator[Curve]:
    for sweep in chosen:
        progress(f"scaling: {sweep.variable}")
        values = [value for value, _, _ in sweep.points]
        with start("library") as process:
            jobs = [process.build(job, each)["job"] for _, each, job in sweep.points]
            rounds = [[process.ask(time=job)["seconds"] for job in jobs] for _ in range(repetitions + 1)]
        seconds = [min(times) for times in zip(*rounds[1:], strict=True)]  # the first is to warm up
        megabytes = [peak(job, each, start) for _, each, job in sweep.points]
        fits = exponent(values, seconds), exponent(values, megabytes)
        yield Curve(sweep.variable, sweep.measures, values, seconds, megabytes, *fits)


def exponent(values: Sequence[float], costs: Sequence[float]) -> float:
    """The slope of log cost against log value, by least squares."""
    x, y = [math.log(value) for value in values], [math.log(cost) for cost in costs]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / sum((a - mean_x) ** 2 for a in x)
