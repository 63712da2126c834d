from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sylvester.app import results, training
from sylvester.app.config import Config, ConfigError, resolve
from sylvester.app.data import Dataset, load
from sylvester.app.experiments import sweep
from sylvester.app.experiments.child import Outcome, with_threads
from sylvester.app.experiments.sweep import Cell, Local, Status, examine, grid, plan, work
from sylvester.app.runs import Run
from tests.app.commands import command, environment, sylvester
from tests.app.conftest import TINY
from tests.app.experiments.conftest import finish, tiny
from tests.app.test_cli import figures

LONG = {"epochs": 60}  # a few seconds: long enough to be met in the midst of it


class Here:
    """Finishes each run in this process."""

    def __init__(self) -> None:
        self.done: list[tuple[Cell, Outcome]] = []
        self.started: list[Path] = []

    def free(self) -> bool:
        return True

    def start(self, cell: Cell) -> None:
        run = Run.open(cell.path)
        data = run.data()
        results.conclude(run, data, training.train(run, data))
        self.started.append(cell.path)
        self.done.append((cell, Outcome(0, ())))

    def ended(self) -> list[tuple[Cell, Outcome]]:
        done, self.done = self.done, []
        return done

    def close(self) -> None:
        """Nothing runs on."""


def data_of(config: Config) -> Dataset:
    return load(config.dataset)


def settings(archive: Path, **given: Any) -> dict[str, Any]:
    values = {"dataset": str(archive), **TINY, "epochs": 2, "flow": "planar", **given}
    return {key: value for key, value in values.items() if (key, values["flow"]) != ("transforms", "gaussian")}


def cells_of(study: Path, archive: Path) -> list[Cell]:
    """The study's runs, as cells."""
    return [
        Cell(study / f"{flow}-{seed}", tiny(archive, flow=flow, seed=seed), f"{flow}-{seed}")
        for flow in ("gaussian", "planar")
        for seed in (0, 1)
    ]


