"""Fits of densities whose integrals, entropies and posteriors are known."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.distributions import (
    Categorical,
    Dirichlet,
    Gamma,
    Independent,
    MixtureSameFamily,
    MultivariateNormal,
    Normal,
    constraints,
)

from sylvester import flows, inference
from sylvester.diagnostics import BLIND_SPOT, Diagnosis, diagnose, weighted_draws
from sylvester.distributions import FlowDistribution

QUICK = {"steps": 300, "learning_rate": 5e-2, "samples": 32}


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def gaussian(z: Tensor) -> Tensor:
    """Means 3 and −1, standard deviations 2 and ½; not normalized."""
    return -0.5 * (((z - z.new_tensor([3.0, -1.0])) / z.new_tensor([2.0, 0.5])) ** 2).sum(-1)


LOG_Z = math.log(2 * math.pi * 2 * 0.5)


def ring(modes: int = 8, radius: float = 6.0, scale: float = 0.5) -> MixtureSameFamily:
    angle = 2 * math.pi * torch.arange(modes) / modes
    centers = radius * torch.stack([angle.cos(), angle.sin()], -1)
    return MixtureSameFamily(Categorical(torch.ones(modes)), Independent(Normal(centers, scale), 1))


@pytest.fixture(scope="module")
def fitted() -> inference.Fit:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return inference.fit(gaussian, flows.Gaussian(2), **QUICK)


def test_a_gaussian_is_recovered(fitted: inference.Fit) -> None:
    assert fitted.log_z == pytest.approx(LOG_Z, abs=4 * fitted.log_z_error + 1e-3)
    assert LOG_Z - 0.02 < fitted.elbo < LOG_Z + 4 * fitted.elbo_error
    assert fitted.ess > 9_000
    assert not fitted.khat > 0.7
    assert fitted.diagnosis.reliable
    normal = fitted.flow().base_dist.base_dist
    torch.testing.assert_close(normal.loc, torch.tensor([3.0, -1.0]), atol=0.1, rtol=0)
    torch.testing.assert_close(normal.scale, torch.tensor([2.0, 0.5]), atol=0, rtol=0.1)


def test_draws_are_of_the_density(fitted: inference.Fit) -> None:
    z = fitted.draws(4000)
    assert z.shape == (4000, 2)
    torch.testing.assert_close(z.mean(0), torch.tensor([3.0, -1.0]), atol=0.15, rtol=0)
    torch.testing.assert_close(z.std(0), torch.tensor([2.0, 0.5]), atol=0, rtol=0.06)
    assert torch.equal(z, fitted.draws(4000))
    assert not torch.equal(z, fitted.draws(4000, seed=1))
    assert len(fitted.draws(100, resample=False).unique(dim=0)) == 100


def test_resampling_corrects_q() -> None:
    """Draws of q = N(0, 1), weighted to N(1, ½)."""
    start = flows.Gaussian(1)
    with torch.no_grad():
        start.base.hypernetwork.bias.copy_(torch.tensor([0.0, math.log(math.e - 1)]))
    target = Normal(1.0, 0.5)
    result = inference.fit(lambda z: target.log_prob(z).squeeze(-1), start, steps=1, learning_rate=1e-12)
    assert abs(result.draws(5000, resample=False).mean()) < 0.1
    z = result.draws(5000)
    assert z.mean().item() == pytest.approx(1.0, abs=0.05)
    assert z.std().item() == pytest.approx(0.5, abs=0.05)


def test_a_result_speaks(fitted: inference.Fit) -> None:
    assert str(fitted).endswith(BLIND_SPOT)
    summary = fitted.summary()
    assert summary["log_z"] == fitted.log_z
    assert summary["verdict"].endswith(BLIND_SPOT)
    steps = [window.step for window in fitted.history]
    assert steps == sorted(steps)
    assert fitted.history[-1].bound == pytest.approx(fitted.elbo, abs=0.1)


def test_seeds_reproduce_to_the_bit_and_torch_is_left_alone() -> None:
    start = partial(flows.Planar, 2, transforms=2)
    before = torch.get_rng_state()
    first, again, other = (
        inference.fit(gaussian, start, steps=20, samples=8, diagnosis_samples=200, seed=seed) for seed in (0, 0, 1)
    )
    diagnose(gaussian, Independent(Normal(torch.zeros(2), 3.0), 1), 100)
    first.draws(10)
    assert torch.equal(before, torch.get_rng_state())
    state = first.flow.state_dict()
    assert all(torch.equal(state[name], value) for name, value in again.flow.state_dict().items())
    assert first.summary() == again.summary()
    assert first.log_z != other.log_z


def test_the_flow_that_came_is_left_as_it_was() -> None:
    flow = flows.Planar(2, transforms=2)
    before = {name: value.clone() for name, value in flow.state_dict().items()}
    result = inference.fit(gaussian, flow, steps=5, diagnosis_samples=100)
    assert all(torch.equal(before[name], value) for name, value in flow.state_dict().items())
    assert any(not torch.equal(before[name], value) for name, value in result.flow.state_dict().items())


def test_a_collapsed_fit_is_not_praised() -> None:
    """On one of eight modes the weights are as good as any, and log Z is log 8 too low."""
    target = ring()
    start = flows.Gaussian(2)
    with torch.no_grad():
        start.base.hypernetwork.bias.copy_(torch.tensor([6.0, 0.0, -1.25, -1.25]))
    result = inference.fit(target.log_prob, start, **QUICK)
    assert result.log_z == pytest.approx(-math.log(8), abs=0.05)
    assert result.ess > 8_000
    assert result.verdict.endswith(BLIND_SPOT)
    # Draws spread four times wider reach the neighbours.
    assert result.diagnosis.wider_log_z > result.log_z + 0.5
    assert not result.diagnosis.reliable
    assert "has missed mass" in str(result)


def test_a_missed_mode_out_of_all_reach_is_at_least_not_ruled_out() -> None:
    target = ring(modes=2, radius=100.0)
    start = flows.Gaussian(2)
    with torch.no_grad():
        start.base.hypernetwork.bias.copy_(torch.tensor([100.0, 0.0, -1.25, -1.25]))
    diagnosis = diagnose(target.log_prob, start())
    assert diagnosis.log_z == pytest.approx(-math.log(2), abs=0.05)
    assert diagnosis.wider_log_z is None
    assert diagnosis.verdict.endswith(BLIND_SPOT)
    assert "Where q puts its mass" in diagnosis.verdict


def test_tempering_leaves_the_lesser_mode() -> None:
    """A q that starts on a mode with a tenth of the mass stays there, unless the density is flattened at first."""
    parts = Independent(Normal(torch.tensor([[-4.0], [4.0]]), 1.0), 1)
    target = MixtureSameFamily(Categorical(torch.tensor([0.1, 0.9])), parts)
    start = flows.Gaussian(1)
    with torch.no_grad():
        start.base.hypernetwork.bias.copy_(torch.tensor([-4.0, 0.5]))
    options = {"steps": 300, "samples": 32, "learning_rate": 0.2, "diagnosis_samples": 1000}
    plain = inference.fit(target.log_prob, start, **options)
    tempered = inference.fit(target.log_prob, start, tempering=0.02, **options)
    assert plain.elbo == pytest.approx(math.log(0.1), abs=0.1)
    assert tempered.elbo == pytest.approx(math.log(0.9), abs=0.1)
    assert tempered.history[0].beta < 0.9
    assert tempered.history[-1].beta == 1.0


def test_restarts_keep_the_best_bound_and_all_are_shown() -> None:
    target = ring(modes=2, radius=2.0)

    def start() -> flows.Flow:
        flow = flows.Gaussian(2)
        with torch.no_grad():
            flow.base.hypernetwork.bias.normal_()
        return flow

    result = inference.fit(target.log_prob, start, steps=20, restarts=3, diagnosis_samples=500)
    assert len({diagnosis.elbo for diagnosis in result.restarts}) == 3
    assert result.elbo == max(diagnosis.elbo for diagnosis in result.restarts)


def test_a_bound_that_stands_still_ends_the_fit() -> None:
    said: list[tuple[int, int, str]] = []
    result = inference.fit(
        gaussian,
        flows.Gaussian(2),
        steps=5000,
        samples=8,
        learning_rate=5e-2,
        tolerance=0.05,
        patience=1,
        diagnosis_samples=1000,
        progress=lambda *now: said.append(now),
    )
    assert result.converged
    assert result.history[-1].step < 2500
    assert result.history[-1].learning_rate < 5e-2
    assert said[-1][:2] == (5000, 5000)


def test_single_draws_that_are_not_finite_take_no_part() -> None:
    def broken(z: Tensor) -> Tensor:
        # Both value and derivative are NaN right of 3.5.
        return gaussian(z) + 0 * (3.5 - z[..., 1]).sqrt()

    result = inference.fit(broken, flows.Gaussian(2), steps=250, samples=32, learning_rate=5e-2)
    assert result.log_z == pytest.approx(LOG_Z, abs=0.05)
    assert all(p.isfinite().all() for p in result.flow.parameters())

    half = diagnose(lambda z: gaussian(z).masked_fill(z[..., 0] > 3, math.nan), result.flow())
    assert half.undefined == pytest.approx(5000, abs=300)
    assert not half.reliable
    assert half.log_z == pytest.approx(LOG_Z - math.log(2), abs=0.1)
    assert "not a number" in half.verdict


def test_a_fit_that_explodes_goes_back_and_on() -> None:
    made: list[flows.Flow] = []

    def start() -> flows.Flow:
        made.append(flows.Gaussian(2))
        return made[0]

    def explode(done: int, total: int, words: str) -> None:
        if done == 300:  # between two windows: the end of the first is no place to go back to
            with torch.no_grad():
                for parameter in made[0].parameters():
                    parameter.add_(20.0)

    found = inference.fit(lambda z: -0.5 * (z - 1).square().sum(-1), start, steps=800, progress=explode)
    bounds = {window.step: window.bound for window in found.history}
    assert bounds[400] < -100
    assert bounds[500] > 1
    assert found.elbo == pytest.approx(math.log(2 * math.pi), abs=0.01)
    rates = {window.step: window.learning_rate for window in found.history}
    assert rates[500] == pytest.approx(rates[400] / 2)


def test_an_affine_step_makes_every_gaussian_of_a_diagonal_one() -> None:
    target = MultivariateNormal(torch.tensor([1.0, -1.0]), torch.tensor([[1.0, 0.9], [0.9, 1.0]]))
    diagonal = inference.fit(target.log_prob, flows.Gaussian(2), **QUICK)
    full = inference.fit(target.log_prob, flows.Gaussian(2), affine=True, **QUICK)
    # A diagonal Gaussian is at best ½ log(1 − 0.9²) away.
    assert diagonal.elbo < 0.5 * math.log(1 - 0.9**2) + 0.05
    assert full.elbo > -0.02
    assert full.history[-1].step == QUICK["steps"]

    support = flows.onto(flows.Gaussian(2), constraints.positive)
    outer = inference.fit(lambda x: target.log_prob(x.log()) - x.log().sum(-1), support, affine=True, **QUICK)
    assert outer.elbo > -0.02


def test_path_gradients_vanish_where_q_is_the_density() -> None:
    """With eight draws a step the noise of an ordinary gradient keeps q away, and that of the path's does not."""
    options = QUICK | {"samples": 8, "tolerance": 0.0, "patience": 100}
    ordinary, path = (
        inference.fit(gaussian, flows.Gaussian(2), path_gradient=path, affine=True, **options) for path in (False, True)
    )
    assert LOG_Z - path.elbo < 1e-4
    assert LOG_Z - ordinary.elbo > 10 * (LOG_Z - path.elbo)
    assert path.history[-1].error < 1e-3 < ordinary.history[-1].error


