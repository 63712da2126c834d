"""Householder flows, amortized: one reflection vector of every step from the context."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sylvester.flows.base import (
    Amortize,
    AmortizedSteps,
    DiagonalGaussian,
    Flow,
    check_sizes,
    family,
    nudge,
)
from sylvester.flows.hypernetwork import Init, Output
from sylvester.transforms import HouseholderTransform


@family
class Householder(Flow):
    """K steps z' = H_v H_1 z, where H_1 flips the first coordinate and v is learned.

    One reflection is never near the identity; two in nearly the same direction are. Since H_1 H_v H_1 is the reflection
    in H_1 v, the K steps are K learned reflections after at most one flip of the base, which its mean absorbs: the
    same family of distributions. They are one product, and so one transform.
    """

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
        spread = nudge(transforms) / features**0.5
        table = {"v": Output((features,), center=torch.eye(features)[:1], spread=spread)}
        steps = AmortizedSteps(
            context, transforms, table, _bind, init=init, hyper_features=hyper_features, amortize=amortize
        )
        super().__init__(base, [steps])


def _bind(raw: dict[str, Tensor]) -> list[HouseholderTransform]:
    v = raw["v"]  # (*, K, D)
    # Every second vector, counted from the last, stands behind an odd number of flips: its first entry changes sign.
    flips = torch.arange(v.shape[-2], device=v.device).flip(0) % 2
    head, tail = v[..., :1] * (1 - 2 * flips).unsqueeze(-1).to(v.dtype), v[..., 1:]
    v = torch.cat([head, tail], -1)
    if v.shape[-2] % 2:
        first = torch.eye(v.shape[-1], dtype=v.dtype, device=v.device)[:1]
        v = torch.cat([first.expand_as(v[..., :1, :]), v], -2)
    return [HouseholderTransform(v)]
