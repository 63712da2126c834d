"""Properties of every step, at every scale, size and batch shape."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from cases import BATCHES, FEATURES, SCALES, STEPS, generator
from torch.distributions import (
    ComposeTransform,
    Independent,
    IndependentTransform,
    Normal,
    TransformedDistribution,
)

pytestmark = pytest.mark.usefixtures("float64")

EVERY_STEP = pytest.mark.parametrize("name", STEPS)
EVERY_SCALE = pytest.mark.parametrize("scale", SCALES)
EVERY_SIZE = pytest.mark.parametrize("features", FEATURES)
EVERY_BATCH = pytest.mark.parametrize("batch", BATCHES, ids=str)
SMALL = pytest.mark.parametrize("features", [1, 2, 5])


def make(name, features, batch, scale, dtype=torch.float64):
    case = STEPS[name]
    step = case.build(*case.leaves(name, features, batch, scale, dtype))
    z = torch.randn(2, *batch, features, generator=generator(name, features, batch), dtype=torch.float64)
    return step, 2 * z.to(dtype)


def jacobians(step, z):
    """∂t/∂z of every point by autograd: (*, D, D)."""
    z = z.clone().requires_grad_()
    y = step(z)
    return torch.stack([torch.autograd.grad(y[..., i].sum(), z, retain_graph=True)[0] for i in range(z.shape[-1])], -2)


@EVERY_STEP
@EVERY_SCALE
@EVERY_SIZE
@EVERY_BATCH
def test_log_determinant_is_that_of_the_jacobian(name, features, batch, scale):
    step, z = make(name, features, batch, scale)
    y, ladj = step.call_and_ladj(z)
    jacobian = jacobians(step, z)
    trusted = torch.linalg.cond(jacobian) < 1e8
    expected = torch.linalg.slogdet(jacobian).logabsdet
    assert ladj.shape == z.shape[:-1]
    assert ((ladj - expected).abs() <= 1e-8 * features)[trusted].all()
    torch.testing.assert_close(step.log_abs_det_jacobian(z, y), ladj)
    # At unit scale and below hardly any point is too ill-conditioned for the dense determinant to be an oracle.
    assert scale > 1 or features > 5 or trusted.all()


@EVERY_STEP
@EVERY_SCALE
@EVERY_SIZE
@EVERY_BATCH
def test_inverse(name, features, batch, scale):
    step, z = make(name, features, batch, scale)
    y, _ladj = step.call_and_ladj(z)
    back = step.inv(y)
    singular = torch.linalg.svdvals(jacobians(step, z))
    # What may be lost: the rounding on the way there, amplified on the way back; a flat stretch amplifies by itself.
    amplified = (1 + singular[..., 0]) / singular[..., -1]
    error = (back - z).abs().amax(-1) / (1 + z.abs().amax(-1) + y.abs().amax(-1))
    assert (error <= 1e-13 * (1 + amplified)).all()
    # Any point of the space has an inverse image, not only images of typical points.
    y = 3 * y.flip(0) + 1
    back, inverse_ladj = step.inv.call_and_ladj(y)
    assert ((step(back) - y).abs() <= 1e-9 * (1 + y.abs())).all()
    torch.testing.assert_close(inverse_ladj, -step.log_abs_det_jacobian(back, y), rtol=1e-9, atol=1e-9)


@EVERY_STEP
def test_samples_meet_parameters_as_a_loop_would(name):
    case, (features, batch) = STEPS[name], (5, (4, 3))
    leaves = case.leaves(name, features, batch, 1.0)
    z = torch.randn(6, *batch, features)
    y, ladj = case.build(*leaves).call_and_ladj(z)
    for i in range(batch[0]):
        for j in range(batch[1]):
            step = case.build(*[leaf[i, j] for leaf in leaves]) if case.batched else case.build(*leaves)
            for s in range(6):
                y_one, ladj_one = step.call_and_ladj(z[s, i, j])
                torch.testing.assert_close(y[s, i, j], y_one)
                torch.testing.assert_close(ladj[s, i, j], ladj_one)
                torch.testing.assert_close(step.inv(y[s, i, j]), z[s, i, j])


@EVERY_STEP
def test_a_point_meets_a_batch_of_parameters(name):
    step, _ = make(name, 5, (4, 3), 1.0)
    z = torch.randn(5)
    y, ladj = step.call_and_ladj(z)
    expected = (4, 3) if STEPS[name].batched else ()
    assert y.shape == (*expected, 5)
    assert ladj.shape == expected
    torch.testing.assert_close(step.inv(y), z.expand_as(y))
    assert step.forward_shape((2, 1, 1, 5)) == torch.broadcast_shapes((2, 1, 1, 5), (*expected, 5))


@EVERY_STEP
@pytest.mark.parametrize("features", [1, 2, pytest.param(5, marks=pytest.mark.slow)])
@pytest.mark.parametrize("direction", ["forward", "inverse"])
def test_gradients(name, features, direction):
    case = STEPS[name]
    leaves = [leaf.requires_grad_() for leaf in case.leaves(name, features, (2,), 1.0)]
    z = torch.randn(2, 2, features, requires_grad=True)

    def run(z, *leaves):
        step = case.build(*leaves)
        return (step if direction == "forward" else step.inv).call_and_ladj(z)

    assert torch.autograd.gradcheck(run, (z, *leaves))


@EVERY_STEP
@pytest.mark.parametrize(
    "features", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("direction", ["forward", "inverse"])
def test_second_derivatives(name, features, direction):
    case = STEPS[name]
    leaves = [leaf.requires_grad_() for leaf in case.leaves(name, features, (), 1.0)]
    z = torch.randn(features, requires_grad=True)

    def run(z, *leaves):
        step = case.build(*leaves)
        return (step if direction == "forward" else step.inv).call_and_ladj(z)

    assert torch.autograd.gradgradcheck(run, (z, *leaves))


@EVERY_STEP
def test_function_transforms(name):
    step, z = make(name, 5, (), 1.0)
    y = step(z)
    for direction, points in ((step, z), (step.inv, y)):
        torch.testing.assert_close(torch.func.vmap(direction)(points), direction(points))
        by_vmap = torch.func.vmap(torch.func.jacrev(direction))(points)
        torch.testing.assert_close(by_vmap, jacobians(direction, points))
    identity = torch.eye(5).expand(2, 5, 5)
    torch.testing.assert_close(torch.func.vmap(torch.func.jacrev(lambda p: step.inv(step(p))))(z), identity)


@EVERY_STEP
def test_vmap_over_parameters(name):
    case = STEPS[name]
    leaves = [torch.stack(pair) for pair in zip(*(case.leaves(name, 4, (3,), s) for s in (0.5, 1.0)), strict=True)]
    z = torch.randn(5, 3, 4)

    def round_trip(*leaves):
        step = case.build(*leaves)
        y, ladj = step.call_and_ladj(z)
        return y, ladj, step.inv(y)

    y, ladj, back = torch.func.vmap(round_trip)(*leaves)
    for i in range(2):
        y_one, ladj_one, back_one = round_trip(*[leaf[i] for leaf in leaves])
        torch.testing.assert_close((y[i], ladj[i], back[i]), (y_one, ladj_one, back_one))


@EVERY_STEP
def test_is_a_torch_transform(name):
    step, z = make(name, 5, (3,), 1.0)
    y = step(z)
    assert step.bijective
    assert step.domain.event_dim == step.codomain.event_dim == 1
    assert step.inv.inv is step

    cached = step.with_cache()
    assert cached == step
    assert cached.inv == step.inv
    y = cached(z)
    assert cached(z) is y
    assert cached.inv(y) is z
    ladj = cached.log_abs_det_jacobian(z, y)
    assert cached.with_cache(0) == step

    both = ComposeTransform([step, step.inv])
    torch.testing.assert_close(both(z), z)
    torch.testing.assert_close(both.log_abs_det_jacobian(z, both(z)), torch.zeros(z.shape[:-1]))
    torch.testing.assert_close(ComposeTransform([step]).inv(y), z)
    independent = IndependentTransform(step, 1)
    torch.testing.assert_close(independent.log_abs_det_jacobian(z, y), ladj.sum(-1))

    base = Independent(Normal(torch.zeros(3, 5), torch.ones(3, 5)), 1)
    distribution = TransformedDistribution(base, [step])
    assert distribution.rsample((2,)).shape == (2, 3, 5)
    torch.testing.assert_close(distribution.log_prob(y), base.log_prob(z) - ladj)


@EVERY_STEP
def test_equality(name):
    step, _ = make(name, 5, (3,), 1.0)
    other, _ = make(name, 5, (3,), 0.1)
    assert step == copy.copy(step)
    assert step != other
    assert step != "a step"


@pytest.mark.parametrize("name", [name for name in STEPS if name != "affine-plain-function"])
def test_pickle(name):
    step, z = make(name, 5, (3,), 1.0)
    torch.testing.assert_close(pickle.loads(pickle.dumps(step)).inv(step(z)), z)


@EVERY_STEP
@pytest.mark.parametrize("scale", [0.1, 1.0, 3.0, 10.0])
def test_float32(name, scale):
    step, z = make(name, 64, (3,), scale, torch.float32)
    y, ladj = step.call_and_ladj(z)
    back, back_ladj = step.inv.call_and_ladj(y)
    again = step(back)
    for value in (y, ladj, back, back_ladj, again):
        assert value.dtype == torch.float32
        assert value.isfinite().all()
    if scale <= 1:
        assert ((again - y).abs() <= 1e-4 * (1 + y.abs())).all()


@EVERY_STEP
def test_float32_gradients_are_finite(name):
    case = STEPS[name]
    leaves = [leaf.requires_grad_() for leaf in case.leaves(name, 64, (3,), 3.0, torch.float32)]
    z = torch.randn(2, 3, 64, dtype=torch.float32, requires_grad=True)
    y, ladj = case.build(*leaves).call_and_ladj(z)
    (y.sum() + ladj.sum()).backward()
    assert all(leaf.grad.isfinite().all() for leaf in (z, *leaves))
