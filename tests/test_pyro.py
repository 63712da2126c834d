"""Flows in Pyro, on Pyro itself: what its own tests ask of guides, distributions and transforms, asked of ours."""

from __future__ import annotations

import copy
import io
import math
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from cases import FLOWS, SCALES, redraw
from torch import Tensor, nn
from torch.testing import assert_close

pyro = pytest.importorskip("pyro")

import pyro.distributions as dist  # noqa: E402
from pyro import poutine  # noqa: E402
from pyro.infer import (  # noqa: E402
    SVI,
    JitTrace_ELBO,
    Predictive,
    Trace_ELBO,
    TraceEnum_ELBO,
    TraceGraph_ELBO,
    TraceMeanField_ELBO,
)
from pyro.infer.autoguide import (  # noqa: E402
    AutoDelta,
    AutoDiagonalNormal,
    AutoDiscreteParallel,
    AutoGuideList,
    AutoNormalizingFlow,
    init_to_feasible,
    init_to_mean,
    init_to_median,
    init_to_sample,
)
from pyro.infer.importance import vectorized_importance_weights  # noqa: E402
from pyro.infer.reparam import NeuTraReparam, ProjectedNormalReparam  # noqa: E402
from pyro.nn import PyroModule, PyroParam, PyroSample  # noqa: E402
from torch.distributions import constraints  # noqa: E402

from benchmarks import pyro_guides  # noqa: E402
from sylvester import flows  # noqa: E402
from sylvester.contrib.pyro import AutoFlow, PyroFlowDistribution, PyroFlowTransform, as_pyro, log_density  # noqa: E402
from sylvester.diagnostics import diagnose  # noqa: E402
from sylvester.distributions import FlowDistribution  # noqa: E402
from sylvester.inference import fit  # noqa: E402
from sylvester.transforms import SylvesterTransform  # noqa: E402

ROOT = Path(__file__).parents[1]
triangular = partial(flows.TriangularSylvester, transforms=3)
ELBOS = pytest.mark.parametrize("elbo", [Trace_ELBO, TraceGraph_ELBO, TraceEnum_ELBO])
STARTS = pytest.mark.parametrize("init_loc_fn", [init_to_feasible, init_to_mean, init_to_median, init_to_sample])


@pytest.fixture(autouse=True)
def clean(float64: None) -> Iterator[None]:
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    yield
    pyro.clear_param_store()


