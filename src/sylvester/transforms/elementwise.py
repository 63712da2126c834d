"""What autoregressive and coupling steps do to one coordinate, given the numbers that a network makes for it.

    Shift       z' = z + μ
    Affine      z' = exp(4 tanh(s/4)) z + μ
    Gated       z' = g z + (1 − g) μ,    g = ε + (1 − ε) σ(s)            (eq. 31, where ε = 0)

The bounds keep float32 finite: a log-scale stays within ±4, a gate above its floor ε. Splines have a file of their own.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

#: How far a flow's steps together may move a log-density at an identity start.
NUDGE = 1e-4


class Elementwise(ABC):
    """A monotone increasing map of each coordinate, with its slope.

    A new one is a class with ``numbers``, :meth:`forward` and :meth:`backward`.

    >>> z, raw = torch.randn(5, 3), torch.randn(5, 2, 3)
    >>> for elementwise in (Affine(), Gated(), Gated(floor=0.1)):
    ...     y, log_slope = elementwise.forward(z, raw)
    ...     assert torch.allclose(elementwise.backward(y, raw)[0], z, atol=1e-4)
    >>> Shift().forward(torch.zeros(2), torch.ones(1, 2))[0]
    tensor([1., 1.])
    """

    #: How many numbers a coordinate asks for.
    numbers: int
    #: What the paper's experiments add to each of them: the bias a network starts with under ``init="torch"``.
    bias: tuple[float, ...] = ()

    @abstractmethod
    def forward(self, z: Tensor, raw: Tensor) -> tuple[Tensor, Tensor]:
        """z' and log ∂z'/∂z, both ``(*, D)``, for z ``(*, D)`` and raw numbers ``(*, numbers, D)``."""

    @abstractmethod
    def backward(self, y: Tensor, raw: Tensor) -> tuple[Tensor, Tensor]:
        """The z that ``forward`` takes to y, and log ∂z'/∂z there."""

    def start(self, transforms: int, features: int) -> tuple[float, tuple[float, ...]]:
        """Where K steps of D coordinates begin under ``init="identity"``: the size of a network's outputs, 1 for what
        torch's default gives, and a bias of each number. By default all numbers are nearly zero: let that be the
        identity."""
        return NUDGE / math.sqrt(transforms * features), (0.0,) * self.numbers


@dataclass(frozen=True)
class Shift(Elementwise):
    """z' = z + μ: volume preserving."""

    numbers = 1

    def forward(self, z: Tensor, raw: Tensor) -> tuple[Tensor, Tensor]:
        (shift,) = raw.unbind(-2)
        return z + shift, torch.zeros_like(shift)

    def backward(self, y: Tensor, raw: Tensor) -> tuple[Tensor, Tensor]:
        (shift,) = raw.unbind(-2)
        return y - shift, torch.zeros_like(shift)


@dataclass(frozen=True)
class Affine(Elementwise):
    """z' = exp(4 tanh(s/4)) z + μ."""

    numbers = 2

    def forward(self, z: Tensor, raw: Tensor) -> tuple[Tensor, Tensor]:
        shift, log_scale = self._coefficients(raw)
        return log_scale.exp() * z + shift, log_scale

    def backward(self, y: Tensor, raw: Tensor) -> tuple[Tensor, Tensor]:
        shift, log_scale = self._coefficients(raw)
        return (y - shift) / log_scale.exp(), log_scale

    def _coefficients(self, raw: Tensor) -> tuple[Tensor, Tensor]:
        shift, raw_scale = raw.unbind(-2)
        return shift, 4 * torch.tanh(raw_scale / 4)


@dataclass(frozen=True)
class Gated(Elementwise):
    """z' = g z + (1 − g) μ with a gate above ``floor``; a floor of 0 is the paper's."""

    floor: float = 1e-3
    numbers = 2
    bias = (0.0, 1.0)

    def forward(self, z: Tensor, raw: Tensor) -> tuple[Tensor, Tensor]:
        gate, offset, log_gate = self._coefficients(raw)
        return gate * z + offset, log_gate

    def backward(self, y: Tensor, raw: Tensor) -> tuple[Tensor, Tensor]:
        gate, offset, log_gate = self._coefficients(raw)
        return (y - offset) / gate, log_gate

    def start(self, transforms: int, features: int) -> tuple[float, tuple[float, ...]]:
        # Open but for the share that a Gaussian start just allows: a gate learns in proportion to it.
        return 1.0, (0.0, math.log(transforms * math.sqrt(features) / 5e-4))

    def _coefficients(self, raw: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(g, (1 − g) μ, log g)."""
        shift, raw_gate = raw.unbind(-2)
        gate = self.floor + (1 - self.floor) * torch.sigmoid(raw_gate)
        complement = (1 - self.floor) * torch.sigmoid(-raw_gate)
        # log g from the nearer end: near 1 the complement has the digits, and a floorless gate may underflow.
        if self.floor == 0:
            log_gate = torch.nn.functional.logsigmoid(raw_gate)
        else:
            log_gate = torch.where(raw_gate > 0, torch.log1p(-complement), torch.log(gate))
        return gate, complement * shift, log_gate
