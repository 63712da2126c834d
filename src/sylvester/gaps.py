"""Where a VAE's bound falls short of log p(x): by the family of its posterior, or by its encoder.

    log p(x) − ELBO(q_h)  =  log p(x) − ELBO(q*)   +   ELBO(q*) − ELBO(q_h)
                             approximation gap         amortization gap

(Cremer, Li & Duvenaud, 2018). q_h is what encoder and hypernetwork make of x, and q* the member of the same family that
is best for this x. It is sought by maximising the bound of each image by itself, starting from q_h, with the parameters
of its own that `Flow.local` gives it; the decoder stays as it is.

One log p̂(x) stands for log p(x) in the gaps of all families: importance sampling from the even mixture of the refined
q's. A weight p(x, z)/q̄(z), q̄ = 1/K Σ_j q_j, is at most K times that of any single q_j, so that it is as good as the
best of them wherever they differ. A bound makes q narrower than the posterior, above all where it lacks correlations,
and draws of such a q alone would miss much of p̂. Therefore one more q takes part: the model's own with a full
covariance in its base, refined as the others are.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Independent, Normal

from sylvester.diagnostics import KHAT_LIMIT, effective_sample_size, log_mean_error, pareto_khat
from sylvester.distributions import FlowDistribution
from sylvester.evaluation import evaluating, finite_or_none, latents_at_once, log_weights
from sylvester.flows import DiagonalGaussian, Flow, MaskedSteps
from sylvester.flows.affine import AffineStep
from sylvester.objectives import elbo, log_mean_exp
from sylvester.random import Noise, stream
from sylvester.transforms import AutoregressiveTransform
from sylvester.transforms.base import inverse_tolerance
from sylvester.vae.model import VAE, check_data

__all__ = ["Bounds", "Gaps", "measure", "refine"]

_IMAGES = 50  # refined at a time
_WIDER = "the model's own with a full covariance"  # takes part in log p̂ alone
_CHOICE = 256  # draws by which the refined q is held against the one that it started from
_MOMENTS = 256  # draws for the mean and the standard deviations at which a family that is not the model's own starts
_TOLERATED_SHARE = 0.05  # of the images may have a large k̂


@dataclass(frozen=True)
class Bounds:
    """The bounds of one family, in nats, one entry per image: each (N,), float64, on the CPU."""

    refined: Tensor  # of q*, as far as it was found
    amortized: Tensor | None  # of q_h; None for a family that is not the model's own
    held: bool  # whether networks of the family were held, so that q* is not its optimum
    in_mixture: bool  # whether log p̂ is made with it: not where its inverse is inexact


@dataclass(frozen=True)
class Gaps:
    """What each family lacks. In nats, one entry per image: each (N,), float64, on the CPU."""

    families: Mapping[str, Bounds]
    log_px: Tensor  # estimates log p(x), the same for all families; too low on average, by about mc_error²/2
    mc_error: Tensor  # Monte Carlo standard error of log_px
    ess: Tensor  # effective number of draws
    khat: Tensor  # Pareto k̂; nan where undefined
    samples: int  # of each refined q
    steps: int  # of the refinement

    def approximation(self, family: str) -> Tensor:
        """log p̂(x) − ELBO(q*), (N,)."""
        return self.log_px - self.families[family].refined

    def amortization(self, family: str) -> Tensor | None:
        """ELBO(q*) − ELBO(q_h), (N,); None for a family that is not the model's own."""
        bounds = self.families[family]
        return None if bounds.amortized is None else bounds.refined - bounds.amortized

    def summary(self) -> dict[str, Any]:
        """Means over the images with their standard errors, and ``notes``. None stands for what is undefined."""
        return {
            "images": len(self.log_px),
            "samples": self.samples,
            "steps": self.steps,
            "log_px": _mean(self.log_px),
            "log_px_bias": finite_or_none(-0.5 * self.mc_error.square().mean()),
            "ess": _mean(self.ess)["mean"],
            "khat_share": (self.khat > KHAT_LIMIT).double().mean().item(),
            "families": {
                name: {
                    "amortized_elbo": _mean(bounds.amortized),
                    "refined_elbo": _mean(bounds.refined),
                    "approximation_gap": _mean(self.approximation(name)),
                    "amortization_gap": _mean(self.amortization(name)),
                }
                for name, bounds in self.families.items()
            },
            "notes": self.notes(),
        }

    def notes(self) -> list[str]:
        """What has to be known to read the figures, in sentences."""
        says = [
            "log p̂(x) is one for all q: importance sampling from the even mixture of the refined ones and of the "
            f"model's own with a full covariance in its base, {self.samples:,} draws of each. It is too low on "
            "average, and so are the approximation gaps; amortization gaps do not contain it.",
            f"Each q was refined for {self.steps:,} steps. What more of them would gain is part of the approximation "
            "gap, which is too large by it, and missing from the amortization gap.",
        ]
        bias = 0.5 * self.mc_error.square().mean().item()
        says.append(f"By its Monte Carlo error, log p̂(x) is too low by about {bias:.1g} nats.")
        heavy = int((self.khat > KHAT_LIMIT).sum())
        if heavy > _TOLERATED_SHARE * len(self.khat):
            says.append(
                f"Pareto k̂ exceeds {KHAT_LIMIT} for {heavy} of {len(self.khat)} images: there log p̂ is probably lower "
                "still, and the approximation gaps are larger than they look."
            )
        if held := [name for name, bounds in self.families.items() if bounds.held]:
            says.append(
                f"Of {' and '.join(held)} the base and the context are free for each image, the networks are held: "
                "this is not the family's optimum, and some of its amortization gap counts as approximation gap."
            )
        if others := [name for name, bounds in self.families.items() if bounds.amortized is None]:
            says.append(
                f"The decoder was not trained with {' and '.join(others)}, which started at the Gaussian with the "
                "moments of the model's own refined q: a decoder favours the q that it was trained with."
            )
        if inexact := [name for name, bounds in self.families.items() if not bounds.in_mixture]:
            says.append(f"log p̂ is made without {' and '.join(inexact)}, whose inverse is not exact in this precision.")
        return says