@pytest.fixture
def solves(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each inverse of a Sylvester step: the number of its points."""
    counted: list[int] = []
    backward = SylvesterTransform._backward

    def counting(self: SylvesterTransform, y: Tensor) -> tuple[Tensor, Tensor]:
        counted.append(y[..., 0].numel())
        return backward(self, y)

    monkeypatch.setattr(SylvesterTransform, "_backward", counting)
    return counted


def auto(model: Callable, **options) -> AutoFlow:
    return AutoFlow(model, triangular, **options)


def scaled(guide: AutoFlow, scale: float) -> AutoFlow:
    """Parameters of the steps away from their start."""
    with torch.no_grad():
        for parameter in guide.flow.parameters():
            parameter.add_(scale * torch.randn_like(parameter))
    return guide


def steps(model: Callable, guide: Callable, n: int, *args, rate: float = 0.02, particles: int = 32) -> list[float]:
    optimizer = pyro.optim.ClippedAdam({"lr": rate, "lrd": 0.02 ** (1 / n)})
    svi = SVI(model, guide, optimizer, Trace_ELBO(num_particles=particles, vectorize_particles=True))
    return [svi.step(*args) for _ in range(n)]


def every_support() -> None:
    pyro.sample("real", dist.Normal(0.0, 1.0))
    pyro.sample("vector", dist.Normal(torch.zeros(2), torch.ones(2)).to_event(1))
    with pyro.plate("plate", 3):
        pyro.sample("in a plate", dist.Gamma(2.0, torch.ones(3)))
        with pyro.plate("inner", 2):
            pyro.sample("in two", dist.Beta(2.0, 2.0))
    pyro.sample("correlated", dist.MultivariateNormal(torch.zeros(2), torch.eye(2)))
    pyro.sample("simplex", dist.Dirichlet(torch.ones(3)))
    pyro.sample("masked", dist.Normal(0, 1).expand((2,)).mask(torch.arange(2) > 0).to_event(1))
    pyro.sample("correlation", dist.LKJCholesky(2, torch.tensor(1.0)))
    pyro.sample("interval", dist.Uniform(-1.0, 3.0))


# The guide


def test_the_whole_density_is_that_of_the_joint_latent() -> None:
    def model() -> None:
        pyro.sample("z", dist.Normal(0.0, 1.0).expand([3]).to_event(1))

    guide = auto(model)
    trace = poutine.trace(guide).get_trace()
    replayed = poutine.trace(poutine.replay(model, trace)).get_trace()
    trace.compute_log_prob()
    replayed.compute_log_prob()
    assert "_AutoFlow_latent" not in replayed.nodes
    latent = trace.nodes["_AutoFlow_latent"]
    assert_close(latent["log_prob_sum"], guide.get_posterior().log_prob(latent["value"].clone()))
    assert_close(trace.nodes["z"]["value"], latent["value"])
    assert trace.nodes["z"]["log_prob_sum"] == 0


@ELBOS
def test_factors_count_once_per_element(elbo: type) -> None:
    def model(log_factor: Tensor) -> None:
        pyro.sample("z", dist.Normal(0.0, 1.0))
        pyro.factor("f", log_factor)
        with pyro.plate("plate", 3):
            pyro.factor("g", log_factor)
            pyro.sample("w", dist.Normal(torch.zeros(3), torch.ones(3)))

    guide, loss = auto(model), elbo(strict_enumeration_warning=False)
    loss.loss(model, guide, torch.tensor(0.0))
    values = []
    for factor in (5.0, 4.0):
        pyro.set_rng_seed(1)
        values.append(loss.loss(model, guide, torch.tensor(factor)))
    assert values[0] - values[1] == pytest.approx(-1 - 3)


@pytest.mark.parametrize("particles", [1, 10])
@ELBOS
@STARTS
def test_every_support_every_start(init_loc_fn: Callable, elbo: type, particles: int) -> None:
    guide = auto(every_support, init_loc_fn=init_loc_fn)
    estimator = elbo(num_particles=particles, vectorize_particles=True, strict_enumeration_warning=False)
    svi = SVI(every_support, guide, pyro.optim.Adam({"lr": 0.01}), estimator)
    before = guide() and {name: value.clone() for name, value in guide.flow.named_parameters()}
    assert math.isfinite(svi.step())
    assert all((value != before[name]).any() for name, value in guide.flow.named_parameters())


def test_draws_lie_in_their_supports_and_have_their_shapes() -> None:
    guide = auto(every_support)
    sites = poutine.trace(every_support).get_trace().nodes
    guide()
    scaled(guide, 0.5)
    for values in (
        guide(),
        guide.median(),
        *({k: v[i] for k, v in guide.quantiles([0.1, 0.9]).items()} for i in (0, 1)),
    ):
        for name, value in values.items():
            assert value.shape == sites[name]["value"].shape
            assert sites[name]["fn"].support.check(value).all(), name


def test_the_density_of_a_draw_comes_from_the_draw(solves: list[int]) -> None:
    guide = auto(every_support)
    steps(every_support, guide, 3)
    estimator = TraceMeanField_ELBO(num_particles=4, vectorize_particles=True)
    SVI(every_support, guide, pyro.optim.Adam({"lr": 0.01}), estimator).evaluate_loss()
    assert solves == []
    guide.get_posterior().log_prob(torch.zeros(guide.latent_dim))
    assert solves == [1, 1, 1]


def test_it_starts_where_it_is_told() -> None:
    inits = {"x": torch.randn(()), "y": torch.rand(5) + 3}

    def model() -> None:
        pyro.sample("x", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.LogNormal(torch.zeros(5), 1.0).to_event(1))

    for scale in (0.1, 1e-4):
        guide = auto(model, init_loc_fn=lambda site: inits[site["name"]], init_scale=scale)
        median = guide.median()
        assert_close(median["x"], inits["x"], rtol=0, atol=2e-3 * scale)
        assert_close(median["y"].log(), inits["y"].log(), rtol=0, atol=2e-3 * scale)
        deviations = guide.get_posterior().sample((10_000,)).std(0)
        assert (deviations / scale - 1).abs().max() < 0.05


def test_quantiles_are_those_of_the_constrained_numbers() -> None:
    """Each in its own direction: the bijection onto numbers below a bound turns the order round."""

    def model() -> None:
        pyro.sample(
            "below",
            dist.TransformedDistribution(dist.LogNormal(0.0, 1.0), [torch.distributions.AffineTransform(2.0, -1.0)]),
        )
        pyro.sample("beta", dist.Beta(2.0, 2.0).expand([2]).to_event(1))
        pyro.sample("real", dist.Normal(0.0, 1.0))

    guide = auto(model)
    guide()
    scaled(guide, 0.3)
    levels = [0.1, 0.5, 0.9]
    found, median = guide.quantiles(levels), guide.median()
    draws = Predictive(model, guide=guide, num_samples=40_000, parallel=True)()
    for name in ("below", "beta", "real"):
        expected = draws[name].reshape(40_000, *found[name].shape[1:]).quantile(torch.tensor(levels), 0)
        spread = draws[name].std()
        assert ((found[name] - expected).abs() / spread).max() < 0.06, name
        assert (found[name].diff(dim=0) > 0).all()
        assert_close(median[name], found[name][1])
        assert not found[name].requires_grad
    again = guide.quantiles(levels)
    assert all(torch.equal(found[name], again[name]) for name in found)


@pytest.mark.parametrize("how", ["deepcopy", "torch.save"])
def test_a_guide_is_copied_and_saved_after_use(how: str) -> None:
    guide = auto(every_support)
    guide()
    if how == "deepcopy":
        other = copy.deepcopy(guide)
    else:
        file = io.BytesIO()
        torch.save(guide, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    pyro.set_rng_seed(3)
    expected = guide.call()
    pyro.set_rng_seed(3)
    assert_close(other.call(), expected)
    assert {*dict(other.named_parameters())} == {*dict(guide.named_parameters())}


def test_a_guide_is_part_of_a_list() -> None:
    data = torch.tensor([0.0, 1.0, 10.0, 11.0, 12.0])

    def model(data: Tensor) -> None:
        weights = pyro.sample("weights", dist.Dirichlet(0.5 * torch.ones(2)))
        locs = pyro.sample("locs", dist.Normal(0, 10).expand_by([2]).to_event(1))
        scale = pyro.sample("scale", dist.LogNormal(0, 1))
        with pyro.plate("data", len(data)):
            assignment = pyro.sample("assignment", dist.Categorical(weights.expand(len(data), 2)))
            pyro.sample("obs", dist.Normal(locs[assignment], scale), obs=data)

    guide = AutoGuideList(model)
    guide.append(auto(poutine.block(model, expose=["weights", "locs"])))
    guide.append(AutoDelta(poutine.block(model, expose=["scale"])))
    guide.append(AutoDiscreteParallel(poutine.block(model, expose=["assignment"])))
    assert math.isfinite(TraceEnum_ELBO(max_plate_nesting=1).loss_and_grads(model, guide, data))
    assert set(guide(data)) == {"weights", "locs", "scale", "assignment"}


def test_a_guide_beside_one_of_ones_own() -> None:
    def model() -> None:
        pyro.sample("x", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.MultivariateNormal(torch.zeros(5), torch.eye(5)))

    def guide_x() -> dict[str, Tensor]:
        return {"x": pyro.sample("x", dist.Delta(pyro.param("x_loc", torch.tensor(0.0))))}

    guide = AutoGuideList(model)
    guide.append(guide_x)
    guide.append(auto(poutine.block(model, expose=["y"])))
    assert set(guide()) == {"x", "y"}


def test_the_model_may_be_a_module_with_parameters() -> None:
    class Model(PyroModule):
        def __init__(self) -> None:
            super().__init__()
            self.x_loc = nn.Parameter(torch.tensor(1.0))
            self.x_scale = PyroParam(torch.tensor(0.1), constraints.positive)

        def forward(self) -> None:
            x = pyro.sample("x", dist.Normal(self.x_loc, self.x_scale))
            pyro.sample("y", dist.Normal(2.0, 0.1))
            pyro.sample("z", dist.Normal(1.0, 0.1), obs=x)

    model = Model()
    guide = auto(model)
    steps(model, guide, 50, rate=0.005, particles=4)
    assert guide.median()["x"].item() == pytest.approx(1.0, abs=0.1)
    assert guide.median()["y"].item() == pytest.approx(2.0, abs=0.1)


class RandomLinear(nn.Linear, PyroModule):
    def __init__(self, features: int):
        super().__init__(features, 1)
        self.weight = PyroSample(dist.Normal(0.0, 1.0).expand([1, features]).to_event(2))
        self.bias = PyroSample(dist.Normal(0.0, 10.0).expand([1]).to_event(1))


class LinearRegression(PyroModule):
    def __init__(self, features: int):
        super().__init__()
        self.linear = RandomLinear(features)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        sigma = pyro.sample("sigma", dist.LogNormal(0.0, 1.0))
        mean = self.linear(x).squeeze(-1)
        with pyro.plate("plate", len(x)):
            return pyro.sample("obs", dist.Normal(mean, sigma), obs=y)


def test_predictive_of_a_regression() -> None:
    x, y = torch.randn(10, 3), torch.randn(10)
    model = LinearRegression(3)
    guide = auto(model)
    SVI(model, guide, pyro.optim.Adam({"lr": 0.005}), Trace_ELBO()).step(x, y)
    draws = Predictive(model, guide=guide, num_samples=7)(x)
    assert {name: value.shape for name, value in draws.items()} == {
        "linear.weight": (7, 1, 1, 3),
        "linear.bias": (7, 1, 1),
        "sigma": (7, 1),
        "obs": (7, 10),
    } or {name: value.shape for name, value in draws.items()} == {
        "linear.weight": (7, 1, 3),
        "linear.bias": (7, 1),
        "sigma": (7,),
        "obs": (7, 10),
    }


@pytest.mark.parametrize("shape", [(), (6,), (5, 4)], ids=str)
def test_plates_around_guide_and_model(shape: tuple[int, ...]) -> None:
    def model() -> tuple[Tensor, ...]:
        a = pyro.sample("a", dist.Normal(0, 1))
        b = pyro.sample("b", dist.Normal(a[..., None], torch.ones(3)).to_event(1))
        with pyro.plate("i", 2):
            c = pyro.sample("c", dist.Dirichlet(b.exp()))
            pyro.sample("d", dist.Categorical(logits=c), obs=torch.tensor([0, 0]))
        return a, b, c

    guide = auto(model)
    with pyro.plate_stack("particles", shape, rightmost_dim=-2):
        trace = poutine.trace(guide).get_trace()
        a, b, c = poutine.replay(model, trace)()
    assert a.shape == ((*shape, 1) if shape else ())
    assert b.shape == ((*shape, 1, 3) if shape else (3,))
    assert c.shape == (*shape, 2, 3)
    trace.compute_log_prob()
    assert trace.nodes["_AutoFlow_latent"]["log_prob"].shape == ((*shape, 1) if shape else ())


@STARTS
def test_what_it_cannot_do_is_said_as_pyros_guides_say_it(init_loc_fn: Callable) -> None:
    def discrete() -> None:
        p = pyro.sample("p", dist.Beta(2.0, 2.0))
        pyro.sample("x", dist.Bernoulli(p))

    def sphere() -> None:
        x = pyro.sample("x", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
        pyro.sample("y", dist.ProjectedNormal(x))

    with pytest.raises(ValueError, match=r"enumeration\.html"):
        auto(discrete, init_loc_fn=init_loc_fn)()
    with pytest.raises(ValueError, match="ProjectedNormalReparam"):
        auto(sphere, init_loc_fn=init_loc_fn)()
    guide = auto(poutine.reparam(sphere, {"y": ProjectedNormalReparam()}), init_loc_fn=init_loc_fn)
    poutine.trace(guide).get_trace().compute_log_prob()
    with pytest.raises(RuntimeError, match="AutoFlow found no latent variables"):
        auto(lambda: None)()


@pytest.mark.parametrize(
    ("estimator", "batch"),
    [
        (Trace_ELBO, True),
        (JitTrace_ELBO, False),
        *(pytest.param(*rest, marks=pytest.mark.slow) for rest in [(Trace_ELBO, False), (JitTrace_ELBO, True)]),
    ],
)
def test_a_conjugate_posterior_is_exact(batch: bool, estimator: type) -> None:
    """Its moments, and its bound, which is then log p(data)."""
    data = torch.randn(3)

    def model(data: Tensor) -> Tensor:
        loc = None if batch else pyro.sample("loc", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(data)):
            loc = pyro.sample("loc", dist.Normal(0.0, 1.0)) if loc is None else loc
            pyro.sample("obs", dist.Normal(loc, 1.0), obs=data)
        return loc

    if batch:
        mean, deviation = data / 2, 0.5**0.5
        log_z = dist.Normal(0.0, 2**0.5).log_prob(data).sum().item()
    else:
        mean, deviation = data.sum() / 4, 0.5
        log_z = dist.MultivariateNormal(torch.zeros(3), torch.eye(3) + 1).log_prob(data).item()
    guide = AutoFlow(model, partial(flows.TriangularSylvester, transforms=2))
    elbo = estimator(num_particles=256, vectorize_particles=True, max_plate_nesting=1, ignore_jit_warnings=True)
    svi = SVI(model, guide, pyro.optim.ClippedAdam({"lr": 0.05, "lrd": 0.01 ** (1 / 300)}), elbo)
    for _ in range(300):
        svi.step(data)
    with torch.no_grad():
        draws = guide.get_posterior().sample((50_000,))
        assert ((draws.mean(0) - mean).abs() / deviation).max() < 0.03
        assert (draws.std(0) / deviation - 1).abs().max() < 0.03
        diagnosis = diagnose(log_density(guide, data), guide.get_posterior())
        assert diagnosis.elbo == pytest.approx(log_z, abs=0.05)
        assert diagnosis.log_z == pytest.approx(log_z, abs=4 * diagnosis.log_z_error)
        assert diagnosis.log_z_error < 0.01


def test_it_bends_where_a_gaussian_cannot() -> None:
    """A banana of a positive latent and a real one, with log Z = 0."""

    def model() -> None:
        scale = pyro.sample("scale", dist.LogNormal(0.0, 0.5))
        pyro.sample("y", dist.Normal(scale.log() ** 2 * 2, 0.3))

    guide = AutoFlow(model, lambda features: flows.inverted(flows.MAF(features, transforms=1)))
    steps(model, guide, 300)
    diagnosis = diagnose(log_density(guide), guide.get_posterior())
    assert -0.25 < diagnosis.elbo < 0.02
    gaussian = AutoFlow(model, flows.Gaussian)
    steps(model, gaussian, 300)
    assert diagnose(log_density(gaussian), gaussian.get_posterior()).elbo < diagnosis.elbo - 0.2


def test_neutra_samples_through_the_guide() -> None:
    """With a guide that is exact, the model is a standard normal of the noise."""

    def model() -> None:
        x = pyro.sample("x", dist.LogNormal(1.0, 0.5))
        pyro.sample("y", dist.Normal(x.log(), 0.2))

    guide = AutoFlow(model, flows.Gaussian)
    guide()
    covariance = torch.tensor([[0.25, 0.25], [0.25, 0.29]])
    tril = torch.linalg.cholesky(covariance)
    outer = guide.flow.steps[-1]
    base = guide.flow().base_dist.base_dist
    with torch.no_grad():
        # c + S (T (μ + σ ε) + m) = 1 + L ε
        scale = tril.diagonal() / base.scale
        outer.log_scale.copy_(scale.log())
        outer.below.copy_(tril / base.scale / scale.unsqueeze(-1))
        unit = outer.below.tril(-1) + torch.eye(2)
        outer.shift.copy_((1 - outer.loc) / scale - unit @ base.loc)
    neutra = NeuTraReparam(guide)
    noise = dist.Normal(torch.zeros(2), 1.0).to_event(1)
    for z in torch.randn(5, 2):
        conditioned = poutine.condition(neutra.reparam(model), {"x_shared_latent": z})
        trace = poutine.trace(conditioned).get_trace()
        assert_close(trace.log_prob_sum(), noise.log_prob(z))
    assert_close(guide.get_transform()(z), guide.get_posterior().rsample_and_log_prob(noise=z)[0])


# The model as a density


def test_the_log_density_is_the_models(solves: list[int]) -> None:
    def model(x: Tensor, y: Tensor) -> None:
        every_support()
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("all", 10, subsample_size=len(x)), poutine.scale(scale=0.5):
            pyro.sample("obs", dist.Normal(x * w, 1.0), obs=y)

    data = torch.randn(2, 4)
    guide = auto(model)
    guide(*data)
    scaled(guide, 0.3)
    with torch.no_grad():
        expected, _, trace = vectorized_importance_weights(model, guide, *data, num_samples=5, max_plate_nesting=2)
        latent = trace.nodes["_AutoFlow_latent"]["value"].reshape(5, -1)
        found = log_density(guide, *data)(latent) - guide.get_posterior().log_prob(latent)
    assert_close(found, expected)
    assert log_density(guide, *data)(latent.reshape(5, 1, -1)).shape == (5, 1)


def test_other_guides_of_pyros_have_a_log_density_too() -> None:
    def model(y: Tensor) -> None:
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(x, 1.0), obs=y)

    y = torch.tensor(0.3)
    guide = AutoDiagonalNormal(model, init_scale=0.7)
    diagnosis = diagnose(log_density(guide, y), guide.get_posterior())
    assert diagnosis.log_z == pytest.approx(dist.Normal(0.0, 2**0.5).log_prob(y).item(), abs=4 * diagnosis.log_z_error)
    result = fit(log_density(guide, y), flows.Gaussian(1), steps=300)
    assert result.elbo == pytest.approx(dist.Normal(0.0, 2**0.5).log_prob(y).item(), abs=0.01)


# The distribution


@pytest.mark.parametrize("name", FLOWS)
def test_a_flow_is_the_same_in_pyro(name: str) -> None:
    flow = redraw(FLOWS[name](3, 2, 2), 0.5, name)
    ours = as_pyro(flow)
    assert ours.state_dict().keys() == flow.state_dict().keys()
    h, noise, z = torch.randn(4, 2), torch.randn(5, 4, 3), torch.randn(5, 4, 3)
    q, p = flow(h), ours(h)
    assert type(p) is PyroFlowDistribution
    assert (p.batch_shape, p.event_shape, p.event_dim) == ((4,), (3,), 1)
    assert p.has_rsample
    assert not p.has_enumerate_support
    assert p.shape((5,)) == (5, 4, 3)
    assert_close(p.rsample_and_log_prob(noise=noise), q.rsample_and_log_prob(noise=noise))
    assert_close(p.log_prob(z), q.log_prob(z))
    assert_close(as_pyro(q).log_prob(z), q.log_prob(z))
    (p.log_prob(z).sum() + p.rsample().sum()).backward()
    assert all(parameter.grad is not None for parameter in flow.parameters())


def test_the_methods_of_pyros_distributions(solves: list[int]) -> None:
    flow = as_pyro(flows.TriangularSylvester(3, context=2, transforms=2))
    d, z = flow(torch.randn(4, 1, 2)), torch.randn(4, 5, 3)
    expanded, by = d.expand([4, 5]), d.expand_by([6])
    assert (expanded.batch_shape, by.batch_shape) == ((4, 5), (6, 4, 1))
    assert_close(expanded.log_prob(z), d.log_prob(z))
    event, mask = expanded.to_event(1), torch.arange(5) > 1
    assert (event.batch_shape, event.event_shape) == ((4,), (5, 3))
    assert_close(event.log_prob(z), d.log_prob(z).sum(-1))
    assert event.to_event(-1) is expanded
    masked = expanded.mask(mask)
    assert_close(masked.log_prob(z), d.log_prob(z) * mask)
    assert solves
    solves.clear()
    for each in (d, expanded, by, event, masked, expanded.mask(mask).to_event(2), by.to_event(2).mask(False)):
        assert each.has_rsample
        value = each()
        assert value.shape == each.shape()
        log_prob, score_function, entropy = each.score_parts(value)
        assert (log_prob.shape, score_function) == (each.batch_shape, 0)
        assert entropy.shape == each.batch_shape
    assert solves == []
    assert torch.equal(expanded.rsample((2,)).std(0) > 0, torch.ones(4, 5, 3, dtype=torch.bool))  # no two share noise


@pytest.mark.parametrize("form", ["plain", "to_event", "mask", "expand_by", "obs_mask"])
@pytest.mark.parametrize("particles", [1, 7])
def test_an_amortized_guide_never_solves(form: str, particles: int, solves: list[int]) -> None:
    flow, encoder = as_pyro(flows.TriangularSylvester(2, context=3, transforms=2)), nn.Linear(4, 3)
    data = torch.randn(6, 4)

    def model(x: Tensor) -> None:
        if form == "to_event":
            z = pyro.sample("z", dist.Normal(torch.zeros(len(x), 2), 1.0).to_event(2))
            pyro.sample("x", dist.Normal(z.repeat_interleave(2, -1), 1.0).to_event(2), obs=x)
            return
        with pyro.plate("data", len(x)):
            prior = dist.Normal(torch.zeros(2), 1.0).to_event(1)
            z = pyro.sample("z", prior.mask(torch.arange(len(x)) > 2) if form == "mask" else prior)
            pyro.sample("x", dist.Normal(z.repeat_interleave(2, -1), 1.0).to_event(1), obs=x)

    def guide(x: Tensor) -> None:
        pyro.module("flow", flow)
        pyro.module("encoder", encoder)
        h = encoder(x)
        if form == "to_event":
            pyro.sample("z", flow(h).to_event(1))
            return
        with pyro.plate("data", len(x)):
            if form == "expand_by":
                pyro.sample("z", flow(h[0]).expand_by([len(x)]))
            elif form == "obs_mask":
                with poutine.mask(mask=torch.arange(len(x)) > 2):
                    pyro.sample("z", flow(h))
            else:
                q = flow(h)
                pyro.sample("z", q.mask(torch.arange(len(x)) > 2) if form == "mask" else q)

    estimator = Trace_ELBO(num_particles=particles, vectorize_particles=True, max_plate_nesting=1)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), estimator)
    before = {name: value.clone() for name, value in flow.named_parameters()}
    assert math.isfinite(svi.step(data))
    assert math.isfinite(svi.evaluate_loss(data))
    assert solves == []
    assert all((value != before[name]).any() for name, value in flow.named_parameters())


def test_an_amortized_guide_finds_each_posterior() -> None:
    """x = z + noise for each of many data: the posterior is N(x/2, 1/2), and the bound log N(x; 0, 2)."""
    data = torch.randn(50, 1) * 2**0.5
    flow = as_pyro(flows.Planar(1, context=1, transforms=2))

    def model(x: Tensor) -> None:
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(torch.zeros(1), 1.0).to_event(1))
            pyro.sample("x", dist.Normal(z, 1.0).to_event(1), obs=x)

    def guide(x: Tensor) -> None:
        pyro.module("flow", flow)
        with pyro.plate("data", len(x)):
            pyro.sample("z", flow(x))

    steps(model, guide, 300, data, particles=8)
    log_z = dist.Normal(0.0, 2**0.5).log_prob(data).sum().item()
    loss = Trace_ELBO(num_particles=2000, vectorize_particles=True, max_plate_nesting=1).loss(model, guide, data)
    assert 0 <= loss + log_z + 0.02 < 0.5  # nats, of fifty posteriors together
    draws = flow(data).sample((5000,))
    assert (draws.mean(0) - data / 2).abs().max() < 0.1


def test_a_flow_is_a_prior_too() -> None:
    """With a support of its own, in a model, under an automatic guide and as an observation."""
    prior = as_pyro(flows.onto(redraw(flows.TriangularSylvester(2, transforms=2), 0.3), constraints.simplex))

    def model(seen: Tensor) -> None:
        pyro.sample("p", prior())
        with pyro.plate("data", len(seen)):
            pyro.sample("seen", prior(), obs=seen)

    seen = prior().sample((4,))
    trace = poutine.trace(model).get_trace(seen)
    assert_close(
        trace.log_prob_sum(), prior().log_prob(trace.nodes["p"]["value"].clone()) + prior().log_prob(seen).sum()
    )
    guide = auto(model)
    assert guide(seen)["p"].shape == (3,)
    losses = steps(model, guide, 20, seen, particles=4)
    assert all(map(math.isfinite, losses))


# The transform


@pytest.mark.parametrize("features", [2, 5])
@pytest.mark.parametrize("scale", SCALES[:2])
@pytest.mark.parametrize("name", FLOWS)
def test_a_transform_is_the_flow_from_standard_noise(name: str, scale: float, features: int) -> None:
    flow = redraw(FLOWS[name](features, 0, 2), scale, name)
    transform, q = PyroFlowTransform(flow), flow()
    x = torch.randn(10, features)
    y = transform(x)
    base = q.base_dist.base_dist
    assert_close(y, q.rsample_and_log_prob(noise=x)[0])
    residual = q.residual(y.detach())
    exact = residual < 1e-9  # a sequential inverse of a steep map is not
    assert exact.any()
    back = transform.inv(y.clone())
    assert_close(back[exact], x[exact], rtol=1e-6, atol=1e-6)
    ladj = transform.log_abs_det_jacobian(x.clone(), y)
    jacobian = torch.func.vmap(torch.func.jacrev(transform._call))(x)
    assert_close(ladj, torch.linalg.slogdet(jacobian).logabsdet)
    assert_close(transform.inv.log_abs_det_jacobian(y, x), -ladj)
    pushed = dist.TransformedDistribution(dist.Normal(torch.zeros(features), 1.0).to_event(1), [transform])
    assert_close(pushed.log_prob(y.detach())[exact], q.log_prob(y.detach())[exact], rtol=1e-6, atol=1e-6)
    assert base.loc.shape == (features,)
    for shape in [(3,), (3, 4), (3, 4, 5)]:
        assert pushed.expand(shape).sample().shape == (*shape, features)
        assert transform.forward_shape((*shape, features)) == transform.inverse_shape((*shape, features))


@pytest.mark.parametrize("name", FLOWS)
def test_maximum_likelihood_reaches_every_parameter(name: str) -> None:
    flow = redraw(FLOWS[name](3, 0, 2), 0.5, name)
    transform = PyroFlowTransform(flow)
    pushed = dist.TransformedDistribution(dist.Normal(torch.zeros(3), 1.0).to_event(1), [transform])
    optimizer = torch.optim.Adam(transform.parameters(), lr=1e-3)
    x, losses = torch.rand(8, 3), []
    for _ in range(3):
        optimizer.zero_grad()
        loss = -pushed.log_prob(x).mean()
        loss.backward()
        assert all(parameter.grad.abs().max() > 0 for parameter in flow.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses[2] < losses[0]


def test_a_transform_onto_another_size() -> None:
    transform = PyroFlowTransform(flows.onto(flows.Planar(2, transforms=2), constraints.simplex))
    assert (transform.forward_shape((4, 2)), transform.inverse_shape((4, 3))) == ((4, 3), (4, 2))
    pushed = dist.TransformedDistribution(dist.Normal(torch.zeros(2), 1.0).to_event(1), [transform])
    assert pushed.event_shape == (3,)
    assert pushed.support.check(pushed.sample((5,))).all()
    with pytest.raises(ValueError, match=r"Expected a shape that ends in \(2,\); got \(4, 3\)"):
        transform.forward_shape((4, 3))


def test_what_a_transform_remembers(solves: list[int]) -> None:
    flow = redraw(flows.TriangularSylvester(2, transforms=1), 0.5)
    transform, x = PyroFlowTransform(flow), torch.randn(4, 2)
    y = transform(x)
    assert transform.inv(y) is x
    assert transform(x) is y
    assert transform.log_abs_det_jacobian(x, y).requires_grad
    assert solves == []
    back = transform.inv(y.clone())
    assert len(solves) == 1
    assert_close(back, x)
    # Parameters that have moved on, points that were changed, and points without a graph are no answer.
    y = transform(x)
    with torch.no_grad():
        next(flow.parameters()).add_(1.0)
    assert (transform.inv(y) - x).abs().max() > 1e-3
    y = transform(x)
    with torch.no_grad():
        x.add_(1.0)
    assert_close(transform(x), transform._call(x))
    transform.clear_cache()
    with torch.no_grad():
        y = transform(x)
        assert transform.inv(y) is x
    assert transform.inv(y).requires_grad
    assert transform.log_abs_det_jacobian(x, y).requires_grad
    other = copy.deepcopy(transform)
    assert_close(other(x), transform(x))
    with torch.inference_mode():
        assert_close(transform.inv(transform(x)), x)
    assert_close(torch.func.vmap(transform)(x), transform(x))
    assert transform.with_cache(1) is transform


def test_pyros_own_flow_guide_takes_it(solves: list[int]) -> None:
    def model() -> None:
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.LogNormal(x.unsqueeze(-1), torch.ones(2)).to_event(1))

    guide = AutoNormalizingFlow(model, lambda features: PyroFlowTransform(triangular(features)))
    losses = steps(model, guide, 200)
    assert solves == []
    assert sum(losses[-50:]) / 50 < 0.1  # log Z = 0
    assert "AutoNormalizingFlow.transform$$$flow.base.hypernetwork.bias" in pyro.get_param_store()


# Bad input, and what is not installed


def test_bad_input_gets_a_sentence() -> None:
    def model() -> None:
        pyro.sample("x", dist.Normal(torch.zeros(2), 1.0).to_event(1))

    with pytest.raises(ValueError, match=r"Expected a function that makes a flow.*got Planar"):
        AutoFlow(model, flows.Planar(2))
    with pytest.raises(ValueError, match="Expected a finite init_scale > 0; got 0"):
        auto(model, init_scale=0.0)
    with pytest.raises(ValueError, match=r"Expected affine in \('triangular', 'diagonal'\); got 'full'"):
        auto(model, affine="full")
    with pytest.raises(ValueError, match="Expected quantile_draws >= 2; got 1"):
        auto(model, quantile_draws=1)
    with pytest.raises(ValueError, match="Expected a flow; got Linear"):
        AutoFlow(model, lambda features: nn.Linear(features, features))()
    with pytest.raises(ValueError, match="Expected a flow without context; got context=3"):
        AutoFlow(model, partial(flows.Planar, context=3))()
    with pytest.raises(ValueError, match="Expected a flow of 2 features, the model's; got 3"):
        AutoFlow(model, lambda features: flows.Planar(features + 1))()
    with pytest.raises(ValueError, match="Expected a flow of real vectors"):
        AutoFlow(model, lambda features: flows.onto(flows.Planar(features), constraints.positive))()
    with pytest.raises(ValueError, match="Expected a list of quantiles between 0 and 1; got"):
        auto(model).quantiles([0.5, 1.5])
    with pytest.raises(ValueError, match="Expected a flow or a flow's distribution; got Normal"):
        as_pyro(dist.Normal(0.0, 1.0))
    with pytest.raises(ValueError, match="Expected a flow without context; got context=3"):
        PyroFlowTransform(flows.Planar(2, context=3))
    with pytest.raises(ValueError, match="Expected a guide of Pyro's for continuous latents; got function"):
        log_density(model)


def test_without_pyro_it_says_what_to_install() -> None:
    code = """
import sys
sys.modules["pyro"] = None
try:
    import sylvester.contrib.pyro
except ModuleNotFoundError as error:
    print(error)
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == 'sylvester.contrib.pyro needs pyro-ppl, which is not installed: pip install "sylvester[pyro]"'


def test_a_distribution_of_ours_stays_one_of_ours() -> None:
    q = as_pyro(flows.Planar(2))()
    assert isinstance(q, FlowDistribution)
    assert isinstance(q.expand([3]), PyroFlowDistribution)


# The documentation


def test_the_page_runs() -> None:
    text = (ROOT / "docs" / "pyro.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 3
    names: dict[str, object] = {}
    torch.set_default_dtype(torch.float32)
    for block in blocks:
        exec(block, names)
    assert names["guide"].prototype_trace is not None


def test_the_example_draws(tmp_path: Path) -> None:
    example = ROOT / "examples" / "pyro_guide.py"
    assert len(example.read_text().splitlines()) < 100
    command = [sys.executable, str(example), str(tmp_path / "pyro.png"), "--steps", "20"]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "AutoFlow: ELBO" in out
    assert (tmp_path / "pyro.png").stat().st_size > 10_000


def test_the_benchmark_runs_and_its_tables_are_the_pages(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    torch.set_default_dtype(torch.float32)
    path = tmp_path / "pyro.json"
    for what in (*pyro_guides.RUNS, "tables"):
        pyro_guides.main([what, "--tiny", "--out", str(path)])
    assert capsys.readouterr().out.count("\n\n") == 2
    written = pyro_guides.Found(ROOT / "docs" / "pyro.json")
    for table in pyro_guides.tables(written, pyro_guides.Sizes()).split("\n\n"):
        assert table in (ROOT / "docs" / "pyro.md").read_text()


def test_the_exact_posterior_of_eight_schools() -> None:
    """The benchmark's reference, against importance sampling with the prior."""
    log_z, draws = pyro_guides.exact_schools(1000)
    n = 400_000
    mu, tau = 5 * torch.randn(n), 5 * torch.randn(n).abs() / torch.randn(n).abs()
    y, s = pyro_guides.EFFECTS.double(), pyro_guides.ERRORS.double()
    log_w = dist.Normal(mu[:, None], (s**2 + tau[:, None] ** 2).sqrt()).log_prob(y).sum(-1)
    assert log_w.logsumexp(0).item() - math.log(n) == pytest.approx(log_z, abs=0.01)
    w = log_w.softmax(0)
    for name, prior in (("mu", mu), ("tau", tau.clamp(max=50))):
        expected = (w * prior).sum()
        assert draws[name].clamp(max=50).mean().item() == pytest.approx(expected.item(), abs=0.5)
