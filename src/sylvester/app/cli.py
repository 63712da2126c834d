"""The command line: the only module that prints. Progress goes to stderr, results to stdout.

Exit codes: 0 done, 1 failed at run time, 2 bad input, 130 interrupted. Nothing here imports torch before a
command needs it.
"""

from __future__ import annotations

import errno
import json as jsonlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, fields, make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, CycloptsError, Parameter
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from sylvester import __version__
from sylvester.app.config import Config, ConfigError, describe, resolve
from sylvester.app.processes import Terminated
from sylvester.app.runs import DamagedRun, Run, RunError, RunFailure

if TYPE_CHECKING:
    from sylvester.app import training
    from sylvester.app.data import Dataset

    Flags = Any
else:
    # The flags are the schema's fields. One that is not given is None, and file and preset decide.
    Flags = make_dataclass(
        "Flags",
        [
            (
                name,
                Annotated[field.annotation | None, Parameter(help=describe(name), negative="", show_default=False)],
                None,
            )
            for name, field in Config.model_fields.items()
        ],
        kw_only=True,
        namespace={"__module__": __name__},
    )

app = App(
    name="sylvester",
    version=__version__,
    help="Train, evaluate and sample variational autoencoders with normalizing-flow posteriors.",
    help_flags=["--help", "-h"],
    suppress_keyboard_interrupt=False,  # main's caller ends the process
)
data_app = App(name="data", help="List, fetch and check the datasets.")
app.command(data_app)

messages = Console(stderr=True, highlight=False, soft_wrap=True)

Quiet = Annotated[bool, Parameter(negative="", help="Show no progress.")]
Json = Annotated[bool, Parameter(negative="", help="Print the result as JSON.")]
DataDir = Annotated[Path | None, Parameter(help="Folder of the dataset's files; nothing is downloaded then.")]


