"""The contract of a step, written once.

A family implements two methods, each of which gives a value together with ladj = log|det ∂z'/∂z| at z:

    _forward(z) -> (z', ladj)        _backward(z') -> (z, ladj)

Everything else derives from these: ``t.call_and_ladj(z)`` and ``t.inv.call_and_ladj(y)``, which check what they are
given, and from them ``t(z)``, ``t.inv(y)`` and ``t.log_abs_det_jacobian(z, y)``, with torch's caching, composition and
shape rules.

A third one is optional. It pushes the score δ = ∂log q/∂z of a density along, which path gradients want:

    _forward_and_score(z, δ) -> (z', ladj, δ')        δ' = J⁻ᵀ(δ − ∂ladj/∂z),    J = ∂z'/∂z

Without it, δ' is one backward pass through the inverse.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributions import Transform, constraints

from sylvester.linalg.precision import full_precision


class FlowTransform(Transform, ABC):
    """A bijection of real vectors whose log-determinant is cheap and whose inverse is exact.

    Points are ``(*, D)``; parameters have any batch shape that broadcasts against the points', so that
    ``(S, B, D)`` points meet ``(B, …)`` parameters without repeating them.
    """

    domain = constraints.real_vector
    codomain = constraints.real_vector
    bijective = True

    #: Names of the attributes that define the step; two steps are equal when these are.
    parameters: tuple[str, ...] = ()

    def __init__(
        self,
        features: int | None,
        batch_shape: Sequence[int] = (),
        *,
        validate_args: bool = False,
        cache_size: int = 0,
    ):
        super().__init__(cache_size=cache_size)
        self.features = features
        self.batch_shape = torch.Size(batch_shape)
        self._validate_args = validate_args
        if validate_args:
            for name in self.parameters:
                value = getattr(self, name)
                if isinstance(value, Tensor) and not value.isfinite().all():
                    raise ValueError(f"Expected finite values in {name}; got a NaN or an infinity")
            self._check_parameters()

    @abstractmethod
    def _forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """z' and ladj."""

    @abstractmethod
    def _backward(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """The z with t(z) = y, and ladj at z."""

    def _check_parameters(self) -> None:
        """Under ``validate_args``: raise where the step would not be invertible."""

    def _forward_and_score(self, z: Tensor, score: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """z', ladj and the score at z', which has no graph."""
        y, ladj = self._forward(z)
        return y, ladj, _through_inverse(self._backward, y, score, -1.0)

    @full_precision
    def call_and_ladj(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """t(z) and its ladj, at the price of one."""
        self._check_points(z)
        return self._forward(z)

    @full_precision
    def call_ladj_and_score(self, z: Tensor, score: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """t(z), its ladj, and the score ∂log q'/∂z' there, for a density q of z with ``score`` = ∂log q/∂z.

        As q'(z') = q(z) / |det J|, the score becomes J⁻ᵀ(score − ∂ladj/∂z). It has the shape of z, and no graph.
        """
        self._check_points(z)
        return self._forward_and_score(z, score)

    def _check_points(self, z: Tensor) -> None:
        if z.dim() < 1 or (self.features is not None and z.shape[-1] != self.features):
            raise ValueError(f"Expected points with {self.features} features in the last axis; got {tuple(z.shape)}")
        if self._validate_args and found(z.isnan()):
            raise ValueError("Expected points without NaN; got a NaN")

    def residual(self, z: Tensor, y: Tensor) -> Tensor:
        """How far t(z) lies from y, relative to 1 + |y|, in the worst coordinate: ``(*)``.

        Rounding, for a y or z that came from this step. Where a map is too steep for the precision at hand, what a
        sequential inverse leaves over is more, and log-densities through it are not to be trusted.
        """
        return ((self.call_and_ladj(z)[0] - y).abs() / (1 + y.abs())).amax(-1)

    def log_abs_det_jacobian(self, z: Tensor, y: Tensor) -> Tensor:
        return self.call_and_ladj(z)[1]

    def _call(self, z: Tensor) -> Tensor:
        return self.call_and_ladj(z)[0]

    def _inverse(self, y: Tensor) -> Tensor:
        return self.inv.call_and_ladj(y)[0]

    @property
    def inv(self) -> FlowTransform:
        return Inverse(self)

    def with_cache(self, cache_size: int = 1) -> FlowTransform:
        if self._cache_size == cache_size:
            return self
        other = copy.copy(self)
        other._cache_size = cache_size
        other._cached_x_y = None, None
        return other

    def forward_shape(self, shape: Sequence[int]) -> torch.Size:
        shape = torch.Size(shape)
        if len(shape) < 1 or (self.features is not None and shape[-1] != self.features):
            raise ValueError(f"Expected a shape that ends in {self.features}; got {tuple(shape)}")
        return broadcast(shape, torch.Size((*self.batch_shape, shape[-1])))

    def inverse_shape(self, shape: Sequence[int]) -> torch.Size:
        return self.forward_shape(shape)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return type(self) is type(other) and all(
            _equal(getattr(self, name), getattr(other, name)) for name in self.parameters
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{type(self).__name__}(features={self.features}, batch_shape={tuple(self.batch_shape)})"


class Inverse(FlowTransform):
    """The other direction of a step; what ``t.inv`` is. Torch's cache, where there is one, is the step's own."""

    parameters = ("transform",)

    def __init__(self, transform: FlowTransform):
        self.transform = transform
        super().__init__(transform.features, transform.batch_shape, cache_size=transform._cache_size)
        self._validate_args = transform._validate_args

    def _forward(self, y: Tensor) -> tuple[Tensor, Tensor]:
        z, ladj = self.transform._backward(y)
        if self._validate_args:
            residual = self.residual(y, z)
            if found(residual > inverse_tolerance(y.dtype)):
                raise ValueError(
                    f"Expected a step whose inverse is exact in {y.dtype}; got {self.transform} with a residual of "
                    f"{residual.max().item():.3g}: it is too steep for this precision"
                )
        return z, -ladj

    def _backward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        y, ladj = self.transform._forward(z)
        return y, -ladj

    def __call__(self, y: Tensor) -> Tensor:
        return self.transform._inv_call(y)

    def _inv_call(self, z: Tensor) -> Tensor:
        return self.transform(z)

    def residual(self, z: Tensor, y: Tensor) -> Tensor:
        return self.transform.residual(y, z)

    def log_abs_det_jacobian(self, z: Tensor, y: Tensor) -> Tensor:
        return -self.transform.log_abs_det_jacobian(y, z)

    @property
    def inv(self) -> FlowTransform:
        return self.transform

    def with_cache(self, cache_size: int = 1) -> FlowTransform:
        return self if self._cache_size == cache_size else Inverse(self.transform.with_cache(cache_size))

    def __repr__(self) -> str:
        return f"{self.transform}.inv"


def call_and_ladj(transform: Transform, z: Tensor) -> tuple[Tensor, Tensor]:
    """A point's image and ladj under any torch transform of vectors, at the price of one where it offers that.

    A transform of single coordinates has one ladj for each of them: they are added up.

    >>> from torch.distributions.transforms import ExpTransform
    >>> call_and_ladj(ExpTransform(), torch.zeros(5, 3))[1]
    tensor([0., 0., 0., 0., 0.])
    """
    if hasattr(transform, "call_and_ladj"):
        y, ladj = transform.call_and_ladj(z)
    else:
        y = transform(z)
        ladj = transform.log_abs_det_jacobian(z, y)
    return y, ladj.sum(-1) if transform.domain.event_dim == 0 else ladj


def call_ladj_and_score(transform: Transform, z: Tensor, score: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same, and the score of the image's density, given that of the point's: see `FlowTransform`.

    >>> from torch.distributions import AffineTransform
    >>> z = torch.tensor([1.0, -2.0])  # of a standard normal, whose score is −z
    >>> y, ladj, score = call_ladj_and_score(AffineTransform(0.0, 2.0, event_dim=1), z, -z)
    >>> torch.allclose(score, -y / 4)  # of N(0, 2²)
    True
    """
    if isinstance(transform, FlowTransform):
        return transform.call_ladj_and_score(z, score)
    y, ladj = call_and_ladj(transform, z)
    return y, ladj, _through_inverse(lambda point: call_and_ladj(transform.inv, point), y, score, 1.0)


@torch.no_grad()
def _through_inverse(
    inverse: Callable[[Tensor], tuple[Tensor, Tensor]], y: Tensor, score: Tensor, sign: float
) -> Tensor:
    """The gradient at y of log q(z) + ``sign`` ladj for (z, ladj) = inverse(y), where ∂log q/∂z is the score."""
    (z, ladj), pull, *_ = torch.func.vjp(inverse, y.detach())
    return pull((score.expand_as(z), torch.full_like(ladj, sign)))[0]


def inverse_tolerance(dtype: torch.dtype) -> float:
    """The residual from which on an inverse is not to be trusted."""
    return torch.finfo(dtype).eps ** 0.5


def broadcast(*shapes: torch.Size) -> torch.Size:
    """torch.broadcast_shapes, which takes tens of microseconds, for shapes that mostly are the same."""
    first = shapes[0]
    return first if all(shape == first for shape in shapes) else torch.broadcast_shapes(*shapes)


def batch_shape_of(**parameters: tuple[Tensor, int]) -> torch.Size:
    """The common batch shape of parameters given as (tensor, number of event axes)."""
    shapes = {}
    for name, (tensor, event_dims) in parameters.items():
        if tensor.dim() < event_dims:
            raise ValueError(f"Expected {name} with at least {event_dims} axes; got shape {tuple(tensor.shape)}")
        shapes[name] = tensor.shape[: tensor.dim() - event_dims]
    try:
        return broadcast(*shapes.values())
    except RuntimeError:
        got = ", ".join(f"{name} {tuple(shape)}" for name, shape in shapes.items())
        raise ValueError(f"Expected batch shapes that broadcast; got {got}") from None


def found(faults: Tensor) -> bool:
    """Whether there are any; code that is compiled or vectorized cannot know, and is not checked."""
    if torch.compiler.is_compiling():
        return False
    try:
        return bool(faults.any())
    except RuntimeError:
        return False


def _equal(a: object, b: object) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a is b or (a.shape == b.shape and bool((a == b).all()))
    return a is b or a == b
