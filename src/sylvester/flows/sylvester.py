"""Sylvester flows, amortized. The three variants differ in how they make Q (§3.2).

R and R̃ come packed in one M x M matrix: its upper triangle is R, its strict lower triangle, transposed, that of R̃, and
R̃'s diagonal has a row of its own. With b that is M² + 2M outputs a step, none of them unused.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Transform

from sylvester.flows.base import AmortizedSteps, Family, check_at_least, each_step, nudge
from sylvester.flows.hypernetwork import Output
from sylvester.linalg import HouseholderProduct, OrthonormalOperator, Reversal, polar
from sylvester.transforms import SylvesterTransform

# tanh reaches ±1 in float32: products of two such diagonals must stay above −1.
_DIAGONAL_BOUND = 0.999


class SylvesterSteps(AmortizedSteps):
    """R, R̃ and b; a variant adds what its Q is made of."""

    def __init__(
        self,
        rank: int,
        context: int,
        transforms: int,
        q_table: dict[str, Output] | None = None,
        **options: Any,
    ):
        # Small R and R̃ of unit size: the step moves little, and both get a gradient.
        small, unit = nudge(transforms) / rank, 1 / rank**0.5
        spread = torch.full((rank, rank), unit).tril(-1) + torch.full((rank, rank), small).triu()
        table = {
            "packed": Output((rank, rank), spread=spread),
            "raw_diagonal": Output((rank,), spread=unit),
            "b": Output((rank,), spread=unit),
        }
        super().__init__(context, transforms, table | (q_table or {}), **options)

    @abstractmethod
    def make_q(self, raw: dict[str, Tensor]) -> Sequence[Tensor | OrthonormalOperator | None]:
        """The K matrices Q."""

    def bind(self, raw: dict[str, Tensor]) -> list[Transform]:
        r, r_tilde_t, rho = _Unpack.apply(raw["packed"], raw["raw_diagonal"])
        steps = zip(
            self.make_q(raw),
            each_step(2, r),
            (each.mT for each in each_step(2, r_tilde_t)),
            each_step(1, raw["b"]),
            each_step(1, rho),
            strict=True,
        )
        return [SylvesterTransform(q, r, r_tilde, b, rho=rho) for q, r, r_tilde, b, rho in steps]


class _Unpack(torch.autograd.Function):
    """R, R̃ᵀ and the products of their diagonals, from the packed triangles and the second diagonal.

    The matrices of a batch are large and the arithmetic is nothing: by hand, each is written once in either direction,
    and in the order in which the steps read and differentiate it.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(packed: Tensor, raw_diagonal: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        upper, lower = _strict_triangles(packed)
        r, r_tilde_t = packed * upper, packed * lower
        diagonal, diagonal_tilde = _bounded(_diagonal(packed)), _bounded(raw_diagonal)
        _diagonal(r).copy_(diagonal)
        _diagonal(r_tilde_t).copy_(diagonal_tilde)
        return r, r_tilde_t, diagonal * diagonal_tilde

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, ...]) -> None:
        packed, raw_diagonal = inputs
        ctx.save_for_backward(_diagonal(packed), raw_diagonal)

    @staticmethod
    def backward(ctx: Any, grad_r: Tensor, grad_r_tilde_t: Tensor, grad_rho: Tensor) -> tuple[Tensor, Tensor]:
        raw = ctx.saved_tensors
        diagonal, diagonal_tilde = (_bounded(each) for each in raw)
        slope, slope_tilde = (_DIAGONAL_BOUND * (1 - torch.tanh(each) ** 2) for each in raw)
        upper, lower = _strict_triangles(grad_r)
        grad = torch.addcmul(grad_r * upper, grad_r_tilde_t, lower)
        _diagonal(grad).copy_((_diagonal(grad_r) + grad_rho * diagonal_tilde) * slope)
        return grad, (_diagonal(grad_r_tilde_t) + grad_rho * diagonal) * slope_tilde


def _bounded(raw_diagonal: Tensor) -> Tensor:
    return _DIAGONAL_BOUND * torch.tanh(raw_diagonal)


def _diagonal(a: Tensor) -> Tensor:
    return a.diagonal(dim1=-2, dim2=-1)


def _strict_triangles(like: Tensor) -> tuple[Tensor, Tensor]:
    """Masks of what lies above and below the diagonal. A product with them is faster than torch's triu and tril."""
    upper = torch.ones(like.shape[-2:], dtype=like.dtype, device=like.device).triu(1)
    return upper, upper.mT.contiguous()


class OrthogonalSteps(SylvesterSteps):
    def __init__(self, features: int, context: int, transforms: int, *, rank: int | None = None, **options: Any):
        rank = (features + 1) // 2 if rank is None else rank
        check_at_least(1, rank=rank)
        if rank > features:
            raise ValueError(f"Expected rank <= features = {features}; got {rank}")
        center = polar(torch.randn(transforms, features, rank))
        q_table = {"raw_q": Output((features, rank), center=center, spread=0.1 / features**0.5)}
        super().__init__(rank, context, transforms, q_table, **options)

    def make_q(self, raw: dict[str, Tensor]) -> Sequence[Tensor]:
        return each_step(2, polar(raw["raw_q"]))  # all K in one batch


class HouseholderSylvesterSteps(SylvesterSteps):
    def __init__(self, features: int, context: int, transforms: int, *, reflections: int | None = None, **options: Any):
        reflections = min(8, features) if reflections is None else reflections
        check_at_least(1, reflections=reflections)
        q_table = {"v": Output((reflections, features), spread=1.0)}
        super().__init__(features, context, transforms, q_table, **options)

    def make_q(self, raw: dict[str, Tensor]) -> Sequence[OrthonormalOperator]:
        return [HouseholderProduct(v) for v in each_step(2, raw["v"])]


class TriangularSteps(SylvesterSteps):
    def make_q(self, raw: dict[str, Tensor]) -> Sequence[OrthonormalOperator | None]:
        return [Reversal() if k % 2 else None for k in range(self.hypernetwork.steps)]


class OrthogonalSylvester(Family):
    """O-SNF: Q is the polar factor of a D x M matrix; ``rank`` is M, half the features unless given."""

    make_steps = OrthogonalSteps


class HouseholderSylvester(Family):
    """H-SNF: Q is a product of ``reflections`` Householder reflections (8, or D where that is less)."""

    make_steps = HouseholderSylvesterSteps


class TriangularSylvester(Family):
    """T-SNF: Q alternates between the identity and the reversal of the coordinates."""

    make_steps = TriangularSteps
