"""Planar flows (Rezende & Mohamed, 2015).

    z' = z + u tanh(w·z + b)                                          (eq. 8)

The Jacobian is a rank-one update of the identity, so by the matrix determinant lemma its determinant is the scalar
1 + tanh'(w·z + b) w·u, which costs one dot product.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sylvester.linalg import solve_tanh
from sylvester.transforms.base import FlowTransform, batch_shape_of


class PlanarTransform(FlowTransform):
    """z' = z + u tanh(w·z + b), for u, w ``(*, D)`` and b ``(*)`` with w·u > −1.

    At w = 0 it is the translation by u tanh(b). The inverse solves the scalar equation a + (w·u) tanh(a) = w·z' + b
    for a = w·z + b: the triangular tanh equation with M = 1.

    >>> t = PlanarTransform(u=torch.tensor([1.0, 0.5]), w=torch.tensor([2.0, -1.0]), b=torch.tensor(0.3))
    >>> z = torch.randn(5, 2)
    >>> torch.allclose(t.inv(t(z)), z, atol=1e-5)
    True
    """

    parameters = ("u", "w", "b")

    def __init__(self, u: Tensor, w: Tensor, b: Tensor, *, validate_args: bool = False, cache_size: int = 0):
        batch_shape = batch_shape_of(u=(u, 1), w=(w, 1), b=(b, 0))
        if u.shape[-1] != w.shape[-1]:
            raise ValueError(f"Expected u and w with equally many features; got {u.shape[-1]} and {w.shape[-1]}")
        self.u, self.w, self.b, self._wu = u, w, b, (w * u).sum(-1)
        super().__init__(u.shape[-1], batch_shape, validate_args=validate_args, cache_size=cache_size)

    @classmethod
    def of_product(cls, u: Tensor, w: Tensor, b: Tensor, wu: Tensor) -> PlanarTransform:
        """The same step from a caller who has ``wu`` = w·u ``(*)``, as a flow does of all its steps at once."""
        step = cls.__new__(cls)
        step.u, step.w, step.b, step._wu = u, w, b, wu
        FlowTransform.__init__(step, u.shape[-1], wu.shape)
        return step

    def _check_parameters(self) -> None:
        if not (self._wu > -1).all():
            raise ValueError(f"Expected w·u > -1, or the step is not invertible; got {self._wu.min().item():.6g}")

    def _forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh((self.w * z).sum(-1) + self.b)
        return z + self.u * h.unsqueeze(-1), self._ladj(h)

    def _backward(self, y: Tensor) -> tuple[Tensor, Tensor]:
        c = (self.w * y).sum(-1) + self.b
        h = torch.tanh(solve_tanh(self._wu[..., None, None], c.unsqueeze(-1)).squeeze(-1))
        return y - self.u * h.unsqueeze(-1), self._ladj(h)

    def _forward_and_score(self, z: Tensor, score: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        # The Sylvester step's with M = 1: R̃ᵀ is w, and 1 + w·u tanh' divides.
        h = torch.tanh((self.w * z).sum(-1) + self.b)
        with torch.no_grad():
            slope = 1 - h * h
            determinant = 1 + self._wu * slope
            grad_ladj = -2 * self._wu * h * slope / determinant
            moved = (grad_ladj + slope * (self.u * score).sum(-1)) / determinant
            pushed = score - self.w * moved.unsqueeze(-1)
        return z + self.u * h.unsqueeze(-1), self._ladj(h), pushed

    def _ladj(self, h: Tensor) -> Tensor:
        return torch.log1p(self._wu * (1 - h * h))
