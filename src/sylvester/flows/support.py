"""Flows on positive, bounded, simplex-valued and other constrained variables."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Transform
from torch.distributions.constraints import Constraint

from sylvester.flows.base import Flow, check_flows, constraint_of
from sylvester.transforms.support import SupportTransform


def onto(flow: Flow, constraint: Constraint) -> Flow:
    """The flow with one more step, torch's bijection onto ``constraint``, which becomes its distributions' support.

    A constraint on single numbers holds for each coordinate, and ``constraints.cat([…], dim=-1, lengths=[…])`` puts a
    constraint of its own on each part of them. The event may have another size than the flow's features: D of them
    reach a simplex of D + 1 numbers, whose density is that of the first D.

    >>> from torch.distributions import constraints
    >>> from sylvester.flows import Planar
    >>> q = onto(Planar(2, transforms=4), constraints.simplex)()
    >>> q.event_shape, q.support
    (torch.Size([3]), Simplex())
    >>> mixed = constraints.cat([constraints.positive, constraints.interval(-1.0, 1.0)], dim=-1)
    >>> q = onto(Planar(2, transforms=4), mixed)()
    >>> bool(q.support.check(q.sample((5,))).all())
    True
    """
    check_flows([flow], "to put onto a constraint")
    if not isinstance(constraint, Constraint):
        raise ValueError(f"Expected a constraint of torch.distributions.constraints; got {constraint!r}")
    if flow.steps and (already := constraint_of(flow.steps[-1])) is not None:
        raise ValueError(f"Expected a flow of real vectors; got one onto {already} already")
    step = SupportTransform(constraint)
    try:
        shape = step.inverse_shape(step.forward_shape((flow.features,)))
    except (ValueError, RuntimeError) as error:
        shape = torch.Size(())
        cause: Exception | None = error
    else:
        cause = None
    if shape != (flow.features,):
        reason = f": {cause}" if cause is not None else ""
        raise ValueError(
            f"Expected a flow with as many features as {constraint} has free entries; got {flow.features}{reason}"
        )
    return Flow(flow.base, [*flow.steps, SupportSteps(constraint)])


class SupportSteps(nn.Module):
    """One step, onto a constraint. Bounds that are tensors move with the module."""

    def __init__(self, constraint: Constraint):
        super().__init__()
        self.constraint = constraint

    def forward(self, context: Tensor | None) -> list[Transform]:
        return [SupportTransform(self.constraint)]

    def local(self, context: Tensor) -> SupportSteps:
        return copy.deepcopy(self)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> SupportSteps:
        super()._apply(fn, recurse)
        self.constraint = _moved(self.constraint, fn)
        return self

    def extra_repr(self) -> str:
        return str(self.constraint)


def _moved(value: Any, fn: Callable[[Tensor], Tensor]) -> Any:
    """A constraint with ``fn`` applied to its tensors, and to those of the constraints it is made of."""
    if isinstance(value, Tensor):
        return fn(value)
    if isinstance(value, list):
        return [_moved(entry, fn) for entry in value]
    if not isinstance(value, Constraint) or not vars(value):
        return value
    moved = copy.copy(value)
    for name, entry in vars(value).items():
        setattr(moved, name, _moved(entry, fn))
    return moved
