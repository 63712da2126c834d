"""The command line: commands alone; their flags are in `flags`, what they show is phrased and drawn in `display`.

Exit codes: 0 done, 1 failed at run time, 2 bad input, 130 interrupted. Nothing here imports torch before a
command needs it.
"""

from __future__ import annotations

import errno
import io
import itertools
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, CycloptsError, Group, Parameter

from sylvester import __version__
from sylvester.allocator import keep_freed_memory
from sylvester.app import completion, display, machine, memory
from sylvester.app.config import WHOLE, Config, ConfigError, resolve
from sylvester.app.flags import (
    GROUPS,
    DataDir,
    DatasetName,
    DryRun,
    Experiment,
    Flags,
    Flow,
    Folders,
    Format,
    Json,
    Preset,
    Quiet,
    RunFolder,
    Shell,
    Split,
    TomlFile,
    Values,
    Where,
    count,
    counts,
    given,
    misread,
    path,
    place,
)
from sylvester.app.paths import PathError, destination, folder
from sylvester.app.processes import Terminated
from sylvester.app.runs import DamagedRun, Run, RunError, RunFailure

if TYPE_CHECKING:
    from sylvester.app.data import Dataset
    from sylvester.app.experiments.comparison import Comparison, Entry
    from sylvester.app.experiments.sweep import Cell, Failure

PICTURES = 10_000  # images of one contact sheet at most
LARGEST_SEED = 2**63 - 1

_order = itertools.count()
_MODEL, _MANY, _REST = (
    Group(name, sort_key=place) for place, name in enumerate(("One model", "Several models", "Data and shell"))
)


def examples(*lines: str) -> str:
    """The end of a help page."""
    return "\n".join(("Example:" if len(lines) == 1 else "Examples:", "", "```sh", *lines, "```"))


def _command(group: Group | None, *lines: str, **options: Any) -> dict[str, Any]:
    """How a command stands in --help: among its like, in the order of this file, its page ending in examples."""
    found = {"sort_key": next(_order), "help_epilogue": examples(*lines), **options}
    return found if group is None else {"group": group, **found}


# The format of a user's own images, for --help; `sylvester.app.data.custom` has the details.
OWN_IMAGES = """Your own images are one archive, `numpy.savez_compressed("mine.npz", train=..., valid=..., test=...)`:
arrays (N, H, W), (N, C, H, W) or (N, H, W, C) of uint8 (levels 0 to 255), bool, or float in [0, 1]. Without `valid`, a
tenth of the training images is held out, drawn by the seed. Images of nothing but 0 and 1, or the bytes 0 and 255, are
Bernoulli, other bytes categorical with 256 levels; grey floats need `--likelihood` or `likelihood="gaussian"` in the
archive. With `dynamic=True` in it, grey images are binarized afresh at each visit. Anything else in it is ignored.
The convolutional architectures need sides that are multiples of 4."""

app = App(
    name="sylvester",
    version=__version__,
    help="""Train, evaluate and sample variational autoencoders with normalizing-flow posteriors.

    `sylvester demo` shows in two minutes what a flow is for, `sylvester train` trains a model on the embedded digits.
    Every run is a folder, and the other commands take such folders. `sylvester COMMAND --help` explains a command.

    Exit codes: 0 done, 1 failed while running, 2 bad input, 130 interrupted.
    """,
    help_flags=["--help", "-h"],
    help_epilogue=examples("sylvester demo", "sylvester train --flow iaf", "sylvester compare --against gaussian"),
    group_parameters=Group("Options", sort_key=-1),
    suppress_keyboard_interrupt=False,  # main's caller ends the process
)
app["--help"].group = app["--version"].group = Group("Options", sort_key=9)