def test_positive_variables_in_one_line() -> None:
    target = Gamma(torch.tensor([2.0, 5.0]), torch.tensor([1.0, 2.0]))
    flow = flows.onto(flows.Gaussian(2), constraints.positive)
    result = inference.fit(lambda x: target.log_prob(x).sum(-1) + 1.5, flow, **QUICK)
    assert result.log_z == pytest.approx(1.5, abs=0.03)
    torch.testing.assert_close(result.draws(5000).mean(0), target.mean, atol=0.1, rtol=0.05)


def test_a_simplex_in_one_line() -> None:
    target = Dirichlet(torch.tensor([2.0, 3.0, 4.0]))
    result = inference.fit(target.log_prob, flows.onto(flows.Gaussian(2), constraints.simplex), **QUICK)
    assert result.log_z == pytest.approx(0.0, abs=0.03)
    torch.testing.assert_close(result.draws(5000).mean(0), target.mean, atol=0.02, rtol=0)


def test_any_distribution_is_diagnosed() -> None:
    target = MultivariateNormal(torch.zeros(3), torch.eye(3) + 0.5)
    good = diagnose(target.log_prob, MultivariateNormal(torch.zeros(3), torch.eye(3) + 0.6))
    assert good.reliable
    assert good.log_z == pytest.approx(0.0, abs=4 * good.log_z_error)
    narrow = diagnose(target.log_prob, Independent(Normal(torch.zeros(3), 0.4), 1))
    assert narrow.khat > 0.7
    assert not narrow.reliable
    assert "too heavy-tailed" in narrow.verdict
    exact = diagnose(target.log_prob, target)
    assert exact.reliable
    assert exact.summary()["khat"] is None


