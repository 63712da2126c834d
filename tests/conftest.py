from __future__ import annotations

import os

import pytest

from sylvester.app import machine

# Before torch is loaded: some processors announce bfloat16 instructions that they do not have.
BF16 = machine.bf16(os.environ)
if BF16 == "limited":
    machine.allow_bf16(os.environ)


@pytest.fixture
def bf16() -> None:
    """For tests that compute in bfloat16."""
    if BF16 == "denied":
        pytest.skip("torch's bfloat16 kernels do not work on this processor")
