"""The command line: commands alone; what they show is phrased and drawn in `display`.

Exit codes: 0 done, 1 failed at run time, 2 bad input, 130 interrupted. Nothing here imports torch before a
command needs it.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, CycloptsError, Parameter, Token

from sylvester import __version__
from sylvester.allocator import keep_freed_memory
from sylvester.app import display, machine, memory
from sylvester.app.config import (
    SETTINGS,
    WHOLE,
    Config,
    ConfigError,
    describe,
    from_text,
    kind_of,
    refused,
    resolve,
    whole,
)
from sylvester.app.paths import PathError, destination, usable
from sylvester.app.processes import Terminated
from sylvester.app.runs import DamagedRun, Run, RunError, RunFailure

if TYPE_CHECKING:
    from sylvester.app.data import Dataset
    from sylvester.app.experiments.comparison import Comparison, Entry
    from sylvester.app.experiments.sweep import Cell, Failure

    Flags = Any
    Values = Any
else:

    def _flag(name: str) -> Any:
        """A flag whose words the schema converts; cyclopts would round 1.5 epochs to 2."""

        def convert(_: object, tokens: Sequence[Token]) -> Any:
            return from_text(name, *(token.value for token in tokens))

        kind = kind_of(name)
        how = {} if kind is bool else {"converter": convert}
        if kind is list:  # one word, with commas
            how |= {"n_tokens": 1}
        shown = Parameter(help=describe(name), negative="", show_default=False, **how)
        types = {tuple: tuple[float, float], list: tuple}
        return Annotated[types.get(kind, kind) | None, shown]

    # The flags are the schema's fields. One that is not given is None, and file and preset decide.
    Flags = make_dataclass(
        "Flags",
        [(name, _flag(name), None) for name in SETTINGS],
        kw_only=True,
        namespace={"__module__": __name__},
    )

    def _values(name: str) -> Any:
        """A flag with several values of a setting, separated by commas; numbers of one value by colons."""

        def convert(_: object, tokens: Sequence[Token]) -> Any:
            words = tokens[0].value.split(",")
            if not all(words):
                raise ConfigError(f"Expected {name} to be values separated by commas; got {tokens[0].value!r}")
            return tuple(dict.fromkeys(_value(name, word) for word in words))

        return Annotated[tuple | None, Parameter(help=describe(name), negative="", n_tokens=1, converter=convert)]

    def _value(name: str, word: str) -> Any:
        kind = kind_of(name)
        if kind is bool:
            if word not in ("true", "false"):
                raise refused(name, word)
            return word == "true"
        return from_text(name, *(word.split(":") if kind in (tuple, list) else [word]))

    # One folder of data for all of a sweep; everything else may vary.
    Values = make_dataclass(
        "Values",
        [(name, _values(name), None) for name in SETTINGS if name != "data_dir"],
        kw_only=True,
        namespace={"__module__": __name__},
    )

PICTURES = 10_000  # images of one contact sheet at most
LARGEST_SEED = 2**63 - 1

# The format of a user's own images, for --help; `sylvester.app.data.custom` has the details.
OWN_IMAGES = """Your own images are one archive, `numpy.savez_compressed("mine.npz", train=..., valid=..., test=...)`:
arrays (N, H, W), (N, C, H, W) or (N, H, W, C) of uint8 (levels 0 to 255), bool, or float in [0, 1]. Without `valid`, a
tenth of the training images is held out, drawn by the seed. Images of nothing but 0 and 1 are Bernoulli, other bytes
categorical with 256 levels; grey floats need `--likelihood` or `likelihood="gaussian"` in the archive. With
`dynamic=True` in it, grey images are binarized afresh at each visit. Anything else in the archive is ignored.
The convolutional architectures need sides that are multiples of 4."""

app = App(
    name="sylvester",
    version=__version__,
    help="Train, evaluate and sample variational autoencoders with normalizing-flow posteriors.",
    help_flags=["--help", "-h"],
    suppress_keyboard_interrupt=False,  # main's caller ends the process
)
data_app = App(name="data", help=f"List, fetch and check the datasets.\n\n{OWN_IMAGES}")
app.command(data_app)


def _whole(low: int, high: int) -> Callable[[object, Sequence[Token]], int]:
    def convert(_: object, tokens: Sequence[Token]) -> int:
        word = tokens[0].value
        try:
            value = whole(word)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            raise ConfigError(
                f"Expected {tokens[0].keyword} to be a whole number from {low:,} to {high:,}; got {word!r}"
            )
        return value

    return convert


def _path(_: object, tokens: Sequence[Token]) -> Path:
    try:
        return usable(Path(tokens[0].value))
    except PathError as error:
        raise ConfigError(f"Expected a path that can be used; got {error}") from None


UserPath = Annotated[Path, Parameter(converter=_path)]
Quiet = Annotated[bool, Parameter(negative="", help="Show no progress.")]
Json = Annotated[bool, Parameter(negative="", help="Print the result as JSON.")]
DataDir = Annotated[
    Path | None, Parameter(converter=_path, help="Folder of the dataset's files; nothing is downloaded then.")
]


Format = Annotated[str, Parameter(help="table, md, csv, tex or json.")]
DryRun = Annotated[
    bool, Parameter(negative="", help="Show what is done and what is left, with an estimate of the time.")
]


def _fraction(_: object, tokens: Sequence[Token]) -> float:
    try:
        value = float(tokens[0].value)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1024:
        raise ConfigError(f"Expected {tokens[0].keyword} to be a number from 0 to 1,024; got {tokens[0].value!r}")
    return value


@dataclass(frozen=True, kw_only=True)
class Where:
    """Where the runs of a sweep are done."""

    workers: Annotated[
        int, Parameter(converter=_whole(1, 1024), help="Processes at a time, with their share of the threads.")
    ] = 1
    ray: Annotated[
        tuple[str, ...] | None,
        Parameter(consume_multiple=(0, 1), negative="", help="On the Ray cluster at this address, or this machine's."),
    ] = None
    cpus: Annotated[float, Parameter(converter=_fraction, help="Of the cluster, for each run.")] = 1
    gpus: Annotated[float, Parameter(converter=_fraction, help="Of the cluster, for each run.")] = 0
    retries: Annotated[
        int, Parameter(converter=_whole(0, 1000), help="How often a run is started again whose process was killed.")
    ] = 2


@app.command(
    help="Train a VAE, evaluate its best model on the test images and draw pictures; alone: T-SNF on the digits."
    f"\n\n{OWN_IMAGES}"
)
def train(
    *,
    flags: Annotated[Flags | None, Parameter(name="*")] = None,
    config: Annotated[Path | None, Parameter(converter=_path, help="TOML file of settings; flags override it.")] = None,
    out: Annotated[
        Path | None,
        Parameter(converter=_path, help="The run's folder, new or empty; by default the next free one in ./runs."),
    ] = None,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    settings = resolve(_given(flags), config)
    if out is not None:
        Run.require_free(out)
    _prepare(settings)
    data = _load(settings, quiet=quiet)

    from sylvester.app import models

    # Built before anything is written, so that settings that make no model leave nothing behind.
    counts = models.rehearse(settings, data.image_shape, data.likelihood)
    if not quiet:
        display.say(display.parameters(settings, data.name, counts))
    stem = f"{Path(settings.dataset).stem}-{settings.flow}"
    run = Run.create_next(Path("runs"), stem, settings) if out is None else Run.create(out, settings)
    _complete(run, data, quiet=quiet, json=json)


@app.command
def resume(run: UserPath, *, data_dir: DataDir = None, quiet: Quiet = False, json: Json = False) -> None:
    """Continue an interrupted run exactly as if it had not been interrupted."""
    opened = Run.open(run)
    result = opened.result
    if result is None:
        _prepare(opened.config)
        _complete(opened, _load(opened.config, data_dir, quiet=quiet), quiet=quiet, json=json)
        return
    try:
        opened.verify()
    except DamagedRun:
        with opened.locked():
            for note in opened.repair():
                display.say(note)
        opened.verify()  # names what could not be repaired
    if json:
        display.show_json(result)
    else:
        display.show(f"{run} is finished: {display.achieved(result)}.")


@app.command
def evaluate(
    run: UserPath,
    *,
    samples: Annotated[int, Parameter(converter=_whole(1, WHOLE), help="Importance samples per image.")] = 5000,
    seed: Annotated[int, Parameter(converter=_whole(0, LARGEST_SEED), help="Seed of the importance samples.")] = 0,
    data_dir: DataDir = None,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Estimate the test log-likelihood of a run's best model; called again, it goes on where it stopped."""
    opened = Run.open(run)
    opened.require_model()
    data = _load(opened.config, data_dir, quiet=quiet)

    from sylvester.app import results

    again = f"sylvester evaluate {run} --samples {samples} --seed {seed}"
    with _interruptible(again), display.counter("evaluating", quiet) as progress:
        figures = results.evaluate(opened, data, samples, seed=seed, progress=progress, notify=display.say)
    if json:
        display.show_json(figures)
    else:
        display.show(f"{display.scores(figures)}, {samples:,} samples per image.")
        if figures["warning"]:
            display.show(figures["warning"])


