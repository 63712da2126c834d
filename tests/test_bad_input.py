"""Bad input gets a sentence that says what was expected and what came."""

from __future__ import annotations

import pytest
import torch
from torch.distributions import Independent, Normal

from sylvester import flows
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
