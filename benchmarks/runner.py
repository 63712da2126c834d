"""Alternating processes, minima over repetitions, ratios.

Every contestant runs in a process of its own, so that no setting of one reaches another, and the two sides of a row
take turns, so that a machine that slows down slows down both. Of the repetitions the fastest counts: everything else a
machine does only adds time.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.sizes import SIZES, Size
from benchmarks.workloads import PEERS, Allocator, Job, Workload

#: The checkout that these benchmarks belong to.
ROOT = Path(__file__).resolve().parents[1]

# A row that has taken so many seconds is content with so many repetitions.
_ENOUGH = ((20.0, 3), (60.0, 1))

Progress = Callable[[str], None]


class BenchmarkError(RuntimeError):
    """A contestant that failed, in one sentence."""


class BadRequest(ValueError):
    """What cannot be measured, in one sentence."""


class Missing(Exception):
    """A contestant that is not installed."""


@dataclass(frozen=True)
class Row:
    """One line of the report. ``ours`` and ``other`` are seconds, megabytes or GFLOP/s, as ``unit`` says."""

    group: str
    name: str
    measures: str
    against: str
    unit: str
    ours: float | None
    other: float | None
    ratio: float | None  # None where the other is not installed
    kind: str
    target: float | None

    @property
    def met(self) -> bool | None:
        if self.target is None or self.ratio is None:
            return None
        return self.ratio <= self.target if self.kind == "cost" else self.ratio >= self.target


class Contestant:
    """A worker process, spoken to line by line; the library it finds first is that of ``tree``."""

    def __init__(self, name: str, *, label: str = "", tree: Path = ROOT, allocator: Allocator = "kept") -> None:
        self.name = label or name
        paths = [str(tree / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        # The variable is for versions that tune the allocator when they are imported.
        settings = {"SYLVESTER_ALLOCATOR": "" if allocator == "kept" else "system"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.worker", name, allocator],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # warnings; what fails is answered
            env=os.environ | settings | {"PYTHONPATH": os.pathsep.join(paths)},
            cwd=ROOT,
            text=True,
        )

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise BenchmarkError(f"The process of {self.name} ended without an answer to {request}")
        answer = json.loads(line)
        if "missing" in answer and self.name in PEERS:
            raise Missing(answer["missing"])
        if "missing" in answer:
            raise BenchmarkError(f"{self.name} failed at {request}: no module named {answer['missing']}")
        if "error" in answer:
            raise BenchmarkError(f"{self.name} failed at {request}: {answer['error']}")
        return answer

    def build(self, job: Job, size: Size) -> dict[str, Any]:
        return self.ask(build=job.task, size=asdict(size), arguments=job.arguments)


Start = Callable[[str], AbstractContextManager[Contestant]]


@contextmanager
def contestant(name: str, *, label: str = "", tree: Path = ROOT, allocator: Allocator = "kept") -> Iterator[Contestant]:
    """``label`` is what its errors call it."""
    started = Contestant(name, label=label, tree=tree, allocator=allocator)
    try:
        yield started
    finally:
        started.process.kill()
        started.process.communicate()


def check(only: Sequence[str], groups: Sequence[str], *, size: str, repetitions: int) -> None:
    if unknown := set(only) - set(groups):
        raise BadRequest(f"Expected groups among {', '.join(groups)}; got {', '.join(sorted(unknown))}")
    if size not in SIZES or repetitions < 1:
        raise BadRequest(
            f"Expected a size among {', '.join(SIZES)} and at least one repetition; got {size!r} and {repetitions}"
        )


def run(
    rows: Sequence[Workload],
    size: Size,
    *,
    repetitions: int = 5,
    progress: Progress = lambda name: None,
    start: Start = contestant,
) -> Iterator[Row]:
    """The rows measured, one after another. Within a group, each contestant keeps its process.

    ``start`` says which process a contestant's name stands for.
    """
    for _, group in groupby(rows, key=lambda row: row.group):
        with ExitStack() as stack:
            processes: dict[str, Contestant] = {}

            def process(name: str, stack: ExitStack = stack, known: dict[str, Contestant] = processes) -> Contestant:
                if name not in known:
                    known[name] = stack.enter_context(start(name))
                return known[name]

            for workload in group:
                progress(f"{workload.group}: {workload.name}")
                try:
                    if workload.quantity == "megabytes":
                        yield row(workload, "MB", *(peak(job, size, start) for job in (workload.ours, workload.other)))
                    else:
                        yield _timed(workload, size, process, repetitions)
                except Missing:
                    yield row(workload, "s", None, None)


def _timed(workload: Workload, size: Size, process: Callable[[str], Contestant], repetitions: int) -> Row:
    jobs = (workload.ours, workload.other)
    sides = [process(job.contestant) for job in jobs]
    built = [side.build(job, size) for side, job in zip(sides, jobs, strict=True)]
    best, started = [math.inf, math.inf], time.perf_counter()
    for repetition in range(repetitions + 1):
        for i, side in enumerate(sides):
            seconds = side.ask(time=built[i]["job"])["seconds"]
            if repetition:  # the first is to warm up
                best[i] = min(best[i], seconds)
        elapsed = time.perf_counter() - started
        if any(elapsed > enough and repetition >= fewest for enough, fewest in _ENOUGH):
            break
    for side in sides:
        side.ask(forget=True)
    if workload.ratio == "share":
        return row(workload, "GFLOP/s", *(side["flops"] / s / 1e9 for side, s in zip(built, best, strict=True)))
    return row(workload, "s", *best)


def peak(job: Job, size: Size, start: Start = contestant) -> float:
    """In a fresh process, whose peak is this job's alone."""
    with start(job.contestant) as process:
        return process.ask(peak=process.build(job, size)["job"])["megabytes"]


def row(workload: Workload, unit: str, ours: float | None, other: float | None) -> Row:
    ratio = None
    if ours is not None and other is not None:
        ratio = other / ours if workload.ratio == "speedup" else ours / other
    return Row(
        workload.group,
        workload.name,
        workload.measures,
        workload.against or workload.other.contestant,
        unit,
        ours,
        other,
        ratio,
        workload.ratio,
        workload.target,
    )
