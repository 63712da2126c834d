"""Rational-quadratic splines against a loop, against autograd and against another library's."""

from __future__ import annotations

import math

import naive
import numpy as np
import pytest
import torch
from cases import SCALES, generator

from sylvester.transforms import RationalQuadratic

pytestmark = pytest.mark.usefixtures("float64")

EVERY_SCALE = pytest.mark.parametrize("scale", SCALES)
EVERY_SPLINE = pytest.mark.parametrize("spline", [RationalQuadratic(1), RationalQuadratic(2, 1.0), RationalQuadratic()])


def draw(spline, scale, points=40):
    """Points inside, in the tails, at the bounds and on the inner knots of both axes, as columns."""
    rng = generator("spline", spline, scale)
    raw = scale * torch.randn(spline.numbers, 1, generator=rng)
    x, y, _ = spline._knots(raw)
    inside = spline.bound * (2 * torch.rand(points, generator=rng) - 1)
    tails = spline.bound * torch.tensor([-1e6, -2.0, -1.0, 1.0, 1.5, 1e6])
    z = torch.cat([inside, tails, x[:, 0], y[:, 0]])
    return z, raw.expand(-1, len(z))


@EVERY_SPLINE
@EVERY_SCALE
def test_agrees_with_a_loop(spline, scale):
    z, raw = draw(spline, scale)
    one = naive.rational_quadratic(raw[:, 0].numpy(), spline.bins, spline.bound)
    np.testing.assert_allclose(spline.forward(z, raw)[0], [one(point) for point in z.tolist()], rtol=1e-12, atol=1e-12)


@EVERY_SPLINE
@EVERY_SCALE
def test_slopes_are_those_of_autograd_and_the_inverse_knows_them(spline, scale):
    z, raw = draw(spline, scale)
    z.requires_grad_()
    y, log_slope = spline.forward(z, raw)
    (slope,) = torch.autograd.grad(y.sum(), z)
    torch.testing.assert_close(log_slope, slope.log(), rtol=1e-9, atol=1e-9)
    back, log_slope_back = spline.backward(y, raw)
    lost = 1e-14 * (1 + z.abs()) * (1 + 1 / slope)
    assert ((back - z).abs() <= lost).all()
    (inverse_slope,) = torch.autograd.grad(back.sum(), y, retain_graph=True)
    torch.testing.assert_close(-inverse_slope.log(), log_slope_back, rtol=1e-9, atol=1e-9)
    # Where a flat stretch lost digits of z, the slopes at both points differ as the points do.
    assert ((log_slope_back - log_slope).abs() <= 1e-10 + 1e4 * lost).all()


@EVERY_SPLINE
def test_raw_zeros_are_the_identity(spline):
    z, raw = draw(spline, 0.0)
    for direction in (spline.forward, spline.backward):
        y, log_slope = direction(z, raw)
        torch.testing.assert_close(y, z, rtol=1e-14, atol=1e-14)
        assert (log_slope.abs() < 1e-14).all()


def test_the_tails_are_the_points_themselves():
    spline = RationalQuadratic(4, 2.0)
    z = torch.tensor([-math.inf, -1e300, -2.0, 2.0, 7.0, math.inf])
    for direction in (spline.forward, spline.backward):
        y, log_slope = direction(z, torch.randn(spline.numbers, 6))
        assert torch.equal(y, z)
        assert not log_slope.any()


@pytest.mark.parametrize(
    "scale", [pytest.param(0.1, marks=pytest.mark.slow), 1.0, pytest.param(3.0, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_derivatives_of_every_order(scale, direction):
    """At the middle of a bin too, where the two forms of the root meet."""
    spline = RationalQuadratic(3, 2.0)
    run = getattr(spline, direction)
    raw = min(scale, 1) * torch.randn(spline.numbers, 4, generator=generator(scale))
    z = torch.tensor([-1.2, 0.3, 1.7, 4.0])
    leaves = (z.requires_grad_(), raw.requires_grad_())
    assert torch.autograd.gradcheck(run, leaves, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(run, leaves)
    middle = (torch.zeros(4, requires_grad=True), torch.zeros(spline.numbers, 4, requires_grad=True))
    assert torch.autograd.gradcheck(run, middle)
    assert torch.autograd.gradgradcheck(run, middle)


@pytest.mark.parametrize("scale", [1.0, 10.0, 1e4])
def test_float32_stays_finite(scale):
    spline = RationalQuadratic()
    rng = generator(scale)
    raw = (scale * torch.randn(spline.numbers, 500, generator=rng)).float().requires_grad_()
    z = (3 * torch.randn(500, generator=rng)).float().requires_grad_()
    for direction in (spline.forward, spline.backward):
        y, log_slope = direction(z, raw)
        assert y.isfinite().all()
        assert log_slope.isfinite().all()
        assert all(grad.isfinite().all() for grad in torch.autograd.grad(y.sum() + log_slope.sum(), (z, raw)))


@EVERY_SPLINE
@EVERY_SCALE
def test_the_spline_of_nflows(spline, scale):
    """The authors' own, given our knots: it takes the logarithms of shares, and slopes before a softplus."""
    splines = pytest.importorskip("nflows.transforms.splines")
    z, raw = draw(spline, scale)
    x, y, slopes = (knots.mT for knots in spline._knots(raw))
    least = 1e-13  # of shares and of slopes: the authors add so much
    before_softplus = (slopes[:, 1:-1] - least).expm1().log()
    for inverse, direction in ((False, spline.forward), (True, spline.backward)):
        expected, log_slope = splines.unconstrained_rational_quadratic_spline(
            z,
            x.diff().log(),
            y.diff().log(),
            before_softplus,
            inverse=inverse,
            tail_bound=spline.bound,
            min_bin_width=least,
            min_bin_height=least,
            min_derivative=least,
        )
        found, found_log_slope = direction(z, raw)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(found_log_slope, -log_slope if inverse else log_slope, rtol=1e-4, atol=1e-4)


@EVERY_SCALE
def test_no_stretch_is_much_flatter_than_its_bin(scale):
    """With κ the larger of 1 and the knots' slopes over the mean slope s, c ≤ s(1 + κ)/2, and the numerator is a mean
    of d₀, s and d₁: the slope is at least 4 min(d₀, s, d₁)/(1 + κ)². At inner knots κ is at most 2e²."""
    spline = RationalQuadratic(8)
    raw = scale * torch.randn(spline.numbers, 200, generator=generator(scale))
    x, y, slopes = spline._knots(raw)
    mean = y.diff(dim=-2) / x.diff(dim=-2)
    assert (slopes[1:-1] <= 2 * math.exp(2) * torch.minimum(mean[1:], mean[:-1])).all()
    share = torch.linspace(0, 1, 101)[1:-1, None, None]
    log_slope = spline.forward((x[:-1] + share * x.diff(dim=-2)).reshape(-1, 200), raw)[1]
    lowest = log_slope.reshape(99, -1, 200).amin(0).exp()
    steepest = (torch.maximum(slopes[:-1], slopes[1:]) / mean).clamp(min=1)
    least = torch.minimum(mean, torch.minimum(slopes[:-1], slopes[1:]))
    assert (lowest >= 0.999 * 4 * least / (1 + steepest) ** 2).all()