def refine(
    vae: VAE,
    x: Tensor,
    flow: Flow,
    *,
    steps: int = 500,
    draws: int = 8,
    learning_rate: float = 2e-2,
    noise: Callable[[int], Tensor] | None = None,
    progress: Callable[[int], object] | None = None,
) -> None:
    """Maximise the bound of each x (B, …) over the free parameters of a flow without context, in place.

    Args:
        vae: its decoder and its prior; they are not changed.
        x: as many as the flow's distribution has rows.
        flow: ``vae.flow.local(vae.encoder(x))``, or any other whose distribution has batch shape (B,).
        steps: of Adam, whose learning rate falls to zero.
        draws: of q for each image at each step, with path gradients where they are cheap.
        learning_rate: the first one.
        noise: count -> standard normal noise (count, B, D); torch's own unless given.
        progress: told the number of steps done.

    The parameters of different images do not meet, so each image is fitted by itself. A gradient that is not finite
    counts as zero.

    >>> from sylvester.flows import Gaussian
    >>> from sylvester.vae import MLPDecoder, MLPEncoder
    >>> vae, x = VAE(MLPEncoder(6, 8), Gaussian(2, context=8), MLPDecoder(6, 2)), torch.randn(3, 6)
    >>> flow = vae.flow.local(vae.encoder(x))
    >>> refine(vae, x, flow, steps=200)
    >>> better = elbo(vae.log_terms(x, 1000, posterior=flow())) - elbo(vae.log_terms(x, 1000))
    >>> bool(better.mean() > 0)
    True
    """
    parameters = [parameter for parameter in flow.parameters() if parameter.requires_grad]
    adam = torch.optim.Adam(parameters, lr=learning_rate)
    for step in range(steps):
        q = flow()
        terms = vae.log_terms(
            x, draws, noise=None if noise is None else noise(draws), posterior=q, path_gradient=_cheap_path(q)
        )
        # For these parameters alone: the model's own would accumulate theirs.
        gradients = torch.autograd.grad(-elbo(terms).sum(), parameters, materialize_grads=True)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        for group in adam.param_groups:
            group["lr"] = learning_rate * (1 - step / steps) ** 2  # narrow posteriors want many small steps
        adam.step()
        if progress is not None:
            progress(step + 1)
    flow.zero_grad()


