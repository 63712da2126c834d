"""Flows onto constraints: against torch's TransformedDistribution, and by integration."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch.distributions import (
    Dirichlet,
    Independent,
    Normal,
    Transform,
    TransformedDistribution,
    biject_to,
    constraints,
)

from sylvester import flows
from sylvester.distributions import FlowDistribution
from sylvester.transforms import SupportTransform
from sylvester.vae import VAE

pytestmark = pytest.mark.usefixtures("float64")

BOUNDS = torch.tensor([-1.0, 0.5]), torch.tensor([2.0, 0.75])

# Each with the size of its events, for two features.
CONSTRAINTS = {
    "positive": (constraints.positive, (2,)),
    "greater_than": (constraints.greater_than(-3.0), (2,)),
    "less_than": (constraints.less_than(1.5), (2,)),
    "interval": (constraints.interval(-2.0, 3.0), (2,)),
    "interval for each": (constraints.interval(*BOUNDS), (2,)),
    "unit_interval": (constraints.unit_interval, (2,)),
    "real": (constraints.real, (2,)),
    "simplex": (constraints.simplex, (3,)),
    "independent positive": (constraints.independent(constraints.positive, 1), (2,)),
}
MIXED = {
    "numbers": constraints.cat([constraints.positive, constraints.interval(-1.0, 1.0)], dim=-1),
    "lengths": constraints.cat([constraints.positive, constraints.real], dim=-1, lengths=[2, 1]),
    "a simplex": constraints.cat([constraints.simplex, constraints.positive], dim=-1, lengths=[3, 2]),
}


def scaled(flow: flows.Flow, scale: float) -> flows.Flow:
    with torch.no_grad():
        for parameter in flow.parameters():
            parameter.copy_(scale * torch.randn_like(parameter))
    return flow


def as_torch(q: FlowDistribution, last: Transform) -> TransformedDistribution:
    """The same distribution in torch's own words."""
    return TransformedDistribution(q.base_dist, [*q.transforms[:-1], last])


