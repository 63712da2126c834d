"""Adapted proposals against closed forms, an optimality condition, SciPy's t, and what must not change them."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from scipy.stats import f, kstest, multivariate_t
from torch import Tensor, nn
from torch.distributions import Independent, MultivariateNormal, Normal

from sylvester import adaptation
from sylvester.adaptation import Proposal, adapt, draws_of_a_round
from sylvester.diagnostics import KHAT_LIMIT
from sylvester.evaluation import log_likelihood
from sylvester.flows import Gaussian, TriangularSylvester
from sylvester.vae import VAE

FEATURES = 8

pytestmark = pytest.mark.usefixtures("float64")


class Linear(nn.Module):
    """x = A z + σ ε with a dense A, so that p(x) = N(0, A Aᵀ + σ²) and the posterior is far from diagonal."""

    scale = 0.3

    def __init__(self, strength: float) -> None:
        super().__init__()
        self.register_buffer("weight", strength * torch.randn(FEATURES, FEATURES) / math.sqrt(FEATURES))

    def forward(self, z: Tensor) -> Independent:
        return Independent(Normal(z @ self.weight.mT, self.scale), 1)

    def log_marginal(self, x: Tensor) -> Tensor:
        cov = self.weight @ self.weight.mT + self.scale**2 * torch.eye(FEATURES)
        return MultivariateNormal(torch.zeros(FEATURES), cov).log_prob(x)


def mistaken(flow: type = Gaussian, strength: float = 1.0) -> VAE:
    """Its q is drawn at random: of x it knows nothing that is true. The steps bend, but do not fold."""
    vae = VAE(nn.Identity(), flow(FEATURES, FEATURES, transforms=3, init="torch"), Linear(strength))
    with torch.no_grad():
        for parameter in vae.flow.steps.parameters():
            parameter *= 0.3
    return vae


def gaussian_target(scale: float) -> tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]:
    """Means and covariances of three posteriors in the noise, and the log weight that makes them."""
    root = torch.randn(3, FEATURES, FEATURES) / math.sqrt(FEATURES)
    precision = torch.eye(FEATURES) + scale**2 * root @ root.mT
    mean = scale * torch.randn(3, FEATURES)
    posterior = MultivariateNormal(mean, precision_matrix=precision)

    def log_weight(noise: Tensor) -> Tensor:
        return posterior.log_prob(noise) - Normal(0.0, 1.0).log_prob(noise).sum(-1)

    return mean, posterior.covariance_matrix, log_weight


def matched(drawn: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor]:
    nothing = torch.full_like(drawn[0], math.nan)
    usable = torch.ones(drawn.shape[:2], dtype=torch.bool)
    return adaptation._matched(nothing, nothing.unsqueeze(-1).expand(-1, -1, drawn.shape[-1]), drawn, slopes, usable)


@pytest.mark.parametrize("scale", [0.1, 1.0, 3.0, 30.0])
def test_a_gaussian_posterior_is_found(scale: float) -> None:
    mean, covariance, log_weight = gaussian_target(scale)
    found = adapt(log_weight, torch.randn(draws_of_a_round(FEATURES), 3, FEATURES), rounds=1)
    torch.testing.assert_close(found.loc, mean, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found.scale_tril @ found.scale_tril.mT, covariance, rtol=1e-6, atol=1e-6)
    assert torch.equal(found.scale_tril, found.scale_tril.tril())


def test_a_round_ends_where_the_derivative_of_what_it_minimizes_vanishes() -> None:
    """The objective as it stands in the text, by autograd; draws and slopes belong to no Gaussian."""
    drawn, slopes = torch.randn(12, 1, FEATURES), 3 * torch.randn(12, 1, FEATURES) - 1
    loc, tril = matched(drawn, slopes)
    m, sigma = loc[0].requires_grad_(True), (tril[0] @ tril[0].mT).requires_grad_(True)
    apart = slopes[:, 0] + (drawn[:, 0] - m) @ sigma.inverse()
    objective = torch.einsum("nd,de,ne->n", apart, sigma, apart).mean()
    in_m, in_sigma = torch.autograd.grad(objective, (m, sigma))
    assert in_m.abs().max() < 1e-9 * objective.item()
    assert (in_sigma + in_sigma.mT).abs().max() < 1e-9 * objective.item()


def test_neither_scales_nor_rotations_of_the_noise_matter() -> None:
    """Where a round starts from N(b, A Aᵀ) and its target is that of ε = A ε' + b, it ends at the image of its end."""
    _, _, log_weight = gaussian_target(1.0)
    target = lambda noise: log_weight(noise) - 0.1 * noise.pow(4).sum(-1)  # noqa: E731
    a, b = torch.randn(FEATURES, FEATURES).tril() + 3 * torch.eye(FEATURES), torch.randn(FEATURES)
    here, there = (
        (torch.zeros(3, FEATURES), torch.eye(FEATURES).expand(3, -1, -1)),
        (b.expand(3, -1), a.expand(3, -1, -1)),
    )
    for _ in range(3):
        standard = torch.randn(20, 3, FEATURES)
        ends = []
        for (loc, tril), back in ((here, lambda y: y), (there, lambda y: torch.linalg.solve(a, (y - b).mT).mT)):
            drawn = (loc + torch.einsum("bde,nbe->nbd", tril, standard)).requires_grad_(True)
            (slopes,) = torch.autograd.grad(target(back(drawn)).sum(), drawn)
            ends.append(matched(drawn.detach(), slopes))
        here, there = ends
    torch.testing.assert_close(there[0], here[0] @ a.mT + b)
    torch.testing.assert_close(there[1] @ there[1].mT, a @ here[1] @ here[1].mT @ a.mT)


