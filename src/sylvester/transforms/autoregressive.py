"""Autoregressive flows: IAF (Kingma et al., 2016) in this direction, MAF (Papamakarios et al., 2017) in the other.

    z'_i = scale_i(z_{<i}) z_i + offset_i(z_{<i})

The Jacobian is triangular in the order of the network, so ladj is the sum of the log-scales. Forward takes one pass
of the network; the inverse takes as many as there are features, each of which settles one more coordinate.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sylvester.transforms.base import FlowTransform
from sylvester.transforms.elementwise import Conditioner, Kind, check_kind, coefficients


class AutoregressiveTransform(FlowTransform):
    """z' = scale(z) z + offset(z), where entry i of ``net(z) -> (shift, raw scale)`` sees only what precedes it.

    Args:
        net: maps ``(*, D)`` to a shift and a raw scale, each ``(*, D)``, autoregressively in some order.
        kind: "gated", "shift" or "affine"; see ``transforms.elementwise``.
        order: the position of each coordinate in that order, where it is known: the inverse then never shows
            the network a coordinate that is not settled yet. Without it any order works.
        gate_floor: the smallest gate of kind "gated".

    The inverse is found without a graph. Its derivatives come from the implicit function theorem: with J the
    Jacobian at the solution, held constant, z ← z − J⁻¹ (t(z) − y) leaves z where it is and gives it the right first
    derivatives; a second such step makes second derivatives right too.
    """

    parameters = ("net", "kind", "gate_floor")

    def __init__(
        self,
        net: Conditioner,
        kind: Kind = "gated",
        *,
        order: Tensor | None = None,
        gate_floor: float = 1e-3,
        validate_args: bool = False,
        cache_size: int = 0,
    ):
        check_kind(kind)
        self.net, self.kind, self.order, self.gate_floor = net, kind, order, gate_floor
        features = None if order is None else order.shape[-1]
        super().__init__(features, validate_args=validate_args, cache_size=cache_size)

    def _forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        scale, offset, log_scale = self._coefficients(z)
        return (z if scale is None else scale * z) + offset, log_scale.sum(-1)

    def _backward(self, y: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            z = self._substitute(y)
        if torch.is_grad_enabled():
            z = self._attach(z, y)
        return z, self._coefficients(z)[2].sum(-1)

    def _coefficients(self, z: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        return coefficients(self.kind, *self.net(z), self.gate_floor)

    def _substitute(self, y: Tensor) -> Tensor:
        """Coordinates one after another, in the network's order."""
        z = torch.zeros_like(y)
        # Errors may grow from coordinate to coordinate without bound, as may those of coordinates that are not settled
        # yet. Far from anything a model means, they stop, so that the network never sees an infinity (0 · inf is NaN).
        far = torch.finfo(y.dtype).max ** 0.25
        for i in range(y.shape[-1]):
            scale, offset, _ = self._coefficients(z)
            solved = ((y - offset) if scale is None else (y - offset) / scale).clamp(-far, far)
            z = solved if self.order is None else torch.where(self.order == i, solved, z)
        return z

    def _attach(self, z: Tensor, y: Tensor) -> Tensor:
        """z with the derivatives of the inverse."""
        residual = self._forward(z)[0] - y
        if not residual.requires_grad:
            return z
        pullback = torch.func.vjp(lambda point: self._forward(point)[0], z)[1]
        basis = torch.eye(z.shape[-1], dtype=z.dtype, device=z.device)
        basis = basis.reshape(z.shape[-1], *(1,) * (z.dim() - 1), z.shape[-1]).expand(-1, *z.shape)
        # Points do not mix, so one pull-back of e_i gives row i of every point's Jacobian.
        jacobian = torch.func.vmap(pullback)(basis)[0].movedim(0, -2).detach()  # (*, D, D)
        for _ in range(2):
            # Zero in value, −J⁻¹ d(t(z) − y) in derivative.
            z = z - torch.linalg.solve(jacobian, residual - residual.detach())
            residual = self._forward(z)[0] - y
        return z
