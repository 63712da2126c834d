"""Gaps of a linear-Gaussian VAE, whose every bound is known."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from benchmarks.linear_gaussian_gaps import LinearGaussian, off
from sylvester import flows
from sylvester.gaps import Gaps, measure, refine
from sylvester.objectives import elbo

FEATURES, SIZE = 3, 4


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def make(scale: float, flow: flows.Flow | None = None) -> LinearGaussian:
    return LinearGaussian(FEATURES, SIZE, scale, flow)


def near(values: Tensor, expected: float | Tensor) -> bool:
    """To 0.02 nats or three standard errors."""
    difference, error = off(values, expected)
    return abs(difference) < max(0.02, 3 * error)


@pytest.mark.parametrize("scale", [0.1, 1.0, 3.0])
def test_the_gaps_are_those_of_the_closed_form(scale):
    model = make(scale)
    x = model.marginal.sample((30,))
    found = measure(model.vae, x, steps=200, draws=16, samples=400, learning_rate=0.03)
    assert near(found.approximation("own"), model.approximation_gap)
    # The encoder is the best there is.
    assert near(found.amortization("own"), 0.0)
    assert abs(found.amortization("own").mean()) < 0.01
    assert near(found.log_px, model.marginal.log_prob(x))


def test_a_worse_encoder_has_a_larger_amortization_gap_alone():
    model = make(1.0)
    model.spoil_encoder()
    x = model.marginal.sample((30,))
    expected = model.amortization_gap(x)
    assert expected.mean() > 0.3
    found = measure(model.vae, x, steps=200, draws=16, samples=400, learning_rate=0.03)
    assert near(found.amortization("own"), expected)
    assert near(found.approximation("own"), model.approximation_gap)


def test_a_family_with_correlations_lacks_less_under_the_same_decoder():
    model = make(1.0)
    assert model.approximation_gap > 0.4
    x = model.marginal.sample((20,))
    others = {"triangular": flows.TriangularSylvester(FEATURES, 1, 4), "maf": flows.MAF(FEATURES, 2, 1)}
    found = measure(model.vae, x, others, name="gaussian", steps=150, draws=8, samples=200, learning_rate=0.05)
    assert list(found.families) == ["gaussian", "triangular", "maf"]
    assert near(found.approximation("gaussian"), model.approximation_gap)
    for name in others:
        assert found.approximation(name).mean() < 0.3 * model.approximation_gap
        assert found.approximation(name).mean() > -0.02
        assert found.amortization(name) is None
    assert near(found.log_px, model.marginal.log_prob(x))
    assert found.mc_error.mean() < 0.03
    assert found.khat.nan_to_num().max() < 0.7
    notes = " ".join(found.notes())
    assert "too low on average" in notes
    assert "not trained with triangular and maf" in notes
    summary = found.summary()
    assert summary["families"]["triangular"]["amortization_gap"] == {"mean": None, "std_error": None}
    assert summary["families"]["gaussian"]["approximation_gap"]["mean"] == pytest.approx(
        found.approximation("gaussian").mean().item()
    )


def test_networks_are_held_and_the_report_says_so():
    model = make(1.0, flows.IAF(FEATURES, SIZE, 2))
    found = measure(model.vae, model.marginal.sample((3,)), steps=20, samples=50)
    assert found.amortization("own").mean() > 0
    assert any("not the family's optimum" in note for note in found.notes())


def test_an_image_has_the_same_gaps_in_any_company():
    model = make(1.0, flows.Planar(FEATURES, SIZE, 2))
    x = model.marginal.sample((5,))
    whole, part = (measure(model.vae, x[i:], steps=20, samples=60, first=i) for i in (0, 3))
    for name in ("approximation", "amortization"):
        torch.testing.assert_close(getattr(whole, name)("own")[3:], getattr(part, name)("own"))


def test_nothing_else_is_changed():
    model = make(1.0)
    vae = model.vae.train()
    state, other, x = copy.deepcopy(vae.state_dict()), flows.Planar(FEATURES, 1, 2), torch.randn(2, SIZE)
    rng = torch.get_rng_state()
    said: list[tuple[int, int]] = []
    found = measure(vae, x, {"planar": other}, steps=3, samples=4, progress=lambda *at: said.append(at))
    assert isinstance(found, Gaps)
    assert said[-1] == (18, 18)  # of two images: its own, the other, and the one for log p̂
    assert vae.training
    assert torch.equal(rng, torch.get_rng_state())
    assert all(torch.equal(state[name], value) for name, value in vae.state_dict().items())
    assert all(parameter.grad is None for parameter in (*vae.parameters(), *other.parameters()))
    assert next(other.parameters()).dtype == torch.float32


def test_refinement_survives_a_gradient_that_is_not_finite():
    model = make(1.0)
    x = model.marginal.sample((2,))
    x[0] = 1e200  # squares to infinity
    local = model.vae.flow.local(x)
    refine(model.vae, x, local, steps=5)
    assert all(parameter.isfinite().all() for parameter in local.parameters())
    alone = model.vae.flow.local(x[1:])
    start = elbo(model.vae.log_terms(x[1:], 2000, posterior=alone())).item()
    assert elbo(model.vae.log_terms(x, 2000, posterior=local()))[1].item() == pytest.approx(start, abs=0.1)


@pytest.mark.parametrize(
    ("others", "options", "message"),
    [
        ({"own": flows.Planar(FEATURES, 1)}, {}, "Expected other families under other names than 'own'"),
        (
            {"planar": flows.Planar(2, 1)},
            {},
            "Expected a flow with features=3 and a context for planar; got features=2",
        ),
        (
            {"planar": flows.Planar(3)},
            {},
            "Expected a flow with features=3 and a context for planar; got features=3, con",
        ),
        ({}, {"steps": 0}, "Expected samples, steps and draws >= 1; got 1000, 0 and 8"),
    ],
)
def test_bad_input_gets_a_sentence(others, options, message):
    with pytest.raises(ValueError, match=message):
        measure(make(1.0).vae, torch.zeros(2, SIZE), others, **options)


def test_a_mixture_or_no_images_get_a_sentence():
    model = make(1.0, flows.Mixture([flows.Gaussian(FEATURES, SIZE)]))
    with pytest.raises(ValueError, match="Expected a VAE with one flow with a context as its posterior; got Mixture"):
        measure(model.vae, torch.zeros(2, SIZE))
    with pytest.raises(ValueError, match="Expected x with a batch axis and at least one image"):
        measure(make(1.0).vae, torch.zeros(0, SIZE))
