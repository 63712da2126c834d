"""Properties of every flow: what it emits, where it starts, and that its density is one."""

from __future__ import annotations

import inspect
import itertools

import naive
import numpy as np
import pytest
import torch
from cases import BATCHES, FEATURES, FLOWS, SCALES, generator, redraw
from scipy import stats
from test_transforms import jacobians
from torch.distributions import AffineTransform, constraints
from torch.nn.functional import elu, relu, silu

from sylvester import flows, names
from sylvester.distributions import FlowDistribution
from sylvester.transforms import Affine, Gated

pytestmark = pytest.mark.usefixtures("float64")

CONTEXT = 3
EVERY_FLOW = pytest.mark.parametrize("name", FLOWS)
EVERY_FAMILY = pytest.mark.parametrize("name", flows.FAMILIES)


def make(name, features, scale, batch=(), *, transforms=2, context=CONTEXT):
    flow = redraw(FLOWS[name](features, context, transforms), scale, name, features)
    return flow, (torch.randn(*batch, context) if context else None)


def test_the_families_have_the_command_lines_names():
    assert tuple(flows.FAMILIES) == names.FLOWS


@EVERY_FLOW
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("batch", BATCHES, ids=str)
def test_log_prob_of_a_sample_is_the_one_it_came_with(name, features, batch, scale):
    flow, context = make(name, features, scale, batch)
    with torch.no_grad():
        posterior = flow(context)
        z, log_q = posterior.rsample_and_log_prob((2,))
        assert posterior.batch_shape == batch
        assert z.shape == (2, *batch, features)
        assert log_q.shape == (2, *batch)
        assert posterior.log_prob(z) is log_q
        again = posterior.log_prob(z.clone())
    assert again.isfinite().all()
    if features > 5:
        assert scale > 1 or ((again - log_q).abs() <= 1e-8 * (1 + log_q.abs())).all()
        return

    def to_base(point):
        for step in reversed(posterior.transforms):
            point = step.inv(point)
        return point

    # What may be lost: the rounding of z, as far as the way back amplifies it and the base resolves it.
    amplified = torch.linalg.matrix_norm(jacobians(to_base, z)) * (1 + z.abs().amax(-1))
    sigma = posterior.base_dist.base_dist.scale.amin(-1)
    assert ((again - log_q).abs() <= 1e-12 * (1 + amplified / sigma) ** 2).all()


@EVERY_FAMILY
@pytest.mark.parametrize("context", [0, CONTEXT])
@pytest.mark.parametrize("scale", [0.1, 1.0])
@pytest.mark.parametrize("features", [1, 2, 5])
def test_agrees_with_the_naive_implementation(name, features, scale, context):
    flow, h = make(name, features, scale, (2,) if context else (), transforms=3, context=context)
    noise = torch.randn(2, 2, features) if context else torch.randn(2, features)
    z, log_q = flow(h).rsample_and_log_prob(noise=noise)
    for index in np.ndindex(*log_q.shape):
        row = h[index[-1]].numpy() if context else None
        z_naive, log_q_naive = naive.sample_and_log_prob(flow, row, noise[index].numpy())
        np.testing.assert_allclose(z[index].detach(), z_naive, rtol=1e-8, atol=1e-8)
        np.testing.assert_allclose(log_q[index].detach(), log_q_naive, rtol=1e-6, atol=1e-6)


@EVERY_FLOW
def test_samples_broadcast_as_a_loop_would(name):
    flow, context = make(name, 5, 1.0, (4, 3))
    noise = torch.randn(6, 4, 3, 5)
    z, log_q = flow(context).rsample_and_log_prob(noise=noise)
    for s, i, j in np.ndindex(6, 4, 3):
        z_one, log_q_one = flow(context[i, j]).rsample_and_log_prob(noise=noise[s, i, j])
        torch.testing.assert_close((z[s, i, j], log_q[s, i, j]), (z_one, log_q_one))


