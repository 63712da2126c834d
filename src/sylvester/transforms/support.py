"""From real vectors onto a constraint: torch's ``biject_to`` as one step of a flow.

    z' = g(z),    ladj = Σ_i log g'(z_i) for a map of single coordinates, else that of torch's map

A simplex of D + 1 numbers, or another event of which some entries follow from the rest, has D of them free: ladj is
then that of the free ones, as torch has it, and so are densities.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributions import Transform, biject_to, constraints
from torch.distributions.constraints import Constraint
from torch.distributions.constraints import cat as ConcatenatedConstraint


class SupportTransform(Transform):
    """Vectors onto ``constraint``, which becomes the codomain: the support of a distribution that ends with it.

    A constraint on single numbers holds for each coordinate. ``constraints.cat`` along the last axis puts each of its
    own on a part of the coordinates; a part's length is that of its event.

    >>> SupportTransform(constraints.simplex)(torch.zeros(2))
    tensor([0.3333, 0.3333, 0.3333])
    """

    domain = constraints.real_vector
    bijective = True

    def __init__(self, constraint: Constraint, *, cache_size: int = 0):
        super().__init__(cache_size=cache_size)
        self.constraint = constraint
        self.codomain = _of_events(constraint)
        if isinstance(constraint, ConcatenatedConstraint):
            if constraint.dim != -1:
                raise ValueError(f"Expected constraints.cat along dim=-1, the coordinates; got dim={constraint.dim}")
            parts = [SupportTransform(part) for part in constraint.cseq]
            if any(part.codomain.event_dim > 1 for part in parts):
                raise ValueError(f"Expected constraints.cat of numbers and vectors; got {constraint.cseq}")
            self.parts, self.sizes_out = parts, list(constraint.lengths)
            self.sizes_in = [
                part.inverse_shape((size,))[-1] for part, size in zip(parts, constraint.lengths, strict=True)
            ]
        else:
            self.bijection = _bijection(constraint)

    @property
    def _concatenated(self) -> bool:
        return isinstance(self.constraint, ConcatenatedConstraint)

    def call_and_ladj(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """g(z) and its ladj."""
        if self._concatenated:
            pairs = [
                part.call_and_ladj(piece) for part, piece in zip(self.parts, z.split(self.sizes_in, -1), strict=True)
            ]
            values, ladjs = zip(*pairs, strict=True)
            return torch.cat(values, -1), torch.stack(ladjs).sum(0)
        y = self.bijection(z)
        return self._within(y), self._ladj(z, y)

    def _within(self, y: Tensor) -> Tensor:
        """Rounding takes far points onto an open bound, or to infinity, where a density may refuse them: next to it."""
        if not isinstance(self.constraint, constraints.greater_than | constraints.less_than):
            return y
        largest = torch.tensor(torch.finfo(y.dtype).max, dtype=y.dtype, device=y.device)
        if isinstance(self.constraint, constraints.greater_than):
            bound = torch.as_tensor(self.constraint.lower_bound, dtype=y.dtype, device=y.device)
            return torch.clamp(y, torch.nextafter(bound, largest), largest)
        bound = torch.as_tensor(self.constraint.upper_bound, dtype=y.dtype, device=y.device)
        return torch.clamp(y, -largest, torch.nextafter(bound, -largest))

    def contains(self, y: Tensor) -> Tensor:
        """Whether events lie on the constraint; entries that follow from others may have been rounded."""
        if self._concatenated:
            pieces = zip(self.parts, y.split(self.sizes_out, -1), strict=True)
            return torch.stack([part.contains(piece) for part, piece in pieces]).all(0)
        if self.constraint.event_dim == 0:
            return self.codomain.check(y)
        error = (self.bijection(self.bijection.inv(y)) - y).abs() / (1 + y.abs())
        return (error <= torch.finfo(y.dtype).eps ** 0.5).flatten(y.dim() - self.codomain.event_dim).all(-1)

    def log_abs_det_jacobian(self, z: Tensor, y: Tensor) -> Tensor:
        if self._concatenated:
            pieces = zip(self.parts, z.split(self.sizes_in, -1), y.split(self.sizes_out, -1), strict=True)
            return torch.stack([part.log_abs_det_jacobian(a, b) for part, a, b in pieces]).sum(0)
        return self._ladj(z, y)

    def _ladj(self, z: Tensor, y: Tensor) -> Tensor:
        ladj = self.bijection.log_abs_det_jacobian(z, y)
        return ladj.sum(-1) if self.bijection.domain.event_dim == 0 else ladj

    def _call(self, z: Tensor) -> Tensor:
        return self.call_and_ladj(z)[0]

    def _inverse(self, y: Tensor) -> Tensor:
        if self._concatenated:
            pieces = zip(self.parts, y.split(self.sizes_out, -1), strict=True)
            return torch.cat([part.inv(piece) for part, piece in pieces], -1)
        return self.bijection.inv(y)

    def forward_shape(self, shape: Sequence[int]) -> torch.Size:
        return self._shape(torch.Size(shape), inverse=False)

    def inverse_shape(self, shape: Sequence[int]) -> torch.Size:
        return self._shape(torch.Size(shape), inverse=True)

    def _shape(self, shape: torch.Size, *, inverse: bool) -> torch.Size:
        if self._concatenated:
            before, after = sum(self.sizes_in), sum(self.sizes_out)
            if inverse:
                before, after = after, before
            if not shape or shape[-1] != before:
                raise ValueError(f"Expected a shape that ends in {before}; got {tuple(shape)}")
            return torch.Size((*shape[:-1], after))
        return torch.Size(self.bijection.inverse_shape(shape) if inverse else self.bijection.forward_shape(shape))

    def with_cache(self, cache_size: int = 1) -> SupportTransform:
        return self if self._cache_size == cache_size else SupportTransform(self.constraint, cache_size=cache_size)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SupportTransform) and self.constraint is other.constraint

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.constraint})"


def _bijection(constraint: Constraint) -> Transform:
    try:
        bijection = biject_to(constraint)
    except NotImplementedError:
        raise ValueError(
            f"Expected a constraint that real vectors can be mapped onto one to one, such as constraints.positive; "
            f"got {constraint}, for which torch's biject_to knows no bijection"
        ) from None
    if bijection.domain.event_dim > 1 or not bijection.bijective:
        raise ValueError(
            "Expected a constraint whose bijection starts from vectors, as those of numbers, vectors, simplices and "
            f"Cholesky factors of correlations do; got {constraint}"
        )
    return bijection


class _Parts(Constraint):
    """What ``constraints.cat`` means where a part is a constraint on vectors, which its own check does not take."""

    event_dim = 1

    def __init__(self, constraint: Constraint, parts: Sequence[Constraint], lengths: Sequence[int]):
        self.constraint, self.parts, self.lengths = constraint, parts, list(lengths)
        super().__init__()

    def check(self, value: Tensor) -> Tensor:
        pieces = zip(self.parts, value.split(self.lengths, -1), strict=True)
        return torch.stack([part.check(piece) for part, piece in pieces]).all(0)


def _of_events(constraint: Constraint) -> Constraint:
    """The constraint on a whole event, (*, D) -> (*)."""
    if isinstance(constraint, ConcatenatedConstraint) and constraint.event_dim:
        return _Parts(constraint, [_of_events(part) for part in constraint.cseq], constraint.lengths)
    return constraint if constraint.event_dim else constraints.independent(constraint, 1)
