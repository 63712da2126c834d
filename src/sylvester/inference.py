"""Fit a flow: to a log-density by its bound (:func:`fit`), or to data by maximum likelihood (:func:`fit_density`).

    fit:          maximise E_q[log p(z) − log q(z)] = log Z − KL(q ‖ p/Z)
    fit_density:  maximise mean log q(x) or, with a context, mean log q(x | context)

Both leave the flow that they are given, and torch's random state, as they are: what comes back is a copy, and a
function of the arguments and the seed.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributions import AffineTransform, Transform
from torch.distributions.constraints import Constraint

from sylvester.diagnostics import Diagnosis, LogDensity, diagnose, evaluated, weighted_draws
from sylvester.distributions import FlowDistribution, MixtureDistribution
from sylvester.flows import Flow, Mixture
from sylvester.flows.affine import AffineStep
from sylvester.flows.base import constraint_of, localized
from sylvester.random import stream
from sylvester.transforms.support import SupportTransform

__all__ = ["DensityFit", "Epoch", "Fit", "Window", "fit", "fit_density", "standardized"]

#: Told the number of steps or epochs done, the largest number there can be, and how it stands.
Progress = Callable[[int, int, str], object]

_WINDOW = 100  # steps whose mean is the smoothed bound
_WARMUP = 100  # steps in which the learning rate grows, or a tenth of all where that is less
_DECAY = 0.3  # of the learning rate where the bound no longer improves
_DECAYS = 4  # so many, and then it is the end
_EPOCH_DECAYS = 3  # the same, in passes over data
_CLIP = 3.0  # times the usual norm of the gradient are the most that a step takes
_HOPELESS = 50  # steps in a row without one finite draw
_COLLAPSE = 10.0  # times its own size is what a bound does not fall by, from window to window, unless the flow exploded
_TEMPERED = 0.5  # the share of the steps in which β grows to 1
_COOLED = 0.3  # the share of the steps, the last ones, in which the learning rate goes to zero
_PROPOSALS = 10  # draws of q for each one that is resampled


class Window(NamedTuple):
    """What some hundred steps came to."""

    step: int  # the last one
    bound: float  # the mean, nats
    error: float  # its standard error
    learning_rate: float
    beta: float  # the power of the density that was fitted
    skipped: int  # draws that were not finite, and took no part


class Epoch(NamedTuple):
    """What a pass over the data came to: mean log-likelihoods, nats."""

    epoch: int
    train: float
    validation: float
    learning_rate: float


@dataclass(frozen=True)
class Fit:
    """A flow fitted to a log-density, and how far it can be trusted: see `Diagnosis`, whose figures it has."""

    flow: Flow | Mixture
    diagnosis: Diagnosis  # from fresh draws
    history: tuple[Window, ...]
    restarts: tuple[Diagnosis, ...]  # of all the fits of which this is the best
    converged: bool  # whether the bound stood still before the steps were used up
    log_density: LogDensity = field(repr=False)

    @property
    def elbo(self) -> float:
        return self.diagnosis.elbo

    @property
    def elbo_error(self) -> float:
        return self.diagnosis.elbo_error

    @property
    def log_z(self) -> float:
        return self.diagnosis.log_z

    @property
    def log_z_error(self) -> float:
        return self.diagnosis.log_z_error

    @property
    def khat(self) -> float:
        return self.diagnosis.khat

    @property
    def ess(self) -> float:
        return self.diagnosis.ess

    @property
    def verdict(self) -> str:
        says = [self.diagnosis.verdict]
        most = max(self.restarts, key=lambda other: other.log_z)
        if most.log_z - self.log_z > 0.1 + 3 * (most.log_z_error + self.log_z_error):
            says.insert(0, f"Another restart has found more mass, log Z = {most.log_z:.3g}: this one has missed some.")
        if not self.converged:
            says.insert(0, "The steps were used up before the bound stood still.")
        return " ".join(says)

    def draws(self, n: int, *, resample: bool = True, seed: int = 0) -> Tensor:
        """``n`` draws, ``(n, *event)``: of the density, by resampling those of q, or of q itself.

        Ten draws of q stand for each one, chosen with probability in proportion to its weight; so some come twice. What
        q has missed, they miss.
        """
        if n < 1:
            raise ValueError(f"Expected n >= 1 draws; got {n}")
        z, log_w = weighted_draws(self.log_density, self.flow(), n * _PROPOSALS if resample else n, seed=seed)
        if not resample:
            return z
        w = (log_w - log_w.nan_to_num(nan=-math.inf, posinf=-math.inf).amax()).exp().nan_to_num(nan=0.0, posinf=0.0)
        # The inverse of the weights' cumulative sum at uniform points: as many categories as there are draws.
        u = torch.rand(n, generator=stream(seed, "resampling"), dtype=torch.float64)
        cumulative = w.cumsum(0)
        chosen = torch.searchsorted(cumulative, u * cumulative[-1]).clamp_(max=len(w) - 1)
        return z[chosen.to(z.device)]

    def summary(self) -> dict[str, Any]:
        """The figures and the verdict; None stands for what is undefined."""
        steps = self.history[-1].step if self.history else 0
        return self.diagnosis.summary() | {"verdict": self.verdict, "converged": self.converged, "steps": steps}

    def __str__(self) -> str:
        steps = self.history[-1].step if self.history else 0
        figures = str(self.diagnosis).removesuffix(self.diagnosis.verdict)
        return f"{type(self.flow).__name__} after {steps} steps: {figures}{self.verdict}"


def fit(
    log_density: LogDensity,
    flow: Flow | Mixture | Callable[[], Flow | Mixture],
    *,
    steps: int = 5000,
    samples: int = 256,
    learning_rate: float = 2e-2,
    affine: bool = False,
    path_gradient: bool = False,
    tempering: float = 1.0,
    tolerance: float = 1e-3,
    patience: int = 3,
    restarts: int = 1,
    diagnosis_samples: int = 10_000,
    seed: int = 0,
    progress: Progress | None = None,
) -> Fit:
    """Fit a flow without context to a density that is known up to its integral.

    Args:
        log_density: ``(*, D) -> (*)``, normalized or not, differentiable. Where the variables are constrained, it is
            the density of the constrained ones, and the flow is `sylvester.flows.onto` the constraint.
        flow: where the fit starts; a function that makes flows, such as ``partial(Planar, 2)``, gives every restart a
            start of its own, where restarts of one flow differ in their noise alone. A `sylvester.flows.Mixture` is
            fitted by its stratified bound, in which the draws are shared evenly between the components.
        steps: at most so many, of Adam.
        samples: draws at each of them. On a CPU a quarter of them takes as long, or with masked networks half as long.
        learning_rate: the largest. It grows at first, falls where the bound stands still, and to zero at the end.
        affine: put an affine step with a triangular matrix after the flow's own, and fit it, with the base alone, for
            the first fifth of the steps: the flow's steps then start from the best Gaussian. It helps flows whose steps
            move little at a time, such as Sylvester and planar ones, where scales and correlations are far from those
            of the start.
        path_gradient: leave out of the gradient what has mean zero in it (see `rsample_and_log_prob`): it then vanishes
            where q is the density, with every draw. Steps of masked networks take twice as long with it.
        tempering: β at the start: p(z)^β is fitted, with log β rising to 0 over the first half of the steps. With a
            small one q finds more of the modes of a density. Heavy tails need 1: their powers may have no integral.
        tolerance: the bound stands still where its mean over a hundred steps is no more than this and its own standard
            error above the best before,
        patience: so many times in a row. Then the learning rate falls, and after the fourth such fall it is the end.
        restarts: fits, of which the one with the largest bound is kept.
        diagnosis_samples: fresh draws for the figures of the result.
        seed: of all that is random.
        progress: called with the number of steps done, their total, and the bound in words.

    Draws at which the log-density is not finite take no part in a step. Where the bound collapses, as when the scales
    of many steps explode together, the fit goes back to where all was well, and on with half the learning rate.

    >>> from sylvester.flows import Gaussian
    >>> result = fit(lambda z: -0.5 * ((z - 3) / 2).square().sum(-1), Gaussian(2), steps=600)
    >>> abs(result.log_z - math.log(2 * math.pi * 4)) < 0.01
    True
    >>> result.draws(1000).mean(0).round(decimals=0)
    tensor([3., 3.])
    """
    _check(
        _positive("steps", steps),
        _positive("samples", samples),
        ("learning_rate", learning_rate, learning_rate > 0, "> 0"),
        ("tempering", tempering, 0 < tempering <= 1, "in (0, 1]"),
        ("tolerance", tolerance, tolerance >= 0, ">= 0"),
        _positive("patience", patience),
        _positive("restarts", restarts),
        _positive("diagnosis_samples", diagnosis_samples),
    )
    if not callable(log_density):
        raise ValueError(f"Expected log_density as a function (*, D) -> (*); got {type(log_density).__name__}")
    results = []
    for restart in range(restarts):
        start, generator = _start(flow, seed, restart).train(), stream(seed, "fit", restart)
        first = steps // 5 if affine else 0
        history: list[Window] = []
        if affine:
            if isinstance(start, Mixture):
                raise ValueError("Expected affine=False for a mixture, whose flows have no outer step in common")
            like = next(start.parameters())
            outer = AffineStep(like.new_zeros(start.features), like.new_ones(start.features))
            steady = _Schedule(max(1, first), learning_rate, tempering, tolerance, patience, tempered=math.inf)
            told = None if progress is None else _Told(progress, restart * steps, restarts * steps)
            ends = [step for step in start.steps if constraint_of(step) is not None]
            gaussian = _with_outer(Flow(start.base, ends), outer)
            history += _ascend(log_density, gaussian, steady, samples, path_gradient, generator, told)
            start = _with_outer(start, outer)
        schedule = _Schedule(steps - first, learning_rate, tempering, tolerance, patience)
        told = None if progress is None else _Told(progress, restart * steps + first, restarts * steps)
        rest = _ascend(log_density, start, schedule, samples, path_gradient, generator, told)
        history += [window._replace(step=window.step + first) for window in rest]
        start.eval().requires_grad_(False)
        diagnosis = diagnose(log_density, start(), diagnosis_samples, seed=seed)
        results.append((diagnosis, start, history, schedule.ended))
    diagnosis, best, history, converged = max(results, key=lambda result: _or_lowest(result[0].elbo))
    return Fit(best, diagnosis, tuple(history), tuple(result[0] for result in results), converged, log_density)


def _start(flow: Flow | Mixture | Callable[[], Flow | Mixture], seed: int, restart: int) -> Flow | Mixture:
    if isinstance(flow, nn.Module):
        made = copy.deepcopy(flow)
    elif callable(flow):
        with torch.random.fork_rng():
            torch.manual_seed(stream(seed, "start", restart).initial_seed())
            made = flow()
    else:
        raise ValueError(f"Expected a flow, or a function that makes one; got {type(flow).__name__}")
    if not isinstance(made, Flow | Mixture):
        raise ValueError(f"Expected a flow, or a function that makes one; got {type(made).__name__}")
    if made.context:
        raise ValueError(f"Expected a flow without context, as one density is fitted; got context={made.context}")
    return made.requires_grad_(True)


def _ascend(
    log_density: LogDensity,
    flow: Flow | Mixture,
    schedule: _Schedule,
    samples: int,
    path_gradient: bool,
    generator: torch.Generator,
    progress: _Told | None,
) -> list[Window]:
    """Maximise the bound in place, until the schedule ends."""
    ascent = _Adam(flow)
    proven = latest = copy.deepcopy(flow.state_dict())
    history: list[Window] = []
    bounds: list[float] = []
    tempered: list[float] = []  # the bounds that were maximised
    reached = -math.inf
    skipped = barren = 0
    for step in range(schedule.steps):
        rate, beta = schedule.at(step)
        q = flow()
        shape = (_count(q, samples), flow.features)
        noise = torch.randn(shape, generator=generator, dtype=torch.float64).to(next(flow.parameters()))
        drawn = _draw(log_density, q, noise, path_gradient=path_gradient)
        finite = (drawn.log_p - drawn.log_q).isfinite().detach()
        kept = int(finite.sum())
        skipped += len(finite) - kept
        barren = 0 if kept else barren + 1
        if barren and (step == 0 or barren == _HOPELESS):
            raise ValueError(
                "Expected a log-density that is finite at draws of the flow; got NaN or infinity at all "
                f"{len(finite)} of them at step {step + 1}: start the flow where the density is, put it onto the "
                "density's support (flows.onto), or lower the learning rate"
            )
        if kept:
            if kept < len(finite):
                # Anew without them: zero times an infinite derivative would be NaN.
                drawn = _draw(log_density, q, noise, finite, path_gradient=path_gradient)
            loss = -drawn.bound(beta)
            ascent.step(loss, rate)
            bounds.append(drawn.bound().item())
            tempered.append(-loss.item())
        if (step + 1) % _WINDOW == 0 or step + 1 == schedule.steps:
            mean = torch.tensor(bounds or [-math.inf], dtype=torch.float64)
            error = (mean.std() / math.sqrt(len(mean))).item() if len(mean) > 1 else math.nan
            history.append(Window(step + 1, mean.mean().item(), error, rate, beta, skipped))
            level = sum(tempered) / len(tempered) if tempered else -math.inf
            bounds, tempered, skipped = [], [], 0
            if progress is not None:
                progress(step + 1, f"bound {history[-1].bound:.3f}")
            if level < reached - _COLLAPSE * (1 + abs(reached)):
                flow.load_state_dict(proven)
                ascent, latest, barren = _Adam(flow), proven, 0
                schedule.learning_rate /= 2
                continue
            # What this window started from has proven good; its end may be where a collapse began.
            proven, latest, reached = latest, copy.deepcopy(flow.state_dict()), level
            schedule.see(history[-1])
            if schedule.ended:
                break
    if progress is not None:
        progress(schedule.steps, f"bound {history[-1].bound:.3f}")
    return history


class _Drawn(NamedTuple):
    log_p: Tensor  # (S,)
    log_q: Tensor  # (S,)
    share: Tensor | None  # (S,), of a mixture's draws

    def bound(self, beta: float = 1.0) -> Tensor:
        values = beta * self.log_p - self.log_q
        return values.mean() if self.share is None else (self.share * values).sum()


def _count(q: FlowDistribution | MixtureDistribution, samples: int) -> int:
    """Of a mixture, as many draws of each component, and at least one."""
    if not isinstance(q, MixtureDistribution):
        return samples
    return len(q.components) * -(-samples // len(q.components))


def _draw(
    log_density: LogDensity,
    q: FlowDistribution | MixtureDistribution,
    noise: Tensor,
    kept: Tensor | None = None,
    *,
    path_gradient: bool,
) -> _Drawn:
    """Draws of q from noise; with ``kept``, only some of them take part."""
    share = None
    if isinstance(q, MixtureDistribution):
        z, log_q, log_share = q.stratified(len(noise) // len(q.components), noise=noise, path_gradient=path_gradient)
        if kept is not None:  # which component a row of noise belongs to must not change
            z, log_q, log_share = z[kept], log_q[kept], log_share[kept]
        share = log_share.softmax(0)
    else:
        rows = noise if kept is None else noise[kept]
        z, log_q = q.rsample_and_log_prob(noise=rows, path_gradient=path_gradient)
    log_p = evaluated(log_density, z, len(q.event_shape))
    if not log_p.requires_grad:
        raise ValueError(
            "Expected a log-density with a gradient for its points; got one without: compute it in torch, without "
            "detach or no_grad (a constant one, as constant + 0 * z.sum(-1))"
        )
    return _Drawn(log_p, log_q, share)


class _Told(NamedTuple):
    """Progress of one of several fits."""

    progress: Progress
    before: int
    total: int

    def __call__(self, done: int, says: str) -> None:
        self.progress(self.before + done, self.total, says)


class _Schedule:
    """The learning rate and β of each step, and when it is the end."""

    def __init__(
        self,
        steps: int,
        learning_rate: float,
        tempering: float,
        tolerance: float,
        patience: int,
        *,
        tempered: float | None = None,
    ):
        self.steps, self.learning_rate, self.tempering = steps, learning_rate, tempering
        self.tolerance, self.patience = tolerance, patience
        tempered = round(_TEMPERED * steps) if tempered is None else tempered
        self.tempered = tempered if tempering < 1 else 0
        self.best, self.best_error = -math.inf, 0.0
        self.still = self.decays = 0

    @property
    def ended(self) -> bool:
        return self.decays >= _DECAYS

    def at(self, step: int) -> tuple[float, float]:
        warm = min(1.0, (step + 1) / max(1, min(_WARMUP, self.steps // 10)))
        cool = min(1.0, (self.steps - step) / max(1.0, _COOLED * self.steps))
        rate = self.learning_rate * _DECAY**self.decays * min(warm, cool)
        if step >= self.tempered:
            return rate, 1.0
        # A straight line for log β: modes part, or q chooses among them, at small ones.
        return rate, self.tempering ** (1 - step / self.tempered)

    def see(self, window: Window) -> None:
        if window.step - _WINDOW < max(self.tempered, _WARMUP):
            return
        error = 0.0 if math.isnan(window.error) else window.error
        if window.bound > self.best + self.tolerance + error:
            self.still = 0
        else:
            self.still += 1
        self.best = max(self.best, window.bound)
        if self.still >= self.patience:
            self.still, self.decays = 0, self.decays + 1


class _Adam:
    """Adam that takes no step along a gradient that is not finite, and a short one where it is unusually large."""

    def __init__(self, module: nn.Module):
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        if not self.parameters:
            raise ValueError("Expected a flow with parameters to fit; got none")
        self.adam = torch.optim.Adam(self.parameters)
        self.usual: float | None = None

    def step(self, loss: Tensor, learning_rate: float) -> None:
        self.adam.zero_grad()
        loss.backward()
        limit = math.inf if self.usual is None else _CLIP * self.usual
        norm = nn.utils.clip_grad_norm_(self.parameters, limit).item()
        if not math.isfinite(norm):
            return
        self.usual = norm if self.usual is None else 0.95 * self.usual + 0.05 * min(norm, limit)
        for group in self.adam.param_groups:
            group["lr"] = learning_rate
        self.adam.step()


@dataclass(frozen=True)
class DensityFit:
    """A flow fitted to data. Mean log-likelihoods per data point, in nats."""

    flow: Flow  # takes data and contexts as they came: standardization is part of it
    log_likelihood: float  # of the points held out; a little too high, as the best epoch was chosen by it
    log_likelihood_error: float  # its standard error over these points
    train_log_likelihood: float  # of the others
    history: tuple[Epoch, ...]
    best_epoch: int
    converged: bool  # whether the held-out log-likelihood stood still before the epochs were used up

    def draws(self, n: int, context: Tensor | None = None, *, seed: int = 0) -> Tensor:
        """``n`` draws, ``(n, *batch, *event)``; for a conditional flow, at ``context`` ``(*batch, C)``."""
        if n < 1:
            raise ValueError(f"Expected n >= 1 draws; got {n}")
        with torch.no_grad():
            q = self.flow(context)
            like = q.base_dist.base_dist.loc
            noise = torch.randn(n, *like.shape, generator=stream(seed, "draws"), dtype=torch.float64)
            return q.rsample_and_log_prob(noise=noise.to(like))[0]

    @property
    def verdict(self) -> str:
        gap = self.train_log_likelihood - self.log_likelihood
        says = []
        if not self.converged:
            says.append("The epochs were used up before the log-likelihood stood still.")
        if gap > 0.1 + 3 * self.log_likelihood_error:
            says.append(f"The flow has overfitted: held-out points are {gap:.2g} nats less likely than the others.")
        return " ".join(
            [*says, "A held-out log-likelihood ranks flows on the same data; it says nothing of far tails."]
        )

    def summary(self) -> dict[str, Any]:
        return {
            "log_likelihood": self.log_likelihood,
            "log_likelihood_error": self.log_likelihood_error,
            "train_log_likelihood": self.train_log_likelihood,
            "epochs": len(self.history),
            "best_epoch": self.best_epoch,
            "converged": self.converged,
            "verdict": self.verdict,
        }

    def __str__(self) -> str:
        return (
            f"{type(self.flow).__name__} after {len(self.history)} epochs: held-out log-likelihood "
            f"{self.log_likelihood:.4g} ± {self.log_likelihood_error:.2g}, training {self.train_log_likelihood:.4g}. "
            f"{self.verdict}"
        )


def fit_density(
    flow: Flow,
    x: Tensor,
    context: Tensor | None = None,
    *,
    validation: float = 0.1,
    standardize: bool = True,
    epochs: int = 300,
    batch_size: int = 256,
    learning_rate: float = 2e-3,
    tolerance: float = 1e-3,
    patience: int = 10,
    seed: int = 0,
    progress: Progress | None = None,
) -> DensityFit:
    """Fit a flow to data by maximum likelihood; with a context, a conditional density, as simulation-based inference.

    Args:
        flow: where the fit starts. Its ``log_prob`` is what is fitted: a MAF's takes one pass, an IAF's D.
        x: ``(N, *event)``, inside the flow's support.
        context: ``(N, C)`` for a flow made with ``context=C``.
        validation: the share of the points held out for early stopping.
        standardize: give x, where it is unconstrained, and the context zero means and unit variances. What does it
            becomes part of the flow, which takes both as they came.
        epochs: at most so many.
        batch_size: points at each step of Adam.
        learning_rate: the first one.
        tolerance: the held-out log-likelihood improves where it is more than this above the best before.
        patience: after so many epochs without, the best flow is taken up again at a smaller learning rate, and after
            the third such time it is the end.
        seed: of the split and the batches.
        progress: called with the number of epochs done, the largest number, and the log-likelihood in words.

    >>> from sylvester.flows import Gaussian
    >>> x = 3 + 2 * torch.randn(1000, 2, generator=stream("doctest"))
    >>> result = fit_density(Gaussian(2), x, epochs=20)
    >>> entropy = 2 * (0.5 * math.log(2 * math.pi * math.e) + math.log(2))
    >>> abs(result.log_likelihood + entropy) < 4 * result.log_likelihood_error
    True
    """
    _check(
        ("validation", validation, 0 < validation < 1, "in (0, 1)"),
        _positive("epochs", epochs),
        _positive("batch_size", batch_size),
        ("learning_rate", learning_rate, learning_rate > 0, "> 0"),
        ("tolerance", tolerance, tolerance >= 0, ">= 0"),
        _positive("patience", patience),
    )
    if not isinstance(flow, Flow):
        raise ValueError(f"Expected a flow; got {type(flow).__name__}")
    x, context = _data(flow, x, context)
    order = torch.randperm(len(x), generator=stream(seed, "split")).to(x.device)
    held = min(max(1, round(validation * len(x))), len(x) - 1)
    valid, train = order[:held], order[held:]
    flow = copy.deepcopy(flow).requires_grad_(True).train()
    if standardize:
        flow = standardized(flow, x[train], None if context is None else context[train])

    def score(rows: Tensor) -> Tensor:
        given = None if context is None else context[rows]
        return flow(given).log_prob(x[rows])

    @torch.no_grad()
    def mean_score(rows: Tensor) -> Tensor:
        flow.eval()
        values = torch.cat([score(part) for part in rows.split(max(batch_size, 1000))]).double()
        flow.train()
        return values

    ascent = _Adam(flow)
    history: list[Epoch] = []
    best, best_epoch, best_state = -math.inf, 0, copy.deepcopy(flow.state_dict())
    rate, still, decays = learning_rate, 0, 0
    for epoch in range(1, epochs + 1):
        shuffled = train[torch.randperm(len(train), generator=stream(seed, "batches", epoch)).to(train.device)]
        total = 0.0
        for rows in shuffled.split(batch_size):
            log_q = score(rows)
            ascent.step(-log_q.mean(), rate)
            total += log_q.detach().sum().item()
        value = mean_score(valid).mean().item()
        history.append(Epoch(epoch, total / len(train), value, rate))
        if progress is not None:
            progress(epoch, epochs, f"held-out log-likelihood {value:.3f}")
        still = 0 if value > best + tolerance else still + 1
        if value > best:
            best, best_epoch, best_state = value, epoch, copy.deepcopy(flow.state_dict())
        if still >= patience:
            decays, still, rate = decays + 1, 0, rate * _DECAY
            if decays >= _EPOCH_DECAYS:
                break
            flow.load_state_dict(best_state)
    if not math.isfinite(best):
        raise ValueError(
            "Expected a flow with a finite log-likelihood at some epoch; got none: lower the learning rate, or bring x "
            "to moderate values"
        )
    flow.load_state_dict(best_state)
    values = mean_score(valid)
    return DensityFit(
        flow=flow.eval().requires_grad_(False),
        log_likelihood=values.mean().item(),
        log_likelihood_error=(values.std() / math.sqrt(len(values))).item() if len(values) > 1 else math.nan,
        train_log_likelihood=mean_score(train).mean().item(),
        history=tuple(history),
        best_epoch=best_epoch,
        converged=decays >= _EPOCH_DECAYS,
    )


def _data(flow: Flow, x: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Both on the flow's device and in its precision, known to fit the flow and one another."""
    like = next(flow.parameters())
    _check_numbers(flow, x, context)
    if flow.context and context is None:
        raise ValueError(f"Expected a context (N, {flow.context}), as the flow was made with one; got none")
    if context is not None and not flow.context:
        raise ValueError("Expected no context, as this flow was made with context=0; got one")
    q = flow(like.new_zeros(flow.context) if flow.context else None)
    x = x.to(like)
    if not q.support.check(x).all():
        raise ValueError(f"Expected x in the flow's support, {q.support}; got points outside")
    if context is not None:
        if context.shape != (len(x), flow.context):
            raise ValueError(f"Expected a context ({len(x)}, {flow.context}); got shape {tuple(context.shape)}")
        context = context.to(like)
    return x, context


