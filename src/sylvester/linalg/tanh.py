"""The triangular tanh equation, whose solution inverts planar and Sylvester steps.

With T = R̃R, multiplying z' = z + Q R tanh(a), a = R̃Qᵀz + b, by R̃Qᵀ gives

    a + T tanh(a) = c,    c = R̃Qᵀz' + b,

in which nothing is divided by R̃. T is upper triangular with diagonal ρ > −1, so the rows can be solved from the last
to the first, and each is a scalar equation a + ρ tanh(a) = c' that is monotone with its root in c' ± |ρ|.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from sylvester.linalg.opaque import opaque, with_tangent
from sylvester.linalg.operators import matvec
from sylvester.linalg.precision import full_precision

_NEWTON_STEPS = 24
_SCALAR_STEPS = 80
# Newton's Jacobians take M² numbers per point: so many numbers are in hand at once.
_WORKING_SET = 1 << 24
# Rows of a block of the transposed system: more of them multiply larger triangles, fewer of them make more calls.
_ROWS = 32


@full_precision
def solve_tanh(t: Tensor, c: Tensor) -> Tensor:
    """The a ``(*, M)`` with a + T tanh(a) = c, for T ``(*, M, M)`` upper triangular with diagonal > −1.

    Batch axes broadcast. What lies below T's diagonal is ignored. Newton's method, which is triangular here,
    and row-by-row bracketing where it does not settle; the gradient comes from the implicit function theorem:
    (I + T diag(tanh'(a))) da = dc − dT tanh(a).

    >>> t, c = torch.tensor([[2.0, -1.0], [0.0, 3.0]]), torch.tensor([1.0, 5.0])
    >>> a = solve_tanh(t, c)
    >>> torch.allclose(a + t @ a.tanh(), c)
    True
    """
    if t.dim() < 2 or t.shape[-1] != t.shape[-2] or c.dim() < 1 or c.shape[-1] != t.shape[-1]:
        raise ValueError(f"Expected t (*, M, M) and c (*, M); got {tuple(t.shape)} and {tuple(c.shape)}")
    return _solve_tanh(t, c)


@full_precision
def solve_tanh_transposed(r: Tensor, r_tilde: Tensor, slope: Tensor, c: Tensor) -> Tensor:
    """The x ``(*, M)`` with (I + R̃ᵀ H Rᵀ) x = c, for R and R̃ ``(*, M, M)`` upper triangular and H = diag(slope).

    The matrix is lower triangular, and differs from sample to sample where R and R̃ do not: it is never formed. With
    s = Rᵀx, a block of rows k knows what the rows before it add,

        p_k = Σ_{j<k} R_jkᵀ x_j,    e_k = c_k − Σ_{j<k} R̃_jkᵀ H_j s_j,

    and is left with the small system (I + (R̃_kk R_kk)ᵀ H_k) s_k = p_k + R_kkᵀ e_k, whence x_k = e_k − R̃_kkᵀ H_k s_k.

    >>> r, r_tilde = torch.rand(2, 5, 5).triu()
    >>> slope, c = torch.rand(2, 5)
    >>> x = solve_tanh_transposed(r, r_tilde, slope, c)
    >>> torch.allclose(x + r_tilde.mT @ (slope * (r.mT @ x)), c, atol=1e-5)
    True
    """
    c = c.expand(torch.broadcast_shapes(r.shape[:-1], r_tilde.shape[:-1], slope.shape, c.shape))
    x, hs = c[..., :0], c[..., :0]  # of the rows so far
    for start in range(0, c.shape[-1], _ROWS):
        rows = slice(start, start + _ROWS)
        r_k, r_tilde_k, h = r[..., rows, rows], r_tilde[..., rows, rows], slope[..., rows]
        e = c[..., rows]
        if start:
            e = e - matvec(r_tilde[..., :start, rows].mT, hs)
            s = matvec(r[..., : start + _ROWS, rows].mT, torch.cat([x, e], -1))
        else:
            s = matvec(r_k.mT, e)
        eye = torch.eye(h.shape[-1], dtype=h.dtype, device=h.device)
        small = (r_tilde_k @ r_k).mT * h.unsqueeze(-2) + eye
        hs_k = h * torch.linalg.solve_triangular(small, s.unsqueeze(-1), upper=False).squeeze(-1)
        x = torch.cat([x, e - matvec(r_tilde_k.mT, hs_k)], -1)
        hs = torch.cat([hs, hs_k], -1)
    return x


class _SolveTanh(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(t: Tensor, c: Tensor) -> Tensor:
        return _solve_tanh_value(t, c)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0], output)
        ctx.save_for_forward(inputs[0], output)
        ctx.c_shape = inputs[1].shape

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        t, a = ctx.saved_tensors
        h = a.tanh()
        jacobian = _jacobian(t, h)
        adjoint = torch.linalg.solve_triangular(jacobian.mT, grad.unsqueeze(-1), upper=False).squeeze(-1)
        grad_t = (adjoint.unsqueeze(-1) * -h.unsqueeze(-2)).sum_to_size(t.shape).triu()
        return grad_t, adjoint.sum_to_size(ctx.c_shape)

    @staticmethod
    def tangent(ctx: Any, t_dot: Tensor | None, c_dot: Tensor | None) -> Tensor:
        t, a = ctx.saved_tensors
        h = a.tanh()
        right = torch.zeros_like(a) if c_dot is None else c_dot.expand_as(a)
        if t_dot is not None:
            right = right - matvec(t_dot.triu(), h)
        return torch.linalg.solve_triangular(_jacobian(t, h), right.unsqueeze(-1), upper=True).squeeze(-1)


_solve_tanh = with_tangent(_SolveTanh)


def _jacobian(t: Tensor, h: Tensor) -> Tensor:
    """I + T diag(tanh'), where h = tanh(a): (*, M, M). Triangular solves read its upper triangle alone."""
    return t * (1 - h * h).unsqueeze(-2) + torch.eye(t.shape[-1], dtype=t.dtype, device=t.device)


def _broadcast_c(t: Tensor, c: Tensor) -> Tensor:
    return c.new_empty(torch.broadcast_shapes(t.shape[:-1], c.shape))


@opaque("solve_tanh", "(Tensor t, Tensor c) -> Tensor", event_dims=(2, 1), fake=_broadcast_c)
def _solve_tanh_value(t: Tensor, c: Tensor) -> Tensor:
    shape = torch.broadcast_shapes(t.shape[:-1], c.shape)
    m = shape[-1]
    t = t.triu()
    # Samples in front: (S, *P, M) with one matrix per P, so that a chunk of samples shares its matrices.
    batch = t.dim() - 2
    samples = math.prod(shape[: len(shape) - 1 - batch])
    c = c.expand(shape).reshape(samples, *shape[len(shape) - 1 - batch :])
    if not c.numel():
        return c.reshape(shape).clone()
    points = c[0].numel() // m
    chunk = max(1, _WORKING_SET // (points * m * m))
    return torch.cat([_newton(t, part) for part in c.split(chunk)]).reshape(shape)


def _newton(t: Tensor, c: Tensor) -> Tensor:
    reach = t.abs().sum(-1)  # |a − c| ≤ reach, since |tanh| ≤ 1
    tolerance = 4 * torch.finfo(c.dtype).eps * (1 + c.abs() + reach)
    lower, upper = c - reach, c + reach
    a = c
    for _ in range(_NEWTON_STEPS):
        h = a.tanh()
        residual = a + matvec(t, h) - c
        settled = (residual.abs() <= tolerance).all(-1)
        if settled.all():
            return a
        step = torch.linalg.solve_triangular(_jacobian(t, h), residual.unsqueeze(-1), upper=True).squeeze(-1)
        a = torch.clamp(a - step, lower, upper)
    stray = ~settled
    rows = t.expand(*c.shape, c.shape[-1])[stray]
    return a.masked_scatter(stray.unsqueeze(-1), _back_substitute(rows, c[stray]))


def _back_substitute(t: Tensor, c: Tensor) -> Tensor:
    """The same solution row by row, each bracketed: slower, and sure."""
    a, h = torch.zeros_like(c), torch.zeros_like(c)
    for i in reversed(range(c.shape[-1])):
        known = c[..., i] - (t[..., i, i + 1 :] * h[..., i + 1 :]).sum(-1)
        a[..., i] = _scalar(t[..., i, i], known)
        h[..., i] = a[..., i].tanh()
    return a


def _scalar(rho: Tensor, c: Tensor) -> Tensor:
    """The root of the increasing function a + ρ tanh(a) − c: Newton's step where it stays in the bracket, else half."""
    lower, upper = c - rho.abs(), c + rho.abs()
    a = c
    for _ in range(_SCALAR_STEPS):
        h = a.tanh()
        residual = a + rho * h - c
        lower, upper = torch.where(residual > 0, lower, a), torch.where(residual > 0, a, upper)
        step = a - residual / (1 + rho * (1 - h * h))
        inside = (step >= lower) & (step <= upper)
        following = torch.where(inside, step, (lower + upper) / 2)
        if torch.equal(following, a):
            break
        a = following
    return a
