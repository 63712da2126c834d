"""Diagnostics on weights whose answers are known."""

from __future__ import annotations

import math
import sys

import pytest
import torch

from sylvester.diagnostics import effective_sample_size, log_mean_error, pareto_khat


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
    assert log_mean_error(torch.randn(1, 3)).isnan().all()


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


@pytest.mark.parametrize(
    ("log_w", "expected"),
    [
        (torch.zeros(100), math.nan),  # equal weights have no tail
        (torch.randn(24), math.nan),  # too few
        (torch.full((100,), math.nan), math.nan),
        (torch.cat([torch.zeros(99), torch.ones(1)]), math.nan),  # a tail of ties
        (torch.cat([torch.full((99,), -1000.0), torch.zeros(1)]), math.inf),  # one weight is everything
        (torch.cat([torch.full((99,), -math.inf), torch.zeros(1)]), math.inf),
    ],
)
def test_khat_where_no_tail_can_be_fitted(log_w: torch.Tensor, expected: float) -> None:
    khat = pareto_khat(log_w.double())
    assert khat.shape == ()
    assert khat.item() == pytest.approx(expected, nan_ok=True)


def test_khat_is_undefined_without_arviz(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "arviz_stats.base", None)
    assert pareto_khat(torch.randn(100, 2)).isnan().all()