@EVERY_FLOW
@pytest.mark.parametrize("context", [0, pytest.param(CONTEXT, marks=pytest.mark.slow)])
def test_the_density_integrates_to_one_on_the_line(name, context):
    flow, h = make(name, 1, 1.0, context=context)
    with torch.no_grad():
        posterior = flow(h)
        middle = posterior.sample((1000,)).quantile(torch.linspace(0, 1, 21)).tolist()
        width = middle[-1] - middle[0] + 1
        # Towards the ends in steps that grow: a bump of a spline may lie beyond all the samples.
        beyond = [width * 10 ** (i / 4) for i in range(-8, 5)]
        knots = [*(middle[0] - b for b in reversed(beyond)), *middle, *(middle[-1] + b for b in beyond)]
        nodes, weights = map(torch.from_numpy, np.polynomial.legendre.leggauss(8))
        panels, total = 4000 if "nsf" in name else 500, 0.0  # the density of a spline has kinks
        for a, b in itertools.pairwise(knots):
            half = (b - a) / (2 * panels)
            x = a + half * (1 + 2 * torch.arange(panels)[:, None] + nodes)
            total += half * (weights * posterior.log_prob(x.unsqueeze(-1)).exp()).sum().item()
    assert total == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "nsf" else []) for name in FLOWS]
)
def test_the_density_integrates_to_one_in_the_plane(name):
    """By importance sampling from Student-t's, each round a sample and as wide as its neighbours lie: a grid fails on
    steep but correct densities, and one broad proposal on those that are steep in places."""
    flow, context = make(name, 2, 1.0)
    with torch.no_grad():
        posterior = flow(context)
        sample = posterior.sample((4000,)).numpy()
        places, near = (200, 60) if name == "nsf" else (60, 200)  # it is steep in many places
        neighbours = [sample[np.argsort(np.linalg.norm(sample - one, axis=1))[:near]] for one in sample[:places]]
        proposals = [
            stats.multivariate_t(part.mean(0), 4 * np.cov(part.T) + 0.01 * np.eye(2), df=2, seed=seed)
            for seed, part in enumerate([sample, *neighbours])
        ]
        x = np.concatenate([proposal.rvs(2000) for proposal in proposals])
        log_proposal = np.logaddexp.reduce([proposal.logpdf(x) for proposal in proposals]) - np.log(len(proposals))
        weights = np.exp(posterior.log_prob(torch.from_numpy(x)).numpy() - log_proposal)
    error = weights.std() / np.sqrt(len(weights))
    assert error < 0.02
    assert abs(weights.mean() - 1) < 4 * error


@EVERY_FLOW
@pytest.mark.parametrize("context", [0, CONTEXT])
@pytest.mark.parametrize("features", [2, pytest.param(5, marks=pytest.mark.slow), 64])
def test_an_identity_start_is_the_gaussian_and_every_parameter_learns(name, features, context):
    transforms = 16 if name not in ("maf", "nsf", "inverted-iaf") or features < 64 else 2
    torch.manual_seed(features)
    flow = FLOWS[name](features, context, transforms)
    h = torch.randn(20, context) if context else None
    posterior = flow(h)
    z, log_q = posterior.rsample_and_log_prob((20,))
    assert ((log_q - posterior.base_dist.log_prob(z)).abs() < 1e-2).all()
    (log_q.mean() + (z**3).mean()).backward()
    for key, parameter in flow.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.isfinite().all(), key
        assert parameter.grad.abs().max() > 0, key


@pytest.mark.parametrize("name", ["mean-only-iaf", "affine-iaf", "maf", "nsf", "nice", "realnvp", "coupling-nsf"])
@pytest.mark.parametrize("context", [0, CONTEXT])
def test_networks_start_at_zero_with_weights_of_the_usual_size(name, context):
    """Twins cancel, and their gradients are opposite, so that they part."""
    # At this width every unit has a twin, beside it.
    steps = flows.FAMILIES[name](4, context, 2, hidden_features=24).steps[0]
    shared = (
        None
        if steps.hypernetwork is None
        else steps.hypernetwork(torch.randn(50, context))["context"].squeeze(-2).detach()
    )
    for net in steps.nets:
        raw = net.bind(shared)(3 * torch.randn(50, 4))
        assert raw.abs().max() < 1e-3
        assert net.layers[-1].weight.abs().max() > 0.1
        (raw * torch.randn_like(raw)).sum().backward()
        for layer in net.layers[:-1]:
            first, second = layer.bias.grad.view(-1, 2).unbind(-1)
            torch.testing.assert_close(first, -second)
            assert (first.abs() > 1e-3).double().mean() > 0.5


