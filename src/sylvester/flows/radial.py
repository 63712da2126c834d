"""Radial flows, amortized: centre, α and β of every step from the context."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor
from torch.nn.functional import softplus

from sylvester.flows.base import (
    Amortize,
    AmortizedSteps,
    DiagonalGaussian,
    Flow,
    check_sizes,
    each_step,
    family,
    nudge,
)
from sylvester.flows.hypernetwork import Init, Output
from sylvester.transforms import RadialTransform


@family
class Radial(Flow):
    """K steps z' = z + β (z − z₀)/(α + |z − z₀|) with α > 0 and β > −α."""

    def __init__(
        self,
        features: int,
        context: int = 0,
        transforms: int = 8,
        *,
        init: Init = "identity",
        hyper_features: Sequence[int] = (),
        variance_bounds: tuple[float, float] | None = None,
        amortize: Amortize = "all",
    ):
        check_sizes(features, context, init, transforms=transforms)
        base = DiagonalGaussian(features, context, hyper_features=hyper_features, variance_bounds=variance_bounds)
        # α = 1 and softplus(raw β) = 1 make β = 0. The two differ by what a step may do: D stretched directions.
        one, small = math.log(math.e - 1), nudge(transforms) / features**0.5
        table = {
            "center": Output((features,), spread=0.5),
            "raw_alpha": Output((), center=one, spread=small),
            "raw_beta": Output((), center=one, spread=small),
        }
        steps = AmortizedSteps(
            context, transforms, table, _bind, init=init, hyper_features=hyper_features, amortize=amortize
        )
        super().__init__(base, [steps])


def _bind(raw: dict[str, Tensor]) -> list[RadialTransform]:
    alpha = softplus(raw["raw_alpha"]) + 1e-6
    # The paper's softplus(β) − α, drawn in by a thousandth so that −α stays out of reach in float32.
    beta = 0.999 * (softplus(raw["raw_beta"]) - alpha)
    parameters = zip(each_step(1, raw["center"]), each_step(0, alpha), each_step(0, beta), strict=True)
    return [RadialTransform(*step) for step in parameters]
