"""Monotone rational-quadratic splines (Gregory and Delbourgo, 1982; Durkan et al., 2019), both ways in closed form.

Between the knots (x_k, y_k) and (x_{k+1}, y_{k+1}), with w and h the bin's width and height, s = h/w its mean slope,
d₀ and d₁ the slopes at its ends, ξ = (z − x_k)/w and η = (z' − y_k)/h, both from 0 to 1:

    η = (s ξ² + d₀ ξ(1 − ξ)) / c,    c = s (ξ² + (1 − ξ)²) + (d₀ + d₁) ξ(1 − ξ)
    ∂z'/∂z = s² (d₁ ξ² + 2s ξ(1 − ξ) + d₀ (1 − ξ)²) / c²

All terms are positive, so nothing cancels. For ξ this is a quadratic equation. Its discriminant is a sum of squares,

    r² = e² + 4s² η(1 − η),    e = d₀(1 − η) − d₁ η

and its root in [0, 1] has two forms, the first without cancellation where e ≥ 0, the second where e ≤ 0:

    ξ = 2sη / (2sη + e + r),    1 − ξ = 2s(1 − η) / (2s(1 − η) − e + r)

Knots much steeper than a bin's mean slope would make its middle flat, as ∂z'/∂z = 2s²/(s + d) at ξ = ½ where both are
d, and a flat stretch loses digits on the way back. So the slope at a knot is given relative to the harmonic mean of
its neighbours' mean slopes, which is at most twice the smaller one: what a monotone interpolant takes without further
knowledge (Fritsch and Butland, 1984).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad

from sylvester.transforms.elementwise import Elementwise

# What keeps float32 finite: the most that numbers say, up or down, of the logarithm of a share and of a knot's factor.
_LOG_SHARE = 3.0
_LOG_FACTOR = 2.0


@dataclass(frozen=True)
class RationalQuadratic(Elementwise):
    """A monotone rational-quadratic spline from [−bound, bound] onto itself, and the identity outside, slopes included.

    The numbers of a coordinate are K widths and K heights, softmax(3 tanh(·/3)) of the whole, and K − 1 slopes at the
    inner knots, exp(2 tanh(·/2)) times the harmonic mean of the mean slopes on either side. All numbers 0 are the
    identity.

    Args:
        bins: K, from 1 to 999: float32 tells the knots of more apart no longer.
        bound: where the tails begin.

    >>> spline = RationalQuadratic(bins=4, bound=3.0)
    >>> z, raw = torch.tensor([-5.0, 0.5, 2.0]), torch.randn(spline.numbers, 3)
    >>> y, log_slope = spline.forward(z, raw)
    >>> torch.allclose(spline.backward(y, raw)[0], z, atol=1e-4)
    True
    """

    bins: int = 8
    bound: float = 5.0
    numbers: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.bins, int) or not 1 <= self.bins < 1000:
            raise ValueError(f"Expected an integer number of bins from 1 to 999; got {self.bins!r}")
        if not 0 < self.bound < math.inf:
            raise ValueError(f"Expected a positive, finite bound; got {self.bound!r}")
        object.__setattr__(self, "numbers", 3 * self.bins - 1)

    def forward(self, z: Tensor, raw: Tensor) -> tuple[Tensor, Tensor]:
        x, y, slopes = self._knots(raw)
        z, inner = self._inner(z, raw)
        x_0, x_1, y_0, y_1, d_0, d_1 = _bin_of(inner, x, x, y, slopes)
        mean = (y_1 - y_0) / (x_1 - x_0)
        left, right = (inner - x_0) / (x_1 - x_0), (x_1 - inner) / (x_1 - x_0)
        rise = (mean * left + d_0 * right) * left / _denominator(left, right, mean, d_0, d_1)
        return self._with_tails(z, y_0 + (y_1 - y_0) * rise, _log_slope(left, right, mean, d_0, d_1))

    def backward(self, y: Tensor, raw: Tensor) -> tuple[Tensor, Tensor]:
        x, knots, slopes = self._knots(raw)
        y, inner = self._inner(y, raw)
        x_0, x_1, y_0, y_1, d_0, d_1 = _bin_of(inner, knots, x, knots, slopes)
        mean = (y_1 - y_0) / (x_1 - x_0)
        below, above = (inner - y_0) / (y_1 - y_0), (y_1 - inner) / (y_1 - y_0)
        e = d_0 * above - d_1 * below
        r = (e * e + 4 * mean * mean * below * above).sqrt()
        # Of the two forms the one without cancellation. A choice, not |e|, whose derivative at 0 would be wrong.
        first = e >= 0
        near, far = 2 * mean * torch.where(first, below, above), torch.where(first, e, -e) + r
        near, far = near / (near + far), far / (near + far)
        left, right = torch.where(first, near, far), torch.where(first, far, near)
        return self._with_tails(y, x_0 + (x_1 - x_0) * left, _log_slope(left, right, mean, d_0, d_1))

    def _knots(self, raw: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Abscissae, ordinates and slopes at the K + 1 knots, each ``(*, K + 1, D)``."""
        raw_widths, raw_heights, raw_slopes = raw.split((self.bins, self.bins, self.bins - 1), -2)
        widths, heights = (_bounded(each, _LOG_SHARE).softmax(-2) for each in (raw_widths, raw_heights))
        mean = heights / widths
        before, after = mean[..., :-1, :], mean[..., 1:, :]
        slopes = 2 * before * after / (before + after) * _bounded(raw_slopes, _LOG_FACTOR).exp()
        return self._places(widths), self._places(heights), pad(slopes, (0, 0, 1, 1), value=1.0)

    def _places(self, shares: Tensor) -> Tensor:
        """From −bound to bound, both exactly."""
        inner = self.bound * (2 * shares[..., :-1, :].cumsum(-2) - 1)
        return torch.cat(
            [pad(inner, (0, 0, 1, 0), value=-self.bound), torch.full_like(shares[..., :1, :], self.bound)], -2
        )

    def _inner(self, z: Tensor, raw: Tensor) -> tuple[Tensor, Tensor]:
        """z in the shape of the result, and what the spline is to see of it: never a point of the tails."""
        z = z.expand(torch.broadcast_shapes(z.shape, raw[..., 0, :].shape))
        return z, torch.where(z.abs() < self.bound, z, 0.0)

    def _with_tails(self, z: Tensor, other: Tensor, log_slope: Tensor) -> tuple[Tensor, Tensor]:
        inside = z.abs() < self.bound
        return torch.where(inside, other, z), torch.where(inside, log_slope, 0.0)


