"""Real zuko and real sbi, in processes of their own: importing zuko changes torch."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import textwrap

import pytest

PREAMBLE = """
import torch
from functools import partial
from torch.testing import assert_close
from cases import FLOWS, STEPS, redraw
from sylvester import flows
from sylvester.distributions import FlowDistribution
from sylvester.flows import DiagonalGaussian, Flow
torch.manual_seed(0)
"""


def apart(code: str) -> None:
    """Runs code in a process of its own, with this folder's modules; what it raises is the failure."""
    process = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PREAMBLE + textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *sys.path])},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert process.returncode == 0, process.stderr[-2000:]


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is not installed")


@pytest.mark.parametrize("module", [pytest.param("zuko", marks=needs("zuko")), pytest.param("sbi", marks=needs("sbi"))])
def test_doctests(module: str) -> None:
    apart(f"""
    import doctest, importlib
    found = doctest.testmod(importlib.import_module("sylvester.contrib.{module}"))
    assert found.attempted > 3 and not found.failed
    """)


@pytest.mark.parametrize("module", ["zuko", "sbi"])
def test_what_is_missing_is_named(module: str) -> None:
    apart(f"""
    import sys
    sys.modules["{module}"] = None
    for name in [name for name in sys.modules if name.startswith("{module}.")]:
        sys.modules[name] = None
    try:
        import sylvester.contrib.{module}
    except ModuleNotFoundError as error:
        assert "needs {module}, which is not installed: pip install" in str(error)
    else:
        raise AssertionError("imported")
    """)


@needs("zuko")
def test_our_flows_as_zukos() -> None:
    """At parameters drawn at unit scale: densities, samples with their densities, gradients, and the direction."""
    apart("""
    torch.set_default_dtype(torch.float64)
    import zuko
    from sylvester.contrib.zuko import as_zuko
    for name, make in FLOWS.items():
        for context in (0, 2):
            flow = redraw(make(3, context, 2), 0.5, name)
            h = torch.randn(4, context) if context else None
            theirs = as_zuko(flow)
            assert isinstance(theirs, zuko.flows.Flow), name
            q, p = flow(h), theirs(h)
            x = torch.randn(5, 4, 3)
            assert p.batch_shape == q.batch_shape and p.event_shape == q.event_shape, name
            assert_close(p.log_prob(x), q.log_prob(x), msg=name)
            z, log_p = p.rsample_and_log_prob((6,))
            assert z.shape == (6, *q.batch_shape, 3), name
            assert_close(log_p, q.log_prob(z), rtol=1e-6, atol=1e-6, msg=name)
            if q.transforms:  # its transform leads from the data to the base
                base, points = q.base_dist, [point for point, _ in q.trajectory((6,))]
                assert_close(p.transform(points[-1]), points[0], rtol=1e-6, atol=1e-6, msg=name)
            parameters = list(flow.parameters())
            assert {id(each) for each in theirs.parameters()} == {id(each) for each in parameters}
            gradients = [torch.autograd.grad(each.log_prob(x).sum(), parameters, allow_unused=True) for each in (p, q)]
            assert_close(*gradients, msg=name)
    try:
        as_zuko(zuko.flows.MAF(3))
    except ValueError as error:
        assert str(error) == "Expected a flow of sylvester; got MAF"
    else:
        raise AssertionError("took zuko's own")
    """)


@needs("zuko")
def test_our_steps_in_zukos_distribution_need_to_be_turned_round() -> None:
    apart("""
    torch.set_default_dtype(torch.float64)
    import zuko
    base = zuko.distributions.DiagNormal(torch.zeros(3), torch.ones(3))
    for name, case in STEPS.items():
        step = case.build(*case.leaves(name, 3, (), 0.5))
        theirs = zuko.distributions.NormalizingFlow(step.inv, base)
        z = torch.randn(5, 3)
        y, ladj = step.call_and_ladj(z)
        assert_close(theirs.log_prob(y), base.log_prob(z) - ladj, msg=name)
    """)


@needs("zuko")
def test_zukos_flows_as_steps_of_ours() -> None:
    """The density is zuko's own under the same base; samples, their densities and path gradients agree with it."""
    apart("""
    torch.set_default_dtype(torch.float64)
    import zuko
    from sylvester.contrib.zuko import Steps
    made = {
        "MAF": zuko.flows.MAF(3, 2, transforms=2),
        "NSF": zuko.flows.NSF(3, 2, transforms=2),
        "RealNVP": zuko.flows.RealNVP(3, 2, transforms=2),
        "SOSPF": zuko.flows.SOSPF(3, 2, transforms=2),
        "NAF": zuko.flows.NAF(3, 2, transforms=1),
        "GF": zuko.flows.GF(3, 2, transforms=2),
    }
    h, x = torch.randn(4, 2), torch.randn(5, 4, 3)
    for name, theirs in made.items():
        flow = Flow(DiagonalGaussian(3, 2), [Steps(theirs.transform), *flows.Planar(3, 2, 1).steps])
        for parameter in flow.parameters():
            parameter.data += 0.2 * torch.randn_like(parameter)
        q = flow(h)
        back, ladj = q.transforms[-1].inv.call_and_ladj(x)
        expected = zuko.distributions.NormalizingFlow(theirs(h).transform, q.base_dist).log_prob(back) + ladj
        assert_close(q.log_prob(x), expected, msg=name)
        z, log_q = q.rsample_and_log_prob((6,))
        assert_close(q.log_prob(z.clone()), log_q, rtol=1e-5, atol=1e-5, msg=name)
        assert sum(p.numel() for p in theirs.parameters()) < sum(p.numel() for p in flow.parameters())
    rotation = zuko.transforms.RotationTransform(torch.randn(3, 3))
    q = Flow(DiagonalGaussian(3), [Steps(rotation)])()
    assert_close(q.log_prob(x), q.base_dist.log_prob(rotation(x)))
    noise = torch.randn(6, 4, 3)
    path, plain = (flow(h).rsample_and_log_prob(noise=noise, path_gradient=each) for each in (True, False))
    assert_close(path, plain, rtol=1e-6, atol=1e-6)
    try:
        Steps(made["MAF"])
    except ValueError as error:
        assert "Expected a transform of zuko, lazy or not; got MAF: give its transform" in str(error)
    else:
        raise AssertionError("took a whole flow")
    """)


