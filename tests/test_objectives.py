"""Bounds from hand-made terms, and the annealing schedule."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from sylvester.objectives import elbo, free_bits, iwae, linear_beta, log_mean_exp
from sylvester.vae import LogTerms


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def draw_terms(samples: int, batch: int = 4) -> LogTerms:
    log_px_z, log_pz, log_q = torch.randn(3, samples, batch, dtype=torch.float64, requires_grad=True).unbind()
    return LogTerms(torch.zeros(samples, batch, 1), 10 * log_px_z, log_pz, log_q + 2)


def test_elbo_weighs_the_divergence_with_beta() -> None:
    terms = draw_terms(3)
    for b in range(4):
        values = [terms.log_px_z[s, b] - 0.25 * (terms.log_q[s, b] - terms.log_pz[s, b]) for s in range(3)]
        torch.testing.assert_close(elbo(terms, 0.25)[b], sum(values) / 3)
    torch.testing.assert_close(elbo(terms), terms.log_w.mean(0))


def test_one_importance_sample_is_the_elbo() -> None:
    terms = draw_terms(1)
    torch.testing.assert_close(iwae(terms), elbo(terms))


def test_iwae_is_the_log_of_the_mean_weight_and_above_the_elbo() -> None:
    terms = draw_terms(50)
    torch.testing.assert_close(iwae(terms), terms.log_w.exp().mean(0).log())
    assert (iwae(terms) > elbo(terms)).all()


def test_log_mean_exp_survives_weights_that_underflow() -> None:
    log_w = torch.tensor([-2000.0, -2000.0, -math.inf, -math.inf], dtype=torch.float64)
    torch.testing.assert_close(log_mean_exp(log_w), torch.tensor(-2000 - math.log(2), dtype=torch.float64))


@pytest.mark.parametrize(("floor", "binding"), [(-100.0, False), (100.0, True)])
def test_free_bits_put_a_floor_under_the_batch_mean(floor: float, binding: bool) -> None:
    terms = draw_terms(3)
    kl = (terms.log_q - terms.log_pz).mean(0)
    bound = free_bits(terms, floor, beta=0.5)
    expected = terms.log_px_z.mean() - 0.5 * max(floor, kl.mean().item())
    torch.testing.assert_close(bound.mean(), expected)
    (gradient,) = torch.autograd.grad(bound.sum(), [terms.log_q])
    assert (gradient == 0).all() == binding
    if not binding:
        torch.testing.assert_close(bound, elbo(terms, 0.5))


def test_free_bits_look_at_the_batch_and_not_at_single_points() -> None:
    log_q = torch.tensor([[0.0, 4.0]])  # KL 0 and 4: the mean is above 1 although one point is below
    terms = LogTerms(torch.zeros(1, 2, 1), torch.zeros(1, 2), torch.zeros(1, 2), log_q)
    torch.testing.assert_close(free_bits(terms, 1.0), torch.tensor([0.0, -4.0]))
    torch.testing.assert_close(free_bits(terms, 3.0), torch.tensor([-3.0, -3.0]))


def test_annealing_is_the_papers() -> None:
    assert [linear_beta(epoch, 100) for epoch in (1, 50, 100, 101, 2000)] == [0.01, 0.5, 1.0, 1.0, 1.0]
    assert linear_beta(1, 0) == 1.0


def test_annealing_by_steps_meets_annealing_by_epochs_at_the_end_of_each() -> None:
    for epoch in (1, 2, 3, 4, 5):
        assert linear_beta(epoch, 4, step=10, steps=10) == linear_beta(epoch, 4)
    assert linear_beta(2, 4, step=5, steps=10) == pytest.approx(1.5 / 4)
    steps = [linear_beta(epoch, 3, step=step, steps=7) for epoch in (1, 2, 3) for step in range(1, 8)]
    assert steps == pytest.approx([(i + 1) / 21 for i in range(21)])


def test_annealing_starts_where_it_is_told_to() -> None:
    assert [linear_beta(epoch, 4, start=0.2) for epoch in (1, 2, 4, 5)] == pytest.approx([0.4, 0.6, 1.0, 1.0])
    assert linear_beta(1, 0, start=0.2) == 1.0


@pytest.mark.parametrize(
    "arguments",
    [
        {"epoch": 0, "warmup": 10},
        {"epoch": 1, "warmup": -1},
        {"epoch": 1, "warmup": 1, "step": 3, "steps": 2},
        {"epoch": 1, "warmup": 1, "start": 1.5},
    ],
)
def test_impossible_schedules_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"Expected .*; got"):
        linear_beta(**arguments)