def until(condition: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def processes_on(path: Path) -> list[int]:
    """Whose command line names a run."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if str(path).encode() in (entry / "cmdline").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def test_a_grid_has_every_combination_once_with_what_each_flow_takes() -> None:
    found = grid({"flow": ("gaussian", "planar"), "seed": (0, 1), "transforms": (4, 8)})
    assert found == [
        {"flow": "gaussian", "seed": 0},
        {"flow": "gaussian", "seed": 1},
        *({"flow": "planar", "transforms": k, "seed": s} for k in (4, 8) for s in (0, 1)),
    ]
    with pytest.raises(ConfigError, match="Expected no rank with the planar flow"):
        resolve(grid({"flow": ("planar",), "rank": (3,)})[0])
    with pytest.raises(ConfigError, match="Expected flow to be one of"):
        resolve(grid({"flow": ("planar", "plannar")})[1])  # not the default flow in its place


def test_a_plan_names_runs_by_identity_and_writes_nothing(archive: Path, tmp_path: Path) -> None:
    given = [settings(archive, seed=seed) for seed in (0, 1)]
    one, two = plan(tmp_path / "sweep", [*given, given[0]], load=data_of)
    assert one.path.name == f"halves-planar-seed0-{one.identity[:10]}"
    assert one.identity != two.identity
    with pytest.raises(ConfigError, match="rank"):
        plan(tmp_path / "sweep", [settings(archive, flow="orthogonal-sylvester", rank=9)], load=data_of)
    assert not (tmp_path / "sweep").exists()


def test_finished_runs_stay_and_unfinished_ones_go_on(study: Path, archive: Path) -> None:
    before = figures(study / "planar-1")
    (study / "planar-1" / "result.json").unlink()
    backend, cells = Here(), cells_of(study, archive)
    assert [examine(cell).condition for cell in cells] == ["finished"] * 3 + ["unfinished"]
    assert work(cells, backend) == []
    assert backend.started == [study / "planar-1"]
    assert figures(study / "planar-1") == before
    again = Here()
    work(cells, again)
    assert again.started == []


@pytest.mark.parametrize("checkpoints", [True, False])
@pytest.mark.parametrize(
    "file", ["config.toml", "result.json", "metrics.jsonl", "evaluation-30-seed1.safetensors", "model.safetensors"]
)
def test_damaged_runs_are_named_and_done_again(study: Path, archive: Path, file: str, checkpoints: bool) -> None:
    path = study / "planar-1"
    before = figures(path)
    if not checkpoints:
        for name in ("checkpoint.pt", "checkpoint.previous.pt"):
            (path / name).unlink()
    target = path / file
    target.write_bytes(target.read_bytes()[:-70])
    said: list[str] = []
    cells = cells_of(study, archive)
    assert examine(cells[-1]).condition == "damaged"
    assert work(cells, Here(), notify=said.append) == []
    assert len(said) == 1
    assert file in said[0]
    assert figures(path) == before
    assert examine(cells[-1]).condition == "finished"


def test_another_runs_folder_is_not_believed(study: Path, archive: Path) -> None:
    cells = cells_of(study, archive)
    swapped = [Cell(cells[0].path, cells[3].config, "swapped")]
    assert examine(swapped[0]).condition == "damaged"
    work(swapped, Here())
    assert figures(cells[0].path) == figures(cells[3].path)


def test_locked_runs_are_come_back_to(study: Path, archive: Path) -> None:
    cells = cells_of(study, archive)
    for cell in cells[:2]:
        (cell.path / "result.json").unlink()
    backend, seen = Here(), []
    with Run.open(cells[0].path).locked():
        thread = threading.Thread(target=work, args=(cells, backend), kwargs={"report": seen.append})
        thread.start()
        until(lambda: bool(seen) and seen[-1].finished == 3)
        assert seen[-1].elsewhere == 1
        assert thread.is_alive()
    thread.join(60)
    assert backend.started == [cells[1].path, cells[0].path]


def test_a_killed_process_is_started_again_and_a_failing_one_named(archive: Path, tmp_path: Path) -> None:
    config = tiny(archive, **LONG, flow="planar")
    cell = Cell(tmp_path / "killed", config, "killed")
    wrong = Cell(tmp_path / "wrong", tiny(tmp_path / "none.npz", flow="planar"), "wrong")
    killed: list[int] = []
    said: list[str] = []

    def kill(status: Status) -> None:
        if not killed and sweep.epochs(cell.path) > 1:
            (pid,) = processes_on(cell.path)
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)

    failures = work([cell, wrong], Local(2, threads=1), report=kill, notify=said.append)
    assert killed
    assert f"{cell.path} was killed by SIGKILL; started again." in said
    assert [failure.cell.path for failure in failures] == [wrong.path]
    assert "none.npz" in failures[0].reason
    assert figures(cell.path) == figures(finish(tmp_path / "expected", config).path)


@pytest.mark.slow
def test_a_killed_sweep_takes_its_runs_along_and_ends_with_the_same_figures(archive: Path, tmp_path: Path) -> None:
    given = settings(archive, **LONG)
    flags = [f"--{key.replace('_', '-')}={value}" for key, value in given.items()]
    words = command("sweep", *flags, "--seed", "0,1", "--out", tmp_path / "s", "--workers", "2", "--json", "--quiet")
    cells = plan(tmp_path / "s", [{**given, "seed": seed} for seed in (0, 1)], load=data_of)
    first = subprocess.Popen(words, env=environment())
    until(lambda: any(sweep.epochs(cell.path) > 1 for cell in cells))
    first.kill()
    first.wait()
    until(lambda: not any(processes_on(cell.path) for cell in cells), seconds=20)

    second = subprocess.Popen(words, env=environment(), stderr=subprocess.PIPE, text=True)
    until(lambda: any(processes_on(cell.path) for cell in cells))
    second.send_signal(signal.SIGTERM)
    _, errors = second.communicate()
    assert second.returncode == 143
    assert "Interrupted; the same command continues where it stopped." in errors
    until(lambda: not any(processes_on(cell.path) for cell in cells), seconds=20)

    # Two at once share what is left.
    both = [subprocess.Popen(words, env=environment(), stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [json.loads(process.communicate()[0]) for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert outputs[0] == outputs[1]
    for cell in cells:
        expected = figures(finish(tmp_path / f"expected-{cell.config.seed}", cell.config).path)
        assert figures(cell.path) == expected
        (found,) = [r for r in outputs[0]["groups"][0]["runs"] if r["seed"] == cell.config.seed]
        assert {key: value for key, value in found["result"].items() if key != "timing"} == expected
    assert {entry.name for entry in (tmp_path / "s").iterdir()} == {cell.path.name for cell in cells}

    done = sylvester(*words[3:])
    assert json.loads(done.stdout) == outputs[0]


def test_threads_are_shared_unless_the_user_has_set_them() -> None:
    assert with_threads({"A": "b"}, 3) == {"A": "b", "OMP_NUM_THREADS": "3"}
    assert with_threads({"OMP_NUM_THREADS": "5"}, 3)["OMP_NUM_THREADS"] == "5"
    assert with_threads({}, None) == {}
    assert sweep.share(1) is None
    assert sweep.share(10_000) == 1