@EVERY_FAMILY
def test_a_torch_start_of_the_hypernetwork_is_the_linear_layers_default(name):
    flow = flows.FAMILIES[name](8, 400, 2, init="torch")
    for key, parameter in flow.named_parameters():
        if "hypernetwork" in key:
            bound = 1 / 400**0.5
            assert bound / 2 < parameter.abs().max() <= bound, key


@pytest.mark.parametrize("family", [flows.IAF, flows.MeanOnlyIAF], ids=lambda f: f.__name__)
def test_masked_networks_start_as_the_papers_did(family):
    """He's rule on the outputs, zero biases, and a gate bias of 1."""
    (net,) = family(64, 4, 1, hidden_features=1280, init="torch").steps[0].nets
    deviations = [layer.weight.std().item() for layer in net.layers]
    assert deviations == pytest.approx([0.0395, 0.0395, 0.1768], rel=0.02)
    assert not any(layer.bias.any() for layer in net.layers[:-1])
    assert (net.layers[-1].bias[:64] == 0).all()
    assert (net.layers[-1].bias[64:] == 1).all()


@EVERY_FLOW
def test_log_prob_gradients(name):
    flow, context = make(name, 2, 0.5, (2,))
    context.requires_grad_()
    z = torch.randn(3, 2, 2, requires_grad=True)
    assert torch.autograd.gradcheck(lambda context, z: flow(context).log_prob(z), (context, z))


@EVERY_FLOW
def test_save_and_load(name, tmp_path):
    flow, context = make(name, 5, 1.0, (3,))
    torch.save(flow.state_dict(), tmp_path / "flow.pt")
    other = FLOWS[name](5, CONTEXT, 2)
    other.load_state_dict(torch.load(tmp_path / "flow.pt"))
    noise = torch.randn(2, 3, 5)
    torch.testing.assert_close(
        flow(context).rsample_and_log_prob(noise=noise),
        other(context).rsample_and_log_prob(noise=noise),
        rtol=0,
        atol=0,
    )


@EVERY_FLOW
@pytest.mark.parametrize("scale", [0.1, 1.0, 3.0, 10.0])
def test_float32_stays_finite(name, scale):
    torch.set_default_dtype(torch.float32)
    flow, context = make(name, 64, scale, (3,), transforms=2)
    z, log_q = flow(context).rsample_and_log_prob((2,))
    back = flow(context).log_prob(z.detach())
    assert z.dtype == log_q.dtype == back.dtype == torch.float32
    assert z.isfinite().all()
    assert log_q.isfinite().all()
    assert back.isfinite().all()
    if name in ("maf", "nsf", "inverted-iaf") and scale > 1:
        return  # D steps of substitution in sequence: the derivatives themselves are beyond float32
    (z.sum() + log_q.sum()).backward()
    for key, parameter in flow.named_parameters():
        assert parameter.grad.isfinite().all(), key


@EVERY_FLOW
def test_float32_is_accurate(name):
    flow, context = make(name, 64, 1.0, (3,), transforms=2)
    noise = torch.randn(2, 3, 64)
    with torch.no_grad():
        z, log_q = flow(context).rsample_and_log_prob(noise=noise)
        z_32, log_q_32 = flow.float()(context.float()).rsample_and_log_prob(noise=noise.float())
    assert (z_32 - z).abs().max() < 1e-3 * (1 + z.abs().max())
    assert (log_q_32 - log_q).abs().max() < 1e-4 * (1 + log_q.abs().max())