@app.command
def sample(
    run: UserPath,
    *,
    number: Annotated[
        int, Parameter(name=["--number", "-n"], converter=_whole(1, PICTURES), help="How many images.")
    ] = 64,
    out: Annotated[
        Path | None, Parameter(converter=_path, help="The PNG file; by default in the run's folder.")
    ] = None,
    seed: Annotated[int, Parameter(converter=_whole(0, LARGEST_SEED), help="Seed of the draws.")] = 0,
) -> None:
    """Draw images from a run's best model into a PNG file."""
    opened = Run.open(run)
    opened.require_model()
    target = opened.path / f"samples-{number}-seed{seed}.png" if out is None else out
    try:
        destination(target)
    except PathError as error:
        raise ConfigError(f"Expected a file for the picture; got {error}") from None

    from sylvester.app import figures

    figures.write(figures.samples(opened.model(), number, seed=seed), target)
    display.show(str(target))


@app.command
def demo(
    *,
    out: Annotated[
        Path, Parameter(converter=_path, help="Folder of the two runs and the picture; called again, it goes on there.")
    ] = Path("runs/demo"),
    quiet: Quiet = False,
) -> None:
    """What a flow is for, in two minutes: a Gaussian and a Sylvester posterior on the embedded digits, compared."""
    from sylvester.app import demonstration

    for flow in demonstration.FLOWS:
        run = demonstration.run(out, flow)
        if run.result is None:
            display.say(f"sylvester train --preset demo --flow {flow} --out {run.path}")
            _finish(run, _load(run.config, quiet=quiet), quiet=quiet)
    found = demonstration.conclude(out)
    for line in display.demonstration(found):
        display.show(line)


