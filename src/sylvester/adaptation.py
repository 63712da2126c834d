"""Importance sampling from a proposal that is fitted to one data point's posterior, in the noise of q.

A flow makes z of noise ε ~ N(0, I). So an importance weight is a function of noise, and its mean is p(x):

    ℓ(ε) = log p(x, z(ε)) − log q(z(ε)|x),    π(ε) = N(ε; 0, I) exp ℓ(ε),    p(x) = ∫ π(ε) dε.

Where q is the posterior, π is N(0, I) times p(x). Where q is not, because its family is too small or because the
encoder missed, π is often still near some Gaussian N(m, Σ), far from N(0, I) as that may be. The slope of a Gaussian's
logarithm is −Σ⁻¹(ε − m): a little more than D draws with their slopes determine it, without noise. Of draws ε_n with
slopes g_n of log π, take the means ε̄ and ḡ and the covariances C and Γ. The Gaussian whose slopes are nearest,

    mean_n ‖g_n + Σ⁻¹(ε_n − m)‖²_Σ  ->  min,    ‖v‖²_Σ = vᵀΣv,

has a closed form: the derivative vanishes in m at m = ε̄ + Σḡ, and then in Σ where

    Σ Γ Σ = C,    Σ = L W diag(w)^(−½) Wᵀ Lᵀ    with C = L Lᵀ and Lᵀ Γ L = W diag(w) Wᵀ.

Draws of that Gaussian help to make the next one, and so on. This is batch and match (Cai et al., 2024), without a rate
of learning: each fit is to all draws of the later half of the rounds so far. How ε is scaled or turned does not matter,
and a Gaussian π is found in one round, because the same m and Σ fit its slopes wherever the draws are.

After some rounds, fresh draws of Student's t with this m and Σ are weighed by π over its density. They know nothing of
the draws that made m and Σ, so the mean of the weights is p(x), whatever the fit is worth. The tails of t are heavier
than those of any Gaussian prior times a bounded likelihood: where q is Gaussian, no weight is unbounded.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from sylvester.annealing import value_and_slope

__all__ = ["Proposal", "adapt", "draws_of_a_round"]


class Proposal(NamedTuple):
    """Student's t in the noise, one for each of B data points; in float64, on the CPU."""

    loc: Tensor  # (B, D)
    scale_tril: Tensor  # (B, D, D)
    start: Tensor  # (N, B), ℓ at the first round's draws, which were q's own

    @property
    def degrees(self) -> int:
        """Of freedom. So many as there are dimensions make |ε|² twice as uncertain as a Gaussian's, and lose little."""
        return max(self.loc.shape[-1], 5)

    @property
    def width(self) -> int:
        """How many standard normal numbers make one draw."""
        return self.loc.shape[-1] + self.degrees

    def draw(self, normal: Tensor) -> tuple[Tensor, Tensor]:
        """Of standard normal numbers (S, B, ``width``) noise ε (S, B, D), and log N(ε; 0, I) − log r(ε), (S, B)."""
        size, degrees = self.loc.shape[-1], self.degrees
        direction, rest = normal.cpu().double().split([size, degrees], -1)
        standard = direction * (degrees / rest.square().sum(-1, keepdim=True)).sqrt()  # t of unit scale
        noise = self.loc + torch.einsum("bde,sbe->sbd", self.scale_tril, standard)
        log_r = (
            math.lgamma((degrees + size) / 2)
            - math.lgamma(degrees / 2)
            - 0.5 * size * math.log(degrees * math.pi)
            - self.scale_tril.diagonal(dim1=-2, dim2=-1).log().sum(-1)
            - 0.5 * (degrees + size) * (standard.square().sum(-1) / degrees).log1p()
        )
        return noise, -0.5 * (noise.square().sum(-1) + size * math.log(2 * math.pi)) - log_r


def draws_of_a_round(features: int) -> int:
    """Twice as many as there are dimensions: no more than so many do not determine a Gaussian."""
    return max(2 * features, 32)


