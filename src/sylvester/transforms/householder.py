"""Householder flows (Tomczak & Welling, 2016): z' = H_H ··· H_1 z, volume preserving.

They turn a diagonal Gaussian into one with full covariance. The determinant of a reflection is −1, so ladj = 0.
Scores turn as points do.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sylvester.linalg import HouseholderProduct
from sylvester.transforms.base import FlowTransform


class HouseholderTransform(FlowTransform):
    """The product of the reflections I − 2 v vᵀ/|v|² for v ``(*, H, D)``; ``v[..., 0, :]`` reflects first.

    A zero vector reflects nothing. The inverse is the transpose.

    >>> t = HouseholderTransform(torch.randn(3, 2))
    >>> z = torch.randn(5, 2)
    >>> torch.allclose(t.inv(t(z)), z, atol=1e-5)
    True
    """

    parameters = ("v",)

    def __init__(self, v: Tensor, *, validate_args: bool = False, cache_size: int = 0):
        self.v = v
        self._q = HouseholderProduct(v)
        super().__init__(v.shape[-1], self._q.batch_shape, validate_args=validate_args, cache_size=cache_size)

    def _forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        y = self._q.matvec(z)
        return y, y.new_zeros(y.shape[:-1])

    def _forward_and_score(self, z: Tensor, score: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y, ladj = self._forward(z)
        with torch.no_grad():
            return y, ladj, self._q.matvec(score)

    def _backward(self, y: Tensor) -> tuple[Tensor, Tensor]:
        z = self._q.rmatvec(y)
        return z, z.new_zeros(z.shape[:-1])
