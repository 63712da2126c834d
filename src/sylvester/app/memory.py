"""How much memory the process may still take."""

from __future__ import annotations

import os
import resource
from pathlib import Path

_GROUP = Path("/sys/fs/cgroup")


def available() -> int:
    """Bytes that are free: on the machine, in the process's control group and within its limits."""
    free = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    if (line := _line("/proc/meminfo", "MemAvailable:")) is not None:
        free.append(1024 * int(line))
    try:
        limit = int((_GROUP / "memory.max").read_text())  # "max" where there is none
        free.append(limit - int((_GROUP / "memory.current").read_text()))
    except (OSError, ValueError):
        pass
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        free.append(soft - _address_space())
    return max(min(free), 0)


def exhausted(error: BaseException) -> bool:
    """Whether an error is about memory: torch has a class of its own for accelerators only."""
    words = ("can't allocate memory", "not enough memory", "out of memory", "Storage size calculation overflowed")
    return isinstance(error, MemoryError) or any(word in str(error) for word in words)


def readable(size: int) -> str:
    return f"{size / 1e9:,.1f} GB"


def _address_space() -> int:
    pages = Path("/proc/self/statm")
    return int(pages.read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE") if pages.exists() else 0


def _line(file: str, start: str) -> str | None:
    try:
        lines = Path(file).read_text().splitlines()
    except OSError:
        return None
    return next((line.split()[1] for line in lines if line.startswith(start)), None)
