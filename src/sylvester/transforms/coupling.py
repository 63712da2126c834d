"""Coupling flows: NICE (Dinh et al., 2015) with shifts, Real NVP (Dinh et al., 2017) with scales.

    z'_A = z_A,    z'_B = f(z_B; net(z_A)),    f increasing in each coordinate

The Jacobian is block triangular, so ladj is the sum of the log-slopes of B, and because z_A passes unchanged, both
directions take one pass of the network.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sylvester.transforms.base import FlowTransform
from sylvester.transforms.conditioner import Conditioner
from sylvester.transforms.elementwise import Elementwise


class CouplingTransform(FlowTransform):
    """z' = z where ``mask`` is true, f(z; numbers) elsewhere, the numbers a function of the masked coordinates alone.

    Args:
        net: maps ``(*, D)``, zero outside the mask, to ``(*, elementwise.numbers, D)``.
        mask: bool ``(D,)``; true for the coordinates that pass unchanged.
        elementwise: what is done to one coordinate: ``Shift()`` (NICE), ``Affine()`` (Real NVP) or one's own.
        batch_shape: of what the network is bound to.
    """

    parameters = ("net", "mask", "elementwise")

    def __init__(
        self,
        net: Conditioner,
        mask: Tensor,
        elementwise: Elementwise,
        *,
        batch_shape: Sequence[int] = (),
        validate_args: bool = False,
        cache_size: int = 0,
    ):
        if mask.dim() != 1:
            raise ValueError(f"Expected a mask of shape (D,); got {tuple(mask.shape)}")
        self.net, self.mask, self.elementwise = net, mask.bool(), elementwise
        super().__init__(mask.shape[0], batch_shape, validate_args=validate_args, cache_size=cache_size)

    def _forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        return self._changed(z, *self.elementwise.forward(z, self._numbers(z)))

    def _backward(self, y: Tensor) -> tuple[Tensor, Tensor]:
        return self._changed(y, *self.elementwise.backward(y, self._numbers(y)))

    def _numbers(self, z: Tensor) -> Tensor:
        return self.net(torch.where(self.mask, z, 0.0))

    def _changed(self, z: Tensor, other: Tensor, log_slope: Tensor) -> tuple[Tensor, Tensor]:
        return torch.where(self.mask, z, other), torch.where(self.mask, 0.0, log_slope).sum(-1)