def test_a_draw_far_above_all_others_is_in_no_tail_and_still_not_to_be_trusted() -> None:
    def spiked(z: torch.Tensor) -> torch.Tensor:
        return Normal(0.0, 1.0).log_prob(z).sum(-1) + 12.0 * (z[..., 0] > 4.0)

    diagnosis = diagnose(spiked, Independent(Normal(torch.zeros(1), 1.1), 1))
    assert diagnosis.ess < 10
    assert diagnosis.khat < 0.7
    assert not diagnosis.reliable
    assert f"leave {diagnosis.ess:.0f} of 10000 draws in effect" in diagnosis.verdict


def test_wider_draws_have_the_density_they_claim() -> None:
    """Importance sampling with any spread estimates the same integral."""
    q = flows.Planar(2, transforms=2)()
    for spread in (0.8, 1.5, 2.0):
        _, log_w = weighted_draws(q.log_prob, q, 20_000, spread=spread)
        assert log_w.exp().mean().item() == pytest.approx(1.0, abs=0.05)


# Maximum likelihood.


def test_a_known_density_reaches_its_entropy() -> None:
    x = 100 + torch.randn(2000, 2) @ torch.tensor([[2.0, 1.0], [0.0, 0.1]])
    result = inference.fit_density(flows.MAF(2, transforms=2), x, epochs=30, learning_rate=1e-2, patience=3)
    entropy = math.log(2 * math.pi * math.e) + math.log(0.2)
    assert result.log_likelihood == pytest.approx(-entropy, abs=4 * result.log_likelihood_error)
    assert result.train_log_likelihood == pytest.approx(-entropy, abs=0.05)
    assert result.draws(2000).mean(0).sub(100).abs().max() < 0.2
    assert str(result).startswith("Flow after")


