"""Mixtures against brute force, quadrature and the flow that they are where there is one."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from cases import SCALES, redraw
from torch import Tensor, nn
from torch.distributions import Categorical, Independent, MixtureSameFamily, MultivariateNormal, Normal

from sylvester import flows, inference
from sylvester.evaluation import log_likelihood
from sylvester.flows import Mixture
from sylvester.objectives import dreg, elbo, free_bits, iwae, renyi
from sylvester.vae import VAE, PathTerms

pytestmark = pytest.mark.usefixtures("float64")


def make(scale: float = 1.0, context: int = 0) -> Mixture:
    """Three families, of unequal weights."""
    parts = (flows.Planar(2, context, 2), flows.TriangularSylvester(2, context, 2), flows.RealNVP(2, context, 2))
    mixture = Mixture([redraw(part, scale) for part in parts])
    with torch.no_grad():
        mixture.hypernetwork.bias.copy_(torch.tensor([0.0, 1.0, -1.0]))
    return mixture


@pytest.mark.parametrize("scale", SCALES)
def test_the_density_is_the_weighted_sum(scale):
    mixture, z, h = make(scale, context=4), torch.randn(6, 5, 2), torch.randn(5, 4)
    q = mixture(h)
    weights = q.logits.softmax(-1)
    densities = torch.stack([flow(h).log_prob(z).exp() for flow in mixture.flows], -1)
    torch.testing.assert_close(q.log_prob(z), (weights * densities).sum(-1).log())
    assert not torch.equal(weights[0], weights[1])  # amortized


def grid(width: float, points: int) -> tuple[Tensor, float]:
    side = torch.linspace(-width, width, points)
    return torch.cartesian_prod(side, side), (2 * width / (points - 1)) ** 2


def target(z: Tensor) -> Tensor:
    """Two ridges, not normalized."""
    return -0.5 * ((z[..., 0].abs() - 1.5) ** 2 / 0.3 + (z[..., 1] - 0.3 * z[..., 0] ** 2) ** 2) + 1.0


@torch.no_grad()
def test_the_stratified_bound_agrees_with_quadrature():
    q = make(0.5)()
    points, area = grid(12.0, 401)
    log_q = q.log_prob(points)
    mass = log_q.exp() * area
    assert mass.sum().item() == pytest.approx(1.0, abs=2e-3)
    z, log_q_of_draws, log_share = q.stratified(4000)
    torch.testing.assert_close(log_q_of_draws, q.log_prob(z))
    torch.testing.assert_close(log_share.exp().sum(0), torch.tensor(1.0))
    for values, expected in ((target(z) - log_q_of_draws, target(points) - log_q), (-log_q_of_draws, -log_q)):
        variances = [part.var().item() / len(part) for part in values.chunk(3)]
        weights = q.logits.softmax(-1).tolist()
        error = math.sqrt(sum(weight**2 * each for weight, each in zip(weights, variances, strict=True)))
        exact = (mass * expected).sum().item()
        assert (log_share.exp() * values).sum().item() == pytest.approx(exact, abs=4 * error + 2e-3)
    assert q.entropy(4000).item() == pytest.approx(-(mass * log_q).sum().item(), abs=0.05)


@pytest.mark.parametrize("path_gradient", [False, True])
def test_gradients_of_the_stratified_bound_are_those_of_the_quadrature(path_gradient):
    mixture = make(0.5)
    parameters = [mixture.hypernetwork.bias, mixture.flows[0].base.hypernetwork.bias]
    points, area = grid(12.0, 201)
    log_q = mixture().log_prob(points)
    exact = torch.autograd.grad((log_q.exp() * (target(points) - log_q)).sum() * area, parameters)
    draws = []
    for _ in range(40):
        z, log_q, log_share = mixture().stratified(100, path_gradient=path_gradient)
        draws.append(torch.autograd.grad((log_share.exp() * (target(z) - log_q)).sum(), parameters))
    for expected, *got in zip(exact, *draws, strict=True):
        found = torch.stack(got)
        error = found.std(0) / math.sqrt(len(found))
        assert ((found.mean(0) - expected).abs() < 4.5 * error + 2e-3).all()


def test_path_gradients_vanish_where_the_mixture_is_the_target():
    mixture = make()
    frozen = copy.deepcopy(mixture).requires_grad_(False)
    z, log_q, log_share = mixture().stratified(5, path_gradient=True)
    torch.testing.assert_close(log_q, mixture().log_prob(z))
    bound = (log_share.exp() * (frozen().log_prob(z) - log_q)).sum()
    for gradient in torch.autograd.grad(bound, list(mixture.parameters()), materialize_grads=True):
        assert gradient.abs().max() < 1e-9


def test_samples_come_from_the_components_in_proportion():
    parts = [flows.Gaussian(1) for _ in range(2)]
    mixture = Mixture(parts)
    with torch.no_grad():
        for part, loc in zip(parts, (-50.0, 50.0), strict=True):
            part.base.hypernetwork.bias[0] = loc
        mixture.hypernetwork.bias.copy_(torch.tensor([0.2, 0.8]).log())
    z = mixture().sample((4000, 3))
    assert z.shape == (4000, 3, 1)
    assert (z > 0).double().mean().item() == pytest.approx(0.8, abs=0.02)
    wide = mixture().expand((7, 3))
    assert wide.sample((5,)).shape == (5, 7, 3, 1)
    assert wide.log_prob(z[:7]).shape == (7, 3)
    with pytest.raises(NotImplementedError):
        mixture().rsample()


def test_one_component_is_the_flow():
    flow = redraw(flows.TriangularSylvester(3, 4, 2), 1.0)
    h, z, noise = torch.randn(5, 4), torch.randn(6, 5, 3), torch.randn(6, 5, 3)
    q, alone = Mixture([flow])(h), flow(h)
    torch.testing.assert_close(q.log_prob(z), alone.log_prob(z))
    strata, expected = q.stratified(6, noise=noise), alone.rsample_and_log_prob(noise=noise)
    torch.testing.assert_close(tuple(strata)[:2], expected)
    torch.testing.assert_close(strata.log_share.exp(), torch.full((6, 5), 1 / 6))


class Linear(nn.Module):
    """x = W z + ½ ε."""

    def __init__(self, weight: Tensor):
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, z: Tensor) -> Independent:
        return Independent(Normal(z @ self.weight.T, 0.5), 1)


def test_a_vae_takes_a_mixture_and_its_objectives_know_the_shares():
    mixture, x = make(0.3, context=3), torch.randn(4, 3)
    decoder = Linear(torch.randn(3, 2))
    vae = VAE(nn.Identity(), mixture, decoder)
    terms = vae.log_terms(x, samples=5)
    assert terms.log_w.shape == (15, 4)
    share = terms.log_share.exp()
    torch.testing.assert_close(elbo(terms), (share * terms.log_w).sum(0))
    torch.testing.assert_close(iwae(terms), (share * terms.log_w.exp()).sum(0).log())
    torch.testing.assert_close(renyi(terms, 1.0), elbo(terms))
    torch.testing.assert_close(renyi(terms, 0.5), 2 * (share * (0.5 * terms.log_w).exp()).sum(0).log())
    torch.testing.assert_close(free_bits(terms, -100.0), elbo(terms))
    covariance = decoder.weight @ decoder.weight.T + 0.25 * torch.eye(3)
    log_px = MultivariateNormal(torch.zeros(3), covariance).log_prob(x)
    torch.testing.assert_close(iwae(vae.log_terms(x, samples=20_000)), log_px, atol=0.1, rtol=0)
    assert vae.reconstruct(x).shape == x.shape
    path = vae.log_terms(x, samples=2, path_gradient=True)
    assert isinstance(path, PathTerms)
    elbo(path).sum().backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in mixture.parameters())
    with pytest.raises(ValueError, match="Expected terms of one flow for dreg; got those of a mixture"):
        dreg(path)
    with pytest.raises(ValueError, match="Expected noise of shape"):
        vae.log_terms(x, samples=2, noise=torch.zeros(2, 4, 2))
    with pytest.raises(ValueError, match="Expected a VAE with one flow as its posterior; got a mixture"):
        log_likelihood(vae, x, 10)


def test_a_mixture_is_fitted_to_modes_that_are_far_apart():
    centers = torch.tensor([[-6.0, 0.0], [6.0, 0.0]])
    modes = MixtureSameFamily(Categorical(torch.tensor([0.25, 0.75])), Independent(Normal(centers, 1.0), 1))
    parts = [flows.Gaussian(2) for _ in range(2)]
    with torch.no_grad():
        for part, center in zip(parts, centers, strict=True):
            part.base.hypernetwork.bias[:2] = 0.5 * center
    result = inference.fit(modes.log_prob, Mixture(parts), steps=400, samples=32, learning_rate=0.05)
    assert result.elbo > -0.02
    assert result.log_z == pytest.approx(0.0, abs=0.02)
    torch.testing.assert_close(result.flow().logits.softmax(-1), torch.tensor([0.25, 0.75]), atol=0.03, rtol=0)
    assert (result.draws(2000)[:, 0] > 0).double().mean().item() == pytest.approx(0.75, abs=0.05)


def test_draws_that_are_not_finite_take_no_part():
    parts = [flows.Gaussian(2) for _ in range(3)]
    broken = lambda z: -0.5 * z.square().sum(-1) + 0 * (1.0 - z[..., 0]).sqrt()  # noqa: E731
    result = inference.fit(broken, Mixture(parts), steps=30, samples=32, diagnosis_samples=100)
    assert result.history[0].skipped > 0
    assert all(parameter.isfinite().all() for parameter in result.flow.parameters())


def test_a_local_mixture_starts_where_the_amortized_one_is():
    mixture, h, z = make(context=4), torch.randn(5, 4), torch.randn(6, 5, 2)
    local = mixture.local(h)
    torch.testing.assert_close(local().log_prob(z), mixture(h).log_prob(z))
    assert local.context == 0
    assert local.hypernetwork.values.requires_grad


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([], "Expected at least one flow to mix"),
        ([flows.Planar(2), nn.Linear(2, 2)], "Expected at least one flow to mix, and nothing else"),
        ([flows.Planar(2), flows.Planar(3)], r"Expected flows with the same features; got \[2, 3\]"),
        ([flows.Planar(2), flows.Planar(2, 1)], r"Expected flows with the same context; got \[0, 1\]"),
    ],
)
def test_bad_parts_get_a_sentence(parts, message):
    with pytest.raises(ValueError, match=message):
        Mixture(parts)


def test_bad_draws_get_a_sentence():
    q = make()()
    with pytest.raises(ValueError, match="Expected at least one sample of each component; got 0"):
        q.stratified(0)
    with pytest.raises(ValueError, match="6 rows; got 5"):
        q.stratified(2, noise=torch.zeros(5, 2))
    with pytest.raises(ValueError, match="Expected affine=False for a mixture"):
        inference.fit(target, make(), affine=True, steps=2)
