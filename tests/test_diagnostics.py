"""Diagnostics on weights whose answers are known, and Pareto k̂ against arviz-stats."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from arviz_stats.base import array_stats
from torch import Tensor

from sylvester import diagnostics
from sylvester.diagnostics import effective_sample_size, log_mean_error, pareto_khat


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def arviz_khat(log_w: Tensor) -> Tensor:
    """Column by column; it takes negated log weights."""
    columns = log_w.double().unbind(1)
    with np.errstate(all="ignore"):
        return torch.tensor([array_stats.psislw(-c.numpy())[1].item() for c in columns], dtype=torch.float64)


def test_effective_sample_size_of_known_weights() -> None:
    log_w = torch.tensor([[0.0, 0.0, 5.0], [0.0, -math.inf, 4.0], [0.0, -math.inf, 3.0]]).double() - 3000
    w = torch.tensor([5.0, 4.0, 3.0]).double().exp()
    expected = torch.tensor([3.0, 1.0, (w.sum() ** 2 / (w**2).sum()).item()]).double()
    torch.testing.assert_close(effective_sample_size(log_w), expected)


def test_error_of_the_log_mean_is_what_repetitions_show() -> None:
    generator = torch.Generator().manual_seed(0)
    log_w = torch.randn(400, 3000, generator=generator, dtype=torch.float64) - 800
    error = log_mean_error(log_w)
    assert error.mean().item() == pytest.approx(log_w.logsumexp(0).std().item(), rel=0.08)
    # Log-normal weights: std/mean = √(e − 1).
    assert error.mean().item() == pytest.approx(math.sqrt((math.e - 1) / 400), rel=0.08)


def test_one_sample_has_no_error_estimate() -> None:
    error = log_mean_error(torch.randn(1, 3))
    assert error.shape == (3,)
    assert error.isnan().all()


# Weights with log-normal tails, with tails heavier than any power, and Pareto weights with k = scale.
TAILS: dict[str, Callable[[int, int], Tensor]] = {
    "gaussian": lambda *shape: torch.randn(shape, dtype=torch.float64),
    "student-t": lambda *shape: torch.distributions.StudentT(torch.tensor(3.0).double()).sample(shape),
    "pareto": lambda *shape: torch.distributions.Exponential(torch.tensor(1.0).double()).sample(shape),
    "bounded": lambda *shape: -(torch.randn(shape, dtype=torch.float64) ** 2),
}


@pytest.mark.parametrize("samples", [25, 26, 29, 30, 100, 224, 225, 226, 1000, 5000])
@pytest.mark.parametrize("name", TAILS)
def test_khat_agrees_with_arviz(name: str, samples: int) -> None:
    for scale in (1e-3, 0.1, 1.0, 3.0, 10.0):
        log_w = scale * TAILS[name](samples, 6) - 3000 * torch.rand(6, dtype=torch.float64)
        torch.testing.assert_close(pareto_khat(log_w), arviz_khat(log_w), rtol=1e-8, atol=1e-8)


def test_khat_agrees_with_arviz_on_ties_zeros_and_giants() -> None:
    log_w = torch.randn(400, 8, dtype=torch.float64)
    log_w[:, 0] = log_w[:, 0].mul(20).round() / 20  # ties within the tail
    log_w[:300, 1] = -math.inf  # zeros below the tail
    log_w[:350, 2] = -math.inf  # zeros within the tail, and a threshold of zero
    log_w[7, 3:8] += torch.tensor([5.0, 50.0, 300.0, 600.0, 640.0])  # one giant
    torch.testing.assert_close(pareto_khat(log_w), arviz_khat(log_w), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("k", [0.2, 0.7, 1.2])
def test_khat_of_pareto_weights(k: float) -> None:
    u = torch.rand(100_000, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    log_w = (((1 - u) ** -k - 1) / k).log() - 900
    # The tail holds 948 weights, so the standard error of the fit is (1 + k)/√948 ≤ 0.07.
    assert (pareto_khat(log_w) - k).abs().max().item() < 4 * (1 + k) / math.sqrt(948)


def test_khat_tells_a_wide_proposal_from_a_narrow_one() -> None:
    z = torch.randn(5000, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    # Target N(0, 1), proposal N(0, s²): bounded weights for s > 1; else P(w > t) falls as t^(−1/(1 − s²)).
    log_w = torch.stack([-0.5 * (s * z) ** 2 + 0.5 * z**2 for s in (1.5, 0.4)], 1)
    wide, narrow = pareto_khat(log_w).tolist()
    assert wide < 0.3
    assert narrow == pytest.approx(1 - 0.4**2, abs=0.25)


def test_khat_keeps_its_digits_where_weights_are_close() -> None:
    log_w = torch.randn(1000, 4, dtype=torch.float64)
    # 1 + c w has the tail of w, and its logarithm is c w for a small c.
    close = torch.log1p(1e-9 * log_w.exp())
    torch.testing.assert_close(pareto_khat(close), pareto_khat(log_w), rtol=1e-5, atol=1e-5)


def test_khat_of_an_exactly_exponential_point_of_the_grid() -> None:
    # 16 weights in the tail: θ_j = 0 at j = 9 of 34, where √(34 / 8.5) = 2 and max x = 3 x*.
    w = torch.tensor([1.0] * 64 + [2.0] * 4 + [3.0] * 11 + [4.0], dtype=torch.float64)
    near = torch.cat([w[:-1], w[-1:] + 1e-9])
    assert pareto_khat(w.log()).item() == pytest.approx(pareto_khat(near.log()).item(), abs=1e-6)


@pytest.mark.parametrize(
    ("log_w", "expected"),
    [
        (torch.zeros(100), math.nan),  # equal weights have no tail
        (torch.randn(24), math.nan),  # too few
        (torch.randn(0), math.nan),
        (torch.full((100,), math.nan), math.nan),
        (torch.cat([torch.full((1,), math.nan), torch.randn(99)]), math.nan),
        (torch.full((100,), -math.inf), math.nan),
        (torch.cat([torch.zeros(99), torch.ones(1)]), math.nan),  # a tail of ties
        (torch.cat([torch.full((99,), -1000.0), torch.zeros(1)]), math.inf),  # one weight is everything
        (torch.cat([torch.full((99,), -math.inf), torch.zeros(1)]), math.inf),
        (torch.linspace(0, 1e5, 100), math.inf),
    ],
)
def test_khat_where_no_tail_can_be_fitted(log_w: Tensor, expected: float) -> None:
    khat = pareto_khat(log_w.double())
    assert khat.shape == ()
    assert khat.item() == pytest.approx(expected, nan_ok=True)


def test_khat_of_any_batch_shape_is_that_of_each_column(monkeypatch: pytest.MonkeyPatch) -> None:
    log_w = torch.randn(100, 3, 4, requires_grad=True)
    khat = pareto_khat(log_w)
    assert khat.shape == (3, 4)
    assert khat.dtype == torch.float32
    assert not khat.requires_grad
    assert khat[2, 1] == pareto_khat(log_w[:, 2, 1])
    assert pareto_khat(torch.randn(100, 0, 4)).shape == (0, 4)
    monkeypatch.setattr(diagnostics, "_WORKSPACE", 2000)  # two or three images at a time
    torch.testing.assert_close(pareto_khat(log_w), khat, rtol=0, atol=0)


def test_khat_of_a_whole_test_set() -> None:
    log_w = torch.randn(5000, 2000)
    columns = [0, 111, 112, 1999]  # at the seams of what is fitted together
    torch.testing.assert_close(
        pareto_khat(log_w)[columns].double(), arviz_khat(log_w[:, columns]), rtol=1e-6, atol=1e-6
    )