def test_a_linear_gaussian_posterior_from_simulations() -> None:
    """θ ~ N(0, 1), x = 50 + 10 (θ + ½ ε): the posterior is N(0.8 (x − 50)/10, 0.2)."""
    theta = torch.randn(4000, 1)
    x = 50 + 10 * (theta + 0.5 * torch.randn(4000, 1))
    result = inference.fit_density(flows.Gaussian(1, context=1), theta, x, epochs=25, learning_rate=2e-2, patience=3)
    observed = torch.tensor([[40.0], [50.0], [65.0]])
    z = result.draws(4000, observed).squeeze(-1)
    torch.testing.assert_close(z.mean(0), torch.tensor([-0.8, 0.0, 1.2]), atol=0.12, rtol=0)
    torch.testing.assert_close(z[:, :2].std(0), torch.full((2,), 0.2**0.5), atol=0.06, rtol=0)


def test_data_on_a_constraint_are_standardized_where_they_are_unconstrained() -> None:
    x = (7 + 0.3 * torch.randn(2000, 1)).exp()
    flow = flows.onto(flows.Gaussian(1), constraints.positive)
    result = inference.fit_density(flow, x, epochs=15, learning_rate=1e-2)
    entropy = 0.5 * math.log(2 * math.pi * math.e) + math.log(0.3) + 7
    assert result.train_log_likelihood == pytest.approx(-entropy, abs=0.06)
    assert isinstance(result.flow(), FlowDistribution)


@pytest.mark.parametrize("constraint", [constraints.interval(0.0, 1.0), constraints.positive, constraints.real])
def test_a_fitted_flow_is_fitted_further(constraint: constraints.Constraint) -> None:
    """On the scales that it has: standardized twice, a context and the variables would be others."""
    noise, context = torch.randn(600, 1), 50 + torch.randn(600, 1)
    bijection = torch.distributions.biject_to(constraint)
    x = bijection(context - 50 + 0.5 * noise)
    flow = flows.onto(flows.RealNVP(1, context=1, transforms=2), constraint)
    first = inference.fit_density(flow, x, context, epochs=10)
    again = inference.fit_density(first.flow, x, context, epochs=2)
    q = again.flow(context[0])
    assert str(q.support) == str(first.flow(context[0]).support)
    assert again.history[0].validation > first.history[-1].validation - 0.5
    grid = bijection(torch.linspace(-8, 8, 4001)).unsqueeze(-1)
    assert torch.trapezoid(q.log_prob(grid).exp(), grid.squeeze(-1)).item() == pytest.approx(1, abs=1e-2)


