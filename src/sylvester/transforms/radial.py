"""Radial flows (Rezende & Mohamed, 2015).

    z' = z + β (z − z₀) / (α + r),    r = |z − z₀|

Points move along rays from the centre z₀. The Jacobian has the eigenvalue r'/r = 1 + β/(α + r) in the D − 1 directions
across the ray and dr'/dr = 1 + αβ/(α + r)² along it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sylvester.transforms.base import FlowTransform, batch_shape_of


class RadialTransform(FlowTransform):
    """z' = z + β (z − z₀) / (α + |z − z₀|), for a centre ``(*, D)`` and α > 0, β > −α, both ``(*)``.

    The new radius is r' = r (1 + β/(α + r)), a quadratic in r whose positive root gives the inverse.

    >>> t = RadialTransform(torch.zeros(2), alpha=torch.tensor(1.0), beta=torch.tensor(-0.5))
    >>> z = torch.randn(5, 2)
    >>> torch.allclose(t.inv(t(z)), z, atol=1e-5)
    True
    """

    parameters = ("center", "alpha", "beta")

    def __init__(
        self, center: Tensor, alpha: Tensor, beta: Tensor, *, validate_args: bool = False, cache_size: int = 0
    ):
        self.center, self.alpha, self.beta = center, alpha, beta
        batch_shape = batch_shape_of(center=(center, 1), alpha=(alpha, 0), beta=(beta, 0))
        super().__init__(center.shape[-1], batch_shape, validate_args=validate_args, cache_size=cache_size)

    def _check_parameters(self) -> None:
        if not (self.alpha > 0).all():
            raise ValueError(f"Expected alpha > 0; got {self.alpha.min().item():.6g}")
        if not (self.beta > -self.alpha).all():
            margin = (self.beta + self.alpha).min().item()
            raise ValueError(f"Expected beta > -alpha, or the step is not invertible; got beta + alpha = {margin:.6g}")

    def _forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        d = z - self.center
        stretch, ladj = self._stretch(torch.linalg.vector_norm(d, dim=-1))
        return self.center + d * stretch.unsqueeze(-1), ladj

    def _forward_and_score(self, z: Tensor, score: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y, ladj = self._forward(z)
        with torch.no_grad():
            d = z - self.center
            r = torch.linalg.vector_norm(d, dim=-1, keepdim=True)
            ray = d / torch.where(r > 0, r, 1.0)
            alpha, reach = self.alpha.unsqueeze(-1), self.alpha.unsqueeze(-1) + r
            pull = self.beta.unsqueeze(-1) / reach
            across, along = 1 + pull, 1 + pull * alpha / reach  # the eigenvalues
            slope = -pull / reach * ((z.shape[-1] - 1) / across + 2 * alpha / (reach * along))  # ∂ladj/∂r
            outward = (ray * score).sum(-1, keepdim=True)
            pushed = (score - ray * outward) / across + ray * (outward - slope) / along
        return y, ladj, pushed

    def _backward(self, y: Tensor) -> tuple[Tensor, Tensor]:
        d = y - self.center
        r_new = torch.linalg.vector_norm(d, dim=-1)
        # r² + p r − α r' = 0, in the form without cancellation for either sign of p.
        p = self.alpha + self.beta - r_new
        root = torch.sqrt(p * p + 4 * self.alpha * r_new)
        r = torch.where(p > 0, 2 * self.alpha * r_new / torch.where(p > 0, root + p, 1.0), (root - p) / 2)
        stretch, ladj = self._stretch(r)
        return self.center + d / stretch.unsqueeze(-1), ladj

    def _stretch(self, r: Tensor) -> tuple[Tensor, Tensor]:
        """r'/r and ladj."""
        pull = self.beta / (self.alpha + r)
        across, along = torch.log1p(pull), torch.log1p(pull * self.alpha / (self.alpha + r))
        return 1 + pull, (self.center.shape[-1] - 1) * across + along
