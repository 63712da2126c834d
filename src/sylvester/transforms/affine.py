"""A triangular affine step, z' = L z + m: with a Gaussian base, every Gaussian.

L is lower triangular, so log|det L| = Σ_i log|L_ii|, and the inverse is a forward substitution.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sylvester.transforms.base import FlowTransform, batch_shape_of


class TriangularAffineTransform(FlowTransform):
    """z' = L z + m for L ``(*, D, D)``, lower triangular without a zero on its diagonal, and m ``(*, D)``.

    >>> t = TriangularAffineTransform(torch.tensor([[2.0, 0.0], [1.0, 0.5]]), torch.ones(2))
    >>> z = torch.randn(5, 2)
    >>> torch.allclose(t.inv(t(z)), z, atol=1e-5)
    True
    """

    parameters = ("scale_tril", "loc")

    def __init__(self, scale_tril: Tensor, loc: Tensor, *, validate_args: bool = False, cache_size: int = 0):
        self.scale_tril, self.loc = scale_tril, loc
        batch_shape = batch_shape_of(scale_tril=(scale_tril, 2), loc=(loc, 1))
        features = loc.shape[-1]
        if scale_tril.shape[-2:] != (features, features):
            raise ValueError(f"Expected scale_tril (*, {features}, {features}); got {tuple(scale_tril.shape)}")
        super().__init__(features, batch_shape, validate_args=validate_args, cache_size=cache_size)

    def _check_parameters(self) -> None:
        if (self.scale_tril.triu(1) != 0).any() or (self.scale_tril.diagonal(dim1=-2, dim2=-1) == 0).any():
            raise ValueError("Expected scale_tril lower triangular, without a zero on its diagonal; got another matrix")

    def _forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        y = (self.scale_tril @ z.unsqueeze(-1)).squeeze(-1) + self.loc
        return y, self._ladj(y)

    def _forward_and_score(self, z: Tensor, score: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y, ladj = self._forward(z)
        with torch.no_grad():
            # J = L, and ladj does not depend on z: δ' = L⁻ᵀ δ.
            pushed = torch.linalg.solve_triangular(self.scale_tril.mT, score.unsqueeze(-1), upper=True).squeeze(-1)
        return y, ladj, pushed

    def _backward(self, y: Tensor) -> tuple[Tensor, Tensor]:
        centred = (y - self.loc).unsqueeze(-1)
        z = torch.linalg.solve_triangular(self.scale_tril, centred, upper=False).squeeze(-1)
        return z, self._ladj(z)

    def _ladj(self, like: Tensor) -> Tensor:
        return self.scale_tril.diagonal(dim1=-2, dim2=-1).abs().log().sum(-1).expand(like.shape[:-1])
