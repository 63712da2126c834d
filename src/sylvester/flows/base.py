"""Bind, then use: a flow is a module that maps a context to a distribution.

    Flow = a base, a module that gives the diagonal Gaussian, and steps, modules that give transforms.

A family adds its steps, and most steps are a table of parameter shapes and a function that keeps the step invertible
(:class:`AmortizedSteps`).
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor, nn
from torch.distributions import Independent, Normal, Transform
from torch.distributions.constraints import Constraint

from sylvester.distributions import FlowDistribution
from sylvester.flows.hypernetwork import Amortized, Hypernetwork, Init, LocalParameters, Output
from sylvester.linalg.precision import full_precision
from sylvester.transforms.elementwise import NUDGE
from sylvester.transforms.support import SupportTransform

_LEAST_VARIANCE = 1e-8

#: What is a function of the context: all of a flow, or its base alone.
Amortize = Literal["all", "base"]

#: {name: parameters of all K steps, (*, K, *shape)} -> the transforms.
Bind = Callable[[dict[str, Tensor]], Sequence[Transform]]


class DiagonalGaussian(Amortized):
    """context -> the base Independent(Normal(μ, σ), 1), with variance softplus(·) + 1e-8.

    ``variance_bounds`` clamps the variance, as the paper's experiments on grey-level images do.
    """

    hypernetwork: Hypernetwork | LocalParameters

    def __init__(
        self,
        features: int,
        context: int = 0,
        *,
        hyper_features: Sequence[int] = (),
        variance_bounds: tuple[float, float] | None = None,
    ):
        super().__init__()
        check_sizes(features, context, "torch")
        if variance_bounds is not None:
            try:
                low, high = map(float, variance_bounds)
                usable = 0 < low <= high < math.inf
            except (TypeError, ValueError):
                usable = False
            if not usable:
                raise ValueError(
                    f"Expected variance_bounds as two positive numbers, the smaller first; got {variance_bounds!r}"
                )
        self.features, self.variance_bounds = features, variance_bounds
        table = {"loc": Output((features,)), "raw_variance": Output((features,))}
        self.hypernetwork = Hypernetwork(context, table, hyper_features=hyper_features)

    @property
    def context(self) -> int:
        return self.hypernetwork.context

    def at(self, loc: Tensor, scale: Tensor) -> DiagonalGaussian:
        """The same without context, with means and standard deviations ``(*, D)`` that are free and start here."""
        variance = scale.square()
        if self.variance_bounds is not None:
            variance = variance.clamp(*self.variance_bounds)
        excess = (variance - _LEAST_VARIANCE).clamp(min=_LEAST_VARIANCE)
        raw = excess + torch.log(-torch.expm1(-excess))  # softplus(raw) = excess
        return self.freed(LocalParameters(torch.cat([loc, raw], -1).unsqueeze(-2), self.hypernetwork.table))

    def forward(self, context: Tensor | None) -> Independent:
        out = {name: value.squeeze(-2) for name, value in self.hypernetwork(context).items()}
        variance = nn.functional.softplus(out["raw_variance"]) + _LEAST_VARIANCE
        if self.variance_bounds is not None:
            variance = variance.clamp(*self.variance_bounds)
        return Independent(Normal(out["loc"], variance.sqrt(), validate_args=False), 1, validate_args=False)

    def extra_repr(self) -> str:
        bounds = "" if self.variance_bounds is None else f", variance_bounds={self.variance_bounds}"
        return f"features={self.features}, context={self.context}{bounds}"


class AmortizedSteps(Amortized):
    """K steps whose parameters the hypernetwork emits.

    Args:
        context: the size of the context; 0 for learned parameters.
        transforms: K.
        table: each parameter of a step with its shape and where it starts.
        bind: makes the transforms of the raw parameters; here the constraints are met.
        init, hyper_features: as for every family.
        amortize: with "base", the steps see no context.
    """

    hypernetwork: Hypernetwork | LocalParameters

    def __init__(
        self,
        context: int,
        transforms: int,
        table: dict[str, Output],
        bind: Bind,
        *,
        init: Init = "identity",
        hyper_features: Sequence[int] = (),
        amortize: Amortize = "all",
    ):
        super().__init__()
        if amortize not in get_args(Amortize):
            raise ValueError(f"Expected amortize in {get_args(Amortize)}; got {amortize!r}")
        self.bind = bind
        seen = context if amortize == "all" else 0
        self.hypernetwork = Hypernetwork(seen, table, transforms=transforms, hyper_features=hyper_features, init=init)

    def forward(self, context: Tensor | None) -> Sequence[Transform]:
        return self.bind(self.hypernetwork(context))


class Flow(nn.Module):
    """A distribution over ``features`` variables, conditional on a context where ``context`` > 0.

    Args:
        base: a module context -> ``Independent(Normal(loc, scale), 1)`` with attributes ``features`` and ``context``.
        steps: modules context -> transforms, first to last.

    >>> from sylvester.flows import DiagonalGaussian, Planar
    >>> planar = Planar(2, context=3, transforms=4)
    >>> flow = Flow(DiagonalGaussian(2, context=3), planar.steps)
    >>> flow(torch.zeros(5, 3))
    FlowDistribution(batch_shape=(5,), event_shape=(2,), transforms=[4 x PlanarTransform])
    """

    def __init__(self, base: nn.Module, steps: Sequence[nn.Module] | nn.ModuleList = ()):
        super().__init__()
        for name in ("features", "context"):
            if not hasattr(base, name):
                raise ValueError(f"Expected a base with an attribute {name}, as DiagonalGaussian has; got {base!r}")
        self.base, self.steps = base, nn.ModuleList(steps)
        self.features: int = base.features  # type: ignore[assignment]
        self.context: int = base.context  # type: ignore[assignment]

    @full_precision
    def forward(self, context: Tensor | None = None) -> FlowDistribution:
        for parameter in self.base.parameters():
            if parameter.dtype.itemsize < 4:
                raise ValueError(
                    f"Expected a flow in float32 or float64, as densities need; got {parameter.dtype}: "
                    "leave the flow at full precision and use autocast, which ends where a flow begins"
                )
        self._check_context(context)
        transforms = [transform for module in self.steps for transform in module(context)]
        return FlowDistribution(self.base(context), transforms, validate_args=False)

    def _check_context(self, context: Tensor | None) -> None:
        if context is None and self.context:
            raise ValueError(f"Expected a context of {self.context} features; got none")
        if context is not None and not self.context:
            raise ValueError("Expected no context, as this flow was made with context=0; got one")
        if context is None:
            return
        if not isinstance(context, Tensor):
            raise ValueError(f"Expected a context as a tensor (*, {self.context}); got {type(context).__name__}")
        if context.dim() < 1 or context.shape[-1] != self.context:
            raise ValueError(f"Expected a context of shape (*, {self.context}); got {tuple(context.shape)}")
        like = next(self.parameters(), context)
        if context.dtype != like.dtype:
            raise ValueError(f"Expected a context of {like.dtype}, as the flow has; got {context.dtype}")

    @full_precision
    def local(self, context: Tensor) -> Flow:
        """A flow without context whose parameters are free, one set for each row of the context.

        ``flow.local(h)()`` is the distribution ``flow(h)`` at first, with its batch shape. What the hypernetworks emit
        for h becomes parameters, so that each row's distribution can be fitted by itself: what it then gains is the
        amortization gap. What does not come from a hypernetwork is copied and held: of masked and coupling families the
        networks, so that their base and their context are free, which is less than all that the family could do. A step
        of one's own that has no method ``local(context)`` is held, too, and its context is free.

        >>> from sylvester.flows import Planar
        >>> flow, h = Planar(2, context=3, transforms=4), torch.randn(5, 3)
        >>> local, z = flow.local(h), torch.zeros(5, 2)
        >>> local()
        FlowDistribution(batch_shape=(5,), event_shape=(2,), transforms=[4 x PlanarTransform])
        >>> torch.equal(local().log_prob(z), flow(h).log_prob(z))
        True
        """
        if not self.context:
            raise ValueError("Expected a flow with a context; got one made with context=0, which is free already")
        self._check_context(context)
        return Flow(localized(self.base, context), [localized(step, context) for step in self.steps])

    @property
    def event_shape(self) -> torch.Size:
        """Of its distributions: (features,), but for flows onto a constraint whose entries are not all free."""
        constraint = constraint_of(self.steps[-1]) if self.steps else None
        shape = (self.features,)
        return torch.Size(shape) if constraint is None else SupportTransform(constraint).forward_shape(shape)

    def extra_repr(self) -> str:
        return f"features={self.features}, context={self.context}"


def localized(module: nn.Module, context: Tensor) -> nn.Module:
    """A flow's base or steps, without context and with free parameters."""
    local: Callable[[Tensor], nn.Module] | None = getattr(module, "local", None)
    return _WithContext(module, context) if local is None else local(context)


