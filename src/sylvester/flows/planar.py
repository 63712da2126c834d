"""Planar flows, amortized: u, w and b of every step from the context."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Transform

from sylvester.flows.base import AmortizedSteps, Family, each_step, nudge
from sylvester.flows.hypernetwork import Output
from sylvester.transforms import PlanarTransform


class PlanarSteps(AmortizedSteps):
    def __init__(self, features: int, context: int, transforms: int, **options: Any):
        # û = 0 where w·u = ln(e − 1), and is singular near w = 0: start at |w| = 1.
        w = torch.nn.functional.normalize(torch.randn(transforms, features), dim=-1)
        small = nudge(transforms) / features**0.5
        table = {
            "u": Output((features,), center=math.log(math.e - 1) * w, spread=small),
            "w": Output((features,), center=w, spread=small),
            "b": Output((), spread=0.5),
        }
        super().__init__(context, transforms, table, **options)

    def bind(self, raw: dict[str, Tensor]) -> list[Transform]:
        u, w, b = raw["u"], raw["w"], raw["b"]
        u = u + ((_above_minus_one((w * u).sum(-1)) - (w * u).sum(-1)) / _squared_norm(w)).unsqueeze(-1) * w
        return [PlanarTransform(*step) for step in zip(each_step(1, u), each_step(1, w), each_step(0, b), strict=True)]


def _above_minus_one(wu: Tensor) -> Tensor:
    """The paper's softplus(w·u) − 1, drawn in by a thousandth so that −1 stays out of reach in float32."""
    return 0.999 * (torch.nn.functional.softplus(wu) - 1)


def _squared_norm(w: Tensor) -> Tensor:
    return (w * w).sum(-1).clamp(min=torch.finfo(w.dtype).tiny ** 0.5)


class Planar(Family):
    """K steps z' = z + û tanh(w·z + b), where û is u with its part along w changed so that w·û > −1."""

    make_steps = PlanarSteps
