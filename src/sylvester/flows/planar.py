"""Planar flows, amortized: u, w and b of every step from the context."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

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
from sylvester.transforms import PlanarTransform


@family
class Planar(Flow):
    """K steps z' = z + û tanh(w·z + b), where û is u with its part along w changed so that w·û > −1."""

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
        # û = 0 where w·u = ln(e − 1), and is singular near w = 0: start at |w| = 1.
        w = torch.nn.functional.normalize(torch.randn(transforms, features), dim=-1)
        small = nudge(transforms) / features**0.5
        table = {
            "u": Output((features,), center=math.log(math.e - 1) * w, spread=small),
            "w": Output((features,), center=w, spread=small),
            "b": Output((), spread=0.5),
        }
        steps = AmortizedSteps(
            context, transforms, table, _bind, init=init, hyper_features=hyper_features, amortize=amortize
        )
        super().__init__(base, [steps])


def _bind(raw: dict[str, Tensor]) -> list[PlanarTransform]:
    u, w, b = raw["u"], raw["w"], raw["b"]
    wu, squared = (w * u).sum(-1), (w * w).sum(-1)
    least = torch.finfo(w.dtype).tiny ** 0.5
    along = (_above_minus_one(wu) - wu) / squared.clamp(min=least)
    u = torch.addcmul(u, along.unsqueeze(-1), w)
    # w·û by what it is to be: summed up once more, large parameters would lose the bound to rounding.
    wu = torch.where(squared >= least, _above_minus_one(wu), wu + along * squared)
    parameters = each_step(1, u), each_step(1, w), each_step(0, b), each_step(0, wu)
    return [PlanarTransform.of_product(*step) for step in zip(*parameters, strict=True)]


def _above_minus_one(wu: Tensor) -> Tensor:
    """The paper's softplus(w·u) − 1, drawn in by a thousandth so that −1 stays out of reach in float32."""
    return 0.999 * (torch.nn.functional.softplus(wu) - 1)
