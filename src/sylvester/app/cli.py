"""The command line: commands alone; what they show is phrased and drawn in `display`.

Exit codes: 0 done, 1 failed at run time, 2 bad input, 130 interrupted. Nothing here imports torch before a
command needs it.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields, make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, CycloptsError, Parameter, Token

from sylvester import __version__
from sylvester.allocator import keep_freed_memory
from sylvester.app import display, machine, memory
from sylvester.app.config import SETTINGS, WHOLE, Config, ConfigError, describe, from_text, kind_of, resolve, whole
from sylvester.app.paths import PathError, destination, usable
from sylvester.app.processes import Terminated
from sylvester.app.runs import DamagedRun, Run, RunError, RunFailure

if TYPE_CHECKING:
    from sylvester.app.data import Dataset

    Flags = Any
else:

    def _flag(name: str) -> Any:
        """A flag whose words the schema converts; cyclopts would round 1.5 epochs to 2."""

        def convert(_: object, tokens: Sequence[Token]) -> Any:
            return from_text(name, *(token.value for token in tokens))

        kind = kind_of(name)
        how = {} if kind is bool else {"converter": convert}
        shown = Parameter(help=describe(name), negative="", show_default=False, **how)
        return Annotated[(tuple[float, float] if kind is tuple else kind) | None, shown]

    # The flags are the schema's fields. One that is not given is None, and file and preset decide.
    Flags = make_dataclass(
        "Flags",
        [(name, _flag(name), None) for name in SETTINGS],
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

    figures.samples(opened.model(), target, number, seed=seed)
    display.show(str(target))


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


def _prepare(config: Config) -> None:
    """Before torch is loaded, which reads the environment once."""
    if config.precision == "bf16-mixed":
        machine.allow_bf16(os.environ)


def _complete(run: Run, data: Dataset, *, quiet: bool, json: bool) -> None:
    """Train, evaluate and draw what the run still lacks, and say what came of it."""
    from sylvester.app import results, training

    with run.locked() as lock, _interruptible(f"sylvester resume {run.path}"):
        bar = display.TrainingBar(run.config.epochs, quiet)
        history = training.train(run, data, lock=lock, reporting=bar, notify=display.say)
        with display.counter("evaluating", quiet) as progress:
            result = results.conclude(run, data, history, progress=progress, notify=display.say)
    if json:
        return display.show_json(result)
    if result["warning"] and not quiet:
        display.say(result["warning"])
    for line in display.conclusion(run.path, run.config, result):
        display.show(line)


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
    from sylvester.app.data import load

    with _data_errors():
        return load(
            config.dataset,
            data_dir=data_dir or config.data_dir,
            seed=config.seed,
            likelihood=config.likelihood,
            progress=not quiet,
        )
