"""Sylvester flows, amortized. The three variants differ in how they make Q (§3.2).

R and R̃ come packed in one M x M matrix: its upper triangle is R, its strict lower triangle, transposed, that of R̃, and
R̃'s diagonal has a row of its own. With b that is M² + 2M outputs a step, none of them unused.

A step is invertible where every product ρ_i = r_ii r̃_ii exceeds −1. Two ways to see to it, from raw numbers c and s:

    bounded   r_ii = 0.999 tanh(c),    r̃_ii = 0.999 tanh(s)                              (the paper's)
    free      ρ_i = 0.999 (softplus(c) − 1),    r̃_ii = e^s,    r_ii = ρ_i / r̃_ii

Bounded, a step multiplies volumes by less than 2 for each column of Q. Free, only the product is bounded, and from
below alone. Nothing is lost with r̃_ii > 0: as tanh is odd, a row of R̃, its b and the column of R that it meets may
change their signs together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from sylvester.flows.base import (
    Amortize,
    AmortizedSteps,
    DiagonalGaussian,
    Flow,
    check_sizes,
    each_step,
    family,
    nudge,
)
from sylvester.flows.hypernetwork import Init, Output
from sylvester.linalg import HouseholderProduct, OrthonormalOperator, Reversal, polar
from sylvester.linalg.opaque import with_tangent
from sylvester.transforms import SylvesterTransform

# tanh reaches ±1 in float32: products of two such diagonals must stay above −1.
_DIAGONAL_BOUND = 0.999
_SMALL = 16  # up to so many features, all of them are the rank

Diagonals = Literal["bounded", "free"]

#: Raw parameters -> the K matrices Q.
MakeQ = Callable[[dict[str, Tensor]], Sequence[Tensor | OrthonormalOperator | None]]


@family
class OrthogonalSylvester(Flow):
    """O-SNF: K steps z' = z + Q R tanh(R̃ Qᵀ z + b), where Q is the polar factor of a D x M matrix.

    Args:
        rank: M, the columns of Q; half the features, but 16 at least (all of fewer), unless given.
        diagonals: what keeps r_ii r̃_ii above −1. "bounded" is the paper's, "free" reaches further in a step; free
            without a context, and bounded with one, unless given.
    """

    def __init__(
        self,
        features: int,
        context: int = 0,
        transforms: int = 8,
        *,
        rank: int | None = None,
        diagonals: Diagonals | None = None,
        init: Init = "identity",
        hyper_features: Sequence[int] = (),
        variance_bounds: tuple[float, float] | None = None,
        amortize: Amortize = "all",
    ):
        # Of rank one, a step would have its u along its w, and be less than a planar one.
        rank = min(features, max(_SMALL, (features + 1) // 2)) if rank is None else rank
        check_sizes(features, context, init, transforms=transforms, rank=rank)
        if rank > features:
            raise ValueError(f"Expected rank <= features = {features}; got {rank}")
        base = DiagonalGaussian(features, context, hyper_features=hyper_features, variance_bounds=variance_bounds)
        center = polar(torch.randn(transforms, features, rank))
        diagonals = _diagonals(diagonals, context)
        table = _table(rank, transforms, diagonals) | {
            "raw_q": Output((features, rank), center=center, spread=0.1 / features**0.5)
        }
        bind = partial(_bind, make_q=_polar_factors, diagonals=diagonals)
        steps = AmortizedSteps(
            context, transforms, table, bind, init=init, hyper_features=hyper_features, amortize=amortize
        )
        super().__init__(base, [steps])


@family
class HouseholderSylvester(Flow):
    """H-SNF: K steps z' = z + Q R tanh(R̃ Qᵀ z + b), where Q is a product of Householder reflections.

    Args:
        reflections: how many; 8, or D where that is less, unless given.
        diagonals: as for :class:`OrthogonalSylvester`.
    """

    def __init__(
        self,
        features: int,
        context: int = 0,
        transforms: int = 8,
        *,
        reflections: int | None = None,
        diagonals: Diagonals | None = None,
        init: Init = "identity",
        hyper_features: Sequence[int] = (),
        variance_bounds: tuple[float, float] | None = None,
        amortize: Amortize = "all",
    ):
        reflections = min(8, features) if reflections is None else reflections
        check_sizes(features, context, init, transforms=transforms, reflections=reflections)
        base = DiagonalGaussian(features, context, hyper_features=hyper_features, variance_bounds=variance_bounds)
        diagonals = _diagonals(diagonals, context)
        table = _table(features, transforms, diagonals) | {"v": Output((reflections, features), spread=1.0)}
        bind = partial(_bind, make_q=_reflections, diagonals=diagonals)
        steps = AmortizedSteps(
            context, transforms, table, bind, init=init, hyper_features=hyper_features, amortize=amortize
        )
        super().__init__(base, [steps])


@family
class TriangularSylvester(Flow):
    """T-SNF: K steps z' = z + Q R tanh(R̃ Qᵀ z + b), where Q is the identity and the reversal by turns.

    Args:
        diagonals: as for :class:`OrthogonalSylvester`.
    """

    def __init__(
        self,
        features: int,
        context: int = 0,
        transforms: int = 8,
        *,
        diagonals: Diagonals | None = None,
        init: Init = "identity",
        hyper_features: Sequence[int] = (),
        variance_bounds: tuple[float, float] | None = None,
        amortize: Amortize = "all",
    ):
        check_sizes(features, context, init, transforms=transforms)
        base = DiagonalGaussian(features, context, hyper_features=hyper_features, variance_bounds=variance_bounds)
        diagonals = _diagonals(diagonals, context)
        bind = partial(_bind, make_q=_by_turns, diagonals=diagonals)
        table = _table(features, transforms, diagonals)
        steps = AmortizedSteps(
            context, transforms, table, bind, init=init, hyper_features=hyper_features, amortize=amortize
        )
        super().__init__(base, [steps])


def _diagonals(given: Diagonals | None, context: int) -> Diagonals:
    if given is None:
        return "bounded" if context else "free"
    if given not in get_args(Diagonals):
        raise ValueError(f"Expected diagonals in {get_args(Diagonals)}; got {given!r}")
    return given


def _table(rank: int, transforms: int, diagonals: Diagonals) -> dict[str, Output]:
    """R, R̃ and b of a step; a variant adds what its Q is made of."""
    # Small R and R̃ of unit size: the step moves little, and both get a gradient.
    small, unit = nudge(transforms) / rank, 1 / rank**0.5
    spread = torch.full((rank, rank), unit).tril(-1) + torch.full((rank, rank), small).triu()
    # Where softplus is one, ρ is zero.
    center = math.log(math.e - 1) * torch.eye(rank) if diagonals == "free" else 0.0
    return {
        "packed": Output((rank, rank), center=center, spread=spread),
        "raw_diagonal": Output((rank,), spread=unit),
        "b": Output((rank,), spread=unit),
    }


def _polar_factors(raw: dict[str, Tensor]) -> Sequence[Tensor]:
    return each_step(2, polar(raw["raw_q"]))  # all K in one batch


def _reflections(raw: dict[str, Tensor]) -> Sequence[OrthonormalOperator]:
    return [HouseholderProduct(v) for v in each_step(2, raw["v"])]


def _by_turns(raw: dict[str, Tensor]) -> Sequence[OrthonormalOperator | None]:
    return [Reversal() if k % 2 else None for k in range(raw["b"].shape[-2])]


def _bind(raw: dict[str, Tensor], make_q: MakeQ, diagonals: Diagonals) -> list[SylvesterTransform]:
    if diagonals == "free":
        r, r_tilde_t, products = _unpack_free(raw["packed"], raw["raw_diagonal"])
    else:
        r, r_tilde_t, diagonal, diagonal_tilde = _unpack(raw["packed"], raw["raw_diagonal"])
        products = diagonal * diagonal_tilde
    r_tilde = (each.mT for each in each_step(2, r_tilde_t))
    rho = each_step(1, products)
    steps = zip(make_q(raw), each_step(2, r), r_tilde, each_step(1, raw["b"]), rho, strict=True)
    return [SylvesterTransform.of_triangles(*step) for step in steps]


def _unpack_free(packed: Tensor, raw_diagonal: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """R, R̃ᵀ and the products of their diagonals."""
    rho = _DIAGONAL_BOUND * (torch.nn.functional.softplus(_diagonal(packed)) - 1)
    r = packed.triu(1) + torch.diag_embed(rho * torch.exp(-raw_diagonal))
    return r, packed.tril(-1) + torch.diag_embed(raw_diagonal.exp()), rho


class _Unpack(torch.autograd.Function):
    """R, R̃ᵀ and their diagonals, from the packed triangles and the second diagonal.

    The matrices of a batch are large and the arithmetic is nothing: by hand, each is written once in either direction,
    and in the order in which the steps read and differentiate it. Half the time of the plain expression, with gradient.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(packed: Tensor, raw_diagonal: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        upper, lower = _strict_triangles(packed)
        r, r_tilde_t = packed * upper, packed * lower
        diagonal, diagonal_tilde = (_DIAGONAL_BOUND * torch.tanh(raw) for raw in (_diagonal(packed), raw_diagonal))
        _diagonal(r).copy_(diagonal)
        _diagonal(r_tilde_t).copy_(diagonal_tilde)
        return r, r_tilde_t, diagonal, diagonal_tilde

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, ...]) -> None:
        # Outputs, so that second derivatives reach them.
        ctx.save_for_backward(*output[2:])
        ctx.save_for_forward(*output[2:])

    @staticmethod
    def backward(ctx: Any, grad_r: Tensor, grad_r_tilde_t: Tensor, *grads: Tensor) -> tuple[Tensor, Tensor]:
        slope, slope_tilde = map(_slope, ctx.saved_tensors)
        upper, lower = _strict_triangles(grad_r)
        grad = torch.addcmul(grad_r * upper, grad_r_tilde_t, lower)
        _diagonal(grad).copy_((_diagonal(grad_r) + grads[0]) * slope)
        return grad, (_diagonal(grad_r_tilde_t) + grads[1]) * slope_tilde

    @staticmethod
    def tangent(ctx: Any, packed_dot: Tensor | None, raw_dot: Tensor | None) -> tuple[Tensor, ...]:
        diagonals = ctx.saved_tensors
        if packed_dot is None:
            packed_dot = torch.diag_embed(torch.zeros_like(diagonals[0]))
        raw_dots = _diagonal(packed_dot), torch.zeros_like(diagonals[1]) if raw_dot is None else raw_dot
        dots = [_slope(diagonal) * dot for diagonal, dot in zip(diagonals, raw_dots, strict=True)]
        triangles = zip(_strict_triangles(packed_dot), dots, strict=True)
        return *(packed_dot * triangle + torch.diag_embed(dot) for triangle, dot in triangles), *dots


_unpack = with_tangent(_Unpack)


def _slope(diagonal: Tensor) -> Tensor:
    """The derivative of c tanh, from its value."""
    return _DIAGONAL_BOUND - diagonal * diagonal / _DIAGONAL_BOUND


def _diagonal(a: Tensor) -> Tensor:
    return a.diagonal(dim1=-2, dim2=-1)


def _strict_triangles(like: Tensor) -> tuple[Tensor, Tensor]:
    """Masks of what lies above and below the diagonal. A product with them is faster than torch's triu and tril."""
    upper = torch.ones(like.shape[-2:], dtype=like.dtype, device=like.device).triu(1)
    return upper, upper.mT.contiguous()