class _WithContext(nn.Module):
    """A module that is held, with a context of its own that is free."""

    context = 0

    def __init__(self, module: nn.Module, context: Tensor):
        super().__init__()
        self.module = copy.deepcopy(module).requires_grad_(False)
        self.given = nn.Parameter(context.detach().clone())
        self.features = getattr(module, "features", None)

    def forward(self, context: None) -> Any:
        return self.module(self.given)


def compose(*flows: Flow) -> Flow:
    """The first flow's base, then the steps of all, in order.

    >>> from sylvester.flows import Planar, TriangularSylvester
    >>> flow = compose(Planar(2, transforms=4), TriangularSylvester(2, transforms=2))
    >>> flow().rsample((3,)).shape
    torch.Size([3, 2])
    """
    check_flows(flows, "to compose")
    for flow in flows[:-1]:
        if (constraint := _constraint_within(flow)) is not None:
            raise ValueError(f"Expected flows of real vectors before the last; got one onto {constraint}")
    return Flow(flows[0].base, [module for flow in flows for module in flow.steps])


def check_flows(flows: Sequence[object], purpose: str) -> None:
    """Flows, and such as belong together."""
    if not flows or not all(isinstance(flow, Flow) for flow in flows):
        raise ValueError(f"Expected at least one flow {purpose}, and nothing else; got {flows!r}")
    for name in ("features", "context"):
        values = [getattr(flow, name) for flow in flows]
        if len(set(values)) > 1:
            raise ValueError(f"Expected flows with the same {name}; got {values}")


