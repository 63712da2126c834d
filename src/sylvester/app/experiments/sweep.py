"""A grid of settings as a folder of runs, which any number of calls and machines may work on, and which any may leave.

The folder has the runs and nothing else; a run's folder is named by its identity, so that every call finds what
others have done. Who works on a run holds its lock. Finished runs stay, half-finished ones go on, damaged ones are
named and mended or done again, locked ones are come back to.
"""

from __future__ import annotations

import itertools
import shutil
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from sylvester.app.config import SETTINGS, Config, ConfigError, resolve
from sylvester.app.experiments.child import Child, Outcome
from sylvester.app.experiments.identity import identity, settings_of
from sylvester.app.machine import cores
from sylvester.app.runs import DamagedRun, Run, RunError

if TYPE_CHECKING:
    from sylvester.app.data import Dataset

__all__ = [
    "Backend",
    "Cell",
    "Failure",
    "Local",
    "Locked",
    "State",
    "Status",
    "epochs",
    "examine",
    "grid",
    "mend",
    "plan",
    "share",
    "work",
]

Condition = Literal["new", "unfinished", "finished", "damaged", "locked"]
Notify = Callable[[str], object]

_LOOK = 0.2  # seconds between two looks at the processes
_RETURN = 2.0  # seconds before coming back to runs that others work on


@dataclass(frozen=True)
class Cell:
    """One run of a sweep, whether or not it exists yet."""

    path: Path
    config: Config
    identity: str


@dataclass(frozen=True)
class State:
    """How far a cell's run is; ``problem`` is a sentence about a damaged one."""

    condition: Condition
    epochs: int = 0
    problem: str | None = None


@dataclass(frozen=True)
class Failure:
    """A run that could not be finished, and why."""

    cell: Cell
    reason: str


@dataclass(frozen=True)
class Status:
    """Where a sweep stands, for a display."""

    total: int
    finished: int
    failed: int
    elsewhere: int  # others work on them
    running: tuple[Cell, ...]


