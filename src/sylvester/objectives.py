"""Bounds on log p(x), to be maximised: one value per data point, from the terms of `VAE.log_terms`.

Any log-density has such terms: `LogTerms(z, log_density(z), zeros, log_q)`, with z and log q from
`FlowDistribution.rsample_and_log_prob`, or `PathTerms` where log q has path gradients; the bounds are then on the
logarithm of its integral.

With w_s = p(x, z_s) / q(z_s|x), the bounds are one family (Li & Turner, 2016),

    L_α = 1/(1 − α) log (1/S) Σ_s w_s^(1−α),

whose limit at α = 1 is the ELBO, and which is the importance-weighted bound at α = 0. With v = softmax((1 − α) log w)
their gradients are

    model        Σ_s v_s ∂log w_s
    posterior    Σ_s (α v_s + (1 − α) v_s²) ∂log w_s/∂z_s ∂z_s/∂φ

where the posterior's is doubly reparameterized (Tucker et al., 2019): it has the mean of Σ_s v_s ∂log w_s, but the
derivative of log q with z held, which v_s multiplies there, has been reparameterized once more. At α = 1 the weight is
v_s itself, so that the ELBO takes path gradients as they are; the others need `dreg`, and refuse them.

A weight β, for annealing, multiplies log q(z|x) − log p(z) in every w_s. Of a mixture's draws each has a share in the
place of 1/S: π_k over the number of draws of its component (`MixtureDistribution.stratified`).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sylvester.distributions import along_path
from sylvester.vae.model import LogTerms, PathTerms

__all__ = ["dreg", "elbo", "free_bits", "iwae", "linear_beta", "log_mean_exp", "renyi"]


def elbo(terms: LogTerms, beta: float = 1.0) -> Tensor:
    """E_q[log p(x|z) − β (log q(z|x) − log p(z))], the mean over samples; (B,). Path gradients are right at any β."""
    return _mean(_log_weights(terms, beta), terms)


def iwae(terms: LogTerms, beta: float = 1.0) -> Tensor:
    """log (1/S) Σ_s p(x, z_s) / q(z_s|x): tightens towards log p(x) as the samples grow; (B,)."""
    _refuse_path_gradients("iwae", terms, "dreg(terms)")
    return _renyi(_log_weights(terms, beta), 0.0, terms.log_share)


def renyi(terms: LogTerms, alpha: float, beta: float = 1.0) -> Tensor:
    """L_α = 1/(1 − α) log (1/S) Σ_s (p(x, z_s) / q(z_s|x))^(1−α), which falls as α ≥ 0 grows; (B,).

    α = 0 is `iwae`, α = 1 the `elbo`.

    >>> log_w, zeros = torch.tensor([[1.0], [3.0]]), torch.zeros(2, 1)
    >>> terms = LogTerms(z=torch.zeros(2, 1, 5), log_px_z=log_w, log_pz=zeros, log_q=zeros)
    >>> [bound(terms).item() for bound in (elbo, lambda terms: renyi(terms, 0.5), iwae)]
    [2.0, 2.240..., 2.433...]
    """
    _refuse_path_gradients("renyi", terms, "dreg(terms, alpha)")
    return _renyi(_log_weights(terms, beta), alpha, terms.log_share)


def dreg(terms: LogTerms, alpha: float = 0.0, beta: float = 1.0) -> Tensor:
    """The value of `renyi` (of `iwae`, unless α is given), with the doubly reparameterized gradient; (B,).

    Takes `PathTerms`. The model's gradient is Σ_s v_s ∂log w_s, as it was, and the posterior's
    Σ_s (α v_s + (1 − α) v_s²) ∂log w_s/∂z_s ∂z_s/∂φ; where β is not 1 the weight is v_s − β (1 − α) v_s (1 − v_s). As
    the two differ where z enters the model, ∂log w/∂z is found by a backward pass of its own, which compiled terms do
    not allow. First derivatives only.
    """
    if not isinstance(terms, PathTerms):
        raise ValueError("Expected terms with path gradients, log_terms(…, path_gradient=True), for dreg; got ordinary")
    if terms.log_share is not None:
        raise ValueError("Expected terms of one flow for dreg; got those of a mixture: iwae and elbo take them")
    log_w, z = _log_weights(terms, beta), terms.z
    bound = _renyi(log_w.detach(), alpha)
    v = torch.softmax((1 - alpha) * log_w.detach(), 0)  # (S, B)
    model = (v * (log_w - log_w.detach())).sum(0)
    if not (z.requires_grad and log_w.requires_grad):
        return bound + model
    # The model's term moves z with weight v, too.
    (score,) = torch.autograd.grad(log_w.sum(), z, retain_graph=True, allow_unused=True)
    if score is None:
        raise ValueError(
            "Expected terms for dreg whose log-densities are functions of their z; "
            "got others, as compiled code leaves them"
        )
    path = along_path(torch.zeros_like(log_w), score, z)
    return bound + model - (beta * (1 - alpha) * v * (1 - v) * path).sum(0)


def free_bits(terms: LogTerms, floor: float, beta: float = 1.0) -> Tensor:
    """The ELBO with the batch-mean KL replaced by max(floor, batch-mean KL), floor in nats; (B,).

    While the mean KL of the batch lies above the floor, this is the ELBO of each data point; below it, every
    data point pays the floor instead of its own KL, and the KL gets no gradient. Either way the mean over the
    batch is exactly mean log p(x|z) − β max(floor, mean KL). Between processes, each takes its own batch.
    """
    _refuse_path_gradients("free_bits", terms, "elbo(terms)")
    kl = _mean(terms.log_q - terms.log_pz, terms)
    return _mean(terms.log_px_z, terms) - beta * torch.where(kl.mean() > floor, kl, floor)


def _log_weights(terms: LogTerms, beta: float) -> Tensor:
    """log p(x|z) − β (log q(z|x) − log p(z)), (S, B)."""
    return terms.log_px_z - beta * (terms.log_q - terms.log_pz)


def _refuse_path_gradients(objective: str, terms: LogTerms, instead: str) -> None:
    if isinstance(terms, PathTerms):
        raise ValueError(
            f"Expected terms with ordinary gradients for {objective}, where log q does not enter linearly; got path "
            f"gradients, which are biased there: {instead} takes them"
        )


def _mean(values: Tensor, terms: LogTerms) -> Tensor:
    """Over samples, each with its share."""
    return values.mean(0) if terms.log_share is None else (terms.log_share.exp() * values).sum(0)


def _renyi(log_w: Tensor, alpha: float, log_share: Tensor | None = None) -> Tensor:
    if not 0 <= alpha < math.inf:
        raise ValueError(f"Expected a finite alpha >= 0; got {alpha}")
    if log_share is not None:
        powers = (1 - alpha) * log_w + log_share
        return (log_share.exp() * log_w).sum(0) if alpha == 1 else powers.logsumexp(0) / (1 - alpha)
    return log_w.mean(0) if alpha == 1 else log_mean_exp((1 - alpha) * log_w) / (1 - alpha)


def log_mean_exp(log_w: Tensor, dim: int = 0) -> Tensor:
    """log of the mean of exp(log_w) along ``dim``.

    >>> log_mean_exp(torch.tensor([1.0, 3.0]).log()).exp()
    tensor(2.)
    """
    return log_w.logsumexp(dim) - math.log(log_w.shape[dim])


def linear_beta(epoch: int, warmup: int, *, step: int = 0, steps: int = 0, start: float = 0.0) -> float:
    """β = start + (1 − start) min(epoch / warmup, 1), with epochs counted from 1; no warm-up gives 1.

    With ``step`` of ``steps`` (counted from 1 within the epoch), β grows with every step, and reaches at the
    end of an epoch what it would have been throughout it.
    """
    if epoch < 1 or warmup < 0 or not 0 <= step <= steps or not 0 <= start <= 1:
        raise ValueError(
            "Expected epoch >= 1, warmup >= 0, 0 <= step <= steps and 0 <= start <= 1; "
            f"got epoch={epoch}, warmup={warmup}, step={step}, steps={steps}, start={start}"
        )
    progress = epoch - 1 + step / steps if steps else epoch
    return start + (1 - start) * min(progress / warmup, 1.0) if warmup else 1.0
