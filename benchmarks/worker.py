"""One process of one contestant: builds tasks and times them, as told line by line in JSON.

    {"build": task, "size": {…}, "arguments": {…}}  ->  {"job": number, "flops": number or null}
    {"time": job}                                   ->  {"seconds": per call}
    {"peak": job}                                   ->  {"megabytes": how far calls raise the process's peak}
    {"forget": true}                                ->  {}, and the jobs so far are gone
    {"library": true}                               ->  {"path": of the library's folder}

A contestant that is not installed answers {"missing": module}, anything else that fails {"error": sentence}.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import resource
import sys
import time
from typing import Any

from benchmarks.sizes import Size
from benchmarks.workloads import Allocator

# A task is repeated until it has taken so long, so that a call of microseconds can be timed.
_LEAST_SECONDS = 0.05


def tasks(contestant: str, allocator: Allocator) -> dict[str, Any]:
    if contestant == "library" and allocator == "kept" and not kept():
        raise RuntimeError("Expected glibc, which can keep freed memory; got another: --allocator system leaves it be")
    if contestant in ("library", "reference"):
        return importlib.import_module(f"benchmarks.tasks_{contestant}").TASKS
    return importlib.import_module("benchmarks.peers").TASKS[contestant]


def kept() -> bool:
    """Freed memory stays with the process from here on, as the application has it."""
    return importlib.import_module("sylvester.allocator").keep_freed_memory()


def seconds(task: Any) -> float:
    """Per call, over as many calls as fill the least time."""
    calls, started = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - started) < _LEAST_SECONDS or calls == 0:
        task()
        calls += 1
    return elapsed / calls


def megabytes(task: Any) -> float:
    """How far two calls raise the peak of the process's memory: the second finds all state in place."""
    before = peak()
    task()
    task()
    return max(peak() - before, resource.getpagesize()) / 2**20


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


class Worker:
    def __init__(self, contestant: str, allocator: Allocator = "system") -> None:
        self.contestant, self.allocator = contestant, allocator
        self.jobs: list[Any] = []

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        if "time" in request:
            return {"seconds": seconds(self.jobs[request["time"]])}
        if "peak" in request:
            return {"megabytes": megabytes(self.jobs[request["peak"]])}
        if "forget" in request:
            self.jobs.clear()
            gc.collect()  # models and optimizers refer to each other
            return {}
        if "library" in request:
            return {"path": importlib.import_module("sylvester").__path__[0]}
        import torch

        torch.manual_seed(0)
        task = tasks(self.contestant, self.allocator)[request["build"]](Size(**request["size"]), **request["arguments"])
        self.jobs.append(task)
        return {"job": len(self.jobs) - 1, "flops": getattr(task, "flops", None)}


def main() -> None:
    # Whatever a contestant prints goes to stderr: stdout is for answers.
    with os.fdopen(os.dup(1), "w", buffering=1) as answers:
        os.dup2(2, 1)
        contestant, allocator = sys.argv[1:]
        worker = Worker(contestant, "kept" if allocator == "kept" else "system")
        for line in sys.stdin:
            try:
                answer = worker.answer(json.loads(line))
            except ModuleNotFoundError as error:
                answer = {"missing": error.name}
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
