"""Householder flows, amortized: one reflection vector of every step from the context."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributions import Transform

from sylvester.flows.base import AmortizedSteps, Family, nudge
from sylvester.flows.hypernetwork import Output
from sylvester.transforms import HouseholderTransform


class HouseholderSteps(AmortizedSteps):
    first: Tensor  # (1, D)
    signs: Tensor  # (K, D)

    def __init__(self, features: int, context: int, transforms: int, **options: Any):
        first = torch.eye(features)[:1]
        table = {"v": Output((features,), center=first, spread=nudge(transforms) / features**0.5)}
        super().__init__(context, transforms, table, **options)
        # Every second vector, counted from the last, stands behind an odd number of flips.
        flipped = torch.arange(transforms).flip(0)[:, None] % 2
        self.register_buffer("first", first, persistent=False)
        self.register_buffer("signs", 1 - 2 * first * flipped, persistent=False)

    def bind(self, raw: dict[str, Tensor]) -> list[Transform]:
        v = raw["v"] * self.signs  # (*, K, D)
        if len(self.signs) % 2:
            v = torch.cat([self.first.expand_as(v[..., :1, :]), v], -2)
        return [HouseholderTransform(v)]


class Householder(Family):
    """K steps z' = H_v H_1 z, where H_1 flips the first coordinate and v is learned.

    One reflection is never near the identity; two in nearly the same direction are. Since H_1 H_v H_1 is the reflection
    in H_1 v, the K steps are K learned reflections after at most one flip of the base, which its mean absorbs: the
    same family of distributions. They are one product, and so one transform.
    """

    make_steps = HouseholderSteps
