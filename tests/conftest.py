from __future__ import annotations

import pytest
import torch


@pytest.fixture
def float64():
    """Start in float64 with a fixed seed, and leave torch as it was found."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(before)