@pytest.mark.parametrize(
    "family",
    [flows.OrthogonalSylvester, flows.HouseholderSylvester, flows.TriangularSylvester],
    ids=lambda f: f.__name__,
)
@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_saturated_diagonals_stay_invertible(family, sign):
    """tanh is exactly ±1 in float32: the product −1 must stay out of reach."""
    flow = family(6, 0, 2, diagonals="bounded").float()
    steps = flow.steps[0].hypernetwork
    with torch.no_grad():
        raw = steps.bias.view(steps.transforms, -1)
        rank = steps.table["b"].shape[0]
        packed = raw[:, : rank * rank].view(-1, rank, rank)
        packed.diagonal(dim1=-2, dim2=-1).fill_(1e4)
        raw[:, rank * rank : rank * rank + rank] = sign * 1e4
    with torch.no_grad():
        for transform in flow().transforms:
            assert (transform._rho > -1).all()
        _z, log_q = flow().rsample_and_log_prob((100,))
        assert log_q.isfinite().all()
        assert flow().log_prob(torch.zeros(6, dtype=torch.float32)).isfinite()


SYLVESTERS = [flows.OrthogonalSylvester, flows.HouseholderSylvester, flows.TriangularSylvester]


@pytest.mark.parametrize("family", SYLVESTERS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("features", [1, 2, 5])
def test_free_diagonals(family, scale, features):
    """Only the product of a pair is bounded, and by −0.999: determinants and inverses are those of any matrix."""
    flow = redraw(family(features, transforms=3, diagonals="free"), scale, features)
    raw = flow.steps[0].hypernetwork(None)
    z = torch.randn(20, features)
    for k, step in enumerate(flow().transforms):
        c, s = raw["packed"][k].diagonal(), raw["raw_diagonal"][k]
        torch.testing.assert_close(step.r_tilde.diagonal(), s.exp())
        rho = step.r.diagonal() * step.r_tilde.diagonal()
        torch.testing.assert_close(rho, 0.999 * (torch.log1p(c.exp()) - 1))
        assert not step.r.tril(-1).any()
        assert not step.r_tilde.tril(-1).any()
        y, ladj = step.call_and_ladj(z)
        jacobian = torch.func.vmap(torch.func.jacrev(step))(z)
        torch.testing.assert_close(ladj, torch.linalg.slogdet(jacobian).logabsdet)
        # What rounding of y may move z by, for a Jacobian this steep.
        slack = 1e-9 * (1 + torch.linalg.inv(jacobian).abs().sum((-1, -2)).max().item())
        torch.testing.assert_close(step.inv(y), z, rtol=0, atol=slack)


def test_free_diagonals_reach_what_bounded_ones_cannot():
    """One step of one coordinate that stretches its centre tenfold."""
    flow = flows.TriangularSylvester(1, transforms=1, diagonals="free")
    with torch.no_grad():
        flow.steps[0].hypernetwork.bias.copy_(torch.tensor([10.0, 2.0, 0.0]))
    (step,) = flow().transforms
    assert step.log_abs_det_jacobian(torch.zeros(1), None).exp().item() == pytest.approx(1 + 0.999 * 9, abs=1e-3)
    bounded = flows.TriangularSylvester(1, transforms=1, diagonals="bounded")
    with torch.no_grad():
        bounded.steps[0].hypernetwork.bias.copy_(torch.tensor([1e4, 1e4, 0.0]))
    assert bounded().transforms[0].log_abs_det_jacobian(torch.zeros(1), None).exp().item() < 2


@pytest.mark.parametrize("family", SYLVESTERS, ids=lambda f: f.__name__)
def test_diagonals_are_the_papers_with_a_context_and_free_without(family):
    for context, free in ((0, True), (2, False)):
        flow = redraw(family(6, context, 4), 5.0)
        posterior = flow(torch.zeros(context)) if context else flow()
        largest = max(step._rho.max().item() for step in posterior.transforms)
        assert (largest > 1) == free


def test_bounds_of_scales_and_gates():
    raw = torch.tensor([-1e4, 0.0, 1e4]).expand(2, 3)
    z = torch.tensor([1.0, 1.0, 1.0])

    def slopes(elementwise):
        (y, log_slope), (y_0, _) = (elementwise.forward(point, raw) for point in (z, 0 * z))
        torch.testing.assert_close(y - y_0, log_slope.exp())
        return log_slope

    assert slopes(Affine()).tolist() == pytest.approx([-4, 0, 4])
    assert slopes(Gated(1e-3)).exp().tolist() == pytest.approx([1e-3, 0.5005, 1.0])
    assert Gated(0.0).forward(z, raw)[1].exp().tolist() == [0.0, 0.5, 1.0]


def test_variance_bounds():
    flow = flows.Gaussian(4, 3, variance_bounds=(0.01, 7))
    scale = flow(100 * torch.randn(50, 3)).base_dist.base_dist.scale
    assert (scale**2).min().item() == pytest.approx(0.01)
    assert (scale**2).max().item() == pytest.approx(7)


@pytest.mark.parametrize(
    ("family", "options", "per_step"),
    [
        (flows.TriangularSylvester, {}, 8**2 + 2 * 8),
        (flows.OrthogonalSylvester, {"rank": 3}, 3**2 + 2 * 3 + 8 * 3),
        (flows.HouseholderSylvester, {"reflections": 5}, 8**2 + 2 * 8 + 5 * 8),
        (flows.Planar, {}, 2 * 8 + 1),
        (flows.Radial, {}, 8 + 2),
        (flows.Householder, {}, 8),
    ],
)
def test_no_output_of_the_hypernetwork_is_thrown_away(family, options, per_step):
    flow = redraw(family(8, 0, 4, **options), 1.0)
    hypernetwork = flow.steps[0].hypernetwork
    assert hypernetwork.bias.shape == (4 * per_step,)
    z, log_q = flow().rsample_and_log_prob((5,))
    ((z**3).sum() + log_q.sum()).backward()
    assert (hypernetwork.bias.grad != 0).all()


def test_orders_of_the_autoregressive_steps():
    def reversed_steps(order):
        nets = flows.IAF(3, 0, 8, order=order).steps[0].nets
        return "".join("R" if net.position[0] else "N" for net in nets)

    assert reversed_steps("paired") == "NRRNNRRN"
    assert reversed_steps("alternating") == "RNRNRNRN"


def test_activations_by_name_or_as_functions():
    families = {
        name: make for name, make in flows.FAMILIES.items() if "activation" in inspect.signature(make).parameters
    }
    assert len(families) == 8
    for name, make in families.items():
        # The paper's; what fits a log-density best; what estimates densities best.
        expected = {"iaf": "elu", "mean-only-iaf": "elu", "affine-iaf": "silu"}.get(name, "relu")
        assert f"activation={expected}," in repr(make(2))
    for name, function in {"elu": elu, "relu": relu, "silu": silu, "tanh": torch.tanh}.items():
        flow = redraw(flows.MAF(3, 2, 2, activation=name), 1.0)
        other = flows.MAF(3, 2, 2, activation=function)
        other.load_state_dict(flow.state_dict())
        assert f"activation={name}," in repr(flow)
        z, h = torch.randn(4, 3), torch.randn(4, 2)
        torch.testing.assert_close(flow(h).log_prob(z), other(h).log_prob(z), rtol=0, atol=0)
        naive_z, _ = naive.sample_and_log_prob(flow, h[0].numpy(), z[0].numpy())
        np.testing.assert_allclose(flow(h[0]).rsample_and_log_prob(noise=z[0])[0].detach(), naive_z, rtol=1e-8)
    assert "activation=Softplus(" in repr(flows.NICE(2, activation=torch.nn.Softplus()))


@pytest.mark.parametrize("family", [flows.IAF, flows.MAF, flows.NSF], ids=lambda f: f.__name__)
def test_without_a_context_every_hidden_unit_sees_a_coordinate(family):
    for net in family(2, 0, 2, hidden_features=4).steps[0].nets:
        assert net.layers[0].mask.any(-1).all()


def test_couplings_of_one_feature_depend_on_the_context_alone():
    for name in ("nice", "realnvp"):
        flow, context = make(name, 1, 1.0, (2,))
        posterior = flow(context)
        for step in posterior.transforms:
            shift = step(torch.zeros(2, 1)) - 0
            torch.testing.assert_close(step(torch.ones(2, 1)) - shift, (step(2 * torch.ones(2, 1)) - shift) / 2)
            assert shift[0] != shift[1]


def test_maf_is_the_other_direction_of_iaf():
    flow, context = make("maf", 5, 1.0)
    posterior = flow(context)
    z = torch.randn(5)
    calls = []
    step = posterior.transforms[0]
    step.inv.net = (lambda net: lambda point: calls.append(1) or net(point))(step.inv.net)
    posterior.log_prob(z)
    assert len(calls) == 1


def test_inverted_turns_the_steps_and_keeps_the_base():
    flow = redraw(flows.Planar(3, 0, 4), 1.0)
    straight, inverted = flow(), flows.inverted(flow)()
    torch.testing.assert_close(straight.base_dist.base_dist.loc, inverted.base_dist.base_dist.loc)
    x = torch.randn(3)
    for step in straight.transforms:
        x = step(x)
    y = x
    for step in inverted.transforms:
        y = step(y)
    for step in straight.transforms:
        y = step(y)
    torch.testing.assert_close(y, x)
    assert sum(p.numel() for p in flows.inverted(flow).parameters()) == sum(p.numel() for p in flow.parameters())


def test_composition_takes_one_base_and_all_steps():
    first, second = flows.Planar(3, 2, 4), flows.IAF(3, 2, 2)
    both = flows.compose(first, second)
    assert len(both(torch.randn(2)).transforms) == 6
    unused = sum(p.numel() for p in second.base.parameters())
    total = sum(p.numel() for f in (first, second) for p in f.parameters())
    assert sum(p.numel() for p in both.parameters()) == total - unused


def test_rows_of_a_batch_do_not_share_noise():
    posterior = flows.Planar(3, 2, 1)(torch.zeros(4, 2))
    z = posterior.rsample()
    assert z.shape == (4, 3)
    assert (z[0] != z[1]).all()


def test_the_distribution():
    flow, context = make("triangular-sylvester", 4, 1.0, (3,))
    posterior = flow(context)
    assert posterior.has_rsample
    assert posterior.event_shape == (4,)
    wide = posterior.expand((5, 3))
    assert isinstance(wide, FlowDistribution)
    assert wide.batch_shape == (5, 3)
    z = wide.rsample((2,))
    torch.testing.assert_close(wide.log_prob(z), posterior.log_prob(z.clone()))

    trajectory = list(posterior.trajectory(noise=torch.zeros(3, 4)))
    assert len(trajectory) == 3
    torch.testing.assert_close(trajectory[-1], posterior.rsample_and_log_prob(noise=torch.zeros(3, 4)))
    torch.testing.assert_close(trajectory[0][1], posterior.base_dist.log_prob(trajectory[0][0]))

    gaussian = flows.Gaussian(4, 0)()
    torch.testing.assert_close(gaussian.entropy(100_000), gaussian.base_dist.entropy(), rtol=0.01, atol=0.01)

    squashed = FlowDistribution(posterior.base_dist, [*posterior.transforms, AffineTransform(1.0, 2.0)])
    z, log_q = squashed.rsample_and_log_prob((2,))
    torch.testing.assert_close(squashed.log_prob(z.clone()), log_q)


def test_a_sample_without_a_graph_gets_its_score():
    """The gradient of log q at a fixed point, not along the reparameterized path, even where the sample is cached."""
    flow, context = make("planar", 3, 1.0)
    posterior = flow(context)
    z = posterior.sample()
    cached = torch.autograd.grad(posterior.log_prob(z), flow.parameters())
    fresh = torch.autograd.grad(flow(context).log_prob(z.clone()), flow.parameters())
    torch.testing.assert_close(cached, fresh)


AMORTIZED = [name for name, family in flows.FAMILIES.items() if "amortize" in inspect.signature(family).parameters]


@pytest.mark.parametrize("name", AMORTIZED)
def test_steps_that_all_contexts_share(name):
    flow = flows.FAMILIES[name](4, context=3, transforms=2, amortize="base")
    redraw(flow, 0.5, name, 4)
    whole = flows.FAMILIES[name](4, context=3, transforms=2)
    assert "amortize: " in type(flow).__doc__
    assert sum(p.numel() for p in whole.steps.parameters()) == 4 * sum(p.numel() for p in flow.steps.parameters())
    context = torch.randn(5, 3)
    q = flow(context)
    assert q.batch_shape == (5,)
    z, log_q = q.rsample_and_log_prob((6,))
    torch.testing.assert_close(q.log_prob(z.clone()), log_q)
    # The same noise at the same base gives the same draw, whatever the context.
    other = FlowDistribution(q.base_dist, flow(torch.randn(5, 3)).transforms)
    noise = torch.randn(5, 4)
    torch.testing.assert_close(other.rsample_and_log_prob(noise=noise), q.rsample_and_log_prob(noise=noise))
    local = flow.local(context)
    torch.testing.assert_close(local().log_prob(z), log_q)
    with pytest.raises(ValueError, match="Expected amortize in"):
        flows.FAMILIES[name](4, context=3, amortize="steps")


@pytest.mark.parametrize("how", ["frozen", "detached", "copied"])
def test_a_sample_that_becomes_a_variable_gets_its_score(how):
    flow = flows.Planar(2, transforms=3)
    if how == "frozen":
        flow.requires_grad_(False)
    q = flow()
    z = q.rsample((4,))
    if how == "detached":
        z.detach_()
    if how == "copied":
        z = z.clone()
    else:
        z.requires_grad_()
    (score,) = torch.autograd.grad(q.log_prob(z).sum(), z)
    other = z.detach().clone().requires_grad_()
    (expected,) = torch.autograd.grad(flow().log_prob(other).sum(), other)
    torch.testing.assert_close(score, expected)


@pytest.mark.parametrize("scale", [1.0, 10.0, 30.0, 100.0])
@pytest.mark.parametrize("features", [2, 64])
def test_planar_steps_of_large_parameters_keep_their_bound(features, scale):
    flow = flows.Planar(features, 2, transforms=4).float()
    with torch.no_grad():
        for parameter in flow.steps.parameters():
            parameter.normal_(0, scale / 2**0.5)
        q = flow(torch.randn(500, 2, dtype=torch.float32))
        for step in q.transforms:
            opposite = -step.b.unsqueeze(-1) * step.w / step.w.square().sum(-1, keepdim=True)  # where tanh is steepest
            assert step.call_and_ladj(opposite)[1].isfinite().all()


def test_the_sample_that_is_given_is_the_one_that_is_checked():
    flow = flows.MAF(8, transforms=2).float()
    with torch.no_grad():  # so steep that some samples are inexact
        for parameter in flow.steps.parameters():
            parameter.normal_(0, 0.4)
    q = flow.requires_grad_(False)()
    noise = torch.randn(200, 8, dtype=torch.float32)
    residual = q.residual(noise=noise) / torch.finfo(torch.float32).eps ** 0.5
    good, bad = noise[residual < 0.1], noise[residual > 10]
    assert min(len(good), len(bad)) > 10
    checked = FlowDistribution(q.base_dist, q.transforms, validate_args=True)
    state = torch.get_rng_state()
    for sample in good:
        checked.rsample_and_log_prob(noise=sample)
    for sample in bad:
        with pytest.raises(ValueError, match="too steep"):
            checked.rsample_and_log_prob(noise=sample)
    assert torch.equal(torch.get_rng_state(), state)


def test_inverted_refuses_a_flow_onto_a_constraint():
    with pytest.raises(ValueError, match="Expected a flow of real vectors"):
        flows.inverted(flows.onto(flows.Planar(2), constraints.positive))
    q = flows.onto(flows.inverted(flows.Planar(2)), constraints.positive)()
    assert q.log_prob(q.sample((5,))).isfinite().all()


@pytest.mark.parametrize("floor", [1e-8, 1e-5, 1e-3, 0.5])
def test_the_log_of_a_closed_gate_has_its_digits(floor):
    raw = torch.stack([torch.zeros(201), torch.linspace(-100, 100, 201)]).float()
    _, log_slope = Gated(floor).forward(torch.ones(201, dtype=torch.float32), raw)
    expected = (floor + (1 - floor) * torch.sigmoid(raw[1].double())).log()
    torch.testing.assert_close(log_slope.double(), expected, rtol=1e-6, atol=1e-9)


def test_noise_is_all_the_randomness():
    flow, context = make("iaf", 3, 1.0, (2,))
    state = torch.random.get_rng_state()
    noise = torch.randn(5, 2, 3, generator=generator("noise"))
    torch.testing.assert_close(
        flow(context).rsample_and_log_prob(noise=noise), flow(context).rsample_and_log_prob(noise=noise)
    )
    assert torch.equal(state, torch.random.get_rng_state())
