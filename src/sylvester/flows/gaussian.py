"""The plain diagonal Gaussian posterior: the baseline every flow starts from."""

from __future__ import annotations

from collections.abc import Sequence

from sylvester.flows.base import DiagonalGaussian, Flow, check_common
from sylvester.flows.hypernetwork import Init


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
        check_common(features, context, init)
        base = DiagonalGaussian(features, context, hyper_features=hyper_features, variance_bounds=variance_bounds)
        self._assemble(base, [])
