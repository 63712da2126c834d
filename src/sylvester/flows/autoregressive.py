"""Autoregressive flows: the context is amortized, the networks are not (§4.1 and eq. 31)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch.distributions import Transform

from sylvester.flows.base import Family
from sylvester.flows.masked import MaskedNet, MaskedSteps
from sylvester.transforms import AutoregressiveTransform
from sylvester.transforms.elementwise import Conditioner, Kind

Order = Literal["paired", "alternating"]


class AutoregressiveSteps(MaskedSteps):
    """K autoregressive steps, the order of the coordinates reversed between them.

    ``order="alternating"`` reverses at every step: N R N R …; ``"paired"`` is what flipping z before every second step
    without flipping it back amounts to, as in the paper's experiments: N R R N N R R N ….
    """

    def __init__(
        self,
        features: int,
        context: int,
        transforms: int,
        *,
        kind: Kind,
        inverse: bool = False,
        order: Order = "paired",
        gate_floor: float = 1e-3,
        hidden_features: int | Sequence[int] | None = None,
        **options: Any,
    ):
        if order not in get_args(Order):
            raise ValueError(f"Expected order in {get_args(Order)}; got {order!r}")
        natural = torch.arange(features)
        turned = [k % 2 if order == "alternating" else (k + 1) // 2 % 2 for k in range(transforms)]
        positions = [natural.flip(0) if turn else natural for turn in turned]
        gate, scale = kind == "gated", kind != "shift"
        super().__init__(positions, context, hidden_features=hidden_features, scale=scale, gate=gate, **options)
        self.kind, self.inverse, self.gate_floor = kind, inverse, gate_floor

    def step(self, net: MaskedNet, conditioner: Conditioner) -> Transform:
        step = AutoregressiveTransform(conditioner, self.kind, order=net.position, gate_floor=self.gate_floor)
        return step.inv if self.inverse else step


class IAF(Family):
    """Inverse autoregressive flow, gated: z' = g z + (1 − g) μ, both from a masked network of z and the context.

    Options: ``hidden_features`` (one width for two layers, or a sequence), ``order`` ("paired" or "alternating"),
    ``gate_floor`` (0 is the paper's). Sampling takes one pass a step, ``log_prob`` of a new point D.
    """

    make_steps = partial(AutoregressiveSteps, kind="gated")


class MeanOnlyIAF(Family):
    """z' = z + μ(z): an inverse autoregressive flow that preserves volume. Options as for :class:`IAF`."""

    make_steps = partial(AutoregressiveSteps, kind="shift")


class MAF(Family):
    """Masked autoregressive flow, the other direction of an affine IAF: ``log_prob`` takes one pass a step, sampling D.

    Options: ``hidden_features`` and ``order``, as for :class:`IAF`.
    """

    make_steps = partial(AutoregressiveSteps, kind="affine", inverse=True)
