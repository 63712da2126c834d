"""How far importance weights, and the inverses of a flow, can be trusted. Log weights are (S, …), samples on axis 0."""

from __future__ import annotations

import math
import warnings

import torch
from torch import Tensor

from sylvester.distributions import FlowDistribution
from sylvester.flows import Flow
from sylvester.random import stream
from sylvester.transforms.base import inverse_tolerance

__all__ = [
    "KHAT_LIMIT",
    "InexactInverseWarning",
    "effective_sample_size",
    "log_mean_error",
    "pareto_khat",
    "warn_if_inexact",
]

KHAT_LIMIT = 0.7  # beyond it, averages of the weights converge too slowly to be of use (Vehtari et al., 2024)
_FEWEST = 25  # samples: a tail of five
# Nats below the largest weight at which the rest of the tail is nothing beside it. The ratio of the two is met in
# float64, which ends at 709, after a division by a difference of weights that may be as small as e⁻³⁶ of them.
_VANISHING = 650.0
_WORKSPACE = 1 << 20  # numbers: the fit takes so many images at a time that no more are in use at once


class InexactInverseWarning(UserWarning):
    """A flow whose samples go through an inverse that is not exact."""


def warn_if_inexact(flow: Flow, posterior: FlowDistribution) -> bool:
    """Warn, and say so, where samples of ``posterior``, what ``flow`` gave, are not what its density describes.

    That can only be where sampling takes a sequential inverse, as a MAF's does: others cost nothing to check.
    """
    like = posterior.base_dist.base_dist.loc
    noise = torch.randn(like.shape, generator=stream("inverses"), dtype=torch.float64).to(like)
    residual = posterior.residual(noise=noise)
    if not (residual > inverse_tolerance(residual.dtype)).any():
        return False
    warnings.warn(
        f"Samples of this {type(flow).__name__} with {flow.features} features and {len(posterior.transforms)} steps "
        f"are not exact in {residual.dtype}, nor are their log-densities: its steps are too steep to be inverted one "
        f"coordinate after another (residual {residual.max().item():.3g}). Use float64, fewer steps, or a flow that "
        "samples in one pass.",
        InexactInverseWarning,
        stacklevel=3,
    )
    return True


def effective_sample_size(log_w: Tensor) -> Tensor:
    """(Σ w)² / Σ w²: between 1, where one weight is everything, and S, where all are equal."""
    return (2 * log_w.logsumexp(0) - (2 * log_w).logsumexp(0)).exp()


def log_mean_error(log_w: Tensor) -> Tensor:
    """Standard error of log mean(w) by the delta method, std(w) / mean(w) / √S; nan for one sample."""
    if len(log_w) < 2:
        return log_w.new_full(log_w.shape[1:], math.nan)
    w = (log_w - log_w.amax(0)).exp()
    return w.std(0) / w.mean(0) / math.sqrt(len(log_w))


def pareto_khat(log_w: Tensor) -> Tensor:
    """Shape k̂ of the generalized Pareto distribution that fits the largest weights, for each column of log_w (S, …).

    The weights have about 1/k̂ finite moments: below 0.5 the central limit theorem holds for their mean, and
    beyond 0.7 the mean is not to be trusted at any affordable number of samples. Weights that are bounded can
    have a negative k̂.

    The tail is as large as Pareto smoothed importance sampling takes it (Vehtari, Simpson, Gelman, Yao and
    Gabry, 2024): 3√S weights, or S/5 where that is less. k̂ is the estimate of Zhang and Stephens (2009), drawn towards
    0.5 by a prior that weighs as much as ten samples. The result has the dtype and device of log_w, and no gradient.

    k̂ is nan where undefined: for fewer than 25 samples, for weights of which any is not a number, and where a
    quarter of the tail or more equals the largest weight below it, as where all weights are equal. It is infinite
    where three quarters of the tail vanish beside the largest weight, which leaves nothing to fit.

    >>> log_w = torch.distributions.Exponential(1 / 0.4).sample((5000, 3))  # w ~ Pareto with k = 0.4
    >>> (pareto_khat(log_w) < KHAT_LIMIT).tolist()
    [True, True, True]
    """
    samples = len(log_w)
    if samples < _FEWEST or log_w.numel() == 0:
        return log_w.new_full(log_w.shape[1:], math.nan)
    columns = log_w.detach().reshape(samples, -1).T  # (B, S)
    count = math.isqrt(9 * samples) if samples > 225 else samples // 5
    tail = columns.topk(count + 1).values.cpu().double()  # descending; the last one is the threshold
    grid = 30 + math.isqrt(count)
    khat = torch.cat([_fit(part, grid) for part in tail.split(max(1, _WORKSPACE // (grid * count)))])
    khat = khat.to(log_w).masked_fill(columns.isnan().any(1), math.nan)
    return khat.reshape(log_w.shape[1:])


def _fit(tail: Tensor, grid: int) -> Tensor:
    """k̂ from the largest log weights (B, n + 1), in descending order.

    The excesses x_i over the threshold have the density (1/σ) (1 + k x_i/σ)^(−1 − 1/k). With θ = −k/σ the
    likelihood is largest at k(θ) = mean log(1 − θ x_i), where its logarithm is −n (log σ + k + 1). Zhang and Stephens
    take the mean of θ over that likelihood, on a grid θ_j = 1/max x + (1 − √(m / (j − ½))) / (3 x*), j = 1, …, m, with
    x* the lower quartile of x; then k̂ is k at this mean.
    """
    log_w, threshold = tail[:, :-1], tail[:, -1:]
    count = log_w.shape[1]
    place = count - int(count / 4 + 0.5)
    quartile = log_w[:, place, None]
    # k̂ does not depend on the scale, so x* is the unit. Differences come before exponentials, so that close weights
    # keep their digits and a threshold of zero is as good as any.
    x = (log_w - quartile).exp() * -torch.expm1(threshold - log_w)
    x = x / x[:, place, None]  # (B, n)
    x = torch.nan_to_num(x, nan=0.0)  # 0/0 where weights of zero reach into the tail; the quartile decides below
    j = torch.arange(1, grid + 1, dtype=x.dtype)
    theta = 1 / x[:, :1] + (1 - (grid / (j - 0.5)).sqrt()) / 3  # (B, m)
    k = torch.log1p(-theta.unsqueeze(-1) * x.unsqueeze(1)).mean(-1)  # (B, m)
    sigma = torch.where(theta == 0, x.mean(1, keepdim=True), -k / theta)  # an exponential tail is the limit
    posterior = (-count * (sigma.log() + k)).softmax(1)
    k = torch.log1p(-(posterior * theta).sum(1, keepdim=True) * x).mean(1)
    khat = (count * k + 10 * 0.5) / (count + 10)
    khat = khat.masked_fill((quartile == threshold).squeeze(1), math.nan)
    return khat.masked_fill((log_w[:, 0] - quartile.squeeze(1)) > _VANISHING, math.inf)
