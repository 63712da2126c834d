"""What the paper states, as it is really true."""

from __future__ import annotations

import pytest
import torch
from cases import generator

from sylvester import flows
from sylvester.linalg import HouseholderProduct, Reversal, polar
from sylvester.transforms import HouseholderTransform, PlanarTransform, SylvesterTransform

pytestmark = pytest.mark.usefixtures("float64")

D = 5


def upper(m, rng, diagonal=None):
    diagonal = torch.tanh(torch.randn(m, generator=rng)) if diagonal is None else diagonal
    return torch.randn(m, m, generator=rng).triu(1) + torch.diag(diagonal)


def test_sylvesters_determinant_identity():
    a, b = torch.randn(D, 3), torch.randn(3, D)
    torch.testing.assert_close(torch.linalg.det(torch.eye(D) + a @ b), torch.linalg.det(torch.eye(3) + b @ a))


def test_a_step_of_rank_one_is_planar_with_u_along_w():
    q = torch.nn.functional.normalize(torch.randn(D, 1), dim=0)
    r, r_tilde, b = torch.tensor([[0.7]]), torch.tensor([[-1.2]]), torch.randn(1)
    sylvester = SylvesterTransform(q, r, r_tilde, b)
    planar = PlanarTransform(q[:, 0] * r[0, 0], q[:, 0] * r_tilde[0, 0], b[0])
    z = torch.randn(7, D)
    torch.testing.assert_close(sylvester.call_and_ladj(z), planar.call_and_ladj(z))
    torch.testing.assert_close(sylvester.inv(z), planar.inv(z))


def test_a_general_planar_step_is_a_sylvester_step_of_rank_two():
    """u = r_11 q_1 and w = r̃_11 q_1 + r̃_12 q_2; the second unit's tanh(b_2) = 0 adds nothing."""
    u, w = torch.randn(D), torch.randn(D)
    u = u * (u @ w).sign()
    b = torch.randn(())
    q_1 = u / u.norm()
    q_2 = torch.nn.functional.normalize(w - (w @ q_1) * q_1, dim=0)
    q = torch.stack([q_1, q_2], -1)
    r = torch.tensor([[u.norm(), 0.0], [0.0, 0.0]])
    r_tilde = torch.tensor([[w @ q_1, w @ q_2], [0.0, 0.0]])
    sylvester = SylvesterTransform(q, r, r_tilde, torch.stack([b, torch.zeros(())]), validate_args=True)
    z = torch.randn(7, D)
    torch.testing.assert_close(sylvester.call_and_ladj(z), PlanarTransform(u, w, b).call_and_ladj(z))
    # r̃_22 = 0: the case the paper's proof of invertibility leaves out.
    torch.testing.assert_close(sylvester.inv(sylvester(z)), z)


@pytest.mark.parametrize("q", [None, Reversal()], ids=["identity", "reversal"])
def test_triangular_steps_with_a_zero_diagonal_preserve_volume(q):
    rng = generator("volume")
    step = SylvesterTransform(q, upper(D, rng, torch.zeros(D)), upper(D, rng), torch.randn(D))
    z = torch.randn(7, D)
    y, ladj = step.call_and_ladj(z)
    assert not ladj.any()
    jacobian = torch.func.vmap(torch.func.jacrev(step))(z)
    torch.testing.assert_close(torch.linalg.det(jacobian), torch.ones(7))
    torch.testing.assert_close(step.inv(y), z)


def test_one_linear_step_without_residual_is_a_reflection():
    """h(x) = x, R = I, R̃ = diag(−1, 1, …, 1), no residual: z' = Q R̃ Qᵀ z = H_v z, where v is Q's first column."""
    q = polar(torch.randn(D, D))
    r_tilde = torch.diag(torch.tensor([-1.0, *[1.0] * (D - 1)]))
    z = torch.randn(7, D)
    torch.testing.assert_close(z @ (q @ r_tilde @ q.T).T, HouseholderTransform(q[:, :1].T)(z))


