"""The polar factor: the matrix with orthonormal columns that is nearest to a given one.

A = Q P with QᵀQ = I and P symmetric positive semidefinite. Orthogonal Sylvester flows take Q from an unconstrained A.

**Value.** An odd polynomial of A acts on its singular values alone, so Q is the limit of polynomials that push every
singular value to 1. Five quintics, each the best uniform approximation of 1 on what its predecessor leaves, take
[0.01, 1] to within 2e-6 of 1; a round of the five multiplies smaller singular values by about 290 and leaves those
near 1 there, so rounds repeat until all have arrived. The paper's iteration multiplies them by 1.5 a step.

**Gradient.** Differentiating A = QP and QᵀQ = I gives, for the cotangent Ḡ of Q,

    Ā = Q X + (I − QQᵀ) Ḡ P⁻¹,    where X solves  P X + X P = QᵀḠ − ḠᵀQ,

a Sylvester equation in P alone: no iteration is unrolled, and memory does not depend on their number.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from sylvester.linalg.opaque import opaque, with_tangent
from sylvester.linalg.precision import full_precision

# Best odd quintics x (a + b x² + c x⁴) on [0.01, 1] and on the intervals round 1 that follow, by linear programming.
_ROUND = (
    (8.0934, -23.6204, 17.4462),
    (3.6366, -2.7219, 0.5365),
    (2.6613, -1.9772, 0.4526),
    (1.9562, -1.3375, 0.3839),
    (1.8752, -1.2502, 0.3750),
)
# Newton–Schulz of order five: cubically convergent at 1.
_POLISH = (15 / 8, -10 / 8, 3 / 8)
# Enough for condition numbers up to about 10⁵.
_DOUBLINGS = 20


@full_precision
def polar(a: Tensor) -> Tensor:
    """The polar factor Q ``(*, D, M)`` of A ``(*, D, M)``, D ≥ M: QᵀQ = I and QᵀA symmetric positive semidefinite.

    Where A has not full rank, Q is not unique: the answer is still orthonormal (the missing directions are completed
    from a singular value decomposition), and the gradient is that of the minimum-norm solution, in which the
    undetermined directions get none. Both are finite; a row with a NaN or an infinity gives NaN.

    >>> q = polar(torch.tensor([[2.0, 0.0], [0.0, 3.0], [0.0, 0.0]]))
    >>> q.round(decimals=4).abs().tolist()
    [[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]]
    """
    if a.dim() < 2 or a.shape[-1] > a.shape[-2] or not a.is_floating_point():
        raise ValueError(f"Expected a floating-point matrix (*, D, M) with M <= D; got {tuple(a.shape)} {a.dtype}")
    return _polar(a)


class _Polar(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor) -> Tensor:
        return _polar_value(a)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0], output)
        ctx.save_for_forward(inputs[0], output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        a, q = ctx.saved_tensors
        return _derivative(a, q, grad)

    @staticmethod
    def tangent(ctx: Any, a_dot: Tensor) -> Tensor:
        a, q = ctx.saved_tensors
        return _derivative(a, q, a_dot)


_polar = with_tangent(_Polar)


@full_precision
def _derivative(a: Tensor, q: Tensor, direction: Tensor) -> Tensor:
    """Ā from Ḡ, and likewise Q̇ from Ȧ: the derivative of the polar factor is its own transpose."""
    p = q.mT @ a
    p = (p + p.mT) / 2
    inner = q.mT @ direction
    skew = inner - inner.mT
    if q.shape[-2] == q.shape[-1]:
        return q @ _lyapunov(p, skew)
    twice_identity = 2 * torch.eye(p.shape[-1], dtype=p.dtype, device=p.device).expand_as(p)
    # P X + X P = 2 I is solved by P⁻¹, so one eigenbasis serves both terms.
    x, p_inverse = _lyapunov(p, torch.stack([skew, twice_identity])).unbind(0)
    return q @ x + (direction - q @ inner) @ p_inverse


class _Lyapunov(torch.autograd.Function):
    """X of P X + X P = S for symmetric positive semidefinite P.

    Directions in which P vanishes get no X (the minimum-norm solution). The equation is its own adjoint, so
    the backward pass is another solve and derivatives of every order follow.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(p: Tensor, s: Tensor) -> Tensor:
        return _lyapunov_value(p, s)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0], output)
        ctx.save_for_forward(inputs[0], output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        p, x = ctx.saved_tensors
        grad_s = _lyapunov(p, grad)
        grad_p = -(grad_s @ x.mT + x.mT @ grad_s)
        return grad_p.sum_to_size(p.shape), grad_s

    @staticmethod
    def tangent(ctx: Any, p_dot: Tensor | None, s_dot: Tensor | None) -> Tensor:
        p, x = ctx.saved_tensors
        right = torch.zeros_like(x) if s_dot is None else s_dot
        if p_dot is not None:
            right = right - p_dot @ x - x @ p_dot
        return _lyapunov(p, right)


_lyapunov = with_tangent(_Lyapunov)


def _broadcast_s(p: Tensor, s: Tensor) -> Tensor:
    return s.new_empty(torch.broadcast_shapes(p.shape, s.shape))


@opaque("lyapunov", "(Tensor p, Tensor s) -> Tensor", event_dims=(2, 2), fake=_broadcast_s)
def _lyapunov_value(p: Tensor, s: Tensor) -> Tensor:
    """Smith's method, doubled: with K = (P + μI)⁻¹ and C = (P − μI)K, the equation reads X = C X C + 2μ K S K, whose
    solution is the sum of Cⁿ (2μ K S K) Cⁿ; n doubles with every pass. For any μ > 0, C has eigenvalues within ±1."""
    shape = torch.broadcast_shapes(p.shape, s.shape)
    if shape[len(shape) - p.dim() :] != p.shape:
        p = p.expand(shape)
    identity = torch.eye(p.shape[-1], dtype=p.dtype, device=p.device)
    mu = 0.7 * p.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    factor, failed = torch.linalg.cholesky_ex(p + mu * identity)
    k = torch.cholesky_inverse(torch.where((failed != 0)[..., None, None], identity, factor))
    c = identity - 2 * mu * k
    # Right-hand sides that share a P are solved one after another: broadcast products would copy K and C.
    sides = s.expand(shape).reshape(math.prod(shape[: len(shape) - p.dim()]), *p.shape).unbind(0)
    xs = [k @ (2 * mu * side) @ k for side in sides]
    for _ in range(_DOUBLINGS):
        xs = [x + c @ x @ c for x in xs]
        c = c @ c
        # What is left of the sum is about |C|² of what is there.
        left = torch.linalg.matrix_norm(c).square()
        stray = ~(left <= torch.finfo(p.dtype).eps) | (failed != 0)
        if not stray.any():
            break
    else:
        exact = [_lyapunov_by_eigenvectors(p[stray], side[stray]) for side in sides]
        mask = stray[..., None, None].expand_as(p)
        xs = [x.masked_scatter(mask, solved) for x, solved in zip(xs, exact, strict=True)]
    return torch.stack(xs).reshape(shape)


def _lyapunov_by_eigenvectors(p: Tensor, s: Tensor) -> Tensor:
    """x_ij = s_ij / (λ_i + λ_j) in the eigenbasis of P, and nothing where both eigenvalues vanish."""
    finite = p.isfinite().all(-1).all(-1)[..., None, None]
    eigenvalues, v = torch.linalg.eigh(torch.where(finite, p, 0.0))
    eigenvalues = eigenvalues.clamp(min=0)
    sums = eigenvalues.unsqueeze(-1) + eigenvalues.unsqueeze(-2)
    floor = 4 * torch.finfo(p.dtype).eps * p.shape[-1] * eigenvalues.amax(-1)[..., None, None]
    x = v @ torch.where(sums > floor, (v.mT @ s @ v) / sums, 0.0) @ v.mT
    return torch.where(finite, x, torch.nan)


def _contiguous_like(a: Tensor) -> Tensor:
    return torch.empty_like(a, memory_format=torch.contiguous_format)


@opaque("polar", "(Tensor a) -> Tensor", event_dims=(2,), fake=_contiguous_like)
def _polar_value(a: Tensor) -> Tensor:
    flat = a.reshape(-1, *a.shape[-2:])
    finite = flat.isfinite().flatten(1).all(1)
    x = torch.where(finite[:, None, None], flat, 0.0)
    largest = x.abs().amax((-2, -1), keepdim=True)
    x = x / torch.where(largest > 0, largest, 1.0)
    # ‖A‖₂ ≤ ‖AᵀA‖_F^½, tighter than the Frobenius norm by up to M^¼.
    bound = torch.linalg.matrix_norm(x.mT @ x, keepdim=True).sqrt()
    start = x / torch.where(bound > 0, bound, 1.0)
    x = start
    rounds, polishes = (3, 1) if a.dtype == torch.float32 else (7, 2)
    for i in range(rounds):
        for coefficients in _ROUND:
            x = _quintic(x, *coefficients)
        stray = (_gram_error(x).abs().amax((-2, -1)) > 1e-3).nonzero().squeeze(-1)
        if len(stray) == 0:
            break
        if i == rounds - 1:
            u, _, vh = torch.linalg.svd(start[stray], full_matrices=False)
            x = x.index_copy(0, stray, u @ vh)
    for _ in range(polishes):
        x = _quintic(x, *_POLISH)
    return torch.where(finite[:, None, None], x, torch.nan).reshape(a.shape)


def _quintic(x: Tensor, a: float, b: float, c: float) -> Tensor:
    gram = x.mT @ x
    inner = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
    return torch.baddbmm(x, x, inner, beta=a)


def _gram_error(x: Tensor) -> Tensor:
    return x.mT @ x - torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
