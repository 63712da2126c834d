"""How far importance weights can be trusted. Log weights are (S, …), with samples on axis 0."""

from __future__ import annotations

import math

import torch
from torch import Tensor

KHAT_LIMIT = 0.7  # beyond it, averages of the weights converge too slowly to be of use (Vehtari et al., 2024)
_UNDERFLOW = 700.0  # nats below the largest weight at which another one is nothing beside it in float64


def effective_sample_size(log_w: Tensor) -> Tensor:
    """(Σ w)² / Σ w²: between 1, where one weight is everything, and S, where all are equal."""
    return (2 * log_w.logsumexp(0) - (2 * log_w).logsumexp(0)).exp()


def log_mean_error(log_w: Tensor) -> Tensor:
    """Standard error of log mean(w) by the delta method, std(w) / mean(w) / √S; nan for one sample."""
    if len(log_w) == 1:
        return torch.full_like(log_w[0], math.nan)
    w = (log_w - log_w.amax(0)).exp()
    return w.std(0) / w.mean(0) / math.sqrt(len(log_w))


def pareto_khat(log_w: Tensor) -> Tensor:
    """Shape k̂ of the generalized Pareto distribution that fits the largest weights, by arviz-stats.

    The weights have about 1/k̂ finite moments: below 0.5 the central limit theorem holds for their mean, and
    beyond 0.7 the mean is not to be trusted at any affordable number of samples. k̂ is nan where undefined:
    without arviz-stats, for fewer than 25 samples, for weights that are equal or not numbers. It is infinite
    where most weights vanish beside the largest, which leaves no tail to fit.
    """
    columns = log_w.detach().cpu().double().reshape(len(log_w), -1).unbind(1)
    return torch.tensor([_khat(column) for column in columns], dtype=torch.float64).reshape(log_w.shape[1:])


def _khat(log_w: Tensor) -> float:
    try:
        import numpy as np
        from arviz_stats.base import array_stats
    except ImportError:
        return math.nan
    if len(log_w) < 25 or log_w.isnan().any():
        return math.nan
    if log_w.max() - log_w.median() > _UNDERFLOW:
        return math.inf
    try:
        # On a degenerate tail the fit divides by zero and goes on to return its prior mean: stop it there.
        with np.errstate(divide="raise", invalid="raise"):
            return float(array_stats.psislw(-log_w.numpy())[1])  # it takes negated log weights
    except (ValueError, FloatingPointError):
        return math.nan