def adapt(
    log_weight: Callable[[Tensor], Tensor],
    noise: Tensor,
    rounds: int,
    *,
    draw: Callable[[], Tensor] | None = None,
    at_once: int | None = None,
) -> Proposal:
    """Fit a proposal to the posterior in the noise of q, in so many rounds.

    Args:
        log_weight: ℓ, noise (S, B, D) -> (S, B), differentiable. What it gives that is not finite is passed over.
        noise: standard normal, (N, B, D): the first round's draws. `draws_of_a_round` says what N should be.
        rounds: each takes N gradients of ℓ for each data point. A Gaussian posterior takes one, others three to five.
        draw: () -> standard normal numbers like ``noise`` for the rounds after; torch's own unless given.
        at_once: how many of the N are given to ``log_weight`` at a time; all unless given.

    p(x, z) = N(z; 0, I) N(x; z₁ + z₂, 0.1²) and q(z|x) = N(0, I), which knows nothing of x: p(x) = N(x; 0, 2.01).

    >>> from torch.distributions import Normal
    >>> _ = torch.manual_seed(0)
    >>> x = torch.tensor([0.0, 5.0])
    >>> def log_weight(z):
    ...     return Normal(z.sum(-1), 0.1).log_prob(x)
    >>> proposal = adapt(log_weight, torch.randn(draws_of_a_round(2), 2, 2), rounds=1)
    >>> [round(value, 3) for value in proposal.loc[1].tolist()]  # the posterior's mean, 5 / 2.01
    [2.488, 2.488]
    >>> z, log_ratio = proposal.draw(torch.randn(1000, 2, proposal.width))
    >>> log_px = (log_weight(z) + log_ratio).logsumexp(0) - torch.tensor(1000.0).log()
    >>> bool((log_px - Normal(0.0, 2.01**0.5).log_prob(x)).abs().max() < 0.1)
    True
    """
    if noise.dim() != 3 or len(noise) <= noise.shape[-1] or rounds < 1 or (at_once is not None and at_once < 1):
        raise ValueError(
            "Expected noise (N, B, D) of more draws than dimensions, at least one round and at least one draw at once; "
            f"got shape {tuple(noise.shape)}, rounds={rounds}, at_once={at_once}"
        )
    *_, points, size = noise.shape
    standard = noise.cpu().double()
    loc = standard.new_zeros(points, size)
    scale_tril = torch.eye(size, dtype=torch.float64).expand(points, size, size)
    seen: list[tuple[Tensor, Tensor, Tensor]] = []
    start: Tensor | None = None
    for done in range(rounds):
        if done:
            standard = (torch.randn_like(noise) if draw is None else draw()).cpu().double()
        drawn = loc + torch.einsum("bde,nbe->nbd", scale_tril, standard)
        parts = drawn.to(noise).split(len(drawn) if at_once is None else at_once)
        found = [value_and_slope(log_weight, part) for part in parts]
        values, slopes = (torch.cat(each).cpu().double() for each in zip(*found, strict=True))
        start = values if start is None else start
        seen.append((drawn, slopes - drawn, values.isfinite() & slopes.isfinite().all(-1)))
        later = (torch.cat(each) for each in zip(*seen[len(seen) // 2 :], strict=True))
        loc, scale_tril = _matched(loc, scale_tril, *later)
    assert start is not None
    return Proposal(loc, scale_tril, start)


def _matched(loc: Tensor, scale_tril: Tensor, drawn: Tensor, slopes: Tensor, usable: Tensor) -> tuple[Tensor, Tensor]:
    """m and a root of Σ after a round, from those before, the round's draws and the slopes of log π, (N, B, D) each.

    ``usable`` says which of them count, (N, B). A data point whose round cannot be used stays where it was.
    """
    share = usable.to(drawn) / usable.sum(0).clamp(min=1)
    drawn_mean, drawn_cov = _moments(share, drawn)
    slope_mean, slope_cov = _moments(share, slopes.where(usable.unsqueeze(-1), 0.0))
    root, failed = torch.linalg.cholesky_ex(drawn_cov)
    w, basis = torch.linalg.eigh((root.mT @ slope_cov @ root).where((failed == 0)[:, None, None], 1.0))
    half = root @ basis * w.pow(-0.25).unsqueeze(-2)  # Σ = half halfᵀ
    known = (failed == 0) & (w[:, 0] > 0) & half.isfinite().all((-2, -1))
    half = half.where(known[:, None, None], 1.0)
    new_loc = drawn_mean + (half @ (half.mT @ slope_mean.unsqueeze(-1))).squeeze(-1)
    # The triangular root of half halfᵀ, without squaring its condition.
    tril = torch.linalg.qr(half.mT).R.mT
    tril = tril * tril.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)
    known &= (tril.diagonal(dim1=-2, dim2=-1) > 0).all(-1)
    return new_loc.where(known[:, None], loc), tril.where(known[:, None, None], scale_tril)


def _moments(share: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Mean (B, D) and covariance (B, D, D) of values (N, B, D) with weights (N, B) that sum to one."""
    mean = torch.einsum("nb,nbd->bd", share, values)
    centred = (values - mean) * share.sqrt().unsqueeze(-1)
    return mean, torch.einsum("nbd,nbe->bde", centred, centred)
