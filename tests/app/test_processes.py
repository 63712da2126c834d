"""Processes that end together, with real ones: what signals do to them, and to the run that they train."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from sylvester.app.processes import Ended, together
from sylvester.app.runs import Run
from tests.app.commands import command, environment, sylvester
from tests.app.test_cli import figures, lines

Send = Callable[[Any], None]


def squares(rank: int, send: Send) -> int:
    send(rank + 1)
    send(rank + 2)
    return rank**2 + 7


def test_the_first_process_is_heard_and_answers() -> None:
    heard: list[int] = []
    assert together(squares, 3, receive=heard.append) == 7
    assert heard == [1, 2]


def fail_one(rank: int, send: Send) -> None:
    if rank == 1:
        raise FileNotFoundError(2, "No such file", "pictures.npz")
    time.sleep(60)


def test_one_failure_ends_all_and_keeps_its_type() -> None:
    started = time.monotonic()
    with pytest.raises(FileNotFoundError, match=r"pictures\.npz") as failure:
        together(fail_one, 2, receive=print)
    assert "fail_one" in str(failure.value.__cause__)
    assert time.monotonic() - started < 50


def killed(rank: int, send: Send) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    raise RuntimeError("Connection closed by peer")


def test_a_kill_is_named_before_what_it_causes() -> None:
    with pytest.raises(Ended, match="killed by SIGKILL, as when memory runs out"):
        together(killed, 2, receive=print)


def leave(rank: int, send: Send) -> None:
    os._exit(3)


def test_a_silent_end_is_an_end() -> None:
    with pytest.raises(Ended, match="ended with code 3"):
        together(leave, 1, receive=print)


def wait_for(path: str, rank: int, send: Send) -> None:
    send("ready")
    while not Path(path).exists():
        time.sleep(0.01)


def test_children_hold_the_lock(tmp_path: Path) -> None:
    held = os.open(tmp_path / "lock", os.O_CREAT | os.O_RDWR)
    fcntl.flock(held, fcntl.LOCK_EX)
    refused = []

    def receive(message: str) -> None:
        os.close(held)
        with open(tmp_path / "lock") as other:
            try:
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                refused.append(message)
        (tmp_path / "end").touch()

    together(partial(wait_for, str(tmp_path / "end")), 1, receive=receive, hold=[held])
    assert refused == ["ready"]
    with open(tmp_path / "lock") as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def descendants(parent: int) -> set[int]:
    """Processes of which ``parent`` is an ancestor, those that have ended and wait to be reaped excepted."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                state, ppid = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            except (FileNotFoundError, ProcessLookupError):
                continue
            if state != "Z":
                parents[int(entry.name)] = int(ppid)
    found = {parent}
    while new := {pid for pid, ppid in parents.items() if ppid in found} - found:
        found |= new
    return found - {parent}


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def seconds_until_gone(pids: set[int]) -> float:
    started = time.monotonic()
    while any(map(alive, pids)):
        assert time.monotonic() - started < 60
        time.sleep(0.02)
    return time.monotonic() - started


def signal_all(number: int, pids: set[int]) -> None:
    for pid in pids:
        os.kill(pid, number)


linux = pytest.mark.skipif(sys.platform != "linux", reason="looks at processes in /proc")

TWO = [
    "--devices=2",
    "--dataset=digits",
    "--latent=2",
    "--transforms=1",
    "--batch-size=300",
    "--epochs=12",
    "--patience=0",
    "--nll-samples=3",
]


def start(path: Path, *, ignore_sigint: bool = False, epochs: int = 2) -> subprocess.Popen[str]:
    """Start a run on two devices, and wait until it has so many epochs."""

    def ignore() -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    process = subprocess.Popen(
        command("train", *TWO, "--out", path),
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        env=environment(),
        preexec_fn=ignore if ignore_sigint else None,
    )
    deadline = time.monotonic() + 200
    metrics = path / "metrics.jsonl"
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < epochs:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return process


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "run"
    done = sylvester("train", *TWO, "--out", path, "--quiet")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return path


@linux
def test_nobody_trains_on_without_the_parent(uninterrupted: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    parent = start(path, ignore_sigint=True)
    children = descendants(parent.pid)
    assert len(children) >= 2
    everyone = {parent.pid, *children}
    signal_all(signal.SIGSTOP, everyone)  # or few epochs would be over before the other has looked
    refused = sylvester("resume", path)
    assert refused.returncode == 2
    assert "in use" in refused.stderr
    parent.kill()
    signal_all(signal.SIGCONT, children)
    assert seconds_until_gone(children) < 5
    parent.communicate()
    assert not (path / "result.json").exists()
    done = sylvester("resume", path, "--quiet")
    assert done.returncode == 0, done.stderr
    assert figures(path) == figures(uninterrupted)
    assert lines(path) == lines(uninterrupted)


@linux
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)]
)
def test_a_signal_to_the_parent_alone_ends_all_with_a_sentence(number: int, code: int, tmp_path: Path) -> None:
    parent = start(tmp_path / "run")
    children = descendants(parent.pid)
    parent.send_signal(number)
    _, errors = parent.communicate()
    assert seconds_until_gone(children) < 5
    assert parent.returncode == code
    assert f"sylvester resume {tmp_path / 'run'}" in errors
    assert "Traceback" not in errors
    with (run := Run.open(tmp_path / "run")).locked():
        assert run.load_checkpoint() is not None


@linux
def test_a_child_that_is_killed_is_a_sentence(tmp_path: Path) -> None:
    parent = start(tmp_path / "run")
    children = descendants(parent.pid)
    trainers = [pid for pid in children if "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text()]
    assert len(trainers) == 2
    os.kill(max(trainers), signal.SIGKILL)
    _, errors = parent.communicate()
    assert seconds_until_gone(children) < 5
    assert parent.returncode == 1
    (sentence,) = [line for line in errors.splitlines() if line.startswith("sylvester: ")]
    assert "was killed by SIGKILL" in sentence
    assert f"sylvester resume {tmp_path / 'run'}" in sentence
    assert "Traceback" not in errors
    with Run.open(tmp_path / "run").locked():
        pass


@pytest.mark.parametrize(
    "pause", [pytest.param(0.0, marks=pytest.mark.slow), 0.05, pytest.param(0.4, marks=pytest.mark.slow)]
)
def test_ctrl_c_twice_is_one_sentence(pause: float, flags: Callable[..., list[str]], tmp_path: Path) -> None:
    path = tmp_path / "run"
    process = subprocess.Popen(
        command("train", *flags(epochs=5000), "--out", path), stderr=subprocess.PIPE, text=True, env=environment()
    )
    while not (path / "checkpoint.pt").exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    time.sleep(pause)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate()
    assert process.returncode == 130
    assert errors.count(f"sylvester resume {path}") == 1
    assert "Traceback" not in errors
    assert "Error" not in errors


def test_three_at_once_find_a_folder_each(flags: Callable[..., list[str]], tmp_path: Path) -> None:
    started = [
        subprocess.Popen(
            command("train", *flags(epochs=1), "--quiet"),
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        for _ in range(3)
    ]
    for process in started:
        errors = process.communicate()[1]
        assert process.returncode == 0, errors
    made = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert made == [f"halves-triangular-sylvester-{number}" for number in (1, 2, 3)]
    assert all(Run.open(tmp_path / "runs" / name).result for name in made)
