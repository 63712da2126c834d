"""Bind, then use: a flow is a module that maps a context to a distribution.

    Flow = a base, which gives the diagonal Gaussian, and groups of steps, which give transforms.

Families add nothing to :class:`Flow` but their steps; most steps are a table of parameter shapes and the constraint
that keeps the step invertible (:class:`AmortizedSteps`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.distributions import Independent, Normal, Transform

from sylvester.distributions import FlowDistribution
from sylvester.flows.hypernetwork import Hypernetwork, Init, Output


class DiagonalGaussian(nn.Module):
    """context -> the base Independent(Normal(μ, σ), 1), with variance softplus(·) + 1e-8.

    ``variance_bounds`` clamps the variance, as the paper's experiments on grey-level images do.
    """

    def __init__(
        self,
        features: int,
        context: int = 0,
        *,
        hyper_features: Sequence[int] = (),
        variance_bounds: tuple[float, float] | None = None,
    ):
        super().__init__()
        self.features, self.context, self.variance_bounds = features, context, variance_bounds
        table = {"loc": Output((features,)), "raw_variance": Output((features,))}
        self.hypernetwork = Hypernetwork(context, table, hyper_features=hyper_features)

    def forward(self, context: Tensor | None) -> Independent:
        out = {name: value.squeeze(-2) for name, value in self.hypernetwork(context).items()}
        variance = nn.functional.softplus(out["raw_variance"]) + 1e-8
        if self.variance_bounds is not None:
            variance = variance.clamp(*self.variance_bounds)
        return Independent(Normal(out["loc"], variance.sqrt(), validate_args=False), 1, validate_args=False)


class Steps(nn.Module, ABC):
    """context -> a list of transforms."""

    @abstractmethod
    def forward(self, context: Tensor | None) -> list[Transform]: ...


class AmortizedSteps(Steps):
    """Steps whose parameters the hypernetwork emits: a family gives the table and says what to make of it."""

    def __init__(
        self,
        context: int,
        transforms: int,
        table: dict[str, Output],
        *,
        init: Init = "identity",
        hyper_features: Sequence[int] = (),
    ):
        super().__init__()
        self.hypernetwork = Hypernetwork(context, table, steps=transforms, hyper_features=hyper_features, init=init)

    @abstractmethod
    def bind(self, raw: dict[str, Tensor]) -> list[Transform]:
        """Transforms from the raw parameters ``(*, K, *shape)``: here the constraints are met."""

    def forward(self, context: Tensor | None) -> list[Transform]:
        return self.bind(self.hypernetwork(context))


def nudge(transforms: int) -> float:
    """How far one of K steps may move the log-density at an identity start, for about 1e-4 in all."""
    return 1e-4 / transforms**0.5


def each_step(event_dims: int, parameter: Tensor) -> Sequence[Tensor]:
    """``(*, K, *shape)`` -> K tensors ``(*, *shape)``."""
    return torch.unbind(parameter, parameter.dim() - event_dims - 1)


class Flow(nn.Module):
    """A distribution over ``features`` variables, conditional on a context where ``context`` > 0.

    ``Flow([flow, flow, …])`` composes: the first flow's base, then the steps of all, in order.

    >>> from sylvester.flows import Planar, TriangularSylvester
    >>> flow = Flow([Planar(2, transforms=4), TriangularSylvester(2, transforms=2)])
    >>> flow().rsample((3,)).shape
    torch.Size([3, 2])
    """

    def __init__(self, flows: Sequence[Flow]):
        if not flows:
            raise ValueError("Expected at least one flow to compose; got none")
        for name in ("features", "context"):
            values = [getattr(flow, name) for flow in flows]
            if len(set(values)) > 1:
                raise ValueError(f"Expected flows with the same {name}; got {values}")
        self._assemble(flows[0].base, [group for flow in flows for group in flow.groups()])

    def _assemble(self, base: DiagonalGaussian, steps: Sequence[Steps]) -> None:
        super().__init__()
        self.base, self.steps = base, nn.ModuleList(steps)
        self.features, self.context = base.features, base.context

    def groups(self) -> list[Steps]:
        """The groups of steps, first to last."""
        return [group for group in self.steps if isinstance(group, Steps)]

    def forward(self, context: Tensor | None = None) -> FlowDistribution:
        if context is None and self.context:
            raise ValueError(f"Expected a context of {self.context} features; got none")
        if context is not None and not self.context:
            raise ValueError("Expected no context, as this flow was made with context=0; got one")
        if context is not None and (context.dim() < 1 or context.shape[-1] != self.context):
            raise ValueError(f"Expected a context of shape (*, {self.context}); got {tuple(context.shape)}")
        transforms = [transform for group in self.groups() for transform in group(context)]
        return FlowDistribution(self.base(context), transforms, validate_args=False)

    def extra_repr(self) -> str:
        return f"features={self.features}, context={self.context}"


class Inverted(Flow):
    """The same flow with every step turned round, the base left as it is.

    Steps that are cheap to sample become cheap to evaluate, as density estimation wants.
    """

    def __init__(self, flow: Flow):
        self._assemble(flow.base, [_InvertedSteps(flow.groups())])


class _InvertedSteps(Steps):
    def __init__(self, groups: Sequence[Steps]):
        super().__init__()
        self.groups = nn.ModuleList(groups)

    def forward(self, context: Tensor | None) -> list[Transform]:
        return [transform.inv for group in reversed(self.groups) for transform in reversed(group(context))]


class Family(Flow):
    """A flow of one kind of step.

    Args:
        features: D, the number of variables.
        context: the size of the context; 0 for learned, data-independent parameters.
        transforms: K, the number of steps.
        init: "identity" starts at the Gaussian posterior, with a gradient for every parameter; "torch" is torch's
            default in the hypernetwork, as in the paper's experiments.
        hyper_features: hidden widths of the hypernetwork; none for the paper's single linear layer.
        variance_bounds: clamp the base's variance, e.g. (0.01, 7).
        options: what the family's own steps take.
    """

    make_steps: Callable[..., Steps]

    def __init__(
        self,
        features: int,
        context: int = 0,
        transforms: int = 8,
        *,
        init: Init = "identity",
        hyper_features: Sequence[int] = (),
        variance_bounds: tuple[float, float] | None = None,
        **options: Any,
    ):
        check_common(features, context, init)
        check_at_least(1, transforms=transforms)
        base = DiagonalGaussian(features, context, hyper_features=hyper_features, variance_bounds=variance_bounds)
        steps = type(self).make_steps(
            features, context, transforms, init=init, hyper_features=hyper_features, **options
        )
        self._assemble(base, [steps])


def check_common(features: int, context: int, init: Init) -> None:
    """What every family asks of the arguments that all of them take."""
    check_at_least(1, features=features)
    check_at_least(0, context=context)
    if init not in get_args(Init):
        raise ValueError(f"Expected init in {get_args(Init)}; got {init!r}")


def check_at_least(least: int, **values: int) -> None:
    for name, value in values.items():
        if not isinstance(value, int) or value < least:
            raise ValueError(f"Expected an integer {name} >= {least}; got {value!r}")
