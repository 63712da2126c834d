from __future__ import annotations

import pytest
import torch
from cases import generator
from hypothesis import given, settings
from hypothesis import strategies as st

from sylvester.linalg import (
    Dense,
    HouseholderProduct,
    Identity,
    Reversal,
    as_operator,
    matvec,
    polar,
    solve_tanh,
)
from sylvester.linalg.tanh import _back_substitute

pytestmark = pytest.mark.usefixtures("float64")

SHAPES = [(1, 1), (2, 1), (5, 3), (5, 5), (64, 32), (64, 64)]


def with_singular_values(values, features, count=20):
    rank = len(values)
    u = torch.linalg.qr(torch.randn(count, features, rank, dtype=torch.float64)).Q
    v = torch.linalg.qr(torch.randn(count, rank, rank, dtype=torch.float64)).Q
    return (u * values) @ v.mT, u @ v.mT


@pytest.mark.parametrize(("features", "rank"), SHAPES)
def test_polar_is_that_of_the_singular_value_decomposition(features, rank):
    a = torch.randn(50, features, rank)
    u, s, vh = torch.linalg.svd(a, full_matrices=False)
    error = (polar(a) - u @ vh).abs().amax((-2, -1))
    assert (error <= 1e-13 * s[:, 0] / s[:, -1]).all()


@pytest.mark.parametrize("condition", [1e0, 1e2, 1e4])
@pytest.mark.parametrize("size", [1e-20, 1.0, 1e15])
def test_polar_float32_is_orthonormal(condition, size):
    values = torch.logspace(0, -torch.tensor(condition).log10().item(), 32)
    a, q = with_singular_values(values, 64)
    found = polar((size * a).float())
    gram = found.mT @ found
    assert torch.linalg.matrix_norm(gram - torch.eye(32, dtype=torch.float32)).max() <= 1e-5
    assert (found - q).abs().max() <= 1e-6 * (1 + 0.1 * condition)


@pytest.mark.parametrize(("features", "rank"), [(1, 1), (3, 2), (4, 4)])
def test_polar_derivatives(features, rank):
    a = torch.randn(2, features, rank, requires_grad=True)
    assert torch.autograd.gradcheck(polar, a)
    assert torch.autograd.gradgradcheck(polar, a)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_polar_without_full_rank(dtype):
    a = torch.zeros(4, 5, 3, dtype=dtype)
    a[1, 0, 0] = 1.0
    a[2] = 1.0
    a[3, :3] = torch.eye(3) * torch.tensor([1.0, 1.0, 1e-30])
    a.requires_grad_()
    q = polar(a)
    torch.testing.assert_close(q.mT @ q, torch.eye(3, dtype=dtype).expand(4, 3, 3))
    p = q.mT @ a
    torch.testing.assert_close(p, p.mT)
    (q * torch.randn(4, 5, 3, dtype=dtype)).sum().backward()
    assert a.grad.isfinite().all()
    assert a.grad.abs().max() < 100


def test_polar_keeps_rows_apart():
    a = torch.randn(3, 4, 2)
    a[1, 0, 0] = torch.nan
    a[2] = 0.0
    q = polar(a)
    assert q[1].isnan().all()
    torch.testing.assert_close(q[0], polar(a[0]))
    torch.testing.assert_close(q[2].mT @ q[2], torch.eye(2))


def test_polar_under_function_transforms():
    a = torch.randn(3, 4, 2)
    torch.testing.assert_close(torch.func.vmap(polar, in_dims=2, out_dims=2)(a.movedim(0, 2)).movedim(2, 0), polar(a))
    expected = torch.stack([torch.autograd.functional.jacobian(polar, matrix) for matrix in a])
    torch.testing.assert_close(torch.func.vmap(torch.func.jacrev(polar))(a), expected)


@pytest.mark.parametrize("bad", [torch.randn(3), torch.randn(2, 3), torch.ones(3, 2, dtype=torch.long)])
def test_polar_refuses(bad):
    with pytest.raises(ValueError, match="Expected a floating-point matrix"):
        polar(bad)


