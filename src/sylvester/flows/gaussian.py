"""The plain diagonal Gaussian posterior: the baseline every flow starts from."""

from __future__ import annotations

from collections.abc import Sequence

from sylvester.flows.base import DiagonalGaussian, Flow, check_sizes, family
from sylvester.flows.hypernetwork import Init


@family
class Gaussian(Flow):
    """No steps at all. ``transforms`` and ``init`` are taken so that families can stand in for one another."""

    def __init__(
        self,
        features: int,
        context: int = 0,
        transforms: int = 0,
        *,
        init: Init = "identity",
        hyper_features: Sequence[int] = (),
        variance_bounds: tuple[float, float] | None = None,
    ):
        check_sizes(features, context, init)
        super().__init__(
            DiagonalGaussian(features, context, hyper_features=hyper_features, variance_bounds=variance_bounds)
        )