@pytest.mark.parametrize("scale", [0.1, 1.0])
@pytest.mark.parametrize("name", CONSTRAINTS)
@pytest.mark.parametrize("context", [0, 3])
def test_densities_shapes_and_support_are_torchs(name: str, scale: float, context: int) -> None:
    constraint, event = CONSTRAINTS[name]
    flow = scaled(flows.onto(flows.Planar(2, context=context, transforms=3), constraint), scale)
    q = flow(torch.randn(4, context)) if context else flow()
    batch = (4,) if context else ()
    oracle = as_torch(q, biject_to(constraint))
    assert (q.batch_shape, q.event_shape) == (batch, event) == (oracle.batch_shape, oracle.event_shape)

    z, log_q = q.rsample_and_log_prob((6,))
    assert z.shape == (6, *batch, *event)
    assert log_q.shape == (6, *batch)
    torch.testing.assert_close(log_q, oracle.log_prob(z), rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(q.log_prob(z.clone()), oracle.log_prob(z), rtol=1e-7, atol=1e-7)
    assert q.support.event_dim == 1
    assert q.support is constraint or q.support.base_constraint is constraint
    assert q.support.check(z).shape == (6, *batch)
    assert q.support.check(z).all()
    assert q.residual().shape == batch
    assert q.residual(z.detach()).shape == (6, *batch)


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_expanded_rows_have_noise_of_their_own(name: str) -> None:
    constraint, event = CONSTRAINTS[name]
    q = scaled(flows.onto(flows.Planar(2, transforms=3), constraint), 1.0)().expand((2, 5))
    z, log_q = q.rsample_and_log_prob((3,))
    assert z.shape == (3, 2, 5, *event)
    assert len(z.reshape(-1, *event).unique(dim=0)) == 30
    torch.testing.assert_close(q.log_prob(z.clone()), log_q)


def test_single_coordinates_integrate_to_one() -> None:
    for name, constraint, low, high in [
        ("positive", constraints.positive, -30.0, 30.0),
        ("interval", constraints.interval(-2.0, 3.0), -2.0, 3.0),
        ("unit_interval", constraints.unit_interval, 0.0, 1.0),
    ]:
        q = scaled(flows.onto(flows.Planar(1, transforms=2), constraint), 0.5)()
        edges = torch.linspace(low, high, 200_001)
        middle = (edges[1:] + edges[:-1]) / 2
        step = (high - low) / 200_000
        # The half-line on a logarithmic scale, whose measure is dx = x du.
        point, measure = (middle.exp(), middle.exp() * step) if name == "positive" else (middle, step)
        assert (q.log_prob(point[:, None]).exp() * measure).sum().item() == pytest.approx(1.0, abs=1e-4), name


def test_a_simplex_integrates_to_one_over_its_free_entries() -> None:
    q = scaled(flows.onto(flows.Planar(2, transforms=2), constraints.simplex), 0.5)()
    count = 800
    u = (torch.arange(count) + 0.5) / count
    first, share = torch.meshgrid(u, u, indexing="ij")
    x = torch.stack([first, (1 - first) * share, (1 - first) * (1 - share)], -1)  # dx₁ dx₂ = (1 − x₁) du₁ du₂
    total = (q.log_prob(x).exp() * (1 - first)).sum() / count**2
    assert total.item() == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("name", MIXED)
def test_each_part_meets_its_own_constraint(name: str) -> None:
    constraint = MIXED[name]
    features = 4 if name == "a simplex" else sum(constraint.lengths)
    flow = scaled(flows.onto(flows.Planar(features, transforms=2), constraint), 0.5)
    q = flow()
    z, log_q = q.rsample_and_log_prob((7,))
    assert z.shape == (7, sum(constraint.lengths))
    assert q.support.check(z).shape == (7,)
    assert q.support.check(z).all()
    assert not q.support.check(z - 10).any()
    torch.testing.assert_close(q.log_prob(z.clone()), log_q)

    # The parts one by one, by torch's own transforms.
    before = FlowDistribution(q.base_dist, q.transforms[:-1])
    inverse, ladj = [], torch.zeros(7)
    for part, piece in zip(constraint.cseq, z.split(constraint.lengths, -1), strict=True):
        map_ = biject_to(part)
        inverse.append(map_.inv(piece))
        term = map_.log_abs_det_jacobian(inverse[-1], piece)
        ladj = ladj + (term.sum(-1) if term.dim() == 2 else term)
    torch.testing.assert_close(log_q, before.log_prob(torch.cat(inverse, -1)) - ladj)


def test_events_may_be_matrices() -> None:
    q = scaled(flows.onto(flows.Planar(3, transforms=2), constraints.corr_cholesky), 0.5)()
    z, log_q = q.rsample_and_log_prob((5,))
    assert q.event_shape == (3, 3)
    assert q.support is constraints.corr_cholesky
    assert q.support.check(z).all()
    torch.testing.assert_close(log_q, as_torch(q, biject_to(constraints.corr_cholesky)).log_prob(z))
    assert q.residual(z.detach()).shape == (5,)


@pytest.mark.parametrize("last", [torch.distributions.ExpTransform(), torch.distributions.StickBreakingTransform()])
def test_torchs_transforms_are_steps_like_any_other(last: Transform) -> None:
    base = Independent(Normal(torch.randn(4, 2), torch.rand(4, 2) + 0.5), 1)
    steps = [torch.distributions.AffineTransform(torch.randn(2), torch.rand(2) + 0.5), last]
    q, oracle = FlowDistribution(base, steps), TransformedDistribution(base, steps)
    z, log_q = q.rsample_and_log_prob((3,))
    assert z.shape == (3, *oracle.batch_shape, *oracle.event_shape)
    torch.testing.assert_close(log_q, oracle.log_prob(z))
    torch.testing.assert_close(
        q.expand((5, 4)).log_prob(z.unsqueeze(1)), oracle.log_prob(z).unsqueeze(1).expand(3, 5, 4)
    )


def test_gradients_reach_parameters_and_points() -> None:
    flow = scaled(flows.onto(flows.Planar(2, transforms=2), constraints.simplex), 0.5)
    point = torch.tensor([[0.2, 0.3, 0.5]], requires_grad=True)
    flow().log_prob(point).sum().backward()
    assert point.grad is not None
    assert all(p.grad is not None and p.grad.isfinite().all() for p in flow.parameters())


def test_bounds_move_with_the_flow_and_travel() -> None:
    lower, upper = torch.tensor([-1.0, 0.5]), torch.tensor([2.0, 0.75])
    flow = flows.onto(flows.Planar(2, transforms=2), constraints.interval(lower, upper)).float()
    z = flow().sample((3,))
    assert z.dtype == torch.float32
    assert lower.dtype == torch.float64
    for other in (copy.deepcopy(flow), pickle.loads(pickle.dumps(flow))):
        noise = torch.randn(3, 2, dtype=torch.float32)
        torch.testing.assert_close(
            other().rsample_and_log_prob(noise=noise), flow().rsample_and_log_prob(noise=noise), rtol=0, atol=0
        )


def test_a_log_normal_is_a_gaussian_onto_the_positive() -> None:
    flow = scaled(flows.onto(flows.Gaussian(1), constraints.positive), 1.0)
    normal = flow().base_dist.base_dist
    x = torch.tensor([[0.1], [1.0], [7.0]])
    oracle = torch.distributions.LogNormal(normal.loc, normal.scale).log_prob(x).squeeze(-1)
    torch.testing.assert_close(flow().log_prob(x), oracle)


REFUSED = {
    "no bijection": (lambda: flows.onto(flows.Gaussian(2), constraints.boolean), "no bijection"),
    "integers": (lambda: flows.onto(flows.Gaussian(2), constraints.nonnegative_integer), "no bijection"),
    "matrices to matrices": (
        lambda: flows.onto(flows.Gaussian(4), constraints.independent(constraints.positive, 2)),
        "starts from vectors",
    ),
    "not a constraint": (lambda: flows.onto(flows.Gaussian(2), Normal(0.0, 1.0)), "Expected a constraint"),
    "bounds of another size": (
        lambda: flows.onto(flows.Gaussian(3), constraints.interval(*BOUNDS)),
        "as many features as",
    ),
    "parts of another size": (lambda: flows.onto(flows.Gaussian(3), MIXED["numbers"]), "as many features as"),
    "parts along another axis": (
        lambda: flows.onto(flows.Gaussian(2), constraints.cat([constraints.positive, constraints.real])),
        "dim=-1",
    ),
    "twice": (
        lambda: flows.onto(flows.onto(flows.Gaussian(2), constraints.positive), constraints.positive),
        "already",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_constraints_get_a_sentence(name: str) -> None:
    attempt, sentence = REFUSED[name]
    with pytest.raises(ValueError, match=r"^Expected .*; got ") as error:
        attempt()
    assert sentence in str(error.value)


@pytest.mark.parametrize(
    "constraint", [constraints.positive, constraints.greater_than(3.0), constraints.less_than(-2.0)], ids=repr
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_far_points_stay_within_open_bounds(constraint: constraints.Constraint, dtype: torch.dtype) -> None:
    """Where exp rounds to zero or to infinity, densities of torch's own would refuse the point."""
    z = torch.tensor([[-1e4], [-50.0], [0.0], [50.0], [1e4]], dtype=dtype, requires_grad=True)
    y, ladj = SupportTransform(constraint).call_and_ladj(z)
    assert constraint.check(y).all()
    assert y.isfinite().all()
    torch.testing.assert_close(ladj, z.squeeze(-1))
    (gradient,) = torch.autograd.grad(y.sum(), z)
    assert gradient[1:4].isfinite().all()


@pytest.mark.parametrize(
    ("constraint", "features", "outside", "inside"),
    [
        (constraints.positive, 2, [-1.0, 1.0], [0.5, 1.0]),
        (constraints.unit_interval, 2, [2.0, 0.5], [0.9, 0.5]),
        (constraints.interval(-1.0, 2.0), 1, [2.5], [1.5]),
        (constraints.simplex, 2, [0.5, 0.5, 0.5], [0.2, 0.5, 0.3]),
        (MIXED["lengths"], 3, [1.0, -1.0, -3.0], [1.0, 1.0, -3.0]),
        (MIXED["a simplex"], 4, [0.5, 0.5, 0.5, 1.0, 1.0], [0.5, 0.25, 0.25, 1.0, 1.0]),
    ],
)
def test_there_is_no_density_outside(constraint, features, outside, inside):
    q = flows.onto(scaled(flows.Planar(features, transforms=2), 0.5), constraint)()
    points = torch.tensor([outside, inside]).requires_grad_()
    log_q = q.log_prob(points)
    assert log_q[0] == -torch.inf
    assert log_q[1].isfinite()
    torch.testing.assert_close(log_q[1], q.log_prob(torch.tensor(inside)))
    log_q[1].backward()
    assert points.grad.isfinite().all()


@pytest.mark.parametrize("features", [2, 20, 200])
def test_its_own_draws_lie_on_a_simplex_of_any_size(features):
    q = flows.onto(flows.Gaussian(features), constraints.simplex).float()()
    z = q.sample((500,))
    assert q.log_prob(z.clone()).isfinite().all()


def test_a_posterior_on_a_simplex():
    class Topics(torch.nn.Linear):
        def forward(self, z):
            return Independent(Normal(super().forward(z), 1.0), 1)

    flow = flows.onto(flows.Planar(2, context=4), constraints.simplex)
    vae = VAE(torch.nn.Linear(6, 4), flow, Topics(3, 6), prior=Dirichlet(torch.ones(3)))
    terms = vae.log_terms(torch.randn(5, 6), 7)
    assert terms.z.shape == (7, 5, 3)
    assert terms.log_w.isfinite().all()
    assert vae.sample(4).shape == (4, 6)
