"""What a person sees: bars, tables and sentences. Progress goes to stderr, results to stdout."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

if TYPE_CHECKING:
    from pathlib import Path

    from sylvester.app import training
    from sylvester.app.config import Config
    from sylvester.app.data import Listing, Report
    from sylvester.app.demonstration import Demonstration
    from sylvester.app.experiments import sweep

WIDE = 80  # columns: with fewer, a line says less
_PAUSE = 1.0  # seconds between two looks at the runs of a sweep

messages = Console(stderr=True, highlight=False, soft_wrap=True)


class Line(Progress):
    """A bar that leaves room for the ``^C`` that terminals echo: wrapped, it would leave the bar there twice."""

    def get_renderable(self) -> RenderableType:
        return Padding(super().get_renderable(), (0, 3, 0, 0))


class TrainingBar:
    """Live figures of training. The display starts with the first of them, which may be in another process."""

    def __init__(self, epochs: int, quiet: bool) -> None:
        self.epochs, self.quiet = epochs, quiet
        self.bar: Progress | None = None
        self.valid = ""

    def __enter__(self) -> Callable[[training.Progress], None]:
        return self.show

    def __exit__(self, *error: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def show(self, progress: training.Progress) -> None:
        if self.quiet:
            return
        if self.bar is None:
            self.bar = bar("epoch {task.fields[epoch]}/{task.total}", "{task.fields[figures]}")
            self.task = self.bar.add_task("", total=self.epochs, epoch=progress.epoch, figures="")
            self.bar.start()
        if progress.valid is not None:
            self.valid = f", valid. {progress.valid['neg_elbo']:.2f}"
        self.bar.update(
            self.task,
            completed=progress.epoch - 1 + progress.batch / progress.batches,
            epoch=progress.epoch,
            figures=self.figures(progress.figures, self.bar.console.width),
        )

    def figures(self, figures: Mapping[str, float], width: int) -> str:
        parts = f" = recon. {figures['reconstruction']:.2f} + KL {figures['kl']:.2f}" if width >= WIDE else ""
        return f"−ELBO {figures['neg_elbo']:.2f}{parts}{self.valid}"


class SweepBar:
    """A sweep as a whole, and below it the runs that are being done here."""

    def __init__(self, quiet: bool) -> None:
        self.bar = bar("{task.description}", "{task.fields[figures]}", disable=quiet, transient=True)
        self.tasks: dict[str, Any] = {}
        self.total: Any = None
        self.done, self.next = 0, 0.0

    def __enter__(self) -> Callable[[sweep.Status], None]:
        self.bar.start()
        return self.show

    def __exit__(self, *error: object) -> None:
        self.bar.stop()

    def show(self, status: sweep.Status) -> None:
        now = time.monotonic()
        if self.bar.disable or (status.finished + status.failed == self.done and now < self.next):
            return
        self.done, self.next = status.finished + status.failed, now + _PAUSE
        if self.total is None:
            self.total = self.bar.add_task("runs", total=status.total, figures="")
        parts = 0.0
        for name in self.tasks.keys() - {cell.path.name for cell in status.running}:
            self.bar.remove_task(self.tasks.pop(name))
        for cell in status.running:
            name, epochs = cell.path.name, cell.config.epochs_at_most
            done, valid = _progress(cell.path)
            parts += done / epochs
            figures = f"epoch {done}/{epochs}{valid}"
            if name not in self.tasks:
                self.tasks[name] = self.bar.add_task(f"  {name}", total=epochs, figures=figures)
            self.bar.update(self.tasks[name], completed=done, figures=figures)
        others = f", {status.elsewhere} elsewhere" if status.elsewhere else ""
        failed = f", {status.failed} failed" if status.failed else ""
        figures = f"{status.finished} of {status.total} finished{others}{failed}"
        self.bar.update(self.total, completed=status.finished + status.failed + parts, figures=figures)


def _progress(run: Path) -> tuple[int, str]:
    """The epochs so far and the last validation −ELBO, of a run that another process writes."""
    try:
        lines = (run / "metrics.jsonl").read_bytes().splitlines()
        bounds = (json.loads(line).get("valid_neg_elbo") for line in reversed(lines))
        bound = next((bound for bound in bounds if bound is not None), None)
        return len(lines), "" if bound is None else f", valid. −ELBO {bound:.2f}"
    except (OSError, ValueError):  # none yet, or in the midst of a line
        return 0, ""


@contextmanager
def counter(what: str, quiet: bool) -> Iterator[Callable[..., None]]:
    """A bar that is told (done, total), and what is being done where that changes."""
    with bar("{task.description}", MofNCompleteColumn(), disable=quiet, transient=True) as display:
        task = display.add_task(what, total=None)
        yield lambda done, total, now=what: display.update(task, completed=done, total=total, description=now)


def bar(before: str, after: str | MofNCompleteColumn, *, disable: bool = False, transient: bool = False) -> Progress:
    """A line of text, bar and text, and what remains where there is room for it."""
    columns = [
        TextColumn(before, table_column=Column(no_wrap=True)),
        BarColumn(bar_width=None, table_column=Column(ratio=1)),
        TextColumn(after, table_column=Column(no_wrap=True)) if isinstance(after, str) else after,
    ]
    if messages.width >= WIDE:
        columns.append(TimeRemainingColumn(compact=True))
    # Where there is no terminal, a bar that is to vanish would leave a blank line.
    unseen = disable or (transient and not messages.is_terminal)
    return Line(*columns, console=messages, expand=True, disable=unseen, transient=transient)


def say(text: str) -> None:
    messages.print(text, markup=False)


def show(text: str) -> None:
    print(text)


def show_json(value: Any) -> None:
    print(json.dumps(value, indent=2, allow_nan=False))


def parameters(config: Config, dataset: str, counts: Mapping[str, int]) -> str:
    parts = ", ".join(f"{name} {count:,}" for name, count in counts.items() if name != "total")
    return f"{config.flow} on {dataset}: {counts['total']:,} parameters ({parts})"


def achieved(result: Mapping[str, Any]) -> str:
    return (
        f"{result['flow']['name']} on {result['dataset']['name']}: {scores(result)}, "
        f"best of {result['epochs']} epochs at {result['best_epoch']}{_averaged(result)}, "
        f"{result['timing']['seconds']:.0f} s"
    )


def _averaged(result: Mapping[str, Any]) -> str:
    """Which average of the weights was best, where some were tracked."""
    average = result.get("average")
    if average is None:
        return ""
    return f" (weights averaged with decay {average:g})" if average else " (weights not averaged)"


def scores(figures: Mapping[str, Any]) -> str:
    """−ELBO and NLL for a person: with both errors, in bits per dimension where those are customary."""
    if figures["neg_elbo"] is None:
        return f"validation −ELBO {figures['valid_neg_elbo']:.3f} nats, not tested"
    bits = figures["bits_per_dim"]
    shown, unit = (figures, "nats") if bits is None else (bits, "bits per dimension")
    text = f"test −ELBO {shown['neg_elbo']:.3f}"
    if shown["nll"] is not None:
        text += (
            f", NLL {shown['nll']:.3f} ± {_number(shown['nll_std_error'])} over images"
            f" ± {_number(shown['nll_mc_error'])} Monte Carlo"
        )
    return f"{text} {unit}"


def _number(value: float | None) -> str:
    return "?" if value is None else f"{value:.3f}"


def conclusion(path: Path, config: Config, result: Mapping[str, Any]) -> Iterator[str]:
    """What came of a run, and what to do with it."""
    yield f"{achieved(result)}."
    yield f"{path} holds the model, its figures (result.json), samples.png and reconstructions.png."
    other = "orthogonal-sylvester" if config.flow == "triangular-sylvester" else "triangular-sylvester"
    yield (
        f"Next: sylvester sample {path} -n 64, sylvester evaluate {path} --samples 5000, "
        f"or sylvester train --dataset {config.dataset} --flow {other} and sylvester compare"
    )


def duration(seconds: float) -> str:
    """In the unit that a person would choose."""
    for unit, length in (("days", 86_400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 1.5 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} seconds"


def demonstration(found: Demonstration) -> Iterator[str]:
    """Two posteriors and what one gains over the other."""
    for flow, result in found.results.items():
        yield f"{flow:21} {scores(result)}"
    gains = {"−ELBO": found.neg_elbo, "NLL": found.nll}
    text = ", ".join(f"{name} {-gain.mean:+.3f} ± {_number(gain.std_error)}" for name, gain in gains.items())
    yield f"What the flow gains, paired over {found.nll.images} test images, one seed: {text} nats per image."
    gaps = " and ".join(f"{gap:.2f}" for gap in found.gaps.values())
    yield f"{found.picture} shows the digit that the Gaussian fits worst: KL(q ‖ p) of {gaps} nats."
    yield f"Next: sylvester report {found.folder} -o {found.folder / 'report.html'}"


def listing(rows: Sequence[Listing]) -> None:
    """The datasets, in 80 columns; licences are sentences, and stand below."""
    table = Table("name", "image", "train / valid / test", "likelihood", "here", box=None)
    for row in rows:
        sizes = " / ".join(f"{count:,}" for count in row.splits.values())
        shape = " x ".join(map(str, row.image))
        table.add_row(row.name, shape, sizes, row.likelihood, "yes" if row.present else "no")
    console = Console(highlight=False)
    console.print(table)
    console.print("\nLicences")
    for row in rows:
        console.print(f" {row.name}: {row.licence}", markup=False)


def report(found: Report, as_json: bool) -> None:
    if as_json:
        return show_json(asdict(found))
    for file in found.files:
        print(f"{'ok ' if file.ok else 'BAD'} {file.name}  {file.path or 'not found'}")
