"""Local flows: what the hypernetworks emit, as parameters of their own, for every family."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from cases import FLOWS, SCALES, redraw
from torch import nn
from torch.distributions import constraints

from sylvester import flows, inference

pytestmark = pytest.mark.usefixtures("float64")

NETWORKS = ("iaf", "mean-only-iaf", "affine-iaf", "maf", "nsf", "nice", "realnvp", "coupling-nsf", "inverted-iaf")


def make(name: str, scale: float = 1.0) -> flows.Flow:
    return redraw(FLOWS[name](3, 4, 2), scale)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", FLOWS)
def test_a_local_flow_starts_where_the_amortized_one_is(name, scale):
    flow, h, noise = make(name, scale), torch.randn(5, 4), torch.randn(6, 5, 3)
    local = flow.local(h)
    assert local.context == 0
    expected, got = (q.rsample_and_log_prob(noise=noise) for q in (flow(h), local()))
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", FLOWS)
def test_each_row_is_free_and_by_itself(name):
    flow, h, noise = make(name), torch.randn(5, 4), torch.randn(5, 3)
    before = copy.deepcopy(flow.state_dict())
    local = flow.local(h)
    free = [parameter for parameter in local.parameters() if parameter.requires_grad]
    z, log_q = local().rsample_and_log_prob(noise=noise)
    row = 2
    for parameter, gradient in zip(free, torch.autograd.grad(z[row].sum() + log_q[row], free), strict=True):
        assert parameter.shape[0] == 5
        assert gradient[row].abs().sum() > 0
        assert gradient[torch.arange(5) != row].abs().max() == 0
    held = sum(not parameter.requires_grad for parameter in local.parameters())
    assert (held > 0) == (name in NETWORKS)
    with torch.no_grad():
        for parameter in local.parameters():
            parameter.add_(1.0)
    assert all(torch.equal(before[name], value) for name, value in flow.state_dict().items())


def test_one_context_gives_one_distribution_that_can_be_fitted():
    flow = flows.Planar(2, context=4, transforms=2)
    local = flow.local(torch.randn(4))
    assert local().batch_shape == ()
    target = torch.distributions.Independent(torch.distributions.Normal(torch.tensor([1.0, -2.0]), 0.5), 1)
    result = inference.fit(target.log_prob, local, steps=200, samples=32, learning_rate=0.05, diagnosis_samples=1000)
    assert abs(result.elbo) < 0.05


def test_a_step_of_ones_own_keeps_its_networks_and_frees_its_context():
    class Shift(nn.Linear):
        def forward(self, context):
            return [torch.distributions.AffineTransform(super().forward(context), 1.0, event_dim=1)]

    flow = flows.Flow(flows.DiagonalGaussian(2, context=4), [Shift(4, 2)])
    h, z = torch.randn(5, 4), torch.randn(5, 2)
    local = flow.local(h)
    torch.testing.assert_close(local().log_prob(z), flow(h).log_prob(z))
    shapes = {tuple(parameter.shape) for parameter in local.parameters() if parameter.requires_grad}
    assert shapes == {(5, 1, 4), (5, 4)}


def test_supports_and_standardized_contexts_stay():
    h, x = 3 + 2 * torch.randn(50, 4), torch.rand(50, 2) + 0.1
    start = flows.onto(flows.Planar(2, context=4, transforms=2), constraints.positive)
    flow = inference.fit_density(start, x, h, epochs=1).flow
    torch.testing.assert_close(flow.local(h)().log_prob(x), flow(h).log_prob(x))


def test_a_base_is_moved():
    base = flows.DiagonalGaussian(3, context=2, variance_bounds=(0.01, 4.0))
    loc, scale = torch.randn(5, 3), torch.tensor([0.5, 1.5, 3.0]).expand(5, 3)
    moved = base.at(loc, scale)(None).base_dist
    torch.testing.assert_close(moved.loc, loc)
    torch.testing.assert_close(moved.scale, scale.clamp(max=2.0))


@pytest.mark.parametrize(
    ("context", "h", "message"),
    [
        (0, torch.zeros(3, 1), "Expected a flow with a context; got one made with context=0"),
        (4, torch.zeros(3, 2), "Expected a context of shape"),
    ],
)
def test_bad_contexts_get_a_sentence(context, h, message):
    with pytest.raises(ValueError, match=message):
        flows.Planar(2, context).local(h)


def test_local_flows_move_and_save():
    flow = flows.TriangularSylvester(3, context=4, transforms=2)
    local, other = (flow.local(torch.randn(5, 4)) for _ in range(2))
    other.load_state_dict(local.state_dict())
    z = torch.randn(5, 3)
    torch.testing.assert_close(other().log_prob(z), local().log_prob(z))
    assert local.float()().log_prob(z.float()).dtype == torch.float32
    assert partial(copy.deepcopy, local)()().batch_shape == (5,)
