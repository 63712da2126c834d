"""Everything, or the groups asked for, from the first row to the report."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks import report, runner, scaling
from benchmarks.sizes import SIZES
from benchmarks.workloads import GROUPS, workloads
from sylvester.app.data import listing, load

ALL_GROUPS = (*GROUPS, "scaling")


def measure(
    only: Sequence[str] = (),
    *,
    size: str = "paper",
    repetitions: int = 5,
    data_dir: Path | None = None,
    progress: Callable[[int, int, str], None] = lambda done, total, name: None,
) -> report.Document:
    """``progress`` is told how many rows are done, of how many, and the name of the next."""
    check(only, size=size, repetitions=repetitions)
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

        measured = list(runner.run(rows, SIZES[size], repetitions=repetitions, progress=tell))
        curves = list(scaling.scale(sweeps, repetitions=repetitions, progress=tell))
    return report.document(measured, curves, size=size, repetitions=repetitions)


def check(only: Sequence[str], *, size: str, repetitions: int) -> None:
    if unknown := set(only) - set(ALL_GROUPS):
        raise ValueError(f"Expected groups among {', '.join(ALL_GROUPS)}; got {', '.join(sorted(unknown))}")
    if size not in SIZES or repetitions < 1:
        raise ValueError(
            f"Expected a size among {', '.join(SIZES)} and at least one repetition; got {size!r} and {repetitions}"
        )


def caltech(data_dir: Path | None, folder: Path) -> str | None:
    """Its training images in a file that any process can read, where they are on this machine."""
    if not any(entry.name == "caltech101" and entry.present for entry in listing(data_dir=data_dir)):
        return None
    path = folder / "train.pt"
    torch.save(load("caltech101", data_dir=data_dir).train, path)
    return str(path)
