"""Whoever asks for it gets the memory of one step again at the next, and nobody else."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

COUNT_PAGES_TAKEN_AGAIN = """
import resource, torch, sylvester.allocator

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

{prepare}
for repetition in range(15):
    if repetition == 10:  # after a few, blocks lie where the next one fits
        before = faults()
    torch.ones(10 << 20)  # 40 MiB, more than any threshold that glibc adapts; freed at once
print((faults() - before) * resource.getpagesize() >> 20)
"""

COMMAND_LINE = """
import sys
from sylvester.app.cli import main
sys.argv = ["sylvester", "--version"]
main()
"""


def pages_are_small() -> bool:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return not setting.exists() or "[always]" not in setting.read_text()


@pytest.mark.skipif(not pages_are_small(), reason="pages of megabytes cannot be counted so")
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators are left alone")
@pytest.mark.parametrize(
    ("prepare", "setting", "kept"),
    [
        ("", "", False),
        ("assert sylvester.allocator.keep_freed_memory()", "", True),
        ("assert not sylvester.allocator.keep_freed_memory()", "system", False),
        (COMMAND_LINE, "", True),
        (COMMAND_LINE, "system", False),
    ],
)
def test_freed_memory_is_kept_where_asked(prepare: str, setting: str, kept: bool) -> None:
    environment = os.environ | {"SYLVESTER_ALLOCATOR": setting}
    code = COUNT_PAGES_TAKEN_AGAIN.replace("{prepare}", prepare)
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    megabytes = int(run.stdout.split()[-1])
    assert megabytes < 2 * 40 if kept else megabytes > 4 * 40
