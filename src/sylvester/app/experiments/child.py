"""One run of many, as a process of its own: ``sylvester resume``, which ends with the process that started it.

``python -m sylvester.app.experiments.child PARENT resume RUN …`` is ``python -m sylvester resume RUN …`` with that
guard. Its environment is set before it starts, because torch reads the number of threads once.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from sylvester.app.processes import end_with

__all__ = ["Child", "Outcome"]

_GRACE = 5.0  # seconds that a process has to end by itself


@dataclass(frozen=True)
class Outcome:
    """How a process ended: its exit code, negative where a signal killed it, and what it had to say."""

    code: int
    said: tuple[str, ...]

    @property
    def killed(self) -> bool:
        return self.code < 0

    @property
    def refused(self) -> bool:
        """Because another process had the run's lock, if only for the moment in which it ended."""
        return self.code == 2 and self.reason.endswith("which is in use")

    @property
    def reason(self) -> str:
        if self.killed:
            return f"was killed by {signal.Signals(-self.code).name}"
        return self.said[-1].removeprefix("sylvester: ") if self.said else f"ended with code {self.code}"


class Child:
    """``sylvester resume`` of a run, in a session of its own: a terminal's Ctrl-C is for the parent to answer."""

    def __init__(self, run: Path, *, threads: int | None, data_dir: Path | None = None) -> None:
        words = ["resume", str(run), "--json", "--quiet"]
        if data_dir is not None:
            words += ["--data-dir", str(data_dir)]
        self._said: IO[str] = tempfile.TemporaryFile("w+", errors="backslashreplace")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", __spec__.name, str(os.getpid()), *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._said,
            env=with_threads(os.environ, threads),
            start_new_session=True,
        )

    def poll(self) -> Outcome | None:
        """None while it runs."""
        return None if self._process.poll() is None else self.wait()

    def wait(self) -> Outcome:
        code = self._process.wait()
        if self._said.closed:
            return Outcome(code, ())
        self._said.seek(0)
        lines = tuple(line.rstrip("\n") for line in self._said if line.strip())
        self._said.close()
        return Outcome(code, lines)

    def terminate(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()

    def end(self) -> None:
        """Wait for a process that was told to end, and kill one that does not: it loses an epoch at most."""
        try:
            self._process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._said.close()


def with_threads(environment: Mapping[str, str], threads: int | None) -> dict[str, str]:
    """Of this process or, with ``threads``, for so many; what the user has set stays."""
    given = dict(environment)
    if threads is not None:
        given.setdefault("OMP_NUM_THREADS", str(threads))
    return given


if __name__ == "__main__":
    end_with(int(sys.argv.pop(1)))

    from sylvester.__main__ import main

    main()
