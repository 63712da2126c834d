"""torch.compile(fullgraph=True) of sampling with the log-density, and its backward, agrees with eager."""

from __future__ import annotations

import shutil

import pytest
import torch
from cases import redraw

from sylvester import flows

pytestmark = [pytest.mark.usefixtures("float64"), pytest.mark.filterwarnings("ignore::FutureWarning")]

needs_compiler = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="Inductor needs a C++ compiler"
)
# Capturing the graph, forward and backward, takes a second or two; generating code for it many more.
KINDS = ("orthogonal-sylvester", "triangular-sylvester", "iaf", "coupling-nsf")
CASES = [pytest.param(name, "aot_eager", marks=[] if name in KINDS else pytest.mark.slow) for name in flows.FAMILIES]
CASES += [pytest.param(name, "inductor", marks=[needs_compiler, pytest.mark.slow]) for name in flows.FAMILIES]


@pytest.mark.parametrize(("name", "backend"), CASES)
def test_compiled_and_eager_agree(name, backend):
    flow = redraw(flows.FAMILIES[name](3, 3, 2), 1.0)
    noise = torch.randn(6, 4, 3)

    def run(h, noise):
        return flow(h).rsample_and_log_prob(noise=noise)

    def values_and_gradients(function):
        flow.zero_grad()
        h = torch.linspace(-1, 1, 12).reshape(4, 3).requires_grad_()
        z, log_q = function(h, noise)
        ((z**2).sum() + log_q.sum()).backward()
        return z, log_q, h.grad, [parameter.grad.clone() for parameter in flow.parameters()]

    torch._dynamo.reset()
    compiled = values_and_gradients(torch.compile(run, fullgraph=True, backend=backend))
    torch.testing.assert_close(compiled, values_and_gradients(run))
