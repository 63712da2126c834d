"""What the command line asks of the machine before it trains, without the user's help.

**Waiting.** OpenMP threads that wait for each other spin. Where another process has taken a core, the one thread spins
for as long as the other does not run, and training slows ten- to twenty-fold. Told to sleep after a short spin, they
leave the core to whoever has work. The number of threads stays as it is: results depend on it.

**bfloat16.** Some virtual machines announce the AMX instructions and do not grant them: torch's bfloat16 kernels die
there of an illegal instruction. That cannot be caught, so a child process finds out, once for each processor and
version of torch, and whether it helps to keep oneDNN below AMX. ``SYLVESTER_BF16`` gives the answer instead: ``works``,
``limited`` or ``denied``.

**Devices.** A run that asks for more than the machine has is refused; for that alone torch is loaded here.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import MutableMapping
from importlib.metadata import version
from pathlib import Path
from typing import Literal

Environment = MutableMapping[str, str]
Verdict = Literal["works", "limited", "denied"]

# About a tenth of a millisecond; libgomp spins for about ten by itself.
_WAITING = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "2000"}
_ABOUT_WAITING = (*_WAITING, "KMP_BLOCKTIME")

_ANSWER = "SYLVESTER_BF16"
_LIMIT = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16"}
_ABOUT_LIMIT = (*_LIMIT, "DNNL_MAX_CPU_ISA")

# Products and convolutions under autocast, forwards and backwards, large enough for the kernels that large ones get.
_PROBE = """
import resource
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
import torch
from torch import nn
layers = nn.Sequential(
    nn.Conv2d(1, 32, 5, padding=2), nn.Conv2d(32, 64, 5, stride=2), nn.ConvTranspose2d(64, 32, 5),
    nn.Flatten(), nn.Linear(32 * 28 * 28, 64),
).to(memory_format=torch.channels_last)
with torch.autocast("cpu", torch.bfloat16):
    y = layers(torch.ones(16, 1, 52, 52)) @ torch.ones(64, 64)
y.float().sum().backward()
assert y.isfinite().all() and all(p.grad.isfinite().all() for p in layers.parameters())
"""


class MachineError(ValueError):
    """What this machine cannot do, in one sentence."""


def wait_passively(environment: Environment) -> None:
    """For libraries that are loaded later, by this process and its children; what the user has set stays."""
    if not any(name in environment for name in _ABOUT_WAITING):
        environment.update(_WAITING)


def cores() -> int:
    """The CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def require(precision: str, devices: int) -> None:
    """Refuse a run that this machine lacks the devices for."""
    if precision != "16-mixed" and devices == 1:
        return
    import torch

    cuda = torch.cuda.device_count()
    if precision == "16-mixed" and not cuda:  # Fabric would take bfloat16 in its stead, whether or not that works
        raise MachineError(
            "Expected a CUDA device for --precision 16-mixed; got none: --precision bf16-mixed is for CPUs"
        )
    most = cuda or max(2, cores())  # two also on one core, where several devices are tried out
    if devices > most:
        kind = "CUDA devices" if cuda else "CPU cores"
        raise MachineError(f"Expected devices to be at most {most} on this machine, by its {kind}; got {devices}")


def allow_bf16(environment: Environment) -> None:
    """Make bfloat16 safe for libraries that are loaded later, or say that it cannot be."""
    verdict = bf16(environment)
    if verdict == "limited":
        environment.update(_LIMIT)
    elif verdict == "denied":
        raise MachineError(
            "Expected a processor on which torch's bfloat16 kernels work; got one on which they die: "
            "--precision 32-true works everywhere"
        )


def bf16(environment: Environment) -> Verdict:
    """Whether bfloat16 works on this processor, or works within a limit; found out once and remembered."""
    said = environment.get(_ANSWER)
    if said is not None:
        for verdict in _VERDICTS:
            if said == verdict:
                return verdict
        raise MachineError(f"Expected {_ANSWER} to be one of {', '.join(_VERDICTS)}; got {said!r}")
    cache = _cache(environment)
    if (remembered := _remembered(cache)) is not None:
        return remembered
    verdict = _find_out(environment)
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        temporary = cache.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps({"bf16": verdict}))
        temporary.replace(cache)
    except OSError:
        pass  # found out again the next time
    return verdict


_VERDICTS: tuple[Verdict, ...] = ("works", "limited", "denied")


def _find_out(environment: Environment) -> Verdict:
    if _survives(environment):
        return "works"
    limited = not any(name in environment for name in _ABOUT_LIMIT) and _survives({**environment, **_LIMIT})
    return "limited" if limited else "denied"


def _survives(environment: Environment) -> bool:
    """Whether the probe does, whatever it dies of."""
    command = [sys.executable, "-c", _PROBE]
    done = subprocess.run(
        command, env=dict(environment), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False
    )
    return done.returncode == 0


def _remembered(cache: Path) -> Verdict | None:
    try:
        found = json.loads(cache.read_text())["bf16"]
    except (OSError, ValueError, KeyError, TypeError):  # none yet, or none that can be read
        return None
    return next((verdict for verdict in _VERDICTS if found == verdict), None)


def _cache(environment: Environment) -> Path:
    """A file for all that the answer depends on."""
    given = [f"{name}={environment.get(name)}" for name in _ABOUT_LIMIT]
    key = hashlib.sha256("\n".join([version("torch"), _processor(), platform.release(), *given]).encode()).hexdigest()
    folder = environment.get("XDG_CACHE_HOME") or Path(environment.get("HOME") or "~").expanduser() / ".cache"
    return Path(folder) / "sylvester" / f"bf16-{key[:16]}.json"


def _processor() -> str:
    """Model and instructions, of the first core."""
    try:
        first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    except OSError:
        return platform.processor() or platform.machine()
    return "\n".join(line for line in first.splitlines() if line.startswith(("model name", "flags", "Features")))
