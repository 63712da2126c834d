"""The command line as tests call it: in a process of its own, or in a fork of one that has loaded torch already."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["sylvester.app.cli", "sylvester.app.training", "sylvester.app.results", __name__])


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "sylvester", *map(str, arguments)]


def environment(**variables: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", **variables}


def in_own_process(*arguments: str | Path, **options: object) -> subprocess.CompletedProcess[str]:
    """The command as a user starts it."""
    options = {"env": environment(), **options}
    return subprocess.run(command(*arguments), capture_output=True, text=True, **options)  # type: ignore[call-overload]


def sylvester(*arguments: str | Path, cwd: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    """The same without seconds of imports: nothing that the command does at its start may matter to the test."""
    return forked(_main, list(map(str, arguments)), cwd=cwd, **variables)


def forked(
    function: Callable[..., None], *arguments: Any, cwd: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """A function of a module in a fork of a process that has loaded torch, and what it printed."""
    with tempfile.TemporaryDirectory() as folder:
        streams = (Path(folder) / "out", Path(folder) / "err")
        everything = (function, arguments, cwd or Path.cwd(), environment(**variables), streams)
        process = _FORKS.Process(target=_run, args=everything)
        process.start()
        process.join()
        said, errors = (stream.read_text(encoding="utf-8") for stream in streams)
    assert process.exitcode is not None
    return subprocess.CompletedProcess(list(arguments), process.exitcode, said, errors)


def _run(
    function: Callable[..., None],
    arguments: Sequence[Any],
    cwd: Path,
    variables: dict[str, str],
    streams: tuple[Path, Path],
) -> None:
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(variables)
    for number, stream in enumerate((Path(os.devnull), *streams)):
        os.dup2(os.open(stream, os.O_RDWR | os.O_CREAT, 0o600), number)
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(number, mode, encoding="utf-8") for number, mode in enumerate("rww"))
    function(*arguments)


def _main(words: list[str]) -> None:
    sys.argv = ["sylvester", *words]
    from sylvester.__main__ import main

    main()
