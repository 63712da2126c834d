"""Everything, or the groups asked for, from the first row to the report."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from benchmarks import report, runner, scaling
from benchmarks.sizes import SIZES
from benchmarks.workloads import ALL_GROUPS, Allocator, workloads
from sylvester.app.data import listing, load


def measure(
    only: Sequence[str] = (),
    *,
    size: str = "paper",
    repetitions: int = 5,
    allocator: Allocator = "kept",
    data_dir: Path | None = None,
    progress: Callable[[int, int, str], None] = lambda done, total, name: None,
) -> report.Document:
    """``progress`` is told how many rows are done, of how many, and the name of the next."""
    runner.check(only, ALL_GROUPS, size=size, repetitions=repetitions)
    chosen = set(only) or set(ALL_GROUPS)
    with tempfile.TemporaryDirectory() as folder:
        # An epoch is one of the real images, or none.
        images = caltech(data_dir, Path(folder)) if "epoch" in chosen and size == "paper" else None
        rows = [row for row in workloads(SIZES[size], images) if row.group in chosen]
        if size != "paper":  # the targets are meant for the paper's sizes
            rows = [replace(row, target=None) for row in rows]
        sweeps = scaling.sweeps(SIZES[size]) if "scaling" in chosen else []
        total = len(rows) + len(sweeps)
        done = iter(range(total))

        def tell(name: str) -> None:
            progress(next(done), total, name)

        start = partial(runner.contestant, allocator=allocator)
        measured = list(runner.run(rows, SIZES[size], repetitions=repetitions, progress=tell, start=start))
        curves = list(scaling.scale(sweeps, repetitions=repetitions, progress=tell, start=start))
    return report.document(measured, curves, size=size, repetitions=repetitions, allocator=allocator)


def caltech(data_dir: Path | None, folder: Path) -> str | None:
    """Its training images in a file that any process can read, where they are on this machine."""
    if not any(entry.name == "caltech101" and entry.present for entry in listing(data_dir=data_dir)):
        return None
    path = folder / "train.pt"
    torch.save(load("caltech101", data_dir=data_dir).train, path)
    return str(path)
