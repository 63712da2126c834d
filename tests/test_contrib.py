"""Real zuko and real sbi, each in a process of its own, which reports verdicts: importing zuko changes torch."""

from __future__ import annotations

import doctest
import importlib
import io
import sys
from functools import partial

import pytest
import torch
from cases import FLOWS, STEPS, redraw
from test_peer_contract import installed, report, verdicts
from torch import nn
from torch.distributions import Normal
from torch.testing import assert_close

from sylvester import flows
from sylvester.flows import DiagonalGaussian, Flow


class Hidden:
    """A finder of modules, for which one package is not there."""

    def __init__(self, package):
        self.package = package

    def find_spec(self, name, *_):
        if name.partition(".")[0] == self.package:
            raise ModuleNotFoundError(f"No module named {name!r}", name=self.package)


def check_missing(package):
    sys.meta_path.insert(0, Hidden(package))
    try:
        with pytest.raises(ModuleNotFoundError, match=f"needs {package}, which is not installed: pip install"):
            importlib.import_module(f"sylvester.contrib.{package}")
    finally:
        del sys.meta_path[0]


def check_doctests(package):
    found = doctest.testmod(importlib.import_module(f"sylvester.contrib.{package}"))
    assert found.attempted > 3
    assert not found.failed


def with_zuko():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    report("missing", lambda: check_missing("zuko"))
    report("doctests", lambda: check_doctests("zuko"))
    report("ours as theirs", check_our_flows_as_zukos)
    report("our steps", check_our_steps_turned_round)
    report("theirs as steps", check_zukos_flows_as_steps)
    report("bad input", check_bad_input_of_zuko)


