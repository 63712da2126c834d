"""Distributions over x that decoders return, all with the whole of x as one event.

A decoder ends in a :class:`Head`, which says how many numbers it needs for each element of x and makes a
distribution of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Bernoulli, Distribution, Independent, Normal, constraints

from sylvester.names import LIKELIHOODS, Likelihood

LEVELS = 256


class Head(nn.Module):
    """What a decoder computed, ``(*, *outputs)``, to a distribution over x with event ``shape``.

    - ``"bernoulli"``: one logit for each element;
    - ``"categorical"``: 256 logits of the levels of each pixel and channel, which are independent given z;
    - ``"gaussian"``: the mean of each element, and one learned scale per channel, or per feature of a vector. A
      scale of its own for each pixel would let the likelihood grow without bound on constant pixels.
    """

    def __init__(self, shape: Sequence[int], likelihood: Likelihood) -> None:
        super().__init__()
        if likelihood not in LIKELIHOODS:
            raise ValueError(f"Expected likelihood to be one of {', '.join(LIKELIHOODS)}; got {likelihood!r}")
        if likelihood == "categorical" and len(shape) != 3:
            raise ValueError(f"Expected images (C, H, W) with likelihood 'categorical'; got the shape {tuple(shape)}")
        self.shape, self.likelihood = tuple(shape), likelihood
        self.levels = LEVELS if likelihood == "categorical" else 1
        self.outputs = (*self.shape, LEVELS) if likelihood == "categorical" else self.shape
        if likelihood == "gaussian":
            self.log_scale = nn.Parameter(torch.zeros(shape[0], *(1 for _ in shape[1:])))

    def forward(self, x: Tensor) -> Distribution:
        if self.likelihood == "categorical":
            return PixelLevels(x)
        if self.likelihood == "gaussian":
            return gaussian(x, self.log_scale, len(self.shape))
        return bernoulli(x, len(self.shape))


def bernoulli(logits: Tensor, event_dims: int) -> Independent:
    """Binary x from logits: -softplus is exact where a probability would round to 0 or 1."""
    return Independent(Bernoulli(logits=logits, validate_args=False), event_dims, validate_args=False)


def gaussian(mean: Tensor, log_scale: Tensor, event_dims: int) -> Independent:
    """Real x around ``mean``, with a scale that broadcasts against it."""
    scale = log_scale.to(mean.dtype).exp().expand_as(mean)
    return Independent(Normal(mean, scale, validate_args=False), event_dims, validate_args=False)


class PixelLevels(Distribution):
    """Independent categorical pixels: x = k / (L - 1) with probability softmax(logits)_k, k in 0 ... L-1.

    ``logits`` is (*batch, C, H, W, L). Values, samples and the mean are all in [0, 1], so that x means the
    same to the encoder, to the decoder and to whoever looks at it.

    >>> import math
    >>> pixels = PixelLevels(torch.zeros(5, 1, 28, 28, 256))  # batch (5,), all levels alike
    >>> (pixels.log_prob(torch.ones(5, 1, 28, 28)) + 28 * 28 * math.log(256)).abs().max() < 0.01
    tensor(True)
    """

    arg_constraints = {"logits": constraints.real_vector}  # noqa: RUF012  (torch's own convention)
    support = constraints.independent(constraints.unit_interval, 3)

    def __init__(self, logits: Tensor, validate_args: bool | None = False) -> None:
        if logits.dim() < 4:
            raise ValueError(f"Expected logits of shape (*, C, H, W, levels); got {tuple(logits.shape)}")
        self.logits = logits
        super().__init__(logits.shape[:-4], logits.shape[-4:-1], validate_args=validate_args)

    @property
    def levels(self) -> int:
        return self.logits.shape[-1]

    @property
    def mean(self) -> Tensor:
        level = torch.arange(self.levels, dtype=self.logits.dtype, device=self.logits.device)
        return self.logits.softmax(-1) @ level / (self.levels - 1)

    def expand(self, batch_shape: Any, _instance: Any = None) -> PixelLevels:
        new = self._get_checked_instance(PixelLevels, _instance)
        new.logits = self.logits.expand(*batch_shape, *self.logits.shape[-4:])
        super(PixelLevels, new).__init__(torch.Size(batch_shape), self.event_shape, validate_args=False)
        new._validate_args = self._validate_args
        return new

    def sample(self, sample_shape: Any = ()) -> Tensor:
        shape = self._extended_shape(torch.Size(sample_shape))
        draws = torch.Size(sample_shape).numel()
        with torch.no_grad():
            probabilities = self.logits.softmax(-1).reshape(-1, self.levels)
            level = torch.multinomial(probabilities, draws, replacement=True)  # (pixels, draws)
        return level.T.reshape(shape).to(self.logits.dtype) / (self.levels - 1)

    def log_prob(self, value: Tensor) -> Tensor:
        if self._validate_args:
            self._validate_sample(value)
        level = (value * (self.levels - 1)).round().long()
        shape = torch.broadcast_shapes(level.shape, self.logits.shape[:-1])
        logits = self.logits.expand(*shape, self.levels)
        chosen = logits.gather(-1, level.expand(shape).unsqueeze(-1)).squeeze(-1)
        return (chosen - self.logits.logsumexp(-1)).sum((-3, -2, -1))
