from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from sylvester.app import machine

# Before torch is loaded: some processors announce bfloat16 instructions that they do not have.
BF16 = machine.bf16(os.environ)
if BF16 == "limited":
    machine.allow_bf16(os.environ)

# A script's background job has SIGINT ignored, and so have all that it starts: tests interrupt processes.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import torch  # noqa: E402


@pytest.fixture
def bf16() -> None:
    """For tests that compute in bfloat16."""
    if BF16 == "denied":
        pytest.skip("torch's bfloat16 kernels do not work on this processor")


@pytest.fixture
def float64() -> Iterator[None]:
    """Start in float64 with a fixed seed, and leave torch as it was found."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(before)