def reflections_of(q):
    """Vectors whose reflections, in order, multiply to an orthogonal matrix: at most one for each column."""
    vectors, rest = [], q.clone()
    for i in range(len(q)):
        v = rest[:, i] - torch.eye(len(q))[i]
        if v.norm() > 1e-12:
            vectors.append(v)
            rest = rest - 2 * torch.outer(v, v @ rest) / (v @ v)
    return torch.stack(vectors).flip(0)  # rest = H_M ··· H_1 q = I, so q = H_1 ··· H_M


@pytest.mark.parametrize("determinant", [-1, 1])
@pytest.mark.parametrize("m", [1, 2, 4, 5])
def test_m_reflections_reach_every_orthogonal_matrix_and_fewer_do_not(m, determinant):
    q = polar(torch.randn(m, m))
    if torch.linalg.det(q) * determinant < 0:
        q[:, 0] = -q[:, 0]
    # −1 to the number of reflections is the determinant, so parity alone rules out M − 1 for half of all matrices.
    vectors = reflections_of(q) if m > 1 or determinant < 0 else torch.zeros(1, 1)
    assert len(vectors) <= m
    torch.testing.assert_close(HouseholderProduct(vectors).matvec(torch.eye(m)).T, q)


def test_minus_the_identity_needs_m_reflections():
    m = 4
    assert len(reflections_of(-torch.eye(m))) == m
    for _ in range(50):
        q = HouseholderProduct(torch.randn(m - 1, m)).matvec(torch.eye(m))
        # M − 1 reflections leave a vector fixed, and −I leaves none.
        assert torch.linalg.eigvals(q).sub(1).abs().min() < 1e-8


def test_alternating_reversal_is_alternating_upper_and_lower_triangles():
    rng = generator("reversal")
    r, r_tilde, b, z = upper(D, rng), upper(D, rng), torch.randn(D), torch.randn(D)
    lower, lower_tilde = r.flip(0, 1), r_tilde.flip(0, 1)
    assert not lower.triu(1).any()
    expected = z + lower @ torch.tanh(lower_tilde @ z + b.flip(0))
    torch.testing.assert_close(SylvesterTransform(Reversal(), r, r_tilde, b)(z), expected)


def test_numbers_of_parameters():
    """§5, with E = 256, D = 64, M = 32, H = 8; triangles packed instead of two full matrices."""
    e, d, k, m, h = 256, 64, 16, 32, 8
    base = 2 * (e * d + d)

    def count(flow):
        return sum(p.numel() for p in flow.parameters()) - base

    assert count(flows.Planar(d, e, k)) == (e + 1) * k * (2 * d + 1)
    assert count(flows.TriangularSylvester(d, e, k)) == (e + 1) * k * (d * d + 2 * d)
    assert count(flows.OrthogonalSylvester(d, e, k, rank=m)) == (e + 1) * k * (m * d + m * m + 2 * m)
    assert count(flows.HouseholderSylvester(d, e, k, reflections=h)) == (e + 1) * k * (h * d + d * d + 2 * d)
    c = 320
    weights, biases = c * c + 3 * c * d, 2 * c + 2 * d
    assert count(flows.IAF(d, e, k, hidden_features=c)) == (e + 1) * c + k * (weights + biases)


def test_singular_r_tilde_is_no_obstacle_to_the_inverse():
    step = SylvesterTransform(None, torch.eye(D), torch.zeros(D, D), torch.randn(D), validate_args=True)
    z = torch.randn(7, D)
    torch.testing.assert_close(step.inv(step(z)), z)


def test_no_dense_determinant_on_the_way_forward():
    """The determinant costs O(M): no decomposition, and no D x D product of reflections, in a forward step."""
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            seen.append((func.name(), tuple(out.shape) if isinstance(out, torch.Tensor) else None))
            return out

    features = 24
    for family, options in [
        (flows.TriangularSylvester, {}),
        (flows.OrthogonalSylvester, {"rank": 6}),
        (flows.HouseholderSylvester, {"reflections": 4}),
    ]:
        posterior = family(features, 3, 2, **options)(torch.randn(2, 3))
        seen.clear()
        with Record():
            posterior.rsample_and_log_prob((7,))
        assert seen
        for name, shape in seen:
            assert not any(word in name for word in ("linalg", "lu_", "cholesky", "triangular", "inverse")), name
            assert "mm" not in name or shape[-2:] != (features, features), (name, shape)
