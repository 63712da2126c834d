"""What autoregressive and coupling steps do to one coordinate, given its shift μ and raw scale s.

    shift    z' = z + μ
    affine   z' = exp(4 tanh(s/4)) z + μ
    gated    z' = g z + (1 − g) μ,    g = ε + (1 − ε) σ(s)            (eq. 31, where ε = 0)

The bounds keep float32 finite: a log-scale stays within ±4, a gate above its floor ε.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor

Kind = Literal["gated", "shift", "affine"]

#: net(z) -> (shift, raw scale), each (*, D); the raw scale is None for kind "shift".
Conditioner = Callable[[Tensor], tuple[Tensor, Tensor | None]]


def check_kind(kind: str, allowed: tuple[str, ...] = get_args(Kind)) -> None:
    if kind not in allowed:
        raise ValueError(f"Expected kind in {allowed}; got {kind!r}")


def coefficients(
    kind: Kind, shift: Tensor, raw_scale: Tensor | None, gate_floor: float
) -> tuple[Tensor | None, Tensor, Tensor]:
    """(scale, offset, log scale) with z' = scale · z + offset; a scale of None is 1."""
    if kind == "shift":
        return None, shift, torch.zeros_like(shift)
    if raw_scale is None:
        raise ValueError(f"Expected net(z) -> (shift, raw scale) for kind {kind!r}; got no raw scale")
    if kind == "affine":
        log_scale = 4 * torch.tanh(raw_scale / 4)
        return log_scale.exp(), shift, log_scale
    gate = gate_floor + (1 - gate_floor) * torch.sigmoid(raw_scale)
    complement = (1 - gate_floor) * torch.sigmoid(-raw_scale)
    # log g from the nearer end: near 1 the complement has the digits, and a floorless gate may underflow.
    log_gate = torch.nn.functional.logsigmoid(raw_scale) if gate_floor == 0 else torch.log1p(-complement)
    return gate, complement * shift, log_gate
