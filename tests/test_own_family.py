"""A family written outside the package is a family like any other."""

from __future__ import annotations

import ast
import copy
import importlib.util
from pathlib import Path

import pytest
import torch
from cases import SCALES, redraw
from test_transforms import jacobians

import sylvester.flows
import sylvester.transforms

pytestmark = pytest.mark.usefixtures("float64")

EXAMPLE = Path(__file__).parents[1] / "examples" / "own_family.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("own_family", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_takes_one_short_file_and_public_names():
    source = EXAMPLE.read_text()
    assert len(source.splitlines()) <= 40
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            public = {"sylvester.flows": sylvester.flows, "sylvester.transforms": sylvester.transforms}[node.module]
            assert {name.name for name in node.names} <= set(public.__all__)


@pytest.mark.parametrize("scale", SCALES)
def test_its_steps_are_exact(example, scale):
    delta, epsilon = (scale * torch.randn(3, 4)).exp().clamp(0.2, 5), scale * torch.randn(3, 4)
    step, z = example.SinhArcsinhTransform(delta, epsilon), torch.randn(2, 3, 4)
    y, ladj = step.call_and_ladj(z)
    torch.testing.assert_close(ladj, torch.linalg.slogdet(jacobians(step, z)).logabsdet)
    torch.testing.assert_close(step.inv(y), z)
    assert copy.deepcopy(step) == step


def test_it_is_a_flow(example):
    flow = example.SinhArcsinh(4, context=3, transforms=2)
    posterior = flow(torch.randn(5, 3))
    z, log_q = posterior.rsample_and_log_prob((6,))
    assert (log_q - posterior.base_dist.log_prob(z)).abs().max() < 1e-2  # it starts at the Gaussian
    redraw(flow, 0.3)
    composed = sylvester.flows.inverted(sylvester.flows.compose(flow, sylvester.flows.Planar(4, 3, 2)))
    posterior = composed(torch.randn(5, 3))
    z, log_q = posterior.rsample_and_log_prob((6,))
    torch.testing.assert_close(posterior.log_prob(z.clone()), log_q)
    (z.sum() + log_q.sum()).backward()
    assert all(parameter.grad.abs().max() > 0 for parameter in flow.parameters())