@app.command
def compare(
    *runs: UserPath,
    against: Annotated[
        str | None, Parameter(help="A flow: differences from its runs on the same data, paired by seed and test image.")
    ] = None,
    format: Format = "table",
) -> None:
    """One table over run folders, grouped by everything but the seed; by default over all in ./runs."""
    from sylvester.app.experiments import comparison

    _require_format(format)
    _show_comparison(comparison.compare(_folders(runs), against=against), format)


@app.command
def gaps(
    *runs: UserPath,
    number: Annotated[
        int, Parameter(name=["--number", "-n"], converter=_whole(1, WHOLE), help="How many images, drawn by the seed.")
    ] = 100,
    split: Annotated[str, Parameter(help="Whose images: test or valid.")] = "test",
    steps: Annotated[int, Parameter(converter=_whole(1, WHOLE), help="Of the refinement of each q.")] = 500,
    samples: Annotated[int, Parameter(converter=_whole(2, WHOLE), help="Draws of each refined q per image.")] = 1000,
    seed: Annotated[int, Parameter(converter=_whole(0, LARGEST_SEED), help="Seed of images and draws.")] = 0,
    data_dir: DataDir = None,
    format: Format = "table",
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Split log p(x) − ELBO into what the family lacks and what the encoder lacks, by refining q for each image.

    Of several runs, every family is refined under every decoder, as each decoder favours the q that it was trained
    with: give a Gaussian's run and a flow's.
    """
    from sylvester.app.experiments import tables

    form = "json" if json else format
    _require_format(form)
    if not runs:
        raise ConfigError("Expected the folders of one run or more; got none")
    if split not in ("test", "valid"):
        raise ConfigError(f"Expected --split to be test or valid; got {split!r}")
    opened = [Run.open(run) for run in dict.fromkeys(runs)]
    for run in opened:
        run.require_model()
    data = [_load(run.config, data_dir, quiet=quiet) for run in opened]

    from sylvester.app import gaps as report

    with display.counter("refining", quiet) as progress:
        found = report.report(
            opened, data, number=number, split=split, samples=samples, steps=steps, seed=seed, progress=progress
        )
    if form == "json":
        return display.show_json(report.as_json(found))
    display.show(tables.render(report.table(found), form))


@app.command
def sweep(
    *,
    values: Annotated[Values | None, Parameter(name="*")] = None,
    config: Annotated[Path | None, Parameter(converter=_path, help="TOML file of settings; flags override it.")] = None,
    out: Annotated[Path, Parameter(converter=_path, help="The folder of the sweep's runs.")] = Path("runs/sweep"),
    against: Annotated[str | None, Parameter(help="A flow: show the differences from its runs.")] = None,
    data_dir: DataDir = None,
    where: Annotated[Where | None, Parameter(name="*")] = None,
    dry_run: DryRun = False,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Train all combinations of settings, each flag with one value or several (--flow gaussian,iaf --seed 0,1,2).

    Stop it anywhere and call it again, or several times at once: what is finished is not repeated, what is half done
    goes on, what is damaged is named and done again.
    """
    from sylvester.app.experiments import sweep as sweeps

    fixed = {} if data_dir is None else {"data_dir": (data_dir,)}
    cells = sweeps.grid({**_given(values), **fixed})
    if against is not None and config is None and not any(cell.get("flow") == against for cell in cells):
        raise ConfigError(f"Expected a flow of the sweep to compare with; got {against}")
    load = _loader(quiet)
    planned = sweeps.plan(out, cells, file=config, load=load)
    if dry_run:
        return _show_plan(planned, where or Where(), load, quiet=quiet, json=json)
    failures = _sweep(planned, where or Where(), quiet=quiet)
    _show_comparison(_comparison_of(planned, against), "json" if json else "table")
    _require_all(failures)


@app.command
def reproduce(
    experiment: str,
    *,
    preset: Annotated[
        str | None, Parameter(help="Other settings than the paper's, such as quick; sizes of the flows follow.")
    ] = None,
    only: Annotated[
        str | None, Parameter(help="Some of the grid: SETTING=VALUE,…, such as dataset=caltech101,flow=iaf.")
    ] = None,
    seeds: Annotated[
        str | None, Parameter(help="By default 0,1,2, for Frey Faces the 123,321,231 of the paper's code.")
    ] = None,
    out: Annotated[
        Path | None, Parameter(converter=_path, help="The folder of the runs; by default runs/EXPERIMENT.")
    ] = None,
    data_dir: DataDir = None,
    where: Annotated[Where | None, Parameter(name="*")] = None,
    report: Annotated[
        Path | None, Parameter(converter=_path, help="Write an HTML page about the runs to this file, too.")
    ] = None,
    dry_run: DryRun = False,
    format: Format = "table",
    quiet: Quiet = False,
) -> None:
    """Do an experiment of the paper, table1, table2, table3 or figure3, or digits, and show it beside the published.

    A sweep like any other: stop it anywhere and call it again.
    """
    from sylvester.app.experiments import reproduction, tables
    from sylvester.app.experiments import sweep as sweeps

    _require_format(format)
    if report is not None:
        _require_destination(report)
    chosen = reproduction.choose(experiment, preset=preset, only=only, seeds=seeds, data_dir=data_dir)
    load = _loader(quiet)
    planned = sweeps.plan(out or Path("runs") / experiment, chosen.cells, load=load)
    if dry_run:
        return _show_plan(planned, where or Where(), load, quiet=quiet, json=format == "json")
    failures = _sweep(planned, where or Where(), quiet=quiet)
    for note in chosen.notes:
        display.say(note)
    if chosen.rows and format != "json":
        found = _comparison_of(planned, None)
        display.show(tables.render(reproduction.table(chosen, found), format))
    else:
        _show_comparison(_comparison_of(planned, chosen.baseline), format)
    if report is not None:
        _write_report(report, _comparison_of(planned, "gaussian"), quiet=quiet)
    _require_all(failures)


@app.command
def report(
    *runs: UserPath,
    out: Annotated[Path, Parameter(name=["--out", "-o"], converter=_path, help="The HTML file.")] = Path("report.html"),
    against: Annotated[
        str, Parameter(help="The flow that differences are taken against, where there are runs of it.")
    ] = "gaussian",
    quiet: Quiet = False,
) -> None:
    """Write one self-contained HTML page about runs, by default all in ./runs: tables, curves, pictures, time."""
    from sylvester.app.experiments import comparison

    folders = _folders(runs)
    _require_destination(out)
    _write_report(out, _compared(comparison.load(folders), against), quiet=quiet)
    display.show(str(out))


@data_app.command(name="list")
def data_list(*, data_dir: DataDir = None, json: Json = False) -> None:
    """The datasets, their sizes, licences and sources, and whether their files are here."""
    from sylvester.app.data import listing

    with _data_errors():
        rows = listing(data_dir=data_dir)
    if json:
        display.show_json([asdict(row) for row in rows])
    else:
        display.listing(rows)


@data_app.command(name="fetch")
def data_fetch(name: str, *, data_dir: DataDir = None, quiet: Quiet = False, json: Json = False) -> None:
    """Download a dataset into the cache folder, or check that its files are in --data-dir."""
    from sylvester.app.data import fetch

    with _data_errors():
        report = fetch(name, data_dir=data_dir, progress=not quiet)
    display.report(report, json)


@data_app.command(name="check")
def data_check(name: str, *, data_dir: DataDir = None, json: Json = False) -> None:
    """Compare a dataset's files with their checksums; exits with 2 where they are missing or differ."""
    from sylvester.app.data import check

    with _data_errors():
        report = check(name, data_dir=data_dir)
    display.report(report, json)
    if not report.ok:
        raise ConfigError(report.problem or f"Expected whole files of {name}; got others")


def main() -> None:
    keep_freed_memory()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal without a minus sign is no reason to fail
    machine.wait_passively(os.environ)
    try:
        app(exit_on_error=False, print_error=False, result_action="return_value")
    except CycloptsError as error:
        _fail(error.__cause__ if isinstance(error.__cause__, ConfigError) else error, 2)
    except (ConfigError, RunError, machine.MachineError) as error:
        _fail(error, 2)
    except RunFailure as error:
        _fail(error, 1)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        advice = "; free some space, then resume the run" if full else ""
        _fail(f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}{advice}", 1)
    except (MemoryError, RuntimeError) as error:
        if not memory.exhausted(error):
            raise
        _fail("Not enough memory: close other programs, or start again with a smaller batch size or model", 1)


def _fail(reason: object, code: int) -> None:
    print(f"sylvester: {' '.join(str(reason).split())}", file=sys.stderr)
    sys.exit(code)


def _given(flags: Any) -> dict[str, Any]:
    """What the user said on the command line, by the schema's names."""
    given = {field.name: getattr(flags, field.name) for field in fields(flags)} if flags is not None else {}
    return {name: value for name, value in given.items() if value is not None}


def _folders(runs: Sequence[Path]) -> Sequence[Path]:
    if not runs and not Path("runs").is_dir():
        raise ConfigError("Expected run folders, or some in ./runs; got neither")
    return runs or [Path("runs")]


def _require_format(form: str) -> None:
    from sylvester.app.experiments.tables import FORMATS

    if form not in FORMATS:
        raise ConfigError(f"Expected --format to be one of {', '.join(FORMATS)}; got {form!r}")


def _show_comparison(found: Comparison, form: str) -> None:
    from sylvester.app.experiments import tables

    if form == "json":
        return display.show_json(tables.comparison_json(found))
    table = tables.comparison_table(found)
    if form == "csv":
        display.show(tables.comparison_csv(found))
        for note in table.notes[1:]:
            display.say(note)
    else:
        display.show(tables.render(table, form))


def _comparison_of(planned: Sequence[Cell], against: str | None) -> Comparison:
    from sylvester.app.experiments import comparison

    return _compared([comparison.inspect(cell.path) for cell in planned], against)


def _compared(entries: Sequence[Entry], against: str | None) -> Comparison:
    """Against a flow where there is a finished run of it, alone otherwise."""
    from sylvester.app.experiments import comparison

    finished = {entry.config.flow for entry in entries if entry.state == "finished"}
    return comparison.compare_entries(entries, against=against if against in finished else None)


def _require_destination(report: Path) -> None:
    try:
        destination(report)
    except PathError as error:
        raise ConfigError(f"Expected a file for the report; got {error}") from None


def _write_report(path: Path, found: Comparison, *, quiet: bool) -> None:
    from sylvester.app.report import html_of
    from sylvester.app.runs import write_text

    with display.counter("drawing", quiet) as progress:
        write_text(path, html_of(found, progress=progress))


def _loader(quiet: bool) -> Callable[[Config], Dataset]:
    """Each dataset once, by the first seed that asks: sweeps look at its files and sizes alone."""
    loaded: dict[tuple[Any, ...], Dataset] = {}

    def load(config: Config) -> Dataset:
        key = (config.dataset, config.data_dir, config.likelihood)
        if key not in loaded:
            loaded[key] = _load(config, quiet=quiet)
        return loaded[key]

    return load


def _sweep(planned: Sequence[Cell], where: Where, *, quiet: bool) -> list[Failure]:
    """Finish all runs, here or on a cluster."""
    from sylvester.app.experiments import sweep as sweeps

    states = [sweeps.examine(cell) for cell in planned]
    if all(state.condition == "finished" for state in states):
        if not quiet:
            display.say(f"All {len(planned)} runs are finished already.")
        return []
    backend: sweeps.Backend
    if where.ray is not None:
        from sylvester.app.experiments.cluster import Cluster

        address = where.ray[0] if where.ray else None
        backend = Cluster(address, cpus=where.cpus, gpus=where.gpus, retries=where.retries)
    else:
        backend = sweeps.Local(where.workers, sweeps.share(where.workers))
    with _interruptible("the same command"), display.SweepBar(quiet) as report:
        return sweeps.work(planned, backend, retries=where.retries, report=report, notify=display.say)


def _show_plan(
    planned: Sequence[Cell], where: Where, load: Callable[[Config], Dataset], *, quiet: bool, json: bool
) -> None:
    """What is done, half done and left, and how long it will take at most."""
    import torch

    from sylvester.app.experiments import estimate
    from sylvester.app.experiments import sweep as sweeps
    from sylvester.app.experiments.identity import settings_of

    threads = sweeps.share(where.workers)
    if threads is not None and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(threads)
    speeds: dict[str, estimate.Speed] = {}
    lines: list[dict[str, Any]] = []
    seconds = 0.0
    with display.counter("measuring", quiet) as progress:
        for number, cell in enumerate(planned, start=1):
            state = sweeps.examine(cell)
            left = 0.0
            if state.condition != "finished":
                key = f"{cell.config.dataset} {settings_of(cell.config, seed=False)}"
                if key not in speeds:
                    speeds[key] = estimate.calibrate(cell.config, load(cell.config))
                left = speeds[key].left(cell.config, state.epochs)
            seconds += left
            lines.append({"path": str(cell.path), "state": state.condition, "epochs": state.epochs, "seconds": left})
            progress(number, len(planned))
    if json:
        return display.show_json({"runs": lines, "seconds": seconds / where.workers})
    for line, cell in zip(lines, planned, strict=True):
        about = "" if line["state"] == "finished" else f", at most {display.duration(line['seconds'])} left"
        epochs = f"{line['epochs']} of {cell.config.epochs_at_most} epochs"
        display.show(f"{line['state']:10}  {line['path']}  {epochs}{about}")
    counts = Counter(line["state"] for line in lines)
    parts = ", ".join(f"{count} {condition}" for condition, count in counts.items())
    display.show(
        f"{len(planned)} runs: {parts}. At most {display.duration(seconds / where.workers)} on this machine with "
        f"{where.workers} at a time; early stopping makes it less."
    )


def _require_all(failures: Sequence[Failure]) -> None:
    if failures:
        first = failures[0]
        raise RunFailure(f"{len(failures)} of the runs failed; the first was {first.cell.path}: {first.reason}")


def _prepare(config: Config) -> None:
    """Before torch is loaded, which reads the environment once."""
    if config.precision == "bf16-mixed":
        machine.allow_bf16(os.environ)


def _complete(run: Run, data: Dataset, *, quiet: bool, json: bool) -> None:
    """Train, evaluate and draw what the run still lacks, and say what came of it."""
    result = _finish(run, data, quiet=quiet)
    if json:
        return display.show_json(result)
    if result["warning"] and not quiet:
        display.say(result["warning"])
    for line in display.conclusion(run.path, run.config, result):
        display.show(line)


def _finish(run: Run, data: Dataset, *, quiet: bool) -> dict[str, Any]:
    from sylvester.app import results, training

    with run.locked() as lock, _interruptible(f"sylvester resume {run.path}"):
        bar = display.TrainingBar(run.config.epochs_at_most, quiet)
        history = training.train(run, data, lock=lock, reporting=bar, notify=display.say)
        with display.counter("evaluating", quiet) as progress:
            return results.conclude(run, data, history, progress=progress, notify=display.say)


@contextmanager
def _interruptible(command: str) -> Iterator[None]:
    try:
        yield
    except (KeyboardInterrupt, Terminated):
        display.say(f"Interrupted; {command} continues where it stopped.")
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
    from sylvester.app.runs import data_of

    with _data_errors():
        return data_of(config, data_dir, progress=not quiet)