@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
@pytest.mark.parametrize("count", [1, 2, 5, 9])
def test_householder_product_is_the_product_of_reflections(batch, count):
    v = torch.randn(*batch, count, 5)
    v[..., count // 2, :] = 0.0
    dense = torch.eye(5).expand(*batch, 5, 5)
    for i in range(count):
        vector = v[..., i, :, None]
        length = (vector * vector).sum((-2, -1), keepdim=True)
        dense = (torch.eye(5) - 2 * vector @ vector.mT / length.clamp(min=1e-300)) @ dense
    q = HouseholderProduct(v)
    z = torch.randn(4, *batch, 5)
    torch.testing.assert_close(q.matvec(z), (dense @ z.unsqueeze(-1)).squeeze(-1))
    torch.testing.assert_close(q.rmatvec(z), (dense.mT @ z.unsqueeze(-1)).squeeze(-1))
    torch.testing.assert_close(q.rmatvec(q.matvec(z)), z)


@pytest.mark.parametrize("size", [1e-30, 1e-10, 1.0, 1e15, 1e30])
def test_reflections_do_not_depend_on_length(size):
    v, z = torch.randn(3, 6, dtype=torch.float32), torch.randn(6, dtype=torch.float32)
    torch.testing.assert_close(HouseholderProduct(size * v).matvec(z), HouseholderProduct(v).matvec(z))


def test_householder_derivatives():
    v = torch.randn(2, 3, 4, requires_grad=True)
    z = torch.randn(5, 2, 4, requires_grad=True)
    for run in (lambda v, z: HouseholderProduct(v).matvec(z), lambda v, z: HouseholderProduct(v).rmatvec(z)):
        assert torch.autograd.gradcheck(run, (v, z))
        assert torch.autograd.gradgradcheck(run, (v, z))


def test_householder_gradient_at_a_zero_vector_is_finite():
    v = torch.zeros(2, 3, requires_grad=True)
    HouseholderProduct(v).matvec(torch.randn(3)).sum().backward()
    assert v.grad.isfinite().all()


def test_operators():
    z = torch.randn(2, 4)
    assert isinstance(as_operator(None), Identity)
    assert isinstance(as_operator(torch.eye(4)), Dense)
    assert as_operator(None).matvec(z) is z
    torch.testing.assert_close(Reversal().rmatvec(z), z.flip(-1))
    assert Reversal() == Reversal()
    assert Reversal() != Identity()
    assert Dense(torch.eye(3)) != Dense(torch.zeros(3, 3))
    with pytest.raises(ValueError, match="Expected q of shape"):
        Dense(torch.randn(2, 3))


@pytest.mark.parametrize(
    ("matrix", "vector"),
    [
        ((2, 3), (3,)),
        ((2, 3), (5, 3)),
        ((4, 2, 3), (4, 3)),
        ((4, 2, 3), (3,)),
        ((4, 2, 3), (6, 4, 3)),
        ((4, 2, 3), (6, 1, 3)),
        ((1, 2, 3), (6, 4, 3)),
        ((5, 4, 2, 3), (7, 6, 5, 4, 3)),
        ((4, 1, 2, 3), (7, 4, 5, 3)),
    ],
)
def test_matvec_broadcasts(matrix, vector):
    a, x = torch.randn(matrix), torch.randn(vector)
    torch.testing.assert_close(matvec(a, x), (a @ x.unsqueeze(-1)).squeeze(-1))


def draw_tanh(m, scale, rng, count=40):
    def triangle():
        off = 2 * scale / m**0.5 * torch.randn(count, m, m, generator=rng)
        return off.triu(1) + torch.diag_embed(0.999 * torch.tanh(scale * torch.randn(count, m, generator=rng)))

    return triangle() @ triangle(), scale * torch.randn(5, count, m, generator=rng)


@pytest.mark.parametrize("scale", [0.1, 1.0, 3.0, 10.0])
@pytest.mark.parametrize("m", [1, 2, 8, 64])
def test_solve_tanh(m, scale):
    t, c = draw_tanh(m, scale, generator(m, scale))
    a = solve_tanh(t, c)
    size = 1 + c.abs() + t.abs().sum(-1)
    assert ((a + matvec(t, a.tanh()) - c).abs() <= 1e-14 * size).all()
    sure = _back_substitute(t.expand(*c.shape, m), c)
    assert ((sure + matvec(t, sure.tanh()) - c).abs() <= 1e-14 * size).all()


@settings(max_examples=300, deadline=None)
@given(
    st.floats(-1, 1e6, exclude_min=True, allow_nan=False),
    st.floats(-1e6, 1e6, allow_nan=False),
)
def test_the_scalar_equation_has_its_root(rho, c):
    rho_, c_ = torch.tensor([[rho]], dtype=torch.float64), torch.tensor([c], dtype=torch.float64)
    a = solve_tanh(rho_, c_)
    assert (a + rho_[0] * a.tanh() - c_).abs() <= 1e-14 * (1 + abs(c) + abs(rho))


def test_solve_tanh_does_not_depend_on_how_points_are_chunked(monkeypatch):
    t, c = draw_tanh(8, 1.0, generator("chunks"))
    whole = solve_tanh(t, c)
    monkeypatch.setattr("sylvester.linalg.tanh._WORKING_SET", 1)
    torch.testing.assert_close(solve_tanh(t, c), whole, rtol=0, atol=1e-14)


def test_solve_tanh_derivatives():
    t, c = draw_tanh(3, 1.0, generator("derivatives"), count=2)
    t.requires_grad_(), c.requires_grad_()
    assert torch.autograd.gradcheck(solve_tanh, (t, c))
    assert torch.autograd.gradgradcheck(solve_tanh, (t, c))


def test_solve_tanh_ignores_the_lower_triangle():
    t, c = draw_tanh(4, 1.0, generator("lower"), count=1)
    full = (t + torch.randn(4, 4).tril(-1)).requires_grad_()
    a = solve_tanh(full, c)
    torch.testing.assert_close(a, solve_tanh(t, c))
    a.sum().backward()
    assert not full.grad.tril(-1).any()


def test_solve_tanh_passes_nan_on():
    t, c = draw_tanh(3, 1.0, generator("nan"), count=2)
    c[0, 0, 1] = torch.nan
    a = solve_tanh(t, c)
    assert a[0, 0, :2].isnan().all()
    assert a[0, 1].isfinite().all()
    assert a[1:].isfinite().all()


def test_solve_tanh_refuses():
    with pytest.raises(ValueError, match="Expected t"):
        solve_tanh(torch.randn(2, 3), torch.randn(3))
    with pytest.raises(ValueError, match="Expected t"):
        solve_tanh(torch.randn(3, 3), torch.randn(2))