@needs("sbi")
def test_a_flow_is_what_sbi_asks_of_a_density_estimator() -> None:
    """Shapes as its own estimators': conditions with and without samples, several at once, embedded or not."""
    apart("""
    from sylvester.contrib.sbi import FlowEstimator, density_estimator
    from sbi.neural_nets.net_builders import build_zuko_maf
    from torch import nn
    theta, x = 3 + 2 * torch.randn(200, 3), 5 * torch.randn(200, 2, 4)
    ours = density_estimator(partial(flows.MAF, transforms=2))(theta, x)
    theirs = build_zuko_maf(theta, x, embedding_net=nn.Flatten())
    assert ours.input_shape == theirs.input_shape and ours.condition_shape == theirs.condition_shape
    for samples, batch, conditions in ((7, 4, 4), (1, 4, 4), (7, 4, 1), (7, 1, 4)):
        point, given = torch.randn(samples, batch, 3), torch.randn(conditions, 2, 4)
        assert ours.log_prob(point, given).shape == theirs.log_prob(point, given).shape
    one, given = torch.randn(4, 3), torch.randn(4, 2, 4)
    assert ours.log_prob(one, given).shape == (1, 4)
    assert_close(ours.loss(one, given), -ours.log_prob(one, given)[0])
    assert_close(ours.log_prob(one[None], given.expand(6, 4, 2, 4)), ours.log_prob(one, given).expand(6, 4))
    assert ours.sample((5, 6), given).shape == theirs.sample((5, 6), given).shape == (5, 6, 4, 3)
    z, log_q = ours.sample_and_log_prob((500,), x[:1])
    assert_close(ours.log_prob(z, x[:1]), log_q, rtol=1e-4, atol=1e-4)
    assert ((z.mean((0, 1)) - theta.mean(0)).abs() < 1).all()  # standardized: it starts where the data are
    embedding = nn.Sequential(nn.Flatten(), nn.Linear(8, 5))
    estimator = density_estimator(partial(flows.NSF, transforms=2), embedding_net=embedding)(theta, x)
    assert estimator.net.context == 5 and estimator.embedding_net is not None
    for target, shape in (("posterior", (3,)), ("likelihood", (8,))):
        assert density_estimator(flows.MAF, target=target)(theta, x.flatten(1)).input_shape == shape
    for bad, message in ((lambda: density_estimator(flows.MAF, target="x"), "Expected target in"),
                         (lambda: density_estimator(flows.MAF, target="likelihood")(theta, x), "estimates of vectors"),
                         (lambda: ours.log_prob(one, torch.randn(4, 7)), "condition")):
        try:
            bad()
        except ValueError as error:
            assert message in str(error), error
        else:
            raise AssertionError(message)
    """)


@needs("sbi")
def test_sbi_infers_a_gaussian_with_a_flow() -> None:
    """θ ~ U(−3, 3)², x = θ + 0.5 ε: far from the prior's edge the posterior at x is N(x, 0.5²). NPE, saved and loaded,
    and NLE, whose likelihood is N(θ, 0.5²)."""
    apart("""
    import io
    from sbi.inference import NLE, NPE
    from sbi.utils import BoxUniform
    from sylvester.contrib.sbi import density_estimator
    prior = BoxUniform(-3 * torch.ones(2), 3 * torch.ones(2))
    theta = prior.sample((2000,))
    x = theta + 0.5 * torch.randn_like(theta)
    options = {"max_num_epochs": 15, "training_batch_size": 100, "learning_rate": 3e-3}
    npe = NPE(prior, density_estimator=density_estimator(partial(flows.MAF, transforms=2)), show_progress_bars=False)
    npe.append_simulations(theta, x).train(**options)
    posterior = npe.build_posterior()
    seen = torch.tensor([0.4, -0.8])
    draws = posterior.sample((2000,), x=seen, show_progress_bars=False)
    assert ((draws.mean(0) - seen).abs() < 0.2).all(), draws.mean(0)
    assert ((draws.std(0) - 0.5).abs() < 0.12).all(), draws.std(0)
    exact = torch.distributions.Normal(seen, 0.5).log_prob(draws[:200]).sum(-1)
    assert (posterior.log_prob(draws[:200], x=seen) - exact).abs().mean() < 0.3
    several = posterior.sample_batched((50,), x=x[:3], show_progress_bars=False)
    assert several.shape == (50, 3, 2)
    saved = io.BytesIO()
    torch.save(npe._neural_net, saved)
    saved.seek(0)
    again = torch.load(saved, weights_only=False)
    assert_close(again.log_prob(draws[:5], seen[None]), npe._neural_net.log_prob(draws[:5], seen[None]))

    made = density_estimator(partial(flows.MAF, transforms=2), target="likelihood")
    likelihood = NLE(prior, density_estimator=made, show_progress_bars=False)
    estimator = likelihood.append_simulations(theta, x).train(**options)
    points, given = seen + 0.5 * torch.randn(300, 1, 2), seen[None]
    exact = torch.distributions.Normal(seen, 0.5).log_prob(points).sum(-1)
    assert (estimator.log_prob(points, given) - exact).abs().mean() < 0.3
    """)
