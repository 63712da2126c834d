"""A learned affine step with parameters of its own, for what is fitted without a context."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributions import AffineTransform, Transform

from sylvester.transforms import TriangularAffineTransform


class AffineStep(nn.Module):
    """One step, z' = loc + S (T z + m): S is diagonal, T lower triangular with a unit diagonal.

    ``loc``, ``(*, D)``, is held. S starts at ``scale``, T at I, and m at zero or at ``shift``. T and m are in units of
    S, so that an optimizer whose steps have one length for all parameters, as Adam's have, moves variables of any scale
    at one pace. With ``triangular=False``, T stays I, where D² parameters are too many.
    """

    loc: Tensor

    def __init__(self, loc: Tensor, scale: Tensor, shift: Tensor | None = None, *, triangular: bool = True):
        super().__init__()
        self.register_buffer("loc", loc.detach())
        self.log_scale = nn.Parameter(scale.detach().log())
        self.shift = nn.Parameter(torch.zeros_like(loc) if shift is None else shift.detach().clone())
        self.below = nn.Parameter(torch.diag_embed(torch.zeros_like(loc))) if triangular else None

    def forward(self, context: Tensor | None) -> list[Transform]:
        scale = self.log_scale.exp()
        loc = self.loc + scale * self.shift
        if self.below is None:
            return [AffineTransform(loc, scale, event_dim=1)]
        unit = self.below.tril(-1) + torch.eye(loc.shape[-1], dtype=loc.dtype, device=loc.device)
        return [TriangularAffineTransform(scale.unsqueeze(-1) * unit, loc)]
