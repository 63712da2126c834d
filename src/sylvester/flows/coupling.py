"""Coupling flows: the context is amortized, the networks are not (§4.2)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch.distributions import Transform

from sylvester.flows.base import DiagonalGaussian, Flow, check_sizes, family
from sylvester.flows.hypernetwork import Init
from sylvester.flows.masked import Activation, BoundNet, MaskedSteps
from sylvester.transforms import Affine, CouplingTransform, Elementwise, RationalQuadratic, Shift


@family
class NICE(Flow):
    """Additive couplings, volume preserving; one pass in both directions.

    Args:
        hidden_features: one width for two hidden layers, or a width for each.
        activation: between the layers: "elu", "relu", "silu", "tanh" or a function of a tensor.
    """

    def __init__(
        self,
        features: int,
        context: int = 0,
        transforms: int = 8,
        *,
        hidden_features: int | Sequence[int] | None = None,
        activation: Activation = "relu",
        init: Init = "identity",
        hyper_features: Sequence[int] = (),
        variance_bounds: tuple[float, float] | None = None,
    ):
        super().__init__(
            *_parts(
                features,
                context,
                transforms,
                Shift(),
                hidden_features=hidden_features,
                activation=activation,
                init=init,
                hyper_features=hyper_features,
                variance_bounds=variance_bounds,
            )
        )


@family
class RealNVP(Flow):
    """Affine couplings; one pass in both directions.

    Args:
        hidden_features, activation: as for :class:`NICE`.
    """

    def __init__(
        self,
        features: int,
        context: int = 0,
        transforms: int = 8,
        *,
        hidden_features: int | Sequence[int] | None = None,
        activation: Activation = "relu",
        init: Init = "identity",
        hyper_features: Sequence[int] = (),
        variance_bounds: tuple[float, float] | None = None,
    ):
        super().__init__(
            *_parts(
                features,
                context,
                transforms,
                Affine(),
                hidden_features=hidden_features,
                activation=activation,
                init=init,
                hyper_features=hyper_features,
                variance_bounds=variance_bounds,
            )
        )


@family
class CouplingNSF(Flow):
    """Neural spline flow with couplings (Durkan et al., 2019): monotone splines; one pass in both directions.

    Args:
        bins: how many pieces a spline has.
        bound: splines act within ±bound; beyond it a step is the identity.
        hidden_features, activation: as for :class:`NICE`.
    """

    def __init__(
        self,
        features: int,
        context: int = 0,
        transforms: int = 8,
        *,
        bins: int = 8,
        bound: float = 5.0,
        hidden_features: int | Sequence[int] | None = None,
        activation: Activation = "relu",
        init: Init = "identity",
        hyper_features: Sequence[int] = (),
        variance_bounds: tuple[float, float] | None = None,
    ):
        super().__init__(
            *_parts(
                features,
                context,
                transforms,
                RationalQuadratic(bins, bound),
                hidden_features=hidden_features,
                activation=activation,
                init=init,
                hyper_features=hyper_features,
                variance_bounds=variance_bounds,
            )
        )


def _parts(
    features: int,
    context: int,
    transforms: int,
    elementwise: Elementwise,
    *,
    hidden_features: int | Sequence[int] | None,
    activation: Activation,
    init: Init,
    hyper_features: Sequence[int],
    variance_bounds: tuple[float, float] | None,
) -> tuple[DiagonalGaussian, list[MaskedSteps]]:
    """The base and the steps of a flow."""
    check_sizes(features, context, init, transforms=transforms)
    base = DiagonalGaussian(features, context, hyper_features=hyper_features, variance_bounds=variance_bounds)
    steps = MaskedSteps(
        _positions(features, transforms),
        context,
        elementwise,
        partial(_bind, elementwise=elementwise),
        hidden_features=hidden_features,
        activation=activation,
        lowest_degree=1,
        init=init,
        hyper_features=hyper_features,
    )
    return base, [steps]


def _positions(features: int, transforms: int) -> list[list[int]]:
    """The even and the odd coordinates take turns: 0 for those that pass, 1 for those that change.

    With one feature it always changes, and depends on the context alone.
    """
    return [[(i + k) % 2 if features > 1 else 1 for i in range(features)] for k in range(transforms)]


def _bind(net: BoundNet, elementwise: Elementwise) -> Transform:
    return CouplingTransform(net, net.position == 0, elementwise, batch_shape=net.batch_shape)