def grid(values: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """All combinations of the settings' values, the last setting's fastest, seeds last of all.

    A setting that a flow does not take is left out for that flow, if another flow of the grid takes it.
    """
    flows = values.get("flow", (Config.model_fields["flow"].default,))
    found: dict[str, dict[str, Any]] = {}
    names = sorted(values, key=lambda name: name == "seed")
    for combination in itertools.product(*(values[name] for name in names)):
        given = dict(zip(names, combination, strict=True))
        flow = given.get("flow", flows[0])
        for name in list(given):
            takers = SETTINGS[name].flows
            if SETTINGS[name].of_some_flows and flow not in takers and any(other in takers for other in flows):
                del given[name]
        found.setdefault(repr(sorted(given.items(), key=lambda item: item[0])), given)
    return list(found.values())


def plan(
    folder: Path,
    cells: Iterable[Mapping[str, Any]],
    *,
    file: Path | None = None,
    load: Callable[[Config], Dataset],
) -> list[Cell]:
    """The runs of a sweep, each once, after a look at whether their data and models can be had.

    ``load`` gives the data of some settings, of which the seed makes no difference here.
    """
    import torch

    from sylvester.app import models

    built: set[str] = set()
    found: dict[str, Cell] = {}
    for given in cells:
        config = resolve(given, file)
        data = load(config)
        if (model := str(settings_of(config, seed=False))) not in built:
            built.add(model)
            with torch.device("meta"):  # sizes that make no model are refused before anything is written
                models.build(config, data.image_shape, data.likelihood)
        name = identity(config, data.sha256)
        stem = f"{Path(config.dataset).stem}-{config.flow}-seed{config.seed}"
        found.setdefault(name, Cell(folder / f"{stem}-{name[:10]}", config, name))
    if not found:
        raise ConfigError("Expected at least one run; got an empty grid")
    return list(found.values())


def examine(cell: Cell) -> State:
    """Read all files of a run, if nobody works on it."""
    if _free(cell.path):
        return State("new")
    try:
        with _locked(cell):
            return _examine(cell)
    except Locked:
        return State("locked", epochs(cell.path))


def _free(path: Path) -> bool:
    try:
        Run.require_free(path)
    except RunError:
        return False
    return True


def _examine(cell: Cell) -> State:
    try:
        run = Run.open(cell.path)
        if settings_of(run.config) != settings_of(cell.config):
            raise DamagedRun(f"Expected the settings that {cell.path} is named for; got others")
        run.verify()
        return State("unfinished" if run.result is None else "finished", len(run.metrics))
    except RunError as error:
        return State("damaged", epochs(cell.path), str(error))


def epochs(path: Path) -> int:
    """How many are done, of a run that another process may be writing."""
    try:
        return (path / "metrics.jsonl").read_bytes().count(b"\n")
    except OSError:
        return 0


def mend(cell: Cell) -> None:
    """Make a run that is not finished one to go on with: what is whole stays, the rest is to be done again.

    Raises `Locked` where another process works on it.
    """
    if cell.path.exists() and not cell.path.is_dir():
        raise RunError(f"Expected a folder for the run; got the file {cell.path}")
    cell.path.mkdir(parents=True, exist_ok=True)
    with _locked(cell):
        if _free(cell.path):
            Run(cell.path, cell.config).write_config()
        for remedy in (_repair, _forget_result, _empty):
            if _examine(cell).condition != "damaged":
                break
            remedy(cell)
        run = Run.open(cell.path)
        if run.config != cell.config and run.result is None:  # the same run from another place
            replace(run, config=cell.config).write_config()


def _repair(cell: Cell) -> None:
    """From the checkpoint."""
    with suppress(RunError):
        Run.open(cell.path).repair()


def _forget_result(cell: Cell) -> None:
    """The evaluation is made again, from the trained model or what the checkpoint has of it."""
    for file in (*cell.path.glob("evaluation-*"), cell.path / "result.json"):
        file.unlink(missing_ok=True)
    _repair(cell)


def _empty(cell: Cell) -> None:
    """All again. The lock's file stays: a process that waits for it would otherwise lock another one."""
    for entry in cell.path.iterdir():
        if entry.name == ".run.lock":
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
    Run(cell.path, cell.config).write_config()


class Locked(Exception):
    """Another process works on the run."""


@contextmanager
def _locked(cell: Cell) -> Iterator[None]:
    with ExitStack() as stack:
        try:
            stack.enter_context(Run(cell.path, cell.config).locked())
        except RunError:
            raise Locked from None
        yield


class Backend(Protocol):
    """Where runs are done."""

    def free(self) -> bool:
        """Whether another run can be started."""

    def start(self, cell: Cell) -> None: ...

    def ended(self) -> list[tuple[Cell, Outcome]]:
        """The runs that have ended since the last call."""

    def close(self) -> None:
        """End what still runs."""


class Local:
    """Processes on this machine, ``workers`` at a time, with ``threads`` each."""

    def __init__(self, workers: int, threads: int | None) -> None:
        self.workers, self.threads = workers, threads
        self._children: dict[str, tuple[Cell, Child]] = {}

    def free(self) -> bool:
        return len(self._children) < self.workers

    def start(self, cell: Cell) -> None:
        child = Child(cell.path, threads=self.threads, data_dir=cell.config.data_dir)
        self._children[cell.identity] = cell, child

    def ended(self) -> list[tuple[Cell, Outcome]]:
        found = [(cell, outcome) for cell, child in self._children.values() if (outcome := child.poll()) is not None]
        for cell, _ in found:
            del self._children[cell.identity]
        return found

    def close(self) -> None:
        children = [child for _, child in self._children.values()]
        for child in children:
            child.terminate()
        for child in children:
            child.end()


def share(workers: int) -> int | None:
    """The threads of each of several processes; one alone has torch's own number."""
    if workers == 1:
        return None
    return max(1, cores() // workers)


def ignore(said: object) -> None:
    """Tell nobody."""


def work(
    cells: Sequence[Cell],
    backend: Backend,
    *,
    retries: int = 2,
    report: Callable[[Status], object] = ignore,
    notify: Notify = ignore,
) -> list[Failure]:
    """Finish all runs, together with whoever else works on them, and return those that could not be.

    A run whose process is killed is started again, ``retries`` times. ``notify`` is told what was damaged, killed or
    failed, and what the runs themselves say.
    """
    waiting, later = deque(cells), list[Cell]()
    running: dict[str, Cell] = {}
    failures: list[Failure] = []
    starts: Counter[str] = Counter()
    finished, returning = 0, 0.0
    try:
        while waiting or later or running:
            for cell, outcome in backend.ended():
                del running[cell.identity]
                for line in outcome.said if outcome.code == 0 else ():
                    notify(line)
                state = State("finished") if outcome.code == 0 else examine(cell)
                if state.condition == "finished":
                    finished += 1
                elif state.condition == "locked" or outcome.refused:  # another was faster
                    later.append(cell)
                    returning = time.monotonic() + _RETURN
                elif outcome.killed and starts[cell.identity] <= retries:
                    notify(f"{cell.path} {outcome.reason}; started again.")
                    waiting.append(cell)
                else:
                    failures.append(Failure(cell, outcome.reason))
                    notify(f"{cell.path} failed: {outcome.reason}")
            if later and time.monotonic() >= returning:
                waiting.extend(later)
                later.clear()
            while waiting and backend.free():
                cell = waiting.popleft()
                state = examine(cell)
                if state.condition == "finished":
                    finished += 1
                    continue
                if state.condition == "damaged":
                    notify(f"{cell.path} is damaged and done again as far as need be. {state.problem}")
                try:
                    mend(cell)
                except Locked:
                    later.append(cell)
                    returning = time.monotonic() + _RETURN
                    continue
                if Run.open(cell.path).result is not None:  # whole again
                    finished += 1
                    continue
                starts[cell.identity] += 1
                running[cell.identity] = cell
                backend.start(cell)
            report(Status(len(cells), finished, len(failures), len(later), tuple(running.values())))
            if running or later:
                time.sleep(_LOOK)
    finally:
        backend.close()
    return failures
