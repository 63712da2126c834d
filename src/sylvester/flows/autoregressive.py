"""Autoregressive flows: the context is amortized, the networks are not (§4.1 and eq. 31)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal, get_args

from torch.distributions import Transform

from sylvester.flows.base import DiagonalGaussian, Flow, check_sizes, family
from sylvester.flows.hypernetwork import Init
from sylvester.flows.masked import Activation, BoundNet, MaskedSteps
from sylvester.transforms import Affine, AutoregressiveTransform, Elementwise, Gated, RationalQuadratic, Shift

Order = Literal["paired", "alternating"]


@family
class IAF(Flow):
    """Inverse autoregressive flow, gated: z' = g z + (1 − g) μ, both from a masked network of z and the context.

    Sampling takes one pass a step, ``log_prob`` of a new point D.

    Args:
        hidden_features: one width for two hidden layers, or a width for each.
        activation: between the layers: "elu", "relu", "silu", "tanh" or a function of a tensor.
        order: "alternating" reverses the order of the coordinates at every step, … R N R N: the last one has their own,
            as models name first what others depend on; "paired" is what flipping z before every second step without
            flipping it back amounts to, as in the paper's experiments: N R R N N R R N ….
        gate_floor: the least gate; 0 is the paper's.
    """

    def __init__(
        self,
        features: int,
        context: int = 0,
        transforms: int = 8,
        *,
        hidden_features: int | Sequence[int] | None = None,
        activation: Activation = "elu",
        order: Order = "paired",
        gate_floor: float = 1e-3,
        init: Init = "identity",
        hyper_features: Sequence[int] = (),
        variance_bounds: tuple[float, float] | None = None,
    ):
        super().__init__(
            *_parts(
                features,
                context,
                transforms,
                Gated(gate_floor),
                hidden_features=hidden_features,
                activation=activation,
                order=order,
                init=init,
                hyper_features=hyper_features,
                variance_bounds=variance_bounds,
            )
        )


@family
class MeanOnlyIAF(Flow):
    """z' = z + μ(z): an inverse autoregressive flow that preserves volume.

    Args:
        hidden_features, activation, order: as for :class:`IAF`.
    """

    def __init__(
        self,
        features: int,
        context: int = 0,
        transforms: int = 8,
        *,
        hidden_features: int | Sequence[int] | None = None,
        activation: Activation = "elu",
        order: Order = "paired",
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
                order=order,
                init=init,
                hyper_features=hyper_features,
                variance_bounds=variance_bounds,
            )
        )


@family
class AffineIAF(Flow):
    """Inverse autoregressive flow, affine: z' = exp(4 tanh(s/4)) z + μ. Gates only shrink; its scales also grow.

    Sampling takes one pass a step, ``log_prob`` of a new point D.

    Args:
        hidden_features, activation: as for :class:`IAF`.
        order: as for :class:`IAF`, but alternating unless given.
    """

    def __init__(
        self,
        features: int,
        context: int = 0,
        transforms: int = 8,
        *,
        hidden_features: int | Sequence[int] | None = None,
        activation: Activation = "silu",
        order: Order = "alternating",
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
                order=order,
                init=init,
                hyper_features=hyper_features,
                variance_bounds=variance_bounds,
            )
        )


@family
class MAF(Flow):
    """Masked autoregressive flow, the other direction of :class:`AffineIAF`.

    ``log_prob`` takes one pass a step, sampling D.

    Args:
        hidden_features, activation: as for :class:`IAF`.
        order: as for :class:`IAF`, but alternating unless given.
    """

    def __init__(
        self,
        features: int,
        context: int = 0,
        transforms: int = 8,
        *,
        hidden_features: int | Sequence[int] | None = None,
        activation: Activation = "relu",
        order: Order = "alternating",
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
                inverse=True,
                hidden_features=hidden_features,
                activation=activation,
                order=order,
                init=init,
                hyper_features=hyper_features,
                variance_bounds=variance_bounds,
            )
        )


@family
class NSF(Flow):
    """Neural spline flow, autoregressive (Durkan et al., 2019): as MAF, with a monotone spline of each coordinate.

    ``log_prob`` takes one pass a step, sampling D.

    Args:
        bins: how many pieces a spline has.
        bound: splines act within ±bound; beyond it a step is the identity.
        hidden_features, activation: as for :class:`IAF`.
        order: as for :class:`IAF`, but alternating unless given.
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
        order: Order = "alternating",
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
                inverse=True,
                hidden_features=hidden_features,
                activation=activation,
                order=order,
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
    inverse: bool = False,
    hidden_features: int | Sequence[int] | None,
    activation: Activation,
    order: Order,
    init: Init,
    hyper_features: Sequence[int],
    variance_bounds: tuple[float, float] | None,
) -> tuple[DiagonalGaussian, list[MaskedSteps]]:
    """The base and the steps of a flow; with ``inverse``, in the other direction."""
    check_sizes(features, context, init, transforms=transforms)
    base = DiagonalGaussian(features, context, hyper_features=hyper_features, variance_bounds=variance_bounds)
    steps = MaskedSteps(
        _positions(features, transforms, order),
        context,
        elementwise,
        partial(_bind, elementwise=elementwise, inverse=inverse),
        hidden_features=hidden_features,
        activation=activation,
        # Units of degree 0 see the context alone: without one they would be constants, half of the units in the plane.
        lowest_degree=0 if context or features == 1 else 1,
        init=init,
        hyper_features=hyper_features,
    )
    return base, [steps]


def _positions(features: int, transforms: int, order: Order) -> list[range]:
    if order not in get_args(Order):
        raise ValueError(f"Expected order in {get_args(Order)}; got {order!r}")
    turned = [(transforms - 1 - k) % 2 if order == "alternating" else (k + 1) // 2 % 2 for k in range(transforms)]
    return [range(features)[::-1] if turn else range(features) for turn in turned]


def _bind(net: BoundNet, elementwise: Elementwise, *, inverse: bool) -> Transform:
    step = AutoregressiveTransform(net, elementwise, order=net.position, batch_shape=net.batch_shape)
    return step.inv if inverse else step