def _cheap_path(q: FlowDistribution) -> bool:
    """Through an autoregressive step, a score takes D passes."""
    return not any(isinstance(step, AutoregressiveTransform) for step in q.transforms)


def measure(
    vae: VAE,
    x: Tensor,
    others: Mapping[str, Flow] | None = None,
    *,
    name: str = "own",
    samples: int = 1000,
    steps: int = 500,
    draws: int = 8,
    learning_rate: float = 2e-2,
    seed: int = 0,
    first: int = 0,
    progress: Callable[[int, int], object] | None = None,
) -> Gaps:
    """Split log p̂(x) − ELBO into approximation and amortization gap, for each image of x (N, …).

    Args:
        vae: a trained model, whose flow has a context.
        x: the data, brought to the model's device and precision.
        others: more families by name, such as ``{"planar": Planar(D, context=1)}``, to be refined under the same
            decoder. Each starts at the Gaussian with the mean and the standard deviations of the model's own refined q,
            with steps that are as they come. All of their parameters are free: those of networks, which all images
            share, are learned for fifty images together.
        name: of the model's own family among them.
        samples: fresh draws of each q, for the bounds and for log p̂.
        steps, draws, learning_rate: of the refinement: see `refine`.
        seed: of all noise, which is a function of the seed and the image's index.
        first: the index of ``x[0]`` in the dataset.
        progress: called with the number of steps of refinement done and their total.

    The model is in evaluation mode for the time being, and torch's random state stays as it is.

    p(z) = N(0, I), p(x|z) = N(z₁ + z₂, 1), so that the posterior's precision is Λ = [[2, 1], [1, 2]], and the best
    diagonal Gaussian lacks ½(Σ log Λ_ii − log|Λ|) = ½ log 4/3 = 0.144 nats.

    >>> from torch.distributions import Independent, Normal
    >>> from sylvester.flows import Gaussian
    >>> class Sum(nn.Module):
    ...     def forward(self, z):
    ...         return Independent(Normal(z.sum(-1, keepdim=True), 1.0), 1)
    >>> _ = torch.manual_seed(0)
    >>> vae = VAE(nn.Linear(1, 3), Gaussian(2, context=3), Sum())
    >>> found = measure(vae, torch.randn(4, 1), steps=300)
    >>> abs(found.approximation("own").mean().item() - 0.144) < 0.02
    True
    """
    others = dict(others or {})
    _check(vae, x, others, name)
    if min(samples, steps, draws) < 1:
        raise ValueError(f"Expected samples, steps and draws >= 1; got {samples}, {steps} and {draws}")
    total, parts = len(x) * (2 + len(others)) * steps, []
    done = 0
    with evaluating(vae):
        for start in range(0, len(x), _IMAGES):
            group = x[start : start + _IMAGES].to(vae.origin)
            indices = range(first + start, first + start + len(group))

            def advance(step: int, count: int = len(group)) -> None:
                nonlocal done
                done += count
                if progress is not None:
                    progress(done, total)

            refinement = {"steps": steps, "draws": draws, "learning_rate": learning_rate, "progress": advance}
            with torch.no_grad():
                context = vae.encoder(group).to(vae.origin.dtype)
                amortized = vae.flow(context)
            refined = _refined(vae, group, context, others, name, seed, indices, refinement)
            parts.append(_estimates(vae, group, amortized, refined, samples, seed, indices, name))
    columns = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
    families = {
        family: Bounds(
            refined=columns[f"refined {family}"],
            amortized=columns["amortized"] if family == name else None,
            held=family == name and any(isinstance(module, MaskedSteps) for module in vae.flow.modules()),
            in_mixture=bool(columns[f"exact {family}"].all()),
        )
        for family in (name, *others)
    }
    about = {key: columns[key] for key in ("log_px", "mc_error", "ess", "khat")}
    return Gaps(families=families, **about, samples=samples, steps=steps)


