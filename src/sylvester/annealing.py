"""Annealed importance sampling (Neal, 2001) in the noise of a posterior.

A flow makes z of noise ε ~ N(0, I). So an importance weight is a function of noise, and its mean is p(x):

    ℓ(ε) = log p(x, z(ε)) − log q(z(ε)|x),    p(x) = E[exp ℓ(ε)].

Where q fits badly, that mean hangs on draws that are too rare to be met. Instead, ε moves from N(0, I) to the noise
that makes the posterior, through

    π_t(ε) ∝ N(ε; 0, I) exp(β_t ℓ(ε)),    0 = β_0 < β_1 < … < β_T = 1,

by transitions ε_{t−1} → ε_t that leave π_t as it is, and the weight is

    log w = Σ_t (β_t − β_{t−1}) ℓ(ε_{t−1}).

The mean of w is p(x) again, whatever the transitions are worth; the more of them there are and the better they mix, the
less w varies. They are Hamiltonian. In the space of the noise nothing of q's scales has to be known: where q is the
posterior, every π_t is N(0, I). And z ↦ ε, the inverse of the flow, is never asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["Annealed", "anneal"]

# Steps of the leapfrog are this long, times or over two: drawn for each transition, and never tuned to the chains,
# which would bias their weights.
_STEP = 0.5
#: So many make a transition.
LEAPFROG = 3
#: Standard normal numbers of one transition beyond those of the momentum: whether it is accepted, and its step.
EXTRA = 2


class Annealed(NamedTuple):
    """S chains of each of B data points: each (S, B), in float64."""

    log_w: Tensor  # the logarithms of weights whose mean is that of exp ℓ under the noise
    start: Tensor  # ℓ where the chains started
    accepted: Tensor  # the share of the transitions that were not refused


def anneal(
    log_weight: Callable[[Tensor], Tensor],
    noise: Tensor,
    transitions: int,
    *,
    leapfrog: int = LEAPFROG,
    draw: Callable[[], Tensor] | None = None,
) -> Annealed:
    """Bring noise to where the posterior has it, in small steps, and weigh it on the way.

    Args:
        log_weight: ℓ, noise (S, B, D) -> (S, B), differentiable.
        noise: where the S chains of each of B data points start, standard normal, (S, B, D).
        transitions: T. The temperatures β_t = t/T are equally far apart.
        leapfrog: steps in one transition, each of which takes one gradient of ℓ.
        draw: () -> standard normal numbers (S, B, D + 2) for one transition; torch's own unless given.

    p(x, z) = N(z; 0, 1) N(x; z, 0.1²) and q(z|x) = N(z; 0, 1), which is far too wide: p(x) = N(x; 0, 1.01).

    >>> _ = torch.manual_seed(0)
    >>> x = torch.tensor([0.0, 3.0])
    >>> def log_weight(z):
    ...     return torch.distributions.Normal(z.squeeze(-1), 0.1).log_prob(x)
    >>> chains = anneal(log_weight, torch.randn(200, 2, 1), 100)
    >>> log_px = chains.log_w.logsumexp(0) - torch.tensor(200.0).log()
    >>> exact = torch.distributions.Normal(0.0, 1.01**0.5).log_prob(x)
    >>> bool((log_px - exact).abs().max() < 0.5)
    True
    """
    if transitions < 1 or leapfrog < 1:
        raise ValueError(f"Expected at least one transition and one step in each; got {transitions} and {leapfrog}")
    value, slope = value_and_slope(log_weight, noise)
    start, log_w, accepted = value, torch.zeros_like(value), torch.zeros_like(value)
    for t in range(1, transitions + 1):
        log_w += value / transitions
        beta = t / transitions
        drawn = noise.new_empty(*value.shape, noise.shape[-1] + EXTRA).normal_() if draw is None else draw()
        momentum, uniform = drawn[..., :-EXTRA], torch.special.ndtr(drawn[..., -EXTRA:])
        step = _STEP * 4 ** (uniform[..., 1:] - 0.5)  # (S, B, 1)

        new, new_momentum, new_slope = noise, momentum, slope
        for _ in range(leapfrog):
            new_momentum = new_momentum + 0.5 * step * (beta * new_slope - new)
            new = new + step * new_momentum
            new_value, new_slope = value_and_slope(log_weight, new)
            new_momentum = new_momentum + 0.5 * step * (beta * new_slope - new)

        gain = beta * (new_value - value) + 0.5 * ((noise**2 + momentum**2) - (new**2 + new_momentum**2)).sum(-1)
        taken = uniform[..., 0].log() < gain  # never where the gain is nan
        noise = new.where(taken.unsqueeze(-1), noise)
        slope = new_slope.where(taken.unsqueeze(-1), slope)
        value = new_value.where(taken, value)
        accepted += taken / transitions
    return Annealed(log_w, start, accepted)


def value_and_slope(log_weight: Callable[[Tensor], Tensor], noise: Tensor) -> tuple[Tensor, Tensor]:
    with torch.enable_grad():
        noise = noise.detach().requires_grad_(True)
        value = check_log_weights(log_weight(noise), noise)
        (slope,) = torch.autograd.grad(value.sum(), noise)
    return value.detach().to(noise.device, torch.float64), slope


def check_log_weights(value: Any, noise: Tensor) -> Tensor:
    """What a function made of noise (S, B, D), if it is log weights (S, B)."""
    expected = tuple(noise.shape[:-1])
    if not isinstance(value, Tensor) or value.shape != expected:
        got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"type {type(value).__name__}"
        raise ValueError(f"Expected log weights as a tensor {expected}, (S, B); got {got}")
    return value
