"""Log-densities whose integrals are known, for fits to be judged by.

banana            z_1 ~ N(0, 2²), z_2 ~ N(z_1²/4, ½²)
funnel            v ~ N(0, 3²), x_i ~ N(0, e^v), i = 1, …, 9 (Neal, 2003)
eight schools     the hierarchical model of Rubin (1981), centred and not, in (μ, log τ, θ or η)
eight Gaussians   on a circle of radius 4, standard deviation ½
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributions import HalfCauchy, MultivariateNormal, Normal

EFFECTS = (28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0)  # of coaching in eight schools, in points of the test
ERRORS = (15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0)  # their standard errors


class Target(NamedTuple):
    features: int
    log_density: Callable[[Tensor], Tensor]
    log_z: Callable[[], float]


def banana(z: Tensor) -> Tensor:
    first, second = z.unbind(-1)
    return Normal(0.0, 2.0).log_prob(first) + Normal(first.square() / 4, 0.5).log_prob(second)


def funnel(z: Tensor) -> Tensor:
    v, x = z[..., 0], z[..., 1:]
    # By hand: the scale of a Normal may round to zero where v is very low, and is not checked to be positive here.
    log_x = -0.5 * (x.square() * torch.exp(-v).unsqueeze(-1) + v.unsqueeze(-1) + math.log(2 * math.pi))
    return Normal(0.0, 3.0).log_prob(v) + log_x.sum(-1)


def eight_schools(z: Tensor, *, centred: bool) -> Tensor:
    """μ ~ N(0, 5²), τ ~ HalfCauchy(5), θ_j ~ N(μ, τ²), y_j ~ N(θ_j, σ_j²); not centred, θ_j = μ + τ η_j."""
    effects, errors = z.new_tensor(EFFECTS), z.new_tensor(ERRORS)
    mu, log_tau, schools = z[..., 0], z[..., 1], z[..., 2:]
    tau = log_tau.exp()
    log_p = Normal(0.0, 5.0).log_prob(mu) + _log_half_cauchy(tau) + log_tau
    if centred:
        residuals = (schools - mu.unsqueeze(-1)) * torch.exp(-log_tau).unsqueeze(-1)
        log_p = log_p + (Normal(0.0, 1.0).log_prob(residuals) - log_tau.unsqueeze(-1)).sum(-1)
    else:
        log_p = log_p + Normal(0.0, 1.0).log_prob(schools).sum(-1)
        schools = mu.unsqueeze(-1) + tau.unsqueeze(-1) * schools
    return log_p + Normal(schools, errors).log_prob(effects).sum(-1)


def _log_half_cauchy(tau: Tensor) -> Tensor:
    return math.log(2 / (5 * math.pi)) - torch.log1p((tau / 5).square())


def eight_schools_log_z() -> float:
    """Given τ, y ~ N(0, diag(σ² + τ²) + 25 · 11ᵀ): what is left is an integral over log τ, which trapezia do."""
    log_tau = torch.linspace(-30.0, 15.0, 9001, dtype=torch.float64)
    tau = log_tau.exp()
    effects, errors = (torch.tensor(values, dtype=torch.float64) for values in (EFFECTS, ERRORS))
    covariance = torch.diag_embed(errors.square() + tau.square().unsqueeze(-1)) + 25.0
    log_y = MultivariateNormal(torch.zeros(8, dtype=torch.float64), covariance).log_prob(effects)
    log_p = HalfCauchy(5.0).log_prob(tau) + log_tau + log_y
    return (log_p.logsumexp(0) + math.log(45 / 9000)).item()


def eight_gaussians(z: Tensor) -> Tensor:
    angle = torch.arange(8, dtype=z.dtype, device=z.device) * (math.pi / 4)
    centers = 4 * torch.stack([angle.cos(), angle.sin()], -1)
    return Normal(centers, 0.5).log_prob(z.unsqueeze(-2)).sum(-1).logsumexp(-1) - math.log(8)


#: In the order in which they are reported.
TARGETS: dict[str, Target] = {
    "banana": Target(2, banana, lambda: 0.0),
    "funnel": Target(10, funnel, lambda: 0.0),
    "eight schools, centred": Target(10, lambda z: eight_schools(z, centred=True), eight_schools_log_z),
    "eight schools, non-centred": Target(10, lambda z: eight_schools(z, centred=False), eight_schools_log_z),
    "eight Gaussians": Target(2, eight_gaussians, lambda: 0.0),
}