def _check(vae: VAE, x: Tensor, others: Mapping[str, Flow], name: str) -> None:
    check_data(x)
    if x.dim() < 2 or not len(x):
        raise ValueError(f"Expected x with a batch axis and at least one image, (N, …); got shape {tuple(x.shape)}")
    if not isinstance(vae.flow, Flow) or not vae.flow.context:
        raise ValueError(f"Expected a VAE with one flow with a context as its posterior; got {type(vae.flow).__name__}")
    for other, flow in {**others, name: vae.flow}.items():
        if not isinstance(flow, Flow) or flow.features != vae.flow.features or not flow.context:
            got = f"features={flow.features}, context={flow.context}" if isinstance(flow, Flow) else repr(flow)
            raise ValueError(f"Expected a flow with features={vae.flow.features} and a context for {other}; got {got}")
        if other != name and not isinstance(flow.base, DiagonalGaussian):
            raise ValueError(f"Expected a flow with a DiagonalGaussian as its base for {other}; got {flow.base}")
    if name in others:
        raise ValueError(f"Expected other families under other names than {name!r}, the model's own; got it twice")


def _refined(
    vae: VAE,
    x: Tensor,
    context: Tensor,
    others: Mapping[str, Flow],
    name: str,
    seed: int,
    indices: range,
    refinement: Mapping[str, Any],
) -> dict[str, FlowDistribution]:
    """The q of every family that is refined for each of the images, by name."""

    def search(family: str, flow: Flow) -> FlowDistribution:
        noise = _NoiseOfImages(seed, f"refinement of {family}", indices, vae.origin)
        refine(vae, x, flow, noise=noise, **refinement)
        with torch.no_grad():
            return flow.eval().requires_grad_(False)()

    assert isinstance(vae.flow, Flow)
    own, start = vae.flow.local(context), vae.flow.local(context)
    search(name, own)
    _keep_better(vae, x, own, start, _NoiseOfImages(seed, "choice", indices, vae.origin))
    with torch.no_grad():
        refined = {name: own()}
        noise = _NoiseOfImages(seed, "moments", indices, vae.origin)(_MOMENTS)
        moments = torch.std_mean(refined[name].rsample_and_log_prob(noise=noise)[0], 0)
    for family, other in others.items():
        other = copy.deepcopy(other).to(vae.origin)
        flow = other.local(context.new_zeros(len(x), other.context)).requires_grad_(True)
        scale, loc = moments
        assert isinstance(other.base, DiagonalGaussian)
        flow.base = other.base.at(loc, scale)
        refined[family] = search(family, flow)
    return refined | {_WIDER: search(_WIDER, _with_full_covariance(own))}


