"""Annealed importance sampling against closed forms, and what must not change it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Independent, Normal

from sylvester.annealing import anneal
from sylvester.diagnostics import KHAT_LIMIT
from sylvester.evaluation import log_likelihood
from sylvester.flows import Gaussian, TriangularSylvester
from sylvester.vae import VAE

FEATURES = 12


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


class Coordinates(nn.Module):
    """x = z + σ ε, coordinate by coordinate, so that p(x) = N(0, 1 + σ²)."""

    scale = 0.5

    def forward(self, z: Tensor) -> Independent:
        return Independent(Normal(z, self.scale), 1)

    def log_marginal(self, x: Tensor) -> Tensor:
        return Normal(0.0, math.hypot(1, self.scale)).log_prob(x).sum(-1)


def shifted(flow: type = Gaussian) -> VAE:
    """Its q has nothing of x: far from the posterior, and wider."""
    vae = VAE(nn.Identity(), flow(FEATURES, FEATURES, variance_bounds=(1.0, 1.0)), Coordinates()).double()
    with torch.no_grad():
        for parameter in vae.flow.base.parameters():
            parameter.zero_()
    return vae


@pytest.mark.parametrize("flow", [Gaussian, TriangularSylvester])
def test_annealing_finds_the_likelihood_that_plain_samples_miss(flow: type) -> None:
    vae = shifted(flow)
    x = vae.sample(6)
    exact = vae.decoder.log_marginal(x)
    plain = log_likelihood(vae, x, 32 * 100)
    assert plain.log_px.mean() < exact.mean() - 1
    assert (plain.khat > KHAT_LIMIT).double().mean() > 0.5
    annealed = log_likelihood(vae, x, 32, anneal=100)
    assert ((annealed.log_px - exact).abs() < 4 * annealed.mc_error).all()
    assert annealed.mc_error.max() < 0.5 < (plain.log_px - exact).abs().mean()
    assert (annealed.khat < KHAT_LIMIT).double().mean() > 0.5
    # The bound is that of q, not of what became of its draws.
    torch.testing.assert_close(annealed.elbo, log_likelihood(vae, x, 32).elbo)


@pytest.mark.parametrize("transitions", [1, 2, 5])
def test_weights_are_unbiased_however_few_the_transitions(transitions: int) -> None:
    x, scale = torch.tensor([0.5, -1.0], dtype=torch.float64), 0.5

    def log_weight(z: Tensor) -> Tensor:
        return Normal(z.squeeze(-1), scale).log_prob(x)

    noise = torch.randn(40_000, 2, 1, dtype=torch.float64)
    ratio = (anneal(log_weight, noise, transitions).log_w - Normal(0.0, math.hypot(1, scale)).log_prob(x)).exp()
    assert ((ratio.mean(0) - 1).abs() < 4 * ratio.std(0) / math.sqrt(len(noise))).all()


def test_more_transitions_leave_less_variance() -> None:
    vae = shifted()
    x = vae.sample(4)
    errors = [log_likelihood(vae, x, 50, anneal=transitions).mc_error.mean() for transitions in (1, 10, 100)]
    assert errors[0] > errors[1] > errors[2]


def test_where_q_is_the_posterior_all_weights_are_equal_and_chains_stay_normal() -> None:
    last: list[Tensor] = []

    def log_weight(noise: Tensor) -> Tensor:
        last[:] = [noise]
        return 0 * noise.sum(-1) - 7.0

    noise = torch.randn(2000, 2, 3, dtype=torch.float64)
    chains = anneal(log_weight, noise, 20)
    torch.testing.assert_close(chains.log_w, torch.full((2000, 2), -7.0).double())
    assert torch.equal(chains.start, torch.full((2000, 2), -7.0).double())
    assert 0.5 < chains.accepted.mean() <= 1
    assert (last[0] - noise).abs().mean() > 0.5  # they have moved
    assert (last[0].mean((0, 1)).abs() < 0.1).all()
    assert (last[0].std((0, 1)) - 1).abs().max() < 0.1


def test_a_step_into_nowhere_is_refused() -> None:
    def log_weight(noise: Tensor) -> Tensor:
        return noise.squeeze(-1).abs().where(noise.squeeze(-1).abs() < 1, math.nan * noise.squeeze(-1))

    noise = 0.1 * torch.randn(100, 1, 1, dtype=torch.float64)
    chains = anneal(log_weight, noise, 10)
    assert chains.log_w.isfinite().all()
    assert chains.accepted.mean() < 1


def test_bad_input_is_a_sentence() -> None:
    noise = torch.randn(4, 2, 3)
    with pytest.raises(ValueError, match="Expected at least one transition"):
        anneal(lambda noise: noise.sum(-1), noise, 0)
    with pytest.raises(ValueError, match=r"Expected log weights as a tensor \(4, 2\), \(S, B\); got shape \(4, 2, 3\)"):
        anneal(lambda noise: noise, noise, 2)
    vae = shifted()
    with pytest.raises(ValueError, match="Expected a number of transitions to anneal by"):
        log_likelihood(vae, vae.sample(2), 4, anneal=-1)