def _check_numbers(flow: Flow, x: Tensor, context: Tensor | None) -> None:
    for name, value in (("x", x), ("context", context)):
        if value is None and name == "context":
            continue
        if not isinstance(value, Tensor) or not value.is_floating_point():
            got = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"Expected {name} as a tensor of floating-point numbers; got {got}")
        if not value.isfinite().all():
            raise ValueError(f"Expected finite values in {name}; got a NaN or an infinity")
    event = tuple(flow.event_shape)
    if x.dim() != len(event) + 1 or tuple(x.shape[1:]) != event or len(x) < 2:
        sizes = ", ".join(map(str, event))
        raise ValueError(f"Expected x with a batch axis, (N, {sizes}), and N >= 2; got shape {tuple(x.shape)}")


def standardized(flow: Flow, x: Tensor, context: Tensor | None = None) -> Flow:
    """The flow with one more step, which gives its variables the means and variances of x, and on contexts that lose
    theirs: what `fit_density` fits. A flow that was standardized before, as a fitted one was, keeps the moments it has.

    >>> from sylvester.flows import Gaussian
    >>> x = 100 + torch.randn(1000, 2, generator=stream("doctest"))
    >>> bool(((standardized(Gaussian(2), x)().sample() - 100).abs() < 20).all())
    True
    """
    _check_numbers(flow, x, context)
    if not any(isinstance(module, _Moments) for step in flow.steps for module in (step, getattr(step, "module", None))):
        if flow.steps and (constraint := constraint_of(flow.steps[-1])) is not None:
            x = SupportTransform(constraint).inv(x)
        flow = _with_outer(flow, _Moments.of(x))
    if context is None or isinstance(flow.base, _Given):
        return flow
    moments = _Moments.of(context)
    return Flow(_Given(flow.base, moments), [_Given(step, moments) for step in flow.steps])