def test_fits_to_data_reproduce_to_the_bit() -> None:
    x = torch.randn(100, 2)
    flow = flows.Planar(2, transforms=1)
    before = torch.get_rng_state()
    first, again = (inference.fit_density(flow, x, epochs=2) for _ in range(2))
    assert torch.equal(before, torch.get_rng_state())
    assert first.summary() == again.summary()
    assert torch.equal(first.draws(5), again.draws(5))


def test_overfitting_stops_at_the_best_epoch() -> None:
    x = torch.randn(40, 2)
    flow = flows.MAF(2, transforms=2)
    result = inference.fit_density(flow, x, validation=0.5, epochs=60, learning_rate=2e-2, patience=2, batch_size=10)
    assert result.converged
    assert result.log_likelihood == pytest.approx(max(epoch.validation for epoch in result.history), abs=1e-5)
    assert result.history[result.best_epoch - 1].validation == pytest.approx(result.log_likelihood, abs=1e-5)


X = torch.zeros(10, 2)
REFUSED = {
    "wrong shape": (lambda: inference.fit(lambda z: z, flows.Gaussian(2)), "one number for each point"),
    "a number": (lambda: inference.fit(lambda z: 1.0, flows.Gaussian(2)), "type float"),
    "NaN everywhere": (lambda: inference.fit(lambda z: z.sum(-1) * math.nan, flows.Gaussian(2)), "is finite at draws"),
    "no gradient": (lambda: inference.fit(lambda z: z.detach().sum(-1), flows.Gaussian(2)), "with a gradient"),
    "a flow with context": (lambda: inference.fit(gaussian, flows.Gaussian(2, context=3)), "without context"),
    "no flow": (lambda: inference.fit(gaussian, lambda: 3), "Expected a flow"),
    "no function": (lambda: inference.fit(3, flows.Gaussian(2)), "log_density as a function"),
    "half a step": (
        lambda: inference.fit(gaussian, flows.Gaussian(2), steps=10.5),
        "steps as a whole number; got 10.5",
    ),
    "no steps": (lambda: inference.fit(gaussian, flows.Gaussian(2), steps=0), "steps >= 1"),
    "tempering of zero": (lambda: inference.fit(gaussian, flows.Gaussian(2), tempering=0.0), "in (0, 1]"),
    "NaN in a diagnosis": (lambda: diagnose(lambda z: z.sum(-1) * math.nan, flows.Gaussian(2)()), "is a number"),
    "a batch of distributions": (lambda: diagnose(gaussian, Normal(torch.zeros(2), 1.0)), "batch_shape ()"),
    "no batch axis": (lambda: inference.fit_density(flows.Gaussian(2), X[0]), "with a batch axis"),
    "other features": (lambda: inference.fit_density(flows.Gaussian(3), X), "(N, 3)"),
    "integers": (lambda: inference.fit_density(flows.Gaussian(2), X.long()), "floating-point"),
    "NaN in x": (lambda: inference.fit_density(flows.Gaussian(2), X * math.nan), "finite values in x"),
    "a missing context": (lambda: inference.fit_density(flows.Gaussian(2, context=3), X), "(N, 3)"),
    "a needless context": (lambda: inference.fit_density(flows.Gaussian(2), X, X), "context=0"),
    "a context of another length": (
        lambda: inference.fit_density(flows.Gaussian(2, context=2), X, X[:5]),
        "context (10, 2)",
    ),
    "data outside the support": (
        lambda: inference.fit_density(flows.onto(flows.Gaussian(2), constraints.positive), X - 1),
        "in the flow's support",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_gets_a_sentence(name: str) -> None:
    attempt, sentence = REFUSED[name]
    with pytest.raises(ValueError, match=r"^Expected .*; got ") as error:
        attempt()
    assert sentence in str(error.value)


def test_a_diagnosis_without_any_figure_is_not_reliable() -> None:
    few = diagnose(gaussian, flows.Gaussian(2)(), 5)
    assert isinstance(few, Diagnosis)
    assert "unknown" in few.verdict
    assert not few.reliable
