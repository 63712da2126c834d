"""How far importance weights, the inverses of a flow, and a distribution that stands in for another can be trusted.

Log weights are (S, …), samples on axis 0.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution

from sylvester.distributions import FlowDistribution, MixtureDistribution
from sylvester.flows import Flow, Mixture
from sylvester.objectives import log_mean_exp
from sylvester.random import stream
from sylvester.transforms.base import inverse_tolerance

__all__ = [
    "BLIND_SPOT",
    "KHAT_LIMIT",
    "Diagnosis",
    "InexactInverseWarning",
    "LogDensity",
    "diagnose",
    "effective_sample_size",
    "log_mean_error",
    "pareto_khat",
    "warn_if_inexact",
    "weighted_draws",
]

KHAT_LIMIT = 0.7  # beyond it, averages of the weights converge too slowly to be of use (Vehtari et al., 2024)
_FEWEST = 25  # samples: a tail of five
# Nats below the largest weight at which the rest of the tail is nothing beside it. The ratio of the two is met in
# float64, which ends at 709, after a division by a difference of weights that may be as small as e⁻³⁶ of them.
_VANISHING = 650.0
_WORKSPACE = 1 << 20  # numbers: the fit takes so many images at a time that no more are in use at once

#: What no figure made of draws from q can tell.
BLIND_SPOT = "k̂ and ESS cannot see a mode that q has missed."

#: ``(*, D) -> (*)``: the logarithm of a density, normalized or not, at each of the points.
LogDensity = Callable[[Tensor], Tensor]

_ERROR_LIMIT = 0.1  # of log Z: beyond it, fewer than some hundred draws are in effect
ROUNDING = 1e-6  # an error that is rounding: such weights are equal, and need no k̂ to be trusted
_AT_ONCE = 10_000  # draws
_SPREADS = (1.5, 2.0, 4.0)  # how much wider than q's own the noise is that looks for what q has missed
_CLEAR = 0.1  # nats: by so much must a wider q see more for it to be said


class InexactInverseWarning(UserWarning):
    """A flow whose samples go through an inverse that is not exact."""


def warn_if_inexact(flow: Flow | Mixture, posterior: FlowDistribution | MixtureDistribution) -> bool:
    """Warn, and say so, where samples of ``posterior``, what ``flow`` gave, are not what its density describes.

    That can only be where sampling takes a sequential inverse, as a MAF's does: others cost nothing to check.

    >>> from sylvester.flows import MAF
    >>> flow = MAF(4)
    >>> warn_if_inexact(flow, flow())
    False
    """
    if isinstance(posterior, MixtureDistribution):
        return sum(warn_if_inexact(flow, component) for component in posterior.components) > 0
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
    """(Σ w)² / Σ w²: between 1, where one weight is everything, and S, where all are equal.

    >>> effective_sample_size(torch.tensor([0.5, 0.25, 0.25]).log())
    tensor(2.6667)
    """
    return (2 * log_w.logsumexp(0) - (2 * log_w).logsumexp(0)).exp()


def log_mean_error(log_w: Tensor) -> Tensor:
    """Standard error of log mean(w) by the delta method, std(w) / mean(w) / √S; nan for one sample.

    >>> log_mean_error(torch.tensor([1.0, 2.0, 3.0, 4.0]).log())  # 2.5 ± 0.65
    tensor(0.2582)
    """
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


@dataclass(frozen=True)
class Diagnosis:
    """How well q stands in for a density p(z) / Z that is known up to Z. In nats, from fresh draws of q.

    E_q[log p − log q] = log Z − KL(q ‖ p/Z) is the bound; importance sampling estimates log Z itself. Both are blind
    where q puts no mass: a q on one of eight equal modes has k̂ and ESS as good as any, and a log Z too low by log 8.
    """

    elbo: float  # the bound
    elbo_error: float  # its standard error
    log_z: float  # too low on average, by about log_z_error²/2
    log_z_error: float
    khat: float  # Pareto k̂; nan where undefined
    ess: float  # effective number of draws
    samples: int
    undefined: int  # draws at which the log-density is not a number, or +∞; they count as of density zero
    wider_log_z: float | None  # what log Z is at least by draws wider than q's, where they clearly see more than q's

    @property
    def reliable(self) -> bool:
        """Whether importance sampling from q can be trusted *where q puts its mass*; never that this is everywhere."""
        equal = self.log_z_error < ROUNDING
        tail = equal or self.khat <= KHAT_LIMIT
        return not self.undefined and self.wider_log_z is None and tail and not self._vague

    @property
    def _vague(self) -> bool:
        """Whether so few draws are in effect that their mean is unknown: one far above all others is in no tail."""
        return self.log_z_error > _ERROR_LIMIT

    @property
    def verdict(self) -> str:
        """What the figures mean, in sentences. The last one always names what they cannot tell."""
        says = []
        if self.undefined:
            says.append(
                f"The log-density is not a number at {self.undefined} of {self.samples} draws, which count as of "
                "density zero."
            )
        if self.wider_log_z is not None:
            says.append(
                f"q has missed mass: draws spread wider than q's give a log Z of at least {self.wider_log_z:.3g}, "
                f"{self.wider_log_z - self.log_z:.2g} nats above what q's own do."
            )
        if self.khat > KHAT_LIMIT:
            says.append(
                f"Pareto k̂ = {self.khat:.2f} exceeds {KHAT_LIMIT}: the weights are too heavy-tailed for {self.samples} "
                "draws, so log Z is probably underestimated and its error too small."
            )
        elif not self.khat <= KHAT_LIMIT and not self.log_z_error < ROUNDING:
            says.append(f"Pareto k̂ is unknown from {self.samples} draws, so nothing vouches for log Z.")
        if self._vague:
            says.append(
                f"The weights leave {self.ess:.0f} of {self.samples} draws in effect: log Z is known to "
                f"±{self.log_z_error:.2g} at best."
            )
        if self.reliable:
            says.append(
                f"Where q puts its mass, importance sampling makes up for KL = {max(0.0, self.log_z - self.elbo):.2g} "
                f"nats that q is off, with {100 * self.ess / self.samples:.0f} % of the draws in effect."
            )
        return " ".join([*says, BLIND_SPOT])

    def summary(self) -> dict[str, Any]:
        """The figures and the verdict. None stands for what is undefined."""
        figures = {name: _or_none(value) for name, value in asdict(self).items()}
        return figures | {"reliable": self.reliable, "verdict": self.verdict}

    def __str__(self) -> str:
        khat = "unknown" if math.isnan(self.khat) else f"{self.khat:.2f}"
        return (
            f"ELBO {self.elbo:.4g} ± {self.elbo_error:.2g}, log Z {self.log_z:.4g} ± {self.log_z_error:.2g}, "
            f"k̂ {khat}, ESS {self.ess:.0f} of {self.samples}. {self.verdict}"
        )


def diagnose(log_density: LogDensity, q: Distribution, samples: int = 10_000, *, seed: int = 0) -> Diagnosis:
    """How well q, a flow's distribution or any other that can be sampled, stands in for a density.

    Args:
        log_density: ``(*, D) -> (*)``, normalized or not.
        q: one distribution (a batch of them, take one by one).
        samples: fresh draws.
        seed: of the draws. Torch's own random state is left as it is.

    For a `FlowDistribution`, the same number of draws spread wider than q's own look for mass that q has missed. They
    can find it, not rule it out.

    >>> from torch.distributions import Independent, Normal
    >>> p = Independent(Normal(torch.zeros(2), 1.0), 1)
    >>> q = Independent(Normal(torch.zeros(2), 1.2), 1)
    >>> diagnosis = diagnose(p.log_prob, q)
    >>> abs(diagnosis.log_z) < 4 * diagnosis.log_z_error, diagnosis.reliable
    (True, True)
    >>> diagnosis.verdict.endswith(BLIND_SPOT)
    True
    """
    _, log_w = weighted_draws(log_density, q, samples, seed=seed)
    undefined = log_w.isnan() | (log_w == math.inf)
    if undefined.all():
        raise ValueError(
            f"Expected a log-density that is a number at draws of q; got NaN or infinity at all {samples} of them"
        )
    log_w = log_w.masked_fill(undefined, -math.inf)
    log_z, log_z_error = log_mean_exp(log_w).item(), log_mean_error(log_w).item()
    wider = None
    if isinstance(q, FlowDistribution):
        for spread in _SPREADS:
            _, other = weighted_draws(log_density, q, max(samples // len(_SPREADS), 1), seed=seed, spread=spread)
            other = other.nan_to_num(nan=-math.inf, posinf=-math.inf, neginf=-math.inf)
            found, error = log_mean_exp(other).item(), log_mean_error(other).item()
            # The error of ten draws in effect is itself known; that of fewer is not.
            certain = effective_sample_size(other).item() >= 10 and found - log_z > _CLEAR + 3 * (error + log_z_error)
            if certain:
                wider = max(found - 2 * error, -math.inf if wider is None else wider)
    return Diagnosis(
        elbo=log_w.mean().item(),
        elbo_error=(log_w.std() / math.sqrt(samples)).item() if samples > 1 else math.nan,
        log_z=log_z,
        log_z_error=log_z_error,
        khat=pareto_khat(log_w).item(),
        ess=effective_sample_size(log_w).item(),
        samples=samples,
        undefined=int(undefined.sum()),
        wider_log_z=wider,
    )


@torch.no_grad()
def weighted_draws(
    log_density: LogDensity, q: Distribution, samples: int, *, seed: int = 0, spread: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Draws z of q, ``(samples, *event)``, and log p(z) − log q(z), ``(samples,)`` in float64 on the CPU.

    With a ``spread`` s, for a `FlowDistribution`, the noise is s ε, and q the density of what it becomes:
    log q_s(z) = log q(z) + ½ s²|ε|² − ½ |ε|² − D log s.

    >>> from torch.distributions import Normal
    >>> z, log_w = weighted_draws(lambda z: -0.5 * z**2, Normal(0.0, 1.0), 3)
    >>> z.shape, log_w  # log √2π
    (torch.Size([3]), tensor([0.9189, 0.9189, 0.9189], dtype=torch.float64))
    """
    if not isinstance(q, Distribution):
        hint = ": call the flow for its distribution, flow()" if isinstance(q, Flow | Mixture) else ""
        raise ValueError(f"Expected a distribution; got {type(q).__name__}{hint}")
    if q.batch_shape:
        raise ValueError(f"Expected one distribution, with batch_shape (); got batch_shape {tuple(q.batch_shape)}")
    if samples < 1:
        raise ValueError(f"Expected at least one sample; got {samples}")
    points, log_weights = [], []
    generator = stream(seed, "diagnosis")
    for start in range(0, samples, _AT_ONCE):
        count = min(_AT_ONCE, samples - start)
        if isinstance(q, FlowDistribution):
            like = q.base_dist.base_dist.loc
            noise = torch.randn(count, *like.shape, generator=generator, dtype=torch.float64)
            z, log_q = q.rsample_and_log_prob(noise=(spread * noise).to(like))
            squares = noise.square().sum(-1)
            log_q = log_q.cpu().double() + 0.5 * (spread**2 - 1) * squares - like.shape[-1] * math.log(spread)
        else:
            with torch.random.fork_rng():
                torch.manual_seed(torch.randint(1 << 62, (), generator=generator).item())
                z = q.sample(torch.Size((count,)))
            log_q = q.log_prob(z).cpu().double()
        points.append(z)
        log_weights.append(evaluated(log_density, z, len(q.event_shape)).cpu().double() - log_q)
    return torch.cat(points), torch.cat(log_weights)


def evaluated(log_density: LogDensity, z: Tensor, event_dims: int = 1) -> Tensor:
    """log_density(z), which must have one number for each point."""
    log_p = log_density(z)
    if isinstance(log_p, Tensor) and log_p.is_complex():
        raise ValueError(f"Expected a log-density of real numbers; got {log_p.dtype}")
    expected = z.shape[: z.dim() - event_dims]
    if not isinstance(log_p, Tensor) or log_p.shape != expected:
        got = f"shape {tuple(log_p.shape)}" if isinstance(log_p, Tensor) else f"type {type(log_p).__name__}"
        raise ValueError(
            f"Expected a log-density with one number for each point, a tensor {tuple(expected)} for points "
            f"{tuple(z.shape)}; got {got}"
        )
    return log_p


def _or_none(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