def inverted(flow: Flow) -> Flow:
    """The same flow with every step turned round, the base left as it is.

    Steps that are cheap to sample become cheap to evaluate, as density estimation wants.

    >>> from sylvester.flows import IAF
    >>> inverted(IAF(2, transforms=3))()
    FlowDistribution(batch_shape=(), event_shape=(2,), transforms=[3 x AutoregressiveTransform.inv])
    """
    check_flows([flow], "to invert")
    if (constraint := _constraint_within(flow)) is not None:
        raise ValueError(
            f"Expected a flow of real vectors, so that onto(inverted(flow), …) be used; got one onto {constraint}"
        )
    return Flow(flow.base, [InvertedSteps(flow.steps)])


def constraint_of(step: nn.Module) -> Constraint | None:
    """What a step leads onto, where that is not all of the space."""
    return getattr(step, "constraint", None)


def _constraint_within(flow: Flow) -> Constraint | None:
    return next((found for step in flow.steps if (found := constraint_of(step)) is not None), None)


class InvertedSteps(nn.Module):
    """The inverses of the transforms that other modules give, last to first."""

    def __init__(self, steps: Sequence[nn.Module] | nn.ModuleList):
        super().__init__()
        self.steps = nn.ModuleList(steps)

    def forward(self, context: Tensor | None) -> list[Transform]:
        return [transform.inv for module in reversed(self.steps) for transform in reversed(module(context))]

    def local(self, context: Tensor) -> InvertedSteps:
        return InvertedSteps([localized(step, context) for step in self.steps])


_COMMON_ARGUMENTS = """
    features: D, the number of variables.
    context: the size of the context; 0 for learned, data-independent parameters.
    transforms: K, the number of steps.
    init: "identity" starts at the Gaussian posterior, with a gradient for every parameter; "torch" starts as the
        paper's experiments did, with torch's default in the hypernetwork.
    hyper_features: hidden widths of the hypernetwork; none for the paper's single linear layer.
    variance_bounds: clamp the base's variance, e.g. (0.01, 7).
"""
_AMORTIZE = """\
    amortize: "base" gives all contexts the same steps, whose parameters are learned, and each its own base alone.
"""

F = TypeVar("F", bound=type)


def family(cls: F) -> F:
    """Describe the arguments that families share, in a family's docstring, before those it adds."""
    summary, _, own = inspect.cleandoc(cls.__doc__ or "").partition("\nArgs:\n")
    amortize = _AMORTIZE if "amortize" in inspect.signature(cls).parameters else ""
    cls.__doc__ = f"{summary.rstrip()}\n\nArgs:{_COMMON_ARGUMENTS}{amortize}{own}"
    return cls


def nudge(transforms: int) -> float:
    """How far one of K steps may move the log-density at an identity start."""
    return NUDGE / transforms**0.5


def each_step(event_dims: int, parameter: Tensor) -> Sequence[Tensor]:
    """``(*, K, *shape)`` -> K tensors ``(*, *shape)``."""
    return torch.unbind(parameter, parameter.dim() - event_dims - 1)


def check_sizes(features: int, context: int, init: Init, **at_least_one: int) -> None:
    """What every family asks of its arguments."""
    for least, values in ((1, {"features": features, **at_least_one}), (0, {"context": context})):
        for name, value in values.items():
            if not isinstance(value, int) or value < least:
                raise ValueError(f"Expected an integer {name} >= {least}; got {value!r}")
    if init not in get_args(Init):
        raise ValueError(f"Expected init in {get_args(Init)}; got {init!r}")
