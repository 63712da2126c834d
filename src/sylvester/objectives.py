"""Bounds on log p(x), to be maximised: one value per data point, from the terms of `VAE.log_terms`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sylvester.vae.model import LogTerms

__all__ = ["elbo", "free_bits", "iwae", "linear_beta", "log_mean_exp"]


def elbo(terms: LogTerms, beta: float = 1.0) -> Tensor:
    """E_q[log p(x|z) − β (log q(z|x) − log p(z))], the mean over samples; (B,)."""
    return (terms.log_px_z - beta * (terms.log_q - terms.log_pz)).mean(0)


def iwae(terms: LogTerms) -> Tensor:
    """log (1/S) Σ_s p(x, z_s) / q(z_s|x): tightens towards log p(x) as the samples grow; (B,)."""
    return log_mean_exp(terms.log_w)


def free_bits(terms: LogTerms, floor: float, beta: float = 1.0) -> Tensor:
    """The ELBO with the batch-mean KL replaced by max(floor, batch-mean KL), floor in nats; (B,).

    While the mean KL of the batch lies above the floor, this is the ELBO of each data point; below it, every
    data point pays the floor instead of its own KL, and the KL gets no gradient. Either way the mean over the
    batch is exactly mean log p(x|z) − β max(floor, mean KL). Between processes, each takes its own batch.
    """
    kl = (terms.log_q - terms.log_pz).mean(0)
    return terms.log_px_z.mean(0) - beta * torch.where(kl.mean() > floor, kl, floor)


def log_mean_exp(log_w: Tensor, dim: int = 0) -> Tensor:
    """log of the mean of exp(log_w) along ``dim``."""
    return log_w.logsumexp(dim) - math.log(log_w.shape[dim])


def linear_beta(epoch: int, warmup: int, *, step: int = 0, steps: int = 0) -> float:
    """β = min(epoch / warmup, 1), with epochs counted from 1; no warm-up gives 1.

    With ``step`` of ``steps`` (counted from 1 within the epoch), β grows with every step, and reaches at the
    end of an epoch what it would have been throughout it.
    """
    if epoch < 1 or warmup < 0 or not 0 <= step <= steps:
        raise ValueError(
            "Expected epoch >= 1, warmup >= 0 and 0 <= step <= steps; "
            f"got epoch={epoch}, warmup={warmup}, step={step}, steps={steps}"
        )
    progress = epoch - 1 + step / steps if steps else epoch
    return min(progress / warmup, 1.0) if warmup else 1.0
