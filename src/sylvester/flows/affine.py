"""A learned affine step with parameters of its own, for what is fitted without a context."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributions import Transform

from sylvester.transforms import TriangularAffineTransform


class AffineStep(nn.Module):
    """One step, z' = loc + scale ∘ (L z + m), that starts at m = 0 and L = I; L is lower triangular.

    ``loc`` and ``scale``, both ``(*, D)``, are held: m and L are in their units.
    """

    loc: Tensor
    scale: Tensor

    def __init__(self, loc: Tensor, scale: Tensor):
        super().__init__()
        self.register_buffer("loc", loc.detach())
        self.register_buffer("scale", scale.detach())
        self.shift, self.log_diagonal = nn.Parameter(torch.zeros_like(loc)), nn.Parameter(torch.zeros_like(loc))
        self.below = nn.Parameter(torch.diag_embed(torch.zeros_like(loc)))

    def forward(self, context: Tensor | None) -> list[Transform]:
        scale_tril = self.below.tril(-1) + torch.diag_embed(self.log_diagonal.exp())
        return [TriangularAffineTransform(self.scale.unsqueeze(-1) * scale_tril, self.loc + self.scale * self.shift)]