@torch.no_grad()
def _keep_better(vae: VAE, x: Tensor, refined: Flow, start: Flow, noise: Callable[[int], Tensor]) -> None:
    """Where refinement has gained nothing, by draws that it has not seen, an image's q is what it was."""
    gain = torch.zeros(len(x), dtype=torch.float64)
    for _ in range(_CHOICE // 32):
        epsilon = noise(32)
        after, before = (elbo(vae.log_terms(x, 32, noise=epsilon, posterior=flow())) for flow in (refined, start))
        gain += (after - before).cpu().double()
    lost = (~(gain > 0)).to(x.device)
    for new, old in zip(refined.parameters(), start.parameters(), strict=True):
        if old.requires_grad:  # the others are held, and shared by all images
            new[lost] = old[lost]


def _with_full_covariance(flow: Flow) -> Flow:
    """The flow with a base μ + σ ∘ L ε in the place of μ + σ ∘ ε; μ and the triangular L are free, its steps held."""
    normal = flow.base(None).base_dist
    steps = copy.deepcopy(flow.steps).requires_grad_(False)
    return Flow(_Standard(normal.loc), [AffineStep(normal.loc, normal.scale), *steps])


class _Standard(nn.Module):
    """The base N(0, I), for each of the images."""

    like: Tensor
    context = 0

    def __init__(self, like: Tensor):
        super().__init__()
        self.features = like.shape[-1]
        self.register_buffer("like", like)

    def forward(self, context: None) -> Independent:
        return Independent(Normal(torch.zeros_like(self.like), torch.ones_like(self.like), validate_args=False), 1)


@torch.no_grad()
def _estimates(
    vae: VAE,
    x: Tensor,
    amortized: FlowDistribution,
    refined: Mapping[str, FlowDistribution],
    samples: int,
    seed: int,
    indices: range,
    name: str,
) -> dict[str, Tensor]:
    """The bounds, and log p̂ with what vouches for it, from the same noise for all q: one number per image for each."""
    noise = _NoiseOfImages(seed, "evaluation", indices, vae.origin)
    bounds: dict[str, list[Tensor]] = {key: [] for key in ("amortized", *refined)}
    weights: list[Tensor] = []
    exact: dict[str, Tensor] = {}
    for count in _counts(samples, x):
        epsilon = noise(count)
        bounds["amortized"].append(_log_w(vae, x, epsilon, amortized)[0])
        drawn = {}
        for family, q in refined.items():
            log_w, z, log_q = _log_w(vae, x, epsilon, q)
            bounds[family].append(log_w)
            drawn[family] = (log_w + log_q, z, log_q)
        if not exact:
            points = torch.cat([z for _, z, _ in drawn.values()])
            exact = {family: _exact(q, points) for family, q in refined.items()}
        proposals = [family for family in refined if exact[family].all()] or [name]
        each = []
        for family in proposals:
            log_p, z, own = drawn[family]
            densities = [own if other == family else refined[other].log_prob(z).cpu().double() for other in proposals]
            each.append(log_p - log_mean_exp(torch.stack(densities)))
        weights.append(log_mean_exp(torch.stack(each)))  # (count, B): of draws of all q from the same noise
    log_w = torch.cat(weights)
    return {
        "amortized": torch.cat(bounds["amortized"]).mean(0),
        **{f"refined {family}": torch.cat(bounds[family]).mean(0) for family in refined},
        **{f"exact {family}": exact[family] for family in refined},
        "log_px": log_mean_exp(log_w),
        "mc_error": log_mean_error(log_w),
        "ess": effective_sample_size(log_w),
        "khat": pareto_khat(log_w),
    }


def _log_w(vae: VAE, x: Tensor, noise: Tensor, q: FlowDistribution) -> tuple[Tensor, Tensor, Tensor]:
    """Log weights, the draws, and their log-density."""
    terms = vae.log_terms(x, len(noise), noise=noise, posterior=q)
    return log_weights(terms), terms.z, terms.log_q.cpu().double()


def _exact(q: FlowDistribution, points: Tensor) -> Tensor:
    """For each image, whether q's log-density is exact at points (S, B, D)."""
    return (q.residual(points) <= inverse_tolerance(points.dtype)).all(0).cpu()


def _counts(samples: int, x: Tensor) -> Iterator[int]:
    """Draws of each image at a time: about as many latents are decoded at once as `evaluation` does."""
    count = max(1, latents_at_once(x) // len(x))
    for start in range(0, samples, count):
        yield min(count, samples - start)


class _NoiseOfImages:
    """count -> standard normal noise (count, B, D), each image's from a stream of its own."""

    def __init__(self, seed: int, purpose: str, indices: range, like: Tensor) -> None:
        self.streams = [Noise(stream(seed, purpose, index), like.shape[-1]) for index in indices]
        self.like = like

    def __call__(self, count: int) -> Tensor:
        return torch.stack([noise.take(count) for noise in self.streams], 1).to(self.like)


def _mean(values: Tensor | None) -> dict[str, float | None]:
    if values is None:
        return {"mean": None, "std_error": None}
    count = len(values)
    error = finite_or_none(values.std() / math.sqrt(count)) if count > 1 else None
    return {"mean": finite_or_none(values.mean()), "std_error": error}