@pytest.mark.parametrize("size", [1, 2, 8])
def test_draws_have_the_density_that_their_ratio_says(size: int) -> None:
    tril = torch.randn(2, size, size).tril(-1) + torch.rand(2, size).add(0.2).diag_embed()
    proposal = Proposal(torch.randn(2, size), tril, torch.zeros(0, 2))
    noise, log_ratio = proposal.draw(torch.randn(50_000, 2, proposal.width))
    for row in range(2):
        student = multivariate_t(proposal.loc[row], tril[row] @ tril[row].mT, proposal.degrees)
        log_r = torch.as_tensor(student.logpdf(noise[:100, row].numpy())).reshape(100)
        torch.testing.assert_close(log_ratio[:100, row], Normal(0.0, 1.0).log_prob(noise[:100, row]).sum(-1) - log_r)
        # The squared distance from the centre, a dimension, has Fisher's F distribution.
        standard = torch.linalg.solve_triangular(tril[row], (noise[:, row] - proposal.loc[row]).mT, upper=False)
        distance = standard.square().mean(0)
        assert kstest(distance.numpy(), f(size, proposal.degrees).cdf).pvalue > 1e-4


@pytest.mark.parametrize("rounds", [1, 3])
def test_weights_are_unbiased_whatever_the_fit_is_worth(rounds: int) -> None:
    """Twenty thousand proposals, each fitted from four draws to a mixture of two modes, and sampled twice."""
    count = 20_000

    def log_weight(noise: Tensor) -> Tensor:
        z = noise.squeeze(-1)
        return torch.logaddexp(Normal(-2.0, 0.3).log_prob(z), Normal(1.0, 0.5).log_prob(z))

    exact = sum(Normal(0.0, math.hypot(1, s)).log_prob(torch.tensor(m)).exp() for m, s in ((-2.0, 0.3), (1.0, 0.5)))
    proposal = adapt(log_weight, torch.randn(4, count, 1), rounds)
    noise, log_ratio = proposal.draw(torch.randn(2, count, proposal.width))
    w = (log_weight(noise) + log_ratio).exp().mean(0) / exact
    assert abs(w.mean() - 1) < 4 * w.std() / math.sqrt(count)


@pytest.mark.parametrize(("flow", "strength"), [(Gaussian, 1.0), (Gaussian, 3.0), (TriangularSylvester, 1.0)])
def test_adaptation_finds_the_likelihood_that_plain_samples_miss(flow: type, strength: float) -> None:
    vae = mistaken(flow, strength)
    x = vae.sample(5)
    exact = vae.decoder.log_marginal(x)
    plain = log_likelihood(vae, x, 2000)
    assert plain.log_px.mean() < exact.mean() - 0.5
    assert (plain.khat > KHAT_LIMIT).any()
    adapted = log_likelihood(vae, x, 500, adapt=6)
    assert ((adapted.log_px - exact).abs() < 4 * adapted.mc_error).all()
    assert adapted.mc_error.max() < 0.15
    assert (adapted.khat < KHAT_LIMIT).all()
    # The bound is that of q, from the draws that the fit began with.
    torch.testing.assert_close(adapted.elbo, log_likelihood(vae, x, draws_of_a_round(FEATURES)).elbo)


def test_what_is_not_finite_is_passed_over() -> None:
    mean, _, log_weight = gaussian_target(1.0)

    def broken(noise: Tensor) -> Tensor:
        value = log_weight(noise)
        return value.masked_fill(noise[..., 0] > 1.0, math.nan)

    noise = torch.randn(64, 3, FEATURES)
    assert (broken(noise).isnan()).any()
    found = adapt(broken, noise, rounds=6)
    assert (found.loc - mean).abs().max() < 1e-3
    nowhere = adapt(lambda noise: math.nan * noise.sum(-1), noise, rounds=2)
    assert torch.equal(nowhere.loc, torch.zeros(3, FEATURES))
    assert torch.equal(nowhere.scale_tril, torch.eye(FEATURES).expand(3, -1, -1))


def test_bad_input_is_a_sentence() -> None:
    noise = torch.randn(4, 2, 3)
    with pytest.raises(ValueError, match=r"Expected noise \(N, B, D\) of more draws than dimensions"):
        adapt(lambda noise: noise.sum(-1), noise, 0)
    with pytest.raises(ValueError, match=r"Expected noise \(N, B, D\) of more draws than dimensions"):
        adapt(lambda noise: noise.sum(-1), noise[:3], 1)
    with pytest.raises(ValueError, match=r"Expected log weights as a tensor \(4, 2\), \(S, B\); got shape \(4, 2, 3\)"):
        adapt(lambda noise: noise, noise, 2)
    vae = mistaken()
    for wrong in ({"adapt": -1}, {"adapt": 1, "anneal": 1}):
        with pytest.raises(ValueError, match="Expected a number of rounds to adapt a proposal in"):
            log_likelihood(vae, vae.sample(2), 4, **wrong)
