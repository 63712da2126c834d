"""What importing costs, and what it does not."""

from __future__ import annotations

import subprocess
import sys

import pytest

import sylvester


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_import_needs_torch_alone():
    """sympy and mpmath are torch's own: it imports them when an operator is registered."""
    code = """
import sys, torch, torch.distributions, torch.func
before = {name.partition('.')[0] for name in sys.modules}
import sylvester
for name in ("linalg", "transforms", "distributions", "flows", "vae", "objectives", "diagnostics", "evaluation"):
    getattr(sylvester, name)
flow = sylvester.flows.TriangularSylvester(features=4, context=3, transforms=2)
z, log_q = flow(torch.randn(5, 3)).rsample_and_log_prob((8,))
new = {name.partition('.')[0] for name in sys.modules} - before - set(sys.stdlib_module_names)
print(sorted(name for name in new if not name.startswith('_') and name not in ("sympy", "mpmath")))
"""
    assert run(code).strip() == "['sylvester']"


def test_import_is_lazy():
    assert run("import sys, sylvester, sylvester.names; print('torch' in sys.modules)").strip() == "False"


def test_the_front_page_example():
    code = """
import torch, sylvester
flow = sylvester.flows.TriangularSylvester(features=64, context=256, transforms=16)
posterior = flow(torch.randn(2, 256))
z, log_q = posterior.rsample_and_log_prob((8,))
print(z.shape, log_q.shape, posterior.log_prob(torch.zeros(64)).shape)
"""
    assert run(code).strip() == "torch.Size([8, 2, 64]) torch.Size([8, 2]) torch.Size([2])"


def test_unknown_names():
    with pytest.raises(AttributeError, match="no attribute 'flow'"):
        _ = sylvester.flow
    assert "flows" in dir(sylvester)