@app.command
def train(
    *,
    flags: Annotated[Flags | None, Parameter(name="*")] = None,
    config: Path | None = None,
    out: Path | None = None,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Train a VAE, evaluate its best model on the test images and draw pictures; alone: T-SNF on the digits.

    Parameters
    ----------
    config
        TOML file of settings; flags override it.
    out
        The run's folder, new or empty; by default the next free one in ./runs.
    """
    given = {field.name: getattr(flags, field.name) for field in fields(flags)} if flags is not None else {}
    settings = resolve({key: value for key, value in given.items() if value is not None}, config)
    if out is not None:
        Run.require_free(out)
    data = _load(settings, quiet=quiet)

    from sylvester.app import models

    # Built before anything is written, so that settings that make no model leave nothing behind.
    counts = models.parameter_counts(models.build(settings, data.image_shape, data.likelihood))
    if not quiet:
        parts = ", ".join(f"{name} {count:,}" for name, count in counts.items() if name != "total")
        messages.print(f"{settings.flow} on {data.name}: {counts['total']:,} parameters ({parts})")
    stem = f"{Path(settings.dataset).stem}-{settings.flow}"
    run = Run.create_next(Path("runs"), stem, settings) if out is None else Run.create(out, settings)
    _complete(run, data, quiet=quiet, json=json)


@app.command
def resume(run: Path, *, data_dir: DataDir = None, quiet: Quiet = False, json: Json = False) -> None:
    """Continue an interrupted run exactly as if it had not been interrupted."""
    opened = Run.open(run)
    result = opened.result
    if result is None:
        _complete(opened, _load(opened.config, data_dir, quiet=quiet), quiet=quiet, json=json)
        return
    try:
        opened.verify()
    except DamagedRun:
        with opened.locked():
            for note in opened.repair():
                messages.print(note)
        opened.verify()  # names what could not be repaired
    if json:
        _print_json(result)
    else:
        print(f"{run} is finished: {_achieved(result)}.")


@app.command
def evaluate(
    run: Path,
    *,
    samples: Annotated[int, Parameter(help="Importance samples an image.")] = 5000,
    seed: Annotated[int, Parameter(help="Seed of the importance samples.")] = 0,
    data_dir: DataDir = None,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Estimate the test log-likelihood of a run's best model; called again, it goes on where it stopped."""
    if samples < 1 or seed < 0:
        raise ConfigError(f"Expected samples >= 1 and seed >= 0; got samples = {samples}, seed = {seed}")
    opened = Run.open(run)
    opened.require_model()
    data = _load(opened.config, data_dir, quiet=quiet)

    from sylvester.app import results

    again = f"sylvester evaluate {run} --samples {samples} --seed {seed}"
    with _interruptible(again), _counter("evaluating", quiet) as progress:
        figures = results.evaluate(opened, data, samples, seed=seed, progress=progress, notify=messages.print)
    if json:
        _print_json(figures)
    else:
        print(f"{_figures(figures)}, {samples:,} samples an image.")
        if figures["warning"]:
            print(figures["warning"])


@app.command
def sample(
    run: Path,
    *,
    number: Annotated[int, Parameter(name=["--number", "-n"], help="How many images.")] = 64,
    out: Annotated[Path | None, Parameter(help="The PNG file; by default in the run's folder.")] = None,
    seed: Annotated[int, Parameter(help="Seed of the draws.")] = 0,
) -> None:
    """Draw images from a run's best model into a PNG file."""
    if number < 1 or seed < 0:
        raise ConfigError(f"Expected number >= 1 and seed >= 0; got number = {number}, seed = {seed}")
    opened = Run.open(run)
    opened.require_model()
    target = opened.path / f"samples-{number}-seed{seed}.png" if out is None else out
    if not target.parent.is_dir():
        raise ConfigError(f"Expected an existing folder for the picture; got {target.parent}")

    from sylvester.app import figures

    figures.samples(opened.model(), target, number, seed=seed)
    print(target)


@data_app.command(name="list")
def data_list(*, data_dir: DataDir = None, json: Json = False) -> None:
    """The datasets, their sizes and sources, and whether their files are here."""
    from sylvester.app.data import listing

    with _data_errors():
        rows = listing(data_dir=data_dir)
    if json:
        return _print_json([asdict(row) for row in rows])
    table = Table("name", "image", "train / valid / test", "likelihood", "here", "licence", box=None)
    for row in rows:
        sizes = " / ".join(f"{count:,}" for count in row.splits.values())
        shape = " x ".join(map(str, row.image))
        table.add_row(row.name, shape, sizes, row.likelihood, "yes" if row.present else "no", row.licence)
    Console().print(table)


@data_app.command(name="fetch")
def data_fetch(name: str, *, data_dir: DataDir = None, quiet: Quiet = False, json: Json = False) -> None:
    """Download a dataset into the cache folder, or check that its files are in --data-dir."""
    from sylvester.app.data import fetch

    with _data_errors():
        report = fetch(name, data_dir=data_dir, progress=not quiet)
    _print_report(report, json)


@data_app.command(name="check")
def data_check(name: str, *, data_dir: DataDir = None, json: Json = False) -> None:
    """Compare a dataset's files with their checksums; exits with 2 where they are missing or differ."""
    from sylvester.app.data import check

    with _data_errors():
        report = check(name, data_dir=data_dir)
    _print_report(report, json)
    if not report.ok:
        raise ConfigError(report.problem or f"Expected whole files of {name}; got others")


@app.command
def bench(
    *,
    only: Annotated[list[str] | None, Parameter(negative="", help="Measure this group alone; may be repeated.")] = None,
    size: Annotated[str, Parameter(help="The paper's sizes, or tiny ones to see that it runs.")] = "paper",
    repetitions: Annotated[int, Parameter(help="Of each measurement, of which the fastest counts.")] = 5,
    out: Annotated[
        Path, Parameter(help="The JSON file; a page (.md) and a figure (.svg) of the same name go beside it.")
    ] = Path("benchmarks.json"),
    data_dir: DataDir = None,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Race the library against the paper's way of running its experiments, and against its peers."""
    if not out.parent.is_dir():
        raise ConfigError(f"Expected an existing folder for the report; got {out.parent}")

    from sylvester.app.bench import benchmarks

    report, runner, suite = (benchmarks(name) for name in ("report", "runner", "suite"))
    options = {"size": size, "repetitions": repetitions}
    try:
        suite.check(only or (), **options)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    try:
        with _counter("measuring", quiet) as progress, _data_errors():
            found = suite.measure(only or (), **options, data_dir=data_dir, progress=progress)
    except runner.BenchmarkError as error:
        raise RunFailure(str(error)) from error
    report.save(found, out)
    if json:
        return _print_json(found)
    for table in report.tables(found):
        Console().print(table)
    print(out)


def main() -> None:
    try:
        app(exit_on_error=False, print_error=False, result_action="return_value")
    except (CycloptsError, ConfigError, RunError) as error:
        _fail(error, 2)
    except RunFailure as error:
        _fail(error, 1)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        advice = "; free some space, then resume the run" if full else ""
        _fail(f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}{advice}", 1)


def _fail(reason: object, code: int) -> None:
    print(f"sylvester: {' '.join(str(reason).split())}", file=sys.stderr)
    sys.exit(code)


def _complete(run: Run, data: Dataset, *, quiet: bool, json: bool) -> None:
    """Train, evaluate and draw what the run still lacks, and say what came of it."""
    from sylvester.app import results, training

    with run.locked() as lock, _interruptible(f"sylvester resume {run.path}"):
        bar = TrainingBar(run.config.epochs, quiet)
        history = training.train(run, data, lock=lock, reporting=bar, notify=messages.print)
        with _counter("evaluating", quiet) as progress:
            result = results.conclude(run, data, history, progress=progress, notify=messages.print)
    if json:
        return _print_json(result)
    if result["warning"] and not quiet:
        messages.print(result["warning"])
    print(f"{_achieved(result)}.")
    print(f"{run.path} holds the model, its figures (result.json), samples.png and reconstructions.png.")
    other = "orthogonal-sylvester" if run.config.flow == "triangular-sylvester" else "triangular-sylvester"
    print(
        f"Next: sylvester sample {run.path} -n 64, sylvester evaluate {run.path} --samples 5000, "
        f"or compare with sylvester train --dataset {run.config.dataset} --flow {other}"
    )


def _achieved(result: Mapping[str, Any]) -> str:
    return (
        f"{result['flow']['name']} on {result['dataset']['name']}: {_figures(result)}, "
        f"best of {result['epochs']} epochs at {result['best_epoch']}, {result['timing']['seconds']:.0f} s"
    )


def _figures(figures: Mapping[str, Any]) -> str:
    """−ELBO and NLL for a person: with both errors, in bits per dimension where those are customary."""
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


class TrainingBar:
    """Live figures of training."""

    def __init__(self, epochs: int, quiet: bool) -> None:
        self.epochs, self.quiet = epochs, quiet

    def __enter__(self) -> Callable[[training.Progress], None]:
        self.bar = Progress(
            TextColumn("epoch {task.fields[epoch]}/{task.fields[epochs]}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(compact=True),  # all of it fits 80 columns
            console=messages,
            disable=self.quiet,
        )
        self.task = self.bar.add_task("", total=self.epochs, epoch=0, epochs=self.epochs, figures="")
        self.valid = ""
        self.bar.start()
        return self.show

    def __exit__(self, *error: object) -> None:
        self.bar.stop()

    def show(self, progress: training.Progress) -> None:
        figures = progress.figures
        if progress.valid is not None:
            self.valid = f", valid. {progress.valid['neg_elbo']:.2f}"
        self.bar.update(
            self.task,
            completed=progress.epoch - 1 + progress.batch / progress.batches,
            epoch=progress.epoch,
            figures=f"−ELBO {figures['neg_elbo']:.2f} = recon. {figures['reconstruction']:.2f}"
            f" + KL {figures['kl']:.2f}{self.valid}",
        )


@contextmanager
def _counter(what: str, quiet: bool) -> Iterator[Callable[..., None]]:
    """A bar that is told (done, total), and what is being done where that changes."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=messages, disable=quiet, transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total, now=what: bar.update(task, completed=done, total=total, description=now)


@contextmanager
def _interruptible(command: str) -> Iterator[None]:
    try:
        yield
    except (KeyboardInterrupt, Terminated):
        messages.print(f"Interrupted; {command} continues where it stopped.")
        raise


@contextmanager
def _data_errors() -> Iterator[None]:
    """Data that cannot be used is bad input like any other; known only once the data module is loaded."""
    from sylvester.app.data import DataError

    try:
        yield
    except DataError as error:
        raise ConfigError(str(error)) from error


def _load(config: Config, data_dir: Path | None = None, *, quiet: bool) -> Dataset:
    from sylvester.app.data import load

    with _data_errors():
        return load(config.dataset, data_dir=data_dir or config.data_dir, seed=config.seed, progress=not quiet)


def _print_json(value: Any) -> None:
    print(jsonlib.dumps(value, indent=2, allow_nan=False))


def _print_report(report: Any, json: bool) -> None:
    if json:
        return _print_json(asdict(report))
    for file in report.files:
        print(f"{'ok ' if file.ok else 'BAD'} {file.name}  {file.path or 'not found'}")