def _with_outer(flow: Flow, outer: nn.Module) -> Flow:
    """The flow with one more step, before the one onto a constraint where there is one."""
    steps = list(flow.steps)
    steps.insert(len(steps) - (1 if steps and constraint_of(steps[-1]) is not None else 0), outer)
    return Flow(flow.base, steps)


class _Moments(nn.Module):
    """One step, from standardized vectors to those of given means and standard deviations."""

    loc: Tensor
    scale: Tensor

    def __init__(self, loc: Tensor, scale: Tensor):
        super().__init__()
        self.register_buffer("loc", loc)
        self.register_buffer("scale", scale)

    @classmethod
    def of(cls, x: Tensor) -> _Moments:
        scale = x.std(0) if len(x) > 1 else torch.ones_like(x[0])
        return cls(x.mean(0), torch.where(scale > 0, scale, 1.0))

    def forward(self, context: Tensor | None) -> Sequence[Transform]:
        return [AffineTransform(self.loc, self.scale, event_dim=1)]

    def local(self, context: Tensor) -> _Moments:
        return copy.deepcopy(self)


class _Given(nn.Module):
    """A flow's base or steps, given a context that is standardized on the way."""

    def __init__(self, module: nn.Module, moments: _Moments):
        super().__init__()
        self.module, self.moments = module, moments
        self.features, self.context = getattr(module, "features", None), getattr(module, "context", None)

    @property
    def constraint(self) -> Constraint | None:
        return constraint_of(self.module)

    def forward(self, context: Tensor) -> Any:
        return self.module(self._standardized(context))

    def local(self, context: Tensor) -> nn.Module:
        return localized(self.module, self._standardized(context))

    def _standardized(self, context: Tensor) -> Tensor:
        return (context - self.moments.loc) / self.moments.scale


def _positive(name: str, value: int) -> tuple[str, float, bool, str]:
    """Its condition; a number of a type that counts, numpy's included."""
    whole = hasattr(value, "__index__")
    return name, value, whole and value >= 1, ">= 1" if whole else "as a whole number"


def _check(*conditions: tuple[str, float, bool, str]) -> None:
    for name, value, holds, what in conditions:
        if not holds:
            raise ValueError(f"Expected {name} {what}; got {value}")


def _or_lowest(value: float) -> float:
    return -math.inf if math.isnan(value) else value
