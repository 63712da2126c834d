"""The contract of a step, written once.

A family implements two methods, each of which gives a value together with ladj = log|det ∂z'/∂z| at z:

    _forward(z) -> (z', ladj)        _backward(z') -> (z, ladj)

Everything else derives from these: ``t(z)``, ``t.inv(y)``, ``t.log_abs_det_jacobian(z, y)``, ``t.call_and_ladj(z)``
and ``t.inv.call_and_ladj(y)``, with torch's caching, composition and shape rules.
"""

from __future__ import annotations

import copy
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributions import Transform, constraints
from torch.distributions.transforms import _InverseTransform
from torch.distributions.utils import _sum_rightmost


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
        self._cached_x_y: Any = (None, None)
        self._cached_ladj: Tensor | None = None
        self._inverse_reference: weakref.ref[InverseFlowTransform] | None = None
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

    def call_and_ladj(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """t(z) and its ladj, at the price of one."""
        return self._run(z, inverse=False)

    def log_abs_det_jacobian(self, z: Tensor, y: Tensor) -> Tensor:
        return self._run(z, inverse=False)[1]

    def _call(self, z: Tensor) -> Tensor:
        return self._run(z, inverse=False)[0]

    def _inverse(self, y: Tensor) -> Tensor:
        return self._run(y, inverse=True)[0]

    def _run(self, point: Tensor, *, inverse: bool) -> tuple[Tensor, Tensor]:
        """The other side of ``point`` and ladj, from the cache where it has them."""
        given, other = self._cached_x_y[:: -1 if inverse else 1]
        if self._cached_ladj is not None and point is given and other is not None:
            return other, self._cached_ladj
        if point.dim() < 1 or (self.features is not None and point.shape[-1] != self.features):
            raise ValueError(
                f"Expected points with {self.features} features in the last axis; got {tuple(point.shape)}"
            )
        if self._validate_args and point.isnan().any():
            raise ValueError("Expected points without NaN; got a NaN")
        other, ladj = self._backward(point) if inverse else self._forward(point)
        if self._cache_size:
            self._cached_x_y = (other, point) if inverse else (point, other)
            self._cached_ladj = ladj
        return other, ladj

    @property
    def inv(self) -> InverseFlowTransform:
        inv = self._inverse_reference() if self._inverse_reference is not None else None
        if inv is None:
            inv = InverseFlowTransform(self)
            self._inverse_reference = weakref.ref(inv)
        return inv

    def with_cache(self, cache_size: int = 1) -> FlowTransform:
        if self._cache_size == cache_size:
            return self
        other = copy.copy(self)
        other._cache_size = cache_size
        other._cached_x_y, other._cached_ladj, other._inverse_reference = (None, None), None, None
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

    def __getstate__(self) -> dict:
        state = self.__dict__.copy()
        state["_inverse_reference"] = None
        return state


class InverseFlowTransform(_InverseTransform):
    """The other direction of a step; what ``t.inv`` returns."""

    def call_and_ladj(self, y: Tensor) -> tuple[Tensor, Tensor]:
        z, ladj = cast(FlowTransform, self.inv)._run(y, inverse=True)
        return z, -ladj


def call_and_ladj(transform: Transform, z: Tensor) -> tuple[Tensor, Tensor]:
    """A point's image and ladj under any torch transform of vectors, at the price of one where it offers that."""
    if hasattr(transform, "call_and_ladj"):
        return transform.call_and_ladj(z)
    y = transform(z)
    return y, _sum_rightmost(transform.log_abs_det_jacobian(z, y), 1 - transform.domain.event_dim)


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


def _equal(a: object, b: object) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a is b or (a.shape == b.shape and bool((a == b).all()))
    return a is b or a == b
