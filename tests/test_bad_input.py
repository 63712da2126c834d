"""Bad input gets a sentence that says what was expected and what came."""

from __future__ import annotations

import pytest
import torch
from torch.distributions import Independent, Normal, constraints

from sylvester import flows, inference
from sylvester.diagnostics import diagnose
from sylvester.distributions import FlowDistribution
from sylvester.linalg import HouseholderProduct
from sylvester.transforms import (
    CouplingTransform,
    HouseholderTransform,
    PlanarTransform,
    RadialTransform,
    Shift,
    SylvesterTransform,
)
from sylvester.vae import VAE

pytestmark = pytest.mark.usefixtures("float64")


def planar(**options):
    return PlanarTransform(torch.ones(3), torch.ones(3), torch.zeros(()), **options)


def sylvester(q=None, r=None, r_tilde=None, **options):
    r = torch.eye(3) if r is None else r
    return SylvesterTransform(q, r, torch.eye(3) if r_tilde is None else r_tilde, torch.zeros(3), **options)


def below_diagonal():
    r = torch.eye(3)
    r[2, 0] = 0.5
    return r


REFUSED = {
    "event size": (lambda: planar()(torch.zeros(4)), "3 features in the last axis; got (4,)"),
    "event size of the inverse": (
        lambda: planar().inv(torch.zeros(2, 4)),
        "3 features in the last axis; got (2, 4)",
    ),
    "no event": (lambda: planar()(torch.tensor(1.0)), "3 features in the last axis; got ()"),
    "shape": (lambda: planar().forward_shape((2, 4)), "a shape that ends in 3; got (2, 4)"),
    "planar sizes": (
        lambda: PlanarTransform(torch.ones(3), torch.ones(2), torch.zeros(())),
        "equally many features; got 3",
    ),
    "planar batch": (
        lambda: PlanarTransform(torch.ones(2, 3), torch.ones(4, 3), torch.zeros(())),
        "that broadcast; got u (2,)",
    ),
    "planar u": (
        lambda: PlanarTransform(torch.tensor(1.0), torch.ones(3), torch.zeros(())),
        "u with at least 1 axes",
    ),
    "planar not invertible": (
        lambda: PlanarTransform(-torch.ones(3), torch.ones(3), torch.zeros(()), validate_args=True),
        "w·u > -1, or the step is not invertible; got -3",
    ),
    "radial alpha": (
        lambda: RadialTransform(torch.ones(3), torch.tensor(0.0), torch.tensor(1.0), validate_args=True),
        "alpha > 0; got 0",
    ),
    "radial beta": (
        lambda: RadialTransform(torch.ones(3), torch.tensor(1.0), torch.tensor(-1.0), validate_args=True),
        "beta > -alpha, or the step is not invertible; got beta + alpha = 0",
    ),
    "householder": (lambda: HouseholderTransform(torch.ones(3)), "v of shape (*, H, D); got (3,)"),
    "sylvester r": (
        lambda: sylvester(r=torch.eye(2)),
        "r (*, M, M), r_tilde (*, M, M) and b (*, M); got (2, 2)",
    ),
    "sylvester q": (
        lambda: sylvester(torch.eye(4)[:, :2]),
        "q of shape (*, D, 3), as r is 3 x 3; got (4, 2)",
    ),
    "sylvester wide q": (lambda: sylvester(torch.eye(3)[:2]), "q of shape (*, D, M) with M <= D; got (2, 3)"),
    "sylvester reflections": (
        lambda: sylvester(HouseholderProduct(torch.ones(2, 4))),
        "reflections of 3 features",
    ),
    "sylvester diagonal": (
        lambda: sylvester(r=-torch.eye(3), validate_args=True),
        "r_ii r_tilde_ii > -1, or the step is not invertible; got -1",
    ),
    "sylvester not triangular": (
        lambda: sylvester(r=below_diagonal(), validate_args=True),
        "upper triangular",
    ),
    "sylvester r_tilde not triangular": (
        lambda: sylvester(r_tilde=below_diagonal(), validate_args=True),
        "upper triangular",
    ),
    "sylvester not orthonormal": (
        lambda: sylvester(2 * torch.eye(3), validate_args=True),
        "orthonormal columns; got",
    ),
    "nan parameter": (
        lambda: PlanarTransform(torch.full((3,), torch.nan), torch.ones(3), torch.zeros(()), validate_args=True),
        "finite values in u",
    ),
    "nan point": (lambda: planar(validate_args=True)(torch.full((3,), torch.nan)), "without NaN"),
    "nan point of the inverse": (
        lambda: planar(validate_args=True).inv(torch.full((3,), torch.nan)),
        "without NaN",
    ),
    "coupling mask": (
        lambda: CouplingTransform(lambda z: z.unsqueeze(-2), torch.ones(2, 3), Shift()),
        "mask of shape (D,); got (2, 3)",
    ),
    "rank": (lambda: flows.OrthogonalSylvester(4, rank=5), "rank <= features = 4; got 5"),
    "diagonals": (
        lambda: flows.TriangularSylvester(4, diagonals="loose"),
        "diagonals in ('bounded', 'free'); got 'loose'",
    ),
    "no rank": (lambda: flows.OrthogonalSylvester(4, rank=0), "integer rank >= 1; got 0"),
    "reflections": (lambda: flows.HouseholderSylvester(4, reflections=0), "integer reflections >= 1; got 0"),
    "hidden width": (
        lambda: flows.IAF(8, hidden_features=7),
        "hidden_features of at least features = 8; got 7",
    ),
    "a hidden width": (
        lambda: flows.RealNVP(8, hidden_features=(16, 4)),
        "at least features = 8; got (16, 4)",
    ),
    "no hidden width": (lambda: flows.MAF(8, hidden_features=()), "at least features = 8; got ()"),
    "activation": (
        lambda: flows.NSF(8, activation="gelu"),
        "activation in ('elu', 'relu', 'silu', 'tanh') or a function of a tensor; got 'gelu'",
    ),
    "no activation": (lambda: flows.RealNVP(8, activation=None), "or a function of a tensor; got None"),
    "bins": (lambda: flows.CouplingNSF(8, bins=0), "bins from 1 to 999; got 0"),
    "order": (lambda: flows.IAF(8, order="random"), "order in ('paired', 'alternating'); got 'random'"),
    "features": (lambda: flows.Planar(0), "integer features >= 1; got 0"),
    "float features": (lambda: flows.Planar(2.5), "integer features >= 1; got 2.5"),
    "transforms": (lambda: flows.Planar(2, transforms=0), "integer transforms >= 1; got 0"),
    "context size": (lambda: flows.Planar(2, -1), "integer context >= 0; got -1"),
    "init": (lambda: flows.Planar(2, init="zeros"), "init in ('identity', 'torch'); got 'zeros'"),
    "gaussian init": (lambda: flows.Gaussian(2, init="zeros"), "init in ('identity', 'torch'); got 'zeros'"),
    "masked init": (lambda: flows.IAF(2, init="zeros"), "init in ('identity', 'torch'); got 'zeros'"),
    "context given": (
        lambda: flows.Planar(2)(torch.zeros(3)),
        "no context, as this flow was made with context=0",
    ),
    "context missing": (lambda: flows.Planar(2, 3)(), "a context of 3 features; got none"),
    "context shape": (lambda: flows.Planar(2, 3)(torch.zeros(4, 2)), "a context of shape (*, 3); got (4, 2)"),
    "nothing to compose": (lambda: flows.compose(), "at least one flow"),
    "other features": (
        lambda: flows.compose(flows.Planar(2), flows.Planar(3)),
        "the same features; got [2, 3]",
    ),
    "other context": (
        lambda: flows.compose(flows.Planar(2), flows.Planar(2, 1)),
        "the same context; got [0, 1]",
    ),
    "noise": (
        lambda: flows.Planar(2)().rsample_and_log_prob(noise=torch.zeros(3)),
        "noise that ends in (2,); got (3,)",
    ),
    "noise as a list": (
        lambda: flows.Planar(2)().rsample_and_log_prob(noise=[0.0, 0.0]),
        "noise as a tensor of torch.float64, as the flow has; got list",
    ),
    "context as a list": (lambda: flows.Planar(2, 3)([0.0] * 3), "a context as a tensor (*, 3); got list"),
    "context of integers": (
        lambda: flows.Planar(2, 3)(torch.zeros(3, dtype=torch.long)),
        "a context of torch.float64, as the flow has; got torch.int64",
    ),
    "local context": (
        lambda: flows.IAF(2, 3).local(torch.zeros(4, 3, dtype=torch.float32)),
        "a context of torch.float64, as the flow has; got torch.float32",
    ),
    "points as a number": (
        lambda: flows.Gaussian(3)().log_prob(0.0),
        "points as a tensor of torch.float64, as the flow has; got float",
    ),
    "points of integers": (
        lambda: flows.NSF(3)().log_prob(torch.zeros(3, dtype=torch.long)),
        "points as a tensor of torch.float64, as the flow has; got torch.int64",
    ),
    "points to be broadcast": (
        lambda: flows.Gaussian(3)().log_prob(torch.zeros(4, 1)),
        "points of shape (*, 3), or one that broadcasts to it; got (4, 1)",
    ),
    "points of another batch": (
        lambda: flows.MAF(3, 2)(torch.zeros(5, 2)).log_prob(torch.zeros(4, 3)),
        "points of shape (*, 5, 3), or one that broadcasts to it; got (4, 3)",
    ),
    "variance bounds": (lambda: flows.Planar(2, variance_bounds=(2.0, 1.0)), "the smaller first; got (2.0, 1.0)"),
    "negative variance": (lambda: flows.MAF(2, variance_bounds=(-2.0, -1.0)), "two positive numbers"),
    "nan variance": (lambda: flows.NICE(2, variance_bounds=(float("nan"), 1.0)), "two positive numbers"),
    "one variance": (lambda: flows.Gaussian(2, variance_bounds=1.0), "two positive numbers"),
    "hypernetwork's width": (lambda: flows.Planar(2, 3, hyper_features=5), "hidden widths, such as (128,); got 5"),
    "hypernetwork's widths": (lambda: flows.Planar(2, 3, hyper_features=(0,)), "hidden widths"),
    "no flow to compose": (lambda: flows.compose([flows.Planar(2)]), "at least one flow to compose"),
    "no flow to invert": (lambda: flows.inverted(flows.Planar(2)()), "at least one flow to invert"),
    "no flow to put": (lambda: flows.onto(Normal(0.0, 1.0), constraints.positive), "at least one flow to put onto"),
    "no flows to mix": (lambda: flows.Mixture(flows.Planar(2)), "flows to mix, in a list; got Planar"),
    "composed after a constraint": (
        lambda: flows.compose(flows.onto(flows.Planar(2), constraints.positive), flows.Planar(2)),
        "flows of real vectors before the last; got one onto GreaterThan",
    ),
    "mixed supports": (
        lambda: flows.Mixture([flows.onto(flows.Planar(2), constraints.positive), flows.Planar(2)]),
        "flows onto one and the same support; got GreaterThan(lower_bound=0.0), None",
    ),
    "base without features": (lambda: flows.Flow(torch.nn.Identity()), "a base with an attribute features"),
    "steps that want a context": (
        lambda: flows.Flow(flows.DiagonalGaussian(2), flows.Planar(2, 3).steps)(),
        "a context of 3 features; got none",
    ),
    "a flow for its distribution": (
        lambda: diagnose(lambda z: z.sum(-1), flows.Planar(2)),
        "a distribution; got Planar: call the flow for its distribution, flow()",
    ),
    "a complex log-density": (
        lambda: diagnose(lambda z: z.sum(-1) + 0j, flows.Planar(2)()),
        "a log-density of real numbers; got torch.complex128",
    ),
    "nothing to diagnose": (
        lambda: inference.fit(lambda z: z.sum(-1), flows.Planar(2), diagnosis_samples=0),
        "diagnosis_samples >= 1; got 0",
    ),
    "standardized by a list": (
        lambda: inference.standardized(flows.Planar(2), [[1.0, 2.0]]),
        "x as a tensor of floating-point numbers; got list",
    ),
    "prior": (
        lambda: VAE(torch.nn.Identity(), flows.Planar(2, 3), torch.nn.Identity(), prior="normal"),
        "a prior as a distribution or a flow; got str",
    ),
    "prior of a simplex": (
        lambda: VAE(torch.nn.Identity(), flows.onto(flows.Planar(2, 3), constraints.simplex), torch.nn.Identity()),
        "a prior with event shape (3,), as the flow has; got none",
    ),
    "no samples": (
        lambda: VAE(torch.nn.Identity(), flows.Planar(2, 3), torch.nn.Identity()).log_terms(torch.zeros(4, 3), 0),
        "at least one sample of at least one data point; got samples=0",
    ),
    "no data": (
        lambda: VAE(torch.nn.Identity(), flows.Planar(2, 3), torch.nn.Identity()).log_terms(torch.zeros(0, 3)),
        "at least one sample of at least one data point",
    ),
    "base": (
        lambda: FlowDistribution(Normal(torch.zeros(2), 1.0), []),
        "base Independent(Normal(loc, scale), 1)",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    call, sentence = REFUSED[case]
    with pytest.raises(ValueError, match="Expected") as error:
        call()
    assert sentence in str(error.value)


def test_nan_in_a_validated_distribution():
    base = Independent(Normal(torch.zeros(3), torch.ones(3)), 1)
    distribution = FlowDistribution(base, [planar()], validate_args=True)
    with pytest.raises(ValueError, match="support"):
        distribution.log_prob(torch.full((3,), torch.nan))


@pytest.mark.parametrize(
    ("family", "option"), [(flows.Planar, "rank"), (flows.TriangularSylvester, "rank"), (flows.IAF, "kind")]
)
def test_an_unknown_option_is_refused(family, option):
    with pytest.raises(TypeError, match=option):
        family(3, **{option: 2})


def test_what_lies_below_the_diagonal_is_ignored_and_gets_no_gradient():
    r, r_tilde = (torch.rand(3, 3).requires_grad_() for _ in range(2))
    step, clean = sylvester(r=r, r_tilde=r_tilde), sylvester(r=r.triu(), r_tilde=r_tilde.triu())
    y, ladj = step.call_and_ladj(torch.ones(3))
    torch.testing.assert_close((y, ladj), clean.call_and_ladj(torch.ones(3)))
    (y.sum() + ladj).backward()
    assert not r.grad.tril(-1).any()
    assert not r_tilde.grad.tril(-1).any()
