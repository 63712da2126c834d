"""The importance-sampled log-likelihood, log p(x) ≈ log (1/S) Σ_s p(x, z_s) / q(z_s|x), z_s ~ q(z|x).

Images are taken in small groups. A group is encoded once and its flow parameters are made once; then samples
stream through the decoder in chunks, and one scalar log weight is kept of each. The noise of an image depends
on the seed and on the image's index alone, so neither chunks nor groups nor parts change the answer.

Where q fits too badly for that, samples come from a proposal that is fitted to the image's posterior first (see
`adaptation`), or are brought nearer to the posterior one by one (see `annealing`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sylvester import adaptation, annealing
from sylvester.annealing import EXTRA, check_log_weights
from sylvester.diagnostics import (
    KHAT_LIMIT,
    ROUNDING,
    effective_sample_size,
    log_mean_error,
    pareto_khat,
    warn_if_inexact,
)
from sylvester.distributions import MixtureDistribution
from sylvester.objectives import log_mean_exp
from sylvester.random import Noise, stream
from sylvester.vae.model import VAE, LogTerms, check_data

__all__ = ["Estimate", "LogWeights", "log_likelihood"]

#: ``(x, samples, noise) -> log weights``: for x (B, …) and standard normal noise (S, B, features), (S, B).
LogWeights = Callable[[Tensor, int, Tensor], Tensor]

# The share of images with a large or unknown k̂ beyond which the mean estimate is called into question.
_TOLERATED_SHARE = 0.05


@dataclass(frozen=True)
class Estimate:
    """Log-likelihood estimates in nats, one entry per image: each (N,), float64, on the CPU."""

    log_px: Tensor  # estimates log p(x); too low on average, by about mc_error²/2
    mc_error: Tensor  # Monte Carlo standard error of log_px; nan for one sample
    ess: Tensor  # effective number of samples
    khat: Tensor  # Pareto k̂; nan where undefined
    elbo: Tensor  # of q itself, from the draws that samples or the proposal's fit began with
    samples: int
    fewer: tuple[Estimate, ...] = ()  # from the first of the same samples, where that was asked for

    def summary(self) -> dict[str, Any]:
        """Means over the images, their errors, and ``warning``: a sentence where they are not to be trusted.

        ``std_error`` and ``elbo_std_error`` are over images: what another test set of this size would change.
        ``mc_error`` is what another seed would. None stands for what is undefined.
        """
        count = len(self.log_px)
        defined = self.khat[~self.khat.isnan()]
        return {
            "images": count,
            "samples": self.samples,
            "log_px": _mean(self.log_px),
            "std_error": finite_or_none(self.log_px.std() / math.sqrt(count)) if count > 1 else None,
            "mc_error": finite_or_none(self.mc_error.square().sum().sqrt() / count),
            "elbo": _mean(self.elbo),
            "elbo_std_error": finite_or_none(self.elbo.std() / math.sqrt(count)) if count > 1 else None,
            "ess": _mean(self.ess),
            "khat_share": _mean(defined > KHAT_LIMIT),
            "warning": self._warning(),
        }

    def _warning(self) -> str | None:
        count = len(self.log_px)
        if broken := int((~self.log_px.isfinite()).sum()):
            return f"The estimate is not finite for {broken} of {count} images."
        heavy = int((self.khat > KHAT_LIMIT).sum())
        if heavy > _TOLERATED_SHARE * count:
            return (
                f"Pareto k̂ exceeds {KHAT_LIMIT} for {heavy} of {count} images: their importance weights "
                f"are too heavy-tailed for {self.samples} samples, so log p(x) is probably underestimated "
                "and its Monte Carlo error too small."
            )
        unknown = int((self.khat.isnan() & ~(self.mc_error < ROUNDING)).sum())
        if unknown > _TOLERATED_SHARE * count:
            return (
                f"Pareto k̂ is unknown for {unknown} of {count} images, so nothing vouches for the estimate: "
                f"k̂ needs at least 25 samples, of which the largest differ; there were {self.samples}."
            )
        return None


def log_likelihood(
    model: VAE | LogWeights,
    x: Tensor,
    samples: int = 5000,
    *,
    features: int | None = None,
    fewer: Sequence[int] = (),
    adapt: int = 0,
    anneal: int = 0,
    seed: int = 0,
    chunk: int | None = None,
    first: int = 0,
    progress: Callable[[int, int], object] | None = None,
) -> Estimate:
    """Estimate log p(x) for each image (data point) of x (N, …) with ``samples`` importance samples.

    Args:
        model: a `VAE`, or a function or module ``(x, samples, noise) -> log weights``. Given data points x (B, …) and
            standard normal noise (S, B, ``features``), in x's precision and on its device, it returns
            log p(x, z) − log q(z|x), (S, B), at the z that it makes of the noise.
        x: the data; a VAE's is brought to the model's device and precision, and a function's stays as it is.
        features: the size of the noise of one sample, for a function; a VAE has its flow's.
        fewer: smaller numbers of samples. What the first so many come to is found on the way, and kept as ``fewer`` of
            the estimate. Where log p(x) still grows from one to the next, the last is probably too low as well.
        adapt: rounds in which a proposal is fitted to each posterior before it is sampled. Each takes two gradients for
            each latent, and four rounds and 500 samples do, with 64 latents at the price of some 2,000 plain samples.
            Where q fits badly but the posterior is smooth, they find what no number of plain samples does. A function
            has to be differentiable in the noise.
        anneal: transitions between q and the posterior, by annealed importance sampling. A sample then costs three
            gradients for each of them, and some tens of samples do. It is dearer than ``adapt`` and asks less of the
            posterior, which may be far from any Gaussian. A function has to be differentiable in the noise.
        seed: with another one, all noise is another.
        chunk: the number of latents decoded at once; by default about a hundred, more where x is small.
        first: the index of ``x[0]`` in the dataset: parts evaluated apart give what the whole would.
        progress: called with the number of images done and their total.

    No gradients are recorded, and a model that is a module is in evaluation mode for the time being.

    A model of one's own: p(z) = N(0, I), p(x|z) = N(z, I) and q(z|x) = N(x/2, I), so that p(x) = N(0, 2 I).

    >>> from torch.distributions import Independent, Normal
    >>> def log_weights(x, samples, noise):
    ...     q = Independent(Normal(x / 2, torch.ones_like(x)), 1)
    ...     z = x / 2 + noise
    ...     prior = Independent(Normal(torch.zeros_like(x), 1), 1)
    ...     return prior.log_prob(z) + Independent(Normal(z, 1), 1).log_prob(x) - q.log_prob(z)
    >>> x = torch.tensor([[0.0, 0.0], [1.0, -2.0]], dtype=torch.float64)
    >>> estimate = log_likelihood(log_weights, x, features=2)
    >>> exact = Independent(Normal(torch.zeros_like(x), 2**0.5), 1).log_prob(x)
    >>> ((estimate.log_px - exact).abs() < 4 * estimate.mc_error).tolist()
    [True, True]
    >>> estimate.summary()["warning"] is None
    True
    >>> [part.samples for part in log_likelihood(log_weights, x, features=2, fewer=(10, 100)).fewer]
    [10, 100]
    """
    vae = _as_vae(model)
    if vae is not None:
        check_data(x)
        if features is not None:
            raise ValueError(f"Expected features for a function only, as a VAE has its flow's; got {features}")
        features = vae.flow.features
    elif not callable(model):
        raise ValueError(f"Expected a VAE or a function (x, samples, noise) -> log weights; got {model!r}")
    elif features is None or features < 1:
        raise ValueError(
            f"Expected features, the size of the noise that the function takes for each sample; got {features}"
        )
    if not isinstance(x, Tensor) or x.dim() < (1 if vae is None else 2):
        kind = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"type {type(x).__name__}"
        raise ValueError(f"Expected x as a tensor with a batch axis, (N, …); got {kind}")
    if samples < 1 or len(x) < 1 or (chunk is not None and chunk < 1):
        raise ValueError(
            "Expected at least one image, one sample and a chunk of at least one; "
            f"got x of shape {tuple(x.shape)}, samples={samples}, chunk={chunk}"
        )
    if not all(1 <= count < samples for count in fewer):
        raise ValueError(f"Expected fewer of the {samples} samples, but at least one; got {', '.join(map(str, fewer))}")
    if anneal < 0:
        raise ValueError(f"Expected a number of transitions to anneal by, or 0 for none; got {anneal}")
    if adapt < 0 or (adapt and anneal):
        raise ValueError(
            "Expected a number of rounds to adapt a proposal in, or 0 for none, and no annealing besides; "
            f"got adapt={adapt}, anneal={anneal}"
        )
    if chunk is None:
        chunk = latents_at_once(x)
    images = max(1, chunk // samples)  # so many share a batch
    counts = (*fewer, samples)
    rows: list[list[Tensor]] = [[] for _ in counts]
    with evaluating(model), torch.no_grad():
        for start in range(0, len(x), images):
            group = x[start : start + images]
            indices = range(first + start, first + start + len(group))
            weigh = partial(model, group) if vae is None else _bound(vae, group.to(vae.origin), check=start == 0)
            randomness = _Randomness(seed, indices, features, like=group if vae is None else vae.origin)
            at_once = chunk // images
            if adapt:
                drawn, weighed = _adapted(weigh, randomness, samples, at_once, adapt)
            elif anneal:
                drawn, weighed = _annealed(weigh, randomness, samples, at_once, anneal)
            else:
                drawn = weighed = _plain(weigh, randomness, samples, at_once)
            for count, found in zip(counts, rows, strict=True):
                columns = [column(weighed[:count]) for column in _COLUMNS.values()]
                found.append(torch.stack([*columns, drawn[:count].mean(0)], 1))
            if progress is not None:
                progress(start + len(group), len(x))
    *parts, whole = (torch.cat(found) for found in rows)
    return _estimate(whole, samples, tuple(map(_estimate, parts, fewer)))


# What is kept of the log weights (S, B) of a group of images: one number per image for each name.
_COLUMNS: dict[str, Callable[[Tensor], Tensor]] = {
    "log_px": log_mean_exp,
    "mc_error": log_mean_error,
    "ess": effective_sample_size,
    "khat": pareto_khat,
}


def _estimate(rows: Tensor, samples: int, fewer: tuple[Estimate, ...] = ()) -> Estimate:
    *columns, elbo = rows.unbind(1)
    return Estimate(**dict(zip(_COLUMNS, columns, strict=True)), elbo=elbo, samples=samples, fewer=fewer)


def _as_vae(model: Any) -> VAE | None:
    """Compiled and other wrapped VAEs are VAEs by what they have."""
    return model if hasattr(model, "log_terms") and hasattr(model, "posterior") else None


def _bound(vae: VAE, x: Tensor, *, check: bool) -> Callable[[int, Tensor], Tensor]:
    """``(samples, noise) -> log weights``, with x encoded once; with ``check``, samples are known to be exact."""
    posterior = vae.posterior(x)
    if isinstance(posterior, MixtureDistribution):
        raise ValueError(
            "Expected a VAE with one flow as its posterior; got a mixture: iwae(vae.log_terms(x, samples)) estimates "
            "log p(x) from all of its components"
        )
    if check:
        warn_if_inexact(vae.flow, posterior)

    def weigh(samples: int, noise: Tensor) -> Tensor:
        return log_weights(vae.log_terms(x, samples, noise=noise, posterior=posterior))

    return weigh


def latents_at_once(x: Tensor) -> int:
    """How many latents to decode at once for data like x (N, …)."""
    # Large chunks leave the cache and fault in fresh pages; small ones pay more for calls than for work.
    return min(max(100, 80_000 // max(1, x[0].numel())), 2000)


def log_weights(terms: LogTerms) -> Tensor:
    """log p(x, z) − log q(z|x), (S, B), on the CPU. The terms cancel to a large part: they are added up in float64."""
    log_px_z, log_pz, log_q = (term.cpu().double() for term in (terms.log_px_z, terms.log_pz, terms.log_q))
    return log_px_z + log_pz - log_q


class _Randomness:
    """Of a group of images: noise by image and sample, whatever the size of groups and chunks."""

    def __init__(self, seed: int, indices: range, features: int, *, like: Tensor) -> None:
        self.seed, self.indices, self.features, self.device = seed, indices, features, like.device
        self.dtype = like.dtype if like.is_floating_point() else torch.get_default_dtype()
        self.of_q = self.others("evaluation", features)

    def noise(self, count: int) -> Tensor:
        """Of the next ``count`` samples of each image, (count, B, D)."""
        return self.like(self.of_q(count))

    def transitions(self, samples: range) -> Callable[[], Tensor]:
        """() -> what one transition of each of these samples takes, (S, B, D + 2)."""
        width = self.features + EXTRA
        chains = [
            [Noise(stream(self.seed, "annealing", index, sample), width) for index in self.indices]
            for sample in samples
        ]
        return lambda: self.like(torch.stack([torch.cat([one.take(1) for one in row]) for row in chains]))

    def others(self, purpose: str, width: int) -> Callable[[int], Tensor]:
        """Count -> standard normal numbers for that purpose alone, (count, B, width), in float64 on the CPU."""
        images = [Noise(stream(self.seed, purpose, index), width) for index in self.indices]
        return lambda count: torch.stack([image.take(count) for image in images], 1)

    def like(self, values: Tensor) -> Tensor:
        return values.to(self.device, self.dtype)


#: ``(samples, noise) -> log weights`` of a group of images: noise (S, B, D), log weights (S, B).
_Weigh = Callable[[int, Tensor], Tensor]


def _plain(weigh: _Weigh, randomness: _Randomness, samples: int, at_once: int) -> Tensor:
    """Log weights of so many samples of each image, (samples, B), in float64 on the CPU."""
    return torch.cat([_weighed(weigh, randomness.noise(count)) for count in _counts(samples, at_once)])


def _annealed(
    weigh: _Weigh, randomness: _Randomness, samples: int, at_once: int, transitions: int
) -> tuple[Tensor, Tensor]:
    """The same of draws of q, and of what annealing makes of them."""
    parts, done = [], 0
    for count in _counts(samples, at_once):
        draw = randomness.transitions(range(done, done + count))
        parts.append(annealing.anneal(partial(weigh, count), randomness.noise(count), transitions, draw=draw))
        done += count
    return torch.cat([part.start.cpu() for part in parts]), torch.cat([part.log_w.cpu() for part in parts])


def _adapted(weigh: _Weigh, randomness: _Randomness, samples: int, at_once: int, rounds: int) -> tuple[Tensor, Tensor]:
    """The same of draws of q, and of draws of the proposal that is fitted from there."""
    draws = adaptation.draws_of_a_round(randomness.features)
    later = randomness.others("adaptation", randomness.features)
    proposal = adaptation.adapt(
        lambda noise: weigh(len(noise), noise),
        randomness.noise(draws),
        rounds,
        draw=lambda: later(draws),
        at_once=at_once,
    )
    normal, parts = randomness.others("adapted", proposal.width), []
    for count in _counts(samples, at_once):
        noise, log_ratio = proposal.draw(normal(count))
        parts.append(_weighed(weigh, randomness.like(noise)) + log_ratio)
    return proposal.start, torch.cat(parts)


def _weighed(weigh: _Weigh, noise: Tensor) -> Tensor:
    return check_log_weights(weigh(len(noise), noise), noise).cpu().double()


def _counts(total: int, at_once: int) -> Iterator[int]:
    for done in range(0, total, at_once):
        yield min(at_once, total - done)


@contextmanager
def evaluating(model: object) -> Iterator[None]:
    """Every module in evaluation mode until the end, then in the mode that it was in."""
    modes = {module: module.training for module in model.modules()} if isinstance(model, nn.Module) else {}
    if isinstance(model, nn.Module):
        model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def _mean(values: Tensor) -> float | None:
    return finite_or_none(values.double().mean())


def finite_or_none(value: Tensor) -> float | None:
    return value.item() if value.isfinite() else None