@app.command(
    **_command(
        _MODEL,
        "sylvester train --flow orthogonal-sylvester --rank 8 --seed 1",
        "sylvester train --dataset mine.npz --preset paper --out runs/mine",
    )
)
def train(
    *,
    flags: Annotated[Flags | None, Parameter(name="*")] = None,
    config: TomlFile = None,
    out: Annotated[
        Path | None, place("The run's folder, new or empty; by default the next free one in ./runs.")
    ] = None,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Train a VAE, score its best model on the test images, and draw pictures.

    Without flags: a triangular Sylvester flow on the embedded digits, in a minute and a half on two cores. Flags come
    before the file of `--config`, and that before the preset. Defaults are those of the preset quick, and of another
    where it differs. Ctrl-C does no harm: `sylvester resume RUN` goes on. `sylvester data --help` says what an archive
    of your own images is.
    """
    settings = resolve(given(flags), config)
    if out is None:
        _require_folder(Path("runs"))
    else:
        Run.require_free(out)
    _prepare(settings, settings.devices)
    data = _load(settings, quiet=quiet)

    from sylvester.app import models

    # Built before anything is written, so that settings that make no model leave nothing behind.
    counts = models.rehearse(settings, data.image_shape, data.likelihood)
    if not quiet:
        display.say(display.parameters(settings, data.name, counts))
    stem = f"{Path(settings.dataset).stem}-{settings.flow}"
    run = Run.create_next(Path("runs"), stem, settings) if out is None else Run.create(out, settings)
    _complete(run, data, quiet=quiet, json=json)


@app.command(**_command(_MODEL, "sylvester resume runs/digits-triangular-sylvester-1"))
def resume(run: RunFolder, /, *, data_dir: DataDir = None, quiet: Quiet = False, json: Json = False) -> None:
    """Continue an interrupted run, to the same bits as if it had not been interrupted.

    Of a finished run, damaged files are made good from the checkpoint where that is possible, and named where not.
    """
    opened = Run.open(run)
    result = opened.result
    if result is None:
        _prepare(opened.config)  # a run that has come from a larger machine goes on, if slowly
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


@app.command(
    **_command(
        _MODEL,
        "sylvester evaluate runs/digits-triangular-sylvester-1 --samples 5000",
        "sylvester evaluate runs/digits-triangular-sylvester-1 --samples 100,1000,10000 --images 50",
        "sylvester evaluate runs/digits-triangular-sylvester-1 --samples 500 --adapt 4",
    )
)
def evaluate(
    run: RunFolder,
    /,
    *,
    samples: Annotated[
        tuple[int, ...],
        counts(
            1,
            WHOLE,
            "Importance samples per image. Several numbers, separated by commas, take the time of the largest.",
            show_default="5000",
        ),
    ] = (5000,),
    adapt: Annotated[
        int,
        count(
            0,
            WHOLE,
            "Rounds in which a proposal is fitted to each image's posterior before it is sampled, each as costly as "
            "six plain samples for every latent. Where k̂ calls an estimate into question, try --samples 500 --adapt 4.",
        ),
    ] = 0,
    anneal: Annotated[
        int,
        count(
            0,
            WHOLE,
            "Transitions by which annealing brings each sample to the posterior, each as costly as nine plain samples. "
            "Where k̂ is large after --adapt as well, try --samples 32 --anneal 100.",
        ),
    ] = 0,
    images: Annotated[int | None, count(1, WHOLE, "Score the first so many test images alone.")] = None,
    seed: Annotated[int, count(0, LARGEST_SEED, "Seed of the importance samples.")] = 0,
    data_dir: DataDir = None,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Estimate the test log-likelihood of a run's best model.

    By importance sampling, plain, adapted or annealed, with the Monte Carlo error and the error over test images.
    Interrupted and called again, it goes on where it stopped; finished, it shows what it found.
    """
    if adapt and anneal:
        raise ConfigError("Expected --adapt or --anneal, not both")
    opened = Run.open(run)
    opened.require_model()
    data = _load(opened.config, data_dir, quiet=quiet)

    from sylvester.app import results

    how = results.Evaluation(max(samples), seed, adapt=adapt, anneal=anneal, images=images)
    with _interruptible(how.command(run, samples)), display.counter("evaluating", quiet) as progress:
        found = results.evaluate_each(opened, data, how, samples, progress=progress, notify=display.say)
    if json:
        display.show_json(found[0] if len(found) == 1 else found)
        return
    how_better = f", each annealed by {anneal:,} transitions" if anneal else ""
    if adapt:
        how_better = f", of a proposal fitted in {adapt:,} rounds"
    for figures in found:
        display.show(f"{display.scores(figures)}, {figures['nll_samples']:,} samples per image{how_better}.")
    if found[-1]["warning"]:
        display.show(found[-1]["warning"])


@app.command(**_command(_MODEL, "sylvester sample runs/digits-triangular-sylvester-1 -n 64 --out digits.png"))
def sample(
    run: RunFolder,
    /,
    *,
    number: Annotated[int, count(1, PICTURES, "How many images.", name=["--number", "-n"])] = 64,
    seed: Annotated[int, count(0, LARGEST_SEED, "Seed of the draws.")] = 0,
    out: Annotated[
        Path | None, place("The PNG file; by default samples-N-seedN.png in the run's folder.", "FILE")
    ] = None,
) -> None:
    """Draw images from a run's best model into a PNG file, whose path is printed."""
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


@app.command(**_command(_MODEL, "sylvester demo"))
def demo(
    *,
    out: Annotated[Path, place("Folder of the two runs and the picture; called again, it goes on there.")] = Path(
        "runs/demo"
    ),
    quiet: Quiet = False,
) -> None:
    """Show in two minutes what a flow is for.

    Trains a Gaussian and a Sylvester posterior with two latents on the embedded digits, compares them, and draws one
    image's true posterior beside both.
    """
    from sylvester.app import demonstration

    for flow in demonstration.FLOWS:
        run = demonstration.run(out, flow)
        if run.result is None:
            display.say(f"sylvester train --preset demo --flow {flow} --out {run.path}")
            _finish(run, _load(run.config, quiet=quiet), quiet=quiet, again="the same command")
    found = demonstration.conclude(out)
    for line in display.demonstration(found):
        display.show(line)


@app.command(
    **_command(
        _MANY,
        "sylvester compare --against gaussian",
        "sylvester compare runs/sweep --format md",
        "sylvester compare results/caltech101 --published --details",
        "sylvester compare results/caltech101 --evaluation 500-adapt4-first200 --against gaussian",
        usage="Usage: sylvester compare [OPTIONS] [RUN...]",
    )
)
def compare(
    *runs: Folders,
    against: Annotated[
        Flow | None,
        Parameter(help="Show differences from this flow's runs on the same data, paired by seed and test image."),
    ] = None,
    evaluation: Annotated[
        str | None,
        Parameter(
            metavar="NAME",
            help="Compare by what sylvester evaluate found: NAME of evaluation-NAME.json in the runs' folders, such as "
            "2000 or 500-adapt4-first200. Its seed may be left out.",
        ),
    ] = None,
    published: Annotated[
        bool, Parameter(negative="", help="Show the paper's figures beside those of its models.")
    ] = False,
    details: Annotated[
        bool,
        Parameter(
            negative="",
            help="Show how many images have an NLL not to be trusted, and what training took, on what machine.",
        ),
    ] = False,
    format: Format = "table",
) -> None:
    """Set runs side by side in one table, with means over seeds.

    Runs that agree in everything but the seed are one row.
    """
    from sylvester.app.experiments import comparison

    found = comparison.compare(_folders(runs), against=against, evaluation=evaluation)
    _show_comparison(found, format, published=published, details=details)
    _require_intact(found)


@app.command(
    **_command(
        _MANY,
        "sylvester gaps runs/digits-gaussian-1 runs/digits-triangular-sylvester-1",
        usage="Usage: sylvester gaps [OPTIONS] RUN...",
    )
)
def gaps(
    *runs: Annotated[Path, Parameter(name="RUN", converter=path, help="Folders of runs on the same data.")],
    number: Annotated[int, count(1, WHOLE, "How many images, drawn by the seed.", name=["--number", "-n"])] = 100,
    split: Annotated[Split, Parameter(help="Whose images.")] = "test",
    steps: Annotated[int, count(1, WHOLE, "Steps of the refinement of each q.")] = 500,
    samples: Annotated[int, count(2, WHOLE, "Draws of each refined q per image.")] = 1000,
    seed: Annotated[int, count(0, LARGEST_SEED, "Seed of images and draws.")] = 0,
    data_dir: DataDir = None,
    format: Format = "table",
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Split log p(x) − ELBO into what the family lacks and what the encoder lacks.

    By refining q for each image. Of several runs, every family is refined under every decoder, as each decoder favours
    the q that it was trained with: give a Gaussian's run and a flow's.
    """
    from sylvester.app.experiments import tables

    form = "json" if json else format
    if not runs:
        raise ConfigError("Expected the folders of one run or more; got none")
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


@app.command(
    **_command(
        _MANY,
        "sylvester sweep --flow gaussian,iaf --seed 0,1,2 --workers 2",
        "sylvester sweep --latent 8,16,32 --dry-run",
    )
)
def sweep(
    *,
    values: Annotated[Values | None, Parameter(name="*")] = None,
    config: TomlFile = None,
    against: Annotated[
        Flow | None, Parameter(group=GROUPS["Output"], help="Show differences from this flow's runs, too.")
    ] = None,
    out: Annotated[Path, place("Folder of the sweep's runs.")] = Path("runs/sweep"),
    data_dir: DataDir = None,
    where: Where | None = None,
    dry_run: DryRun = False,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Train all combinations of settings, and compare them.

    Each setting takes one value or several, separated by commas. Stop it anywhere and call it again, or several times
    at once: what is finished is not repeated, what is half done goes on, what is damaged is named and done again.
    """
    from sylvester.app.experiments import sweep as sweeps

    fixed = {} if data_dir is None else {"data_dir": (data_dir,)}
    cells = sweeps.grid({**given(values), **fixed})
    if against is not None and config is None and not any(cell.get("flow") == against for cell in cells):
        raise ConfigError(f"Expected a flow of the sweep to compare with; got {against}")
    _require_folder(out)
    load = _loader(quiet)
    planned = sweeps.plan(out, cells, file=config, load=load)
    if dry_run:
        return _show_plan(planned, where or Where(), load, quiet=quiet, json=json)
    failures = _sweep(planned, where or Where(), quiet=quiet)
    _show_comparison(_comparison_of(planned, against), "json" if json else "table")
    _require_all(failures)


@app.command(
    **_command(
        _MANY,
        "sylvester reproduce table1 --dry-run",
        "sylvester reproduce table2 --only dataset=caltech101,flow=iaf --workers 2",
    )
)
def reproduce(
    experiment: Annotated[
        Experiment, Parameter(help="A table or figure of the paper, or its six posteriors on the embedded digits.")
    ],
    /,
    *,
    preset: Annotated[
        Preset | None, Parameter(help="Other settings than the paper's; sizes of the flows follow.")
    ] = None,
    only: Annotated[
        str | None,
        Parameter(metavar="SETTING=VALUE,…", help="Some of the runs, such as dataset=caltech101,flow=iaf."),
    ] = None,
    seeds: Annotated[
        str | None,
        Parameter(
            metavar="N,…",
            show_default="0,1,2; freyfaces: 123,321,231",
            help="Seeds of each row's runs; Frey Faces has those of the paper's code.",
        ),
    ] = None,
    data_dir: DataDir = None,
    where: Where | None = None,
    dry_run: DryRun = False,
    out: Annotated[Path | None, place("Folder of the runs.", show_default="runs/EXPERIMENT")] = None,
    report: Annotated[Path | None, place("Write an HTML page about the runs to this file, too.", "FILE")] = None,
    format: Format = "table",
    quiet: Quiet = False,
) -> None:
    """Do an experiment of the paper and show it beside the published figures.

    A sweep like any other: stop it anywhere and call it again.
    """
    from sylvester.app.experiments import reproduction, tables
    from sylvester.app.experiments import sweep as sweeps

    if report is not None:
        _require_destination(report)
    chosen = reproduction.choose(experiment, preset=preset, only=only, seeds=seeds, data_dir=data_dir)
    out = out or Path("runs") / experiment
    _require_folder(out)
    load = _loader(quiet)
    planned = sweeps.plan(out, chosen.cells, load=load)
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


@app.command(
    **_command(
        _MANY,
        "sylvester report",
        "sylvester report runs/sweep -o sweep.html",
        usage="Usage: sylvester report [OPTIONS] [RUN...]",
    )
)
def report(
    *runs: Folders,
    against: Annotated[
        Flow, Parameter(help="The flow that differences are taken against, where there are runs of it.")
    ] = "gaussian",
    out: Annotated[Path, place("The HTML file.", "FILE", name=["--out", "-o"])] = Path("report.html"),
    quiet: Quiet = False,
) -> None:
    """Write one self-contained HTML page about runs: tables, curves, pictures, time."""
    from sylvester.app.experiments import comparison

    folders = _folders(runs)
    _require_destination(out)
    found = _compared(comparison.load(folders), against)
    _write_report(out, found, quiet=quiet)
    display.show(str(out))
    _require_intact(found)


data_app = App(
    name="data",
    help=f"List, fetch and check the datasets.\n\n{OWN_IMAGES}",
    **_command(_REST, "sylvester data list", "sylvester data check mine.npz"),
)
app.command(data_app)


@data_app.command(name="list", **_command(None, "sylvester data list"))
def data_list(*, data_dir: DataDir = None, json: Json = False) -> None:
    """Show the datasets: sizes, licences, and whether their files are here."""
    from sylvester.app.data import listing

    with _data_errors():
        rows = listing(data_dir=data_dir)
    if json:
        display.show_json([asdict(row) for row in rows])
    else:
        display.listing(rows)


@data_app.command(name="fetch", **_command(None, "sylvester data fetch mnist"))
def data_fetch(
    name: Annotated[DatasetName, Parameter(help="A dataset.")],
    /,
    *,
    data_dir: DataDir = None,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Download a dataset into the cache folder, or check that its files are in --data-dir."""
    from sylvester.app.data import fetch

    with _data_errors():
        report = fetch(name, data_dir=data_dir, progress=not quiet)
    display.report(report, json)


@data_app.command(
    name="check", **_command(None, "sylvester data check mine.npz", "sylvester data check mnist --data-dir DIR")
)
def data_check(
    name: Annotated[
        DatasetName, Parameter(help="A dataset by name, or the path of an .npz archive of your own images.")
    ],
    /,
    *,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Compare a dataset's files with their checksums, or see whether an archive of your own can be used.

    Exits with 2 where files are missing, differ or cannot be used.
    """
    from sylvester.app.data import check

    with _data_errors():
        report = check(name, data_dir=data_dir)
    if report.ok or json or len(report.files) > 1:  # of one bad file, the sentence says it all
        display.report(report, json)
    if not report.ok:
        raise ConfigError(report.problem or f"Expected whole files of {name}; got others")


@app.command(
    name="completion",
    **_command(
        _REST,
        'eval "$(sylvester completion bash)"      # in ~/.bashrc',
        'eval "$(sylvester completion zsh)"       # in ~/.zshrc, after compinit',
        "sylvester completion fish | source       # in ~/.config/fish/config.fish",
    ),
)
def shell_completion(shell: Annotated[Shell, Parameter(help="The shell that is to complete.")], /) -> None:
    """Print a script that makes a shell complete commands, flags, names and paths.

    Put the line of your shell into the file that it reads at its start.
    """
    display.show(completion.script(app, shell))


def main() -> None:
    keep_freed_memory()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal without a minus sign is no reason to fail
    machine.wait_passively(os.environ)
    try:
        app(exit_on_error=False, print_error=False, result_action="return_value")
    except CycloptsError as error:
        _fail(error.__cause__ if isinstance(error.__cause__, ConfigError) else misread(error), 2)
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
    sentence = " ".join(str(reason).split())
    print(f"sylvester: {re.sub(r'(?<=[^./ ])[.]$', '', sentence)}", file=sys.stderr)  # not of the folder . itself
    sys.exit(code)


def _folders(runs: Sequence[Path]) -> Sequence[Path]:
    if not runs and not Path("runs").is_dir():
        raise ConfigError("Expected run folders, or some in ./runs; got neither")
    return runs or [Path("runs")]


def _show_comparison(found: Comparison, form: str, *, published: bool = False, details: bool = False) -> None:
    from sylvester.app.experiments import tables

    if form == "json":
        return display.show_json(tables.comparison_json(found))
    table = tables.comparison_table(found, published=published, details=details)
    if form == "csv":
        display.show(tables.comparison_csv(found))
        for note in table.notes[1:]:
            display.say(note)
    else:
        display.show(tables.render(table, form))


def _require_intact(found: Comparison) -> None:
    """After what there is to say of damaged ones is said."""
    if not found.groups:
        raise RunFailure("Expected an intact run; got damaged ones alone")


def _comparison_of(planned: Sequence[Cell], against: str | None) -> Comparison:
    from sylvester.app.experiments import comparison

    return _compared([comparison.inspect(cell.path) for cell in planned], against)


def _compared(entries: Sequence[Entry], against: str | None) -> Comparison:
    """Against a flow where there is a finished run of it, alone otherwise."""
    from sylvester.app.experiments import comparison

    finished = {entry.config.flow for entry in entries if entry.state == "finished"}
    return comparison.compare_entries(entries, against=against if against in finished else None)


def _require_folder(out: Path) -> None:
    """One that is there may be read-only: finished runs are compared all the same."""
    if (out / "config.toml").exists():
        raise ConfigError(f"Expected a folder for the runs; got {out}, which is a run itself")
    try:
        if not out.is_dir():
            folder(out)
    except PathError as error:
        raise ConfigError(f"Expected a folder for the runs; got {error}") from None


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
        given = {"cpus": where.cpus, "gpus": where.gpus}
        resources = {name: value for name, value in given.items() if value is not None}
        backend = Cluster(address, retries=where.retries, **resources)
    else:
        for cell in planned:
            machine.require(cell.config.precision, cell.config.devices)
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


def _prepare(config: Config, devices: int = 1) -> None:
    """Before torch is loaded, which reads the environment once."""
    if config.precision == "bf16-mixed":
        machine.allow_bf16(os.environ)
    machine.require(config.precision, devices)


def _complete(run: Run, data: Dataset, *, quiet: bool, json: bool) -> None:
    """Train, evaluate and draw what the run still lacks, and say what came of it."""
    result = _finish(run, data, quiet=quiet)
    if json:
        return display.show_json(result)
    if result["warning"] and not quiet:
        display.say(result["warning"])
    for line in display.conclusion(run.path, run.config, result):
        display.show(line)


def _finish(run: Run, data: Dataset, *, quiet: bool, again: str | None = None) -> dict[str, Any]:
    from sylvester.app import results, training

    with run.locked() as lock, _interruptible(again or f"sylvester resume {run.path}"):
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
    from sylvester.app.data import DataError, DownloadError

    try:
        yield
    except DownloadError as error:
        raise RunFailure(str(error)) from error
    except DataError as error:
        raise ConfigError(str(error)) from error


def _load(config: Config, data_dir: Path | None = None, *, quiet: bool) -> Dataset:
    from sylvester.app.runs import data_of

    with _data_errors():
        return data_of(config, data_dir, progress=not quiet)
