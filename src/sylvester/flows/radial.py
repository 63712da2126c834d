"""Radial flows, amortized: centre, α and β of every step from the context."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor
from torch.distributions import Transform
from torch.nn.functional import softplus

from sylvester.flows.base import AmortizedSteps, Family, each_step, nudge
from sylvester.flows.hypernetwork import Output
from sylvester.transforms import RadialTransform


class RadialSteps(AmortizedSteps):
    def __init__(self, features: int, context: int, transforms: int, **options: Any):
        # α = 1 and softplus(raw β) = 1 make β = 0. The two differ by what a step may do: D stretched directions.
        one, small = math.log(math.e - 1), nudge(transforms) / features**0.5
        table = {
            "center": Output((features,), spread=0.5),
            "raw_alpha": Output((), center=one, spread=small),
            "raw_beta": Output((), center=one, spread=small),
        }
        super().__init__(context, transforms, table, **options)

    def bind(self, raw: dict[str, Tensor]) -> list[Transform]:
        alpha = softplus(raw["raw_alpha"]) + 1e-6
        # The paper's softplus(β) − α, drawn in by a thousandth so that −α stays out of reach in float32.
        beta = 0.999 * (softplus(raw["raw_beta"]) - alpha)
        parameters = zip(each_step(1, raw["center"]), each_step(0, alpha), each_step(0, beta), strict=True)
        return [RadialTransform(*step) for step in parameters]


class Radial(Family):
    """K steps z' = z + β (z − z₀)/(α + |z − z₀|) with α > 0 and β > −α."""

    make_steps = RadialSteps