def check_our_flows_as_zukos():
    """Densities, samples with theirs, gradients, and the direction: from the data to the base."""
    import zuko

    from sylvester.contrib.zuko import as_zuko

    for name, make in FLOWS.items():
        for context in (0, 2):
            flow = redraw(make(3, context, 2), 0.5, name)
            h, theirs = torch.randn(4, context) if context else None, as_zuko(flow)
            assert isinstance(theirs, zuko.flows.Flow), name
            q, p, x = flow(h), theirs(h), torch.randn(5, 4, 3)
            assert (p.batch_shape, p.event_shape) == (q.batch_shape, q.event_shape), name
            assert_close(p.log_prob(x), q.log_prob(x), msg=lambda text, name=name: f"{name}: {text}")
            z, log_p = p.rsample_and_log_prob((6,))
            assert z.shape == (6, *q.batch_shape, 3), name
            assert_close(log_p, q.log_prob(z), rtol=1e-6, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
            points = [point for point, _ in q.trajectory((6,))]
            assert_close(
                p.transform(points[-1]), points[0], rtol=1e-6, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
            )
            parameters = list(flow.parameters())
            assert {id(each) for each in theirs.parameters()} == {id(each) for each in parameters}
            of_p, of_q = (
                torch.autograd.grad(each.log_prob(x).sum(), parameters, materialize_grads=True) for each in (p, q)
            )
            assert_close(of_p, of_q, msg=lambda text, name=name: f"{name}: {text}")


def check_our_steps_turned_round():
    import zuko

    base = zuko.distributions.DiagNormal(torch.zeros(3), torch.ones(3))
    for name, case in STEPS.items():
        step = case.build(*case.leaves(name, 3, (), 0.5))
        z = torch.randn(5, 3)
        y, ladj = step.call_and_ladj(z)
        theirs = zuko.distributions.NormalizingFlow(step.inv, base)
        assert_close(theirs.log_prob(y), base.log_prob(z) - ladj, msg=lambda text, name=name: f"{name}: {text}")


def check_zukos_flows_as_steps():
    """The density is the one that zuko's transform has under the same base."""
    import zuko

    from sylvester.contrib.zuko import Steps

    h, x, noise = torch.randn(4, 2), torch.randn(5, 4, 3), torch.randn(6, 4, 3)
    for name in ("MAF", "NSF", "RealNVP", "SOSPF"):
        theirs = getattr(zuko.flows, name)(3, 2, transforms=2)
        flow = Flow(DiagonalGaussian(3, 2), [Steps(theirs.transform), *flows.Planar(3, 2, 1).steps])
        with torch.no_grad():
            for parameter in flow.parameters():
                parameter += 0.2 * torch.randn_like(parameter)
        q = flow(h)
        back, ladj = q.transforms[-1].inv.call_and_ladj(x)
        expected = zuko.distributions.NormalizingFlow(theirs(h).transform, q.base_dist).log_prob(back) + ladj
        assert_close(q.log_prob(x), expected, msg=lambda text, name=name: f"{name}: {text}")
        z, log_q = q.rsample_and_log_prob(noise=noise)
        # Some of zuko's inverses are by bisection.
        assert_close(q.log_prob(z.clone()), log_q, rtol=1e-4, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")
        if name in ("MAF", "NSF", "RealNVP"):  # bisection has derivatives of its own, which torch.func cannot take
            of_path = q.rsample_and_log_prob(noise=noise, path_gradient=True)
            assert_close(of_path, (z, log_q), msg=lambda text, name=name: f"{name}: {text}")
            of_path[1].sum().backward()
            assert all(parameter.grad.isfinite().all() for parameter in flow.parameters()), name
    rotation = zuko.transforms.RotationTransform(torch.randn(3, 3))
    q = Flow(DiagonalGaussian(3), [Steps(rotation)])()
    assert_close(q.log_prob(x), q.base_dist.log_prob(rotation(x)))


def check_bad_input_of_zuko():
    import zuko

    from sylvester.contrib.zuko import Steps, as_zuko

    with pytest.raises(ValueError, match="Expected a flow of sylvester; got MAF"):
        as_zuko(zuko.flows.MAF(3))
    with pytest.raises(ValueError, match=r"Expected a transform of zuko, lazy or not; got MAF: give its transform"):
        Steps(zuko.flows.MAF(3))
    with pytest.raises(ValueError, match=r"got int$"):
        Steps(3)


@pytest.fixture(scope="module")
def beside_zuko():
    return verdicts("with_zuko", "test_contrib")


@installed("zuko")
@pytest.mark.parametrize("what", ["missing", "doctests", "ours as theirs", "our steps", "theirs as steps", "bad input"])
def test_zuko(what, beside_zuko):
    assert beside_zuko(what) == ""


def with_sbi():
    torch.manual_seed(0)
    report("missing", lambda: check_missing("sbi"))
    report("doctests", lambda: check_doctests("sbi"))
    report("shapes", check_shapes_of_estimators)
    report("bad input", check_bad_input_of_sbi)
    report("inference", check_inference)


def check_shapes_of_estimators():
    """As its own estimators': conditions with and without samples, several at once, embedded or not."""
    from sbi.neural_nets.net_builders import build_zuko_maf

    from sylvester.contrib.sbi import density_estimator

    theta, x = 3 + 2 * torch.randn(200, 3), 5 * torch.randn(200, 2, 4)
    ours = density_estimator(partial(flows.MAF, transforms=2))(theta, x)
    theirs = build_zuko_maf(theta, x, embedding_net=nn.Flatten())
    assert (ours.input_shape, ours.condition_shape) == (theirs.input_shape, theirs.condition_shape)
    for samples, batch, conditions in ((7, 4, 4), (1, 4, 4), (7, 4, 1), (7, 1, 4)):
        point, given = torch.randn(samples, batch, 3), torch.randn(conditions, 2, 4)
        assert ours.log_prob(point, given).shape == theirs.log_prob(point, given).shape
    point, given = torch.randn(4, 3), torch.randn(4, 2, 4)
    assert_close(ours.loss(point, given), -ours.log_prob(point, given)[0])
    assert_close(ours.log_prob(point[None], given.expand(6, 4, 2, 4)), ours.log_prob(point, given).expand(6, 4))
    assert ours.sample((5, 6), given).shape == theirs.sample((5, 6), given).shape == (5, 6, 4, 3)
    z, log_q = ours.sample_and_log_prob((500,), x[:1])
    assert_close(ours.log_prob(z, x[:1]), log_q, rtol=1e-4, atol=1e-4)
    assert ((z.mean((0, 1)) - theta.mean(0)).abs() < 4).all()  # standardized: it starts where the data are
    embedding = nn.Sequential(nn.Flatten(), nn.Linear(8, 5))
    embedded = density_estimator(partial(flows.NSF, transforms=2), embedding_net=embedding)(theta, x)
    assert embedded.net.context == 5
    assert {id(p) for p in embedding.parameters()} <= {id(p) for p in embedded.embedding_net.parameters()}
    for target, shape in (("posterior", (3,)), ("likelihood", (8,))):
        assert density_estimator(flows.MAF, target=target)(theta, x.flatten(1)).input_shape == shape


def check_bad_input_of_sbi():
    from sylvester.contrib.sbi import density_estimator

    theta, x = torch.randn(20, 3), torch.randn(20, 2, 4)
    with pytest.raises(ValueError, match=r"Expected target in .*; got 'x'"):
        density_estimator(flows.MAF, target="x")
    with pytest.raises(ValueError, match=r"Expected likelihood estimates of vectors, \(N, D\); got shape"):
        density_estimator(flows.MAF, target="likelihood")(theta, x)
    with pytest.raises(ValueError, match="condition"):
        density_estimator(flows.MAF)(theta, x).log_prob(theta, torch.randn(20, 7))


def check_inference():
    """θ ~ U(−3, 3)², x = θ + ε/2: away from the prior's edges the posterior at x is N(x, ¼), as the likelihood is."""
    from sbi.inference import NLE, NPE
    from sbi.utils import BoxUniform

    from sylvester.contrib.sbi import density_estimator

    prior = BoxUniform(-3 * torch.ones(2), 3 * torch.ones(2))
    theta = prior.sample((2000,))
    x, seen = theta + 0.5 * torch.randn_like(theta), torch.tensor([0.4, -0.8])
    options = {"max_num_epochs": 12, "training_batch_size": 100, "learning_rate": 5e-3}
    make = partial(flows.MAF, transforms=2)

    npe = NPE(prior, density_estimator=density_estimator(make), show_progress_bars=False)
    estimator = npe.append_simulations(theta, x).train(**options)
    posterior = npe.build_posterior()
    draws = posterior.sample((2000,), x=seen, show_progress_bars=False)
    assert ((draws.mean(0) - seen).abs() < 0.2).all(), draws.mean(0)
    assert ((draws.std(0) - 0.5).abs() < 0.12).all(), draws.std(0)
    exact = Normal(seen, 0.5).log_prob(draws[:200]).sum(-1)
    assert (posterior.log_prob(draws[:200], x=seen) - exact).abs().mean() < 0.3
    assert posterior.sample_batched((50,), x=x[:3], show_progress_bars=False).shape == (50, 3, 2)
    file = io.BytesIO()
    torch.save(estimator, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    assert_close(again.log_prob(draws[:5, None], seen[None]), estimator.log_prob(draws[:5, None], seen[None]))

    nle = NLE(prior, density_estimator=density_estimator(make, target="likelihood"), show_progress_bars=False)
    likelihood = nle.append_simulations(theta, x).train(**options)
    points = seen + 0.5 * torch.randn(300, 1, 2)
    exact = Normal(seen, 0.5).log_prob(points).sum(-1)
    assert (likelihood.log_prob(points, seen[None]) - exact).abs().mean() < 0.3


@pytest.fixture(scope="module")
def beside_sbi():
    return verdicts("with_sbi", "test_contrib")


@installed("sbi")
@pytest.mark.parametrize("what", ["missing", "doctests", "shapes", "bad input", "inference"])
def test_sbi(what, beside_sbi):
    assert beside_sbi(what) == ""
