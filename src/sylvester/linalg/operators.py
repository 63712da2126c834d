"""Matrices with orthonormal columns, as operators: Q v and Qᵀ z, never Q itself where it can be avoided."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from sylvester.linalg.precision import full_precision


@full_precision
def matvec(a: Tensor, x: Tensor) -> Tensor:
    """``a @ x`` for matrices ``(*P, m, n)`` and vectors ``(*Z, n)`` whose batch axes broadcast.

    Vectors usually carry sample axes in front of the matrices' batch: (S, B, n) against (B, m, n). The samples then
    become the rows of one matrix product per matrix, many times faster than a broadcast product of S·B vectors.

    >>> matvec(torch.ones(3, 2, 4), torch.ones(100, 3, 4)).shape
    torch.Size([100, 3, 2])
    """
    batch, extra = a.dim() - 2, x.dim() - a.dim() + 1
    if extra <= 0:
        return (a @ x.unsqueeze(-1)).squeeze(-1)
    if batch == 0:
        return x @ a.mT
    if x.shape[extra:-1] != a.shape[:-2]:
        x = x.expand(*x.shape[:extra], *torch.broadcast_shapes(x.shape[extra:-1], a.shape[:-2]), x.shape[-1])
    rows = x.flatten(0, extra - 1).movedim(0, -2)  # (*P, S, n)
    return (rows @ a.mT).movedim(-2, 0).unflatten(0, x.shape[:extra])


class OrthonormalOperator(ABC):
    """A matrix Q (D x M) with orthonormal columns, known by what it does to vectors.

    >>> v = torch.tensor([1.0, 2.0, 3.0])
    >>> Reversal().matvec(v)
    tensor([3., 2., 1.])
    >>> Dense(torch.eye(3)[:, :2]).rmatvec(v)
    tensor([1., 2.])
    >>> HouseholderProduct(torch.tensor([[1.0, 0.0, 0.0]])).matvec(v)
    tensor([-1.,  2.,  3.])
    """

    batch_shape: torch.Size = torch.Size()
    #: The tensors that define the operator.
    tensors: tuple[Tensor, ...] = ()

    @abstractmethod
    def matvec(self, v: Tensor) -> Tensor:
        """Q v: (*, M) -> (*, D)."""

    @abstractmethod
    def rmatvec(self, z: Tensor) -> Tensor:
        """Qᵀ z: (*, D) -> (*, M)."""

    def shape(self, rank: int) -> tuple[int, int]:
        """(D, M), given that the operator is to have ``rank`` columns; raises where it has another number."""
        return rank, rank

    def __eq__(self, other: object) -> bool:
        return (
            type(self) is type(other)
            and isinstance(other, OrthonormalOperator)
            and all(torch.equal(a, b) for a, b in zip(self.tensors, other.tensors, strict=True))
        )

    __hash__ = None  # type: ignore[assignment]


class Identity(OrthonormalOperator):
    """Q = I."""

    def matvec(self, v: Tensor) -> Tensor:
        return v

    def rmatvec(self, z: Tensor) -> Tensor:
        return z


class Reversal(OrthonormalOperator):
    """The permutation that reverses the order of the coordinates."""

    def matvec(self, v: Tensor) -> Tensor:
        return v.flip(-1)

    def rmatvec(self, z: Tensor) -> Tensor:
        return z.flip(-1)


class Dense(OrthonormalOperator):
    """A tensor ``(*, D, M)``, taken as orthonormal."""

    def __init__(self, q: Tensor):
        if q.dim() < 2 or q.shape[-1] > q.shape[-2]:
            raise ValueError(f"Expected q of shape (*, D, M) with M <= D; got {tuple(q.shape)}")
        self.q = q
        self.tensors = (q,)
        self.batch_shape = q.shape[:-2]

    def matvec(self, v: Tensor) -> Tensor:
        return matvec(self.q, v)

    def rmatvec(self, z: Tensor) -> Tensor:
        return matvec(self.q.mT, z)

    def shape(self, rank: int) -> tuple[int, int]:
        if self.q.shape[-1] != rank:
            raise ValueError(f"Expected q of shape (*, D, {rank}), as r is {rank} x {rank}; got {tuple(self.q.shape)}")
        return self.q.shape[-2], rank


class HouseholderProduct(OrthonormalOperator):
    """Q = H_H ··· H_1, where H_i = I − 2 v_i v_iᵀ / |v_i|² and v is ``(*, H, D)``.

    Compact WY form: with the vectors as the rows of V, Qᵀ = H_1 ··· H_H = I − Vᵀ T V, where T is the inverse of the
    upper triangular matrix with |v_i|²/2 on the diagonal and v_i·v_j above it. Two H x D products replace H
    reflections in sequence, and no D x D matrix is formed. A zero vector reflects nothing.
    """

    def __init__(self, v: Tensor):
        if v.dim() < 2:
            raise ValueError(f"Expected v of shape (*, H, D); got {tuple(v.shape)}")
        self.tensors = (v,)
        self.batch_shape = v.shape[:-2]
        self._v, self._t = _compact_wy(v)

    def matvec(self, v: Tensor) -> Tensor:
        return self._subtract(v, self._t.mT)

    def rmatvec(self, z: Tensor) -> Tensor:
        return self._subtract(z, self._t)

    def _subtract(self, z: Tensor, t: Tensor) -> Tensor:
        return z - matvec(self._v.mT, matvec(t, matvec(self._v, z)))

    def shape(self, rank: int) -> tuple[int, int]:
        if self._v.shape[-1] != rank:
            raise ValueError(
                f"Expected reflections of {rank} features, as r is {rank} x {rank}; got v {tuple(self._v.shape)}"
            )
        return rank, rank


@full_precision
def _compact_wy(v: Tensor) -> tuple[Tensor, Tensor]:
    """V, scaled, and T."""
    # A reflection does not depend on the length of its vector, so a constant factor changes neither value nor
    # gradient; it keeps |v|² from under- and overflowing.
    size = v.detach().abs().amax(-1, keepdim=True)
    v = v / torch.where(size > 0, size, 1.0)
    gram = v @ v.mT  # (*, H, H)
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    half = torch.where(size.squeeze(-1) > 0, diagonal / 2, 1.0)
    identity = torch.eye(v.shape[-2], dtype=v.dtype, device=v.device)
    return v, torch.linalg.solve_triangular(gram.triu(1) + torch.diag_embed(half), identity, upper=True)


def as_operator(q: Tensor | OrthonormalOperator | None) -> OrthonormalOperator:
    """A tensor, an operator, or None for the identity.

    >>> as_operator(None).matvec(torch.ones(2))
    tensor([1., 1.])
    """
    if q is None:
        return Identity()
    return Dense(q) if isinstance(q, Tensor) else q
