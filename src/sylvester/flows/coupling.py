"""Coupling flows: the context is amortized, the networks are not (§4.2)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.distributions import Transform

from sylvester.flows.base import Family
from sylvester.flows.masked import MaskedNet, MaskedSteps
from sylvester.transforms import CouplingTransform
from sylvester.transforms.elementwise import Conditioner, Kind


class CouplingSteps(MaskedSteps):
    """K coupling steps between the even and the odd coordinates, taking turns.

    As positions of a masked network: 0 for the coordinates that pass, 1 for those that change. With one feature it
    always changes, and depends on the context alone.
    """

    def __init__(
        self,
        features: int,
        context: int,
        transforms: int,
        *,
        kind: Kind,
        hidden_features: int | Sequence[int] | None = None,
        **options: Any,
    ):
        index = torch.arange(features)
        positions = [(index + k) % 2 if features > 1 else torch.ones_like(index) for k in range(transforms)]
        super().__init__(
            positions,
            context,
            hidden_features=hidden_features,
            scale=kind == "affine",
            lowest_degree=1,
            **options,
        )
        self.kind: Kind = kind

    def step(self, net: MaskedNet, conditioner: Conditioner) -> Transform:
        return CouplingTransform(conditioner, net.position == 0, self.kind)


class NICE(Family):
    """Additive couplings, volume preserving; one pass in both directions. Option: ``hidden_features``."""

    make_steps = partial(CouplingSteps, kind="shift")


class RealNVP(Family):
    """Affine couplings; one pass in both directions. Option: ``hidden_features``."""

    make_steps = partial(CouplingSteps, kind="affine")
