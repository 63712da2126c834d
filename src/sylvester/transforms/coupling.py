"""Coupling flows: NICE (Dinh et al., 2015) with shifts, Real NVP (Dinh et al., 2017) with scales.

    z'_A = z_A,    z'_B = scale(z_A) z_B + offset(z_A)

The Jacobian is block triangular, so ladj is the sum of the log-scales of B, and because z_A passes unchanged, both
directions take one pass of the network.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sylvester.transforms.base import FlowTransform
from sylvester.transforms.elementwise import Conditioner, Kind, check_kind, coefficients


class CouplingTransform(FlowTransform):
    """z' = z where ``mask`` is true, scale · z + offset elsewhere, both functions of the masked coordinates alone.

    Args:
        net: maps ``(*, D)``, zero outside the mask, to a shift and a raw scale, each ``(*, D)``.
        mask: bool ``(D,)``; true for the coordinates that pass unchanged.
        kind: "shift" (NICE) or "affine" (Real NVP).
    """

    parameters = ("net", "mask", "kind")

    def __init__(
        self,
        net: Conditioner,
        mask: Tensor,
        kind: Kind = "affine",
        *,
        validate_args: bool = False,
        cache_size: int = 0,
    ):
        check_kind(kind, ("shift", "affine"))
        if mask.dim() != 1:
            raise ValueError(f"Expected a mask of shape (D,); got {tuple(mask.shape)}")
        self.net, self.mask, self.kind = net, mask.bool(), kind
        super().__init__(mask.shape[0], validate_args=validate_args, cache_size=cache_size)

    def _forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        scale, offset, ladj = self._coefficients(z)
        return torch.where(self.mask, z, (z if scale is None else scale * z) + offset), ladj

    def _backward(self, y: Tensor) -> tuple[Tensor, Tensor]:
        scale, offset, ladj = self._coefficients(y)
        z = y - offset
        return torch.where(self.mask, y, z if scale is None else z / scale), ladj

    def _coefficients(self, z: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        kept = torch.where(self.mask, z, 0.0)
        scale, offset, log_scale = coefficients(self.kind, *self.net(kept), gate_floor=0.0)
        return scale, offset, torch.where(self.mask, 0.0, log_scale).sum(-1)