def _bounded(x: Tensor, bound: float) -> Tensor:
    return bound * torch.tanh(x / bound)


def _bin_of(point: Tensor, edges: Tensor, *knots: Tensor) -> list[Tensor]:
    """For each kind of knots ``(*, K + 1, D)``, both ends of the bin in which ``edges`` put the point ``(*, D)``."""
    index = (point.unsqueeze(-2) >= edges[..., 1:-1, :]).sum(-2, keepdim=True)  # few bins: no search
    shape = (*point.shape[:-1], edges.shape[-2], point.shape[-1])
    return [each.expand(shape).gather(-2, index + end).squeeze(-2) for each in knots for end in (0, 1)]


def _denominator(left: Tensor, right: Tensor, mean: Tensor, d_0: Tensor, d_1: Tensor) -> Tensor:
    return mean * (left * left + right * right) + (d_0 + d_1) * left * right


def _log_slope(left: Tensor, right: Tensor, mean: Tensor, d_0: Tensor, d_1: Tensor) -> Tensor:
    """log ∂z'/∂z at ξ = ``left`` and 1 − ξ = ``right``."""
    numerator = d_1 * left * left + 2 * mean * left * right + d_0 * right * right
    return 2 * mean.log() + numerator.log() - 2 * _denominator(left, right, mean, d_0, d_1).log()
