"""Whoever uses the library's flows gets the memory of one step again at the next."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

COUNT_PAGES_TAKEN_AGAIN = """
import resource, torch, sylvester.flows

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

for repetition in range(10):
    if repetition == 5:
        before = faults()
    torch.ones(16 << 20)  # 64 MiB, freed at once
print((faults() - before) * resource.getpagesize() >> 20)
"""


def pages_are_small() -> bool:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return not setting.exists() or "[always]" not in setting.read_text()


@pytest.mark.skipif(not pages_are_small(), reason="pages of megabytes cannot be counted so")
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators are left alone")
@pytest.mark.parametrize(("setting", "again"), [("", False), ("system", True)])
def test_freed_memory_is_kept_unless_asked_otherwise(setting: str, again: bool) -> None:
    environment = os.environ | {"SYLVESTER_ALLOCATOR": setting}
    run = subprocess.run(
        [sys.executable, "-c", COUNT_PAGES_TAKEN_AGAIN], env=environment, capture_output=True, text=True, check=True
    )
    megabytes = int(run.stdout)
    assert megabytes > 4 * 64 if again else megabytes < 2 * 64
