"""Runs on a Ray cluster (extra ``ray``). The runs' folders are on a path that all machines share, as are the data.

A task is one run, done by a process of its own with the threads that the task was given. Ray starts a task again
whose worker has died; the process ends with its worker, and the next one resumes the run.
"""

from __future__ import annotations

import logging
import signal
import socket
from pathlib import Path
from typing import Any

from sylvester.app.config import ConfigError
from sylvester.app.experiments.child import Child, Outcome
from sylvester.app.experiments.sweep import Cell

__all__ = ["Cluster"]

_PATIENCE = 10.0  # seconds for a machine to answer


class Cluster:
    """The cluster at ``address`` or, without one, the one that runs on this machine, which is started if need be."""

    def __init__(self, address: str | None, *, cpus: float = 1, gpus: float = 0, retries: int = 2) -> None:
        try:
            import ray
        except ModuleNotFoundError as error:
            raise ConfigError('Expected Ray to be installed; got none: pip install "sylvester[ray]"') from error
        _require_listener(address)
        self._ray, self._own = ray, not ray.is_initialized()
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            ray.init(address, log_to_driver=False, logging_level=logging.ERROR, ignore_reinit_error=True)
        except (ConnectionError, RuntimeError, ValueError) as error:
            reason = str(error).partition("\n")[0] or type(error).__name__
            raise ConfigError(f"Expected a Ray cluster at {address or 'this machine'}; got: {reason}") from None
        finally:
            for number, handler in handlers.items():  # Ray's would end the process without a word
                signal.signal(number, handler)
        self._require(cpus=cpus, gpus=gpus)
        self._threads = max(1, int(cpus))
        self._task = ray.remote(num_cpus=cpus, num_gpus=gpus, max_retries=retries)(_run)
        self._running: dict[Any, Cell] = {}

    def _require(self, *, cpus: float, gpus: float) -> None:
        """Ray would wait for ever for what no machine of the cluster has."""
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        if not any(node.get("CPU", 0) >= cpus and node.get("GPU", 0) >= gpus for node in nodes):
            most = {kind: max((node.get(kind, 0) for node in nodes), default=0) for kind in ("CPU", "GPU")}
            self._leave()
            raise ConfigError(
                f"Expected a machine of the cluster with {cpus:g} CPUs and {gpus:g} GPUs for a run; "
                f"got at most {most['CPU']:g} and {most['GPU']:g}"
            )

    def free(self) -> bool:
        """Always: Ray keeps the queue."""
        return True

    def start(self, cell: Cell) -> None:
        self._running[self._task.remote(str(cell.path.absolute()), self._threads, cell.config.data_dir)] = cell

    def ended(self) -> list[tuple[Cell, Outcome]]:
        if not self._running:
            return []
        done, _ = self._ray.wait(list(self._running), num_returns=len(self._running), timeout=0)
        return [(self._running.pop(task), self._outcome(task)) for task in done]

    def _outcome(self, task: Any) -> Outcome:
        try:
            code, said = self._ray.get(task)
        except self._ray.exceptions.RayError as error:  # after all retries
            return Outcome(1, (f"Ray gave it up: {str(error).strip().splitlines()[0]}",))
        return Outcome(code, said)

    def close(self) -> None:
        for task in self._running:
            self._ray.cancel(task, force=True)
        self._leave()

    def _leave(self) -> None:
        """Unless this process was part of the cluster before."""
        if self._own:
            self._ray.shutdown()


def _require_listener(address: str | None) -> None:
    """Ask at HOST:PORT first: Ray would knock there for a minute, and then end the process."""
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    if not host:
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_PATIENCE).close()
    except (OSError, ValueError, OverflowError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(f"Expected a Ray cluster at {address}; got: {reason}") from None


def _run(path: str, threads: int, data_dir: Path | None) -> tuple[int, tuple[str, ...]]:
    """In a worker."""
    outcome = Child(Path(path), threads=threads, data_dir=data_dir).wait()
    return outcome.code, outcome.said
