"""The hypernetwork: from a context to the parameters of every step (§3.3).

One linear layer, as in the paper, or an MLP. What it emits is a table: for each of the steps, each parameter with its
shape. Nothing it emits is thrown away.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from sylvester.linalg.opaque import with_tangent

# From so many outputs a step on, a product for each step is faster than one for all.
_WIDE = 1024

Init = Literal["identity", "torch"]


@dataclass(frozen=True)
class Output:
    """One row of the table: a parameter's shape within a step, and where it starts under ``init="identity"``.

    At the start the parameter is ``center`` (broadcast to ``(transforms, *shape)``) and varies round it with standard
    deviation ``spread``: over the steps' biases, and over contexts of unit variance.
    """

    shape: tuple[int, ...]
    center: Tensor | float = 0.0
    spread: Tensor | float = 1.0

    @property
    def size(self) -> int:
        return math.prod(self.shape)


class Hypernetwork(nn.Module):
    """context ``(*, context)`` -> {name: ``(*, transforms, *shape)``}; without context, learned parameters.

    ``init="torch"`` is torch's default for linear layers; ``init="identity"`` follows the table.

    >>> net = Hypernetwork(16, {"u": Output((2,)), "b": Output(())}, transforms=4)
    >>> {name: tuple(value.shape) for name, value in net(torch.zeros(5, 16)).items()}
    {'u': (5, 4, 2), 'b': (5, 4)}
    """

    def __init__(
        self,
        context: int,
        table: dict[str, Output],
        *,
        transforms: int = 1,
        hyper_features: Sequence[int] = (),
        init: Init = "torch",
    ):
        super().__init__()
        if isinstance(hyper_features, int) or not all(isinstance(w, int) and w > 0 for w in hyper_features):
            raise ValueError(f"Expected hyper_features as hidden widths, such as (128,); got {hyper_features!r}")
        self.context, self.table, self.transforms = context, table, transforms
        self.outputs = sum(row.size for row in table.values())
        widths = [context, *hyper_features] if context else [0]
        hidden = [layer for pair in itertools.pairwise(widths) for layer in (nn.Linear(*pair), nn.ELU())]
        self.hidden = nn.Sequential(*hidden)
        fan_in, fan_out = widths[-1], transforms * self.outputs
        # torch's default for linear layers; a table without context takes its outputs' number for the fan-in.
        bound = 1 / math.sqrt(fan_in or max(self.outputs, 1))
        self.weight = nn.Parameter(torch.empty(fan_out, fan_in).uniform_(-bound, bound)) if context else None
        self.bias = nn.Parameter(torch.empty(fan_out).uniform_(-bound, bound))
        if init == "identity":
            self._start_from_table()

    @torch.no_grad()
    def _start_from_table(self) -> None:
        def packed(values: Sequence[Tensor | float]) -> Tensor:
            rows = zip(values, self.table.values(), strict=True)
            return torch.cat(
                [
                    torch.as_tensor(v).expand(self.transforms, *row.shape).reshape(self.transforms, -1)
                    for v, row in rows
                ],
                1,
            )

        center = packed([row.center for row in self.table.values()])
        spread = packed([row.spread for row in self.table.values()])
        self.bias.copy_((center + spread * torch.randn_like(spread)).flatten())
        if self.weight is not None:
            # Uniform on ±√3 has unit variance.
            bound = math.sqrt(3 / self.weight.shape[1])
            self.weight.uniform_(-bound, bound).mul_(spread.reshape(-1, 1))

    def extra_repr(self) -> str:
        table = ", ".join(f"{name}: {row.shape}" for name, row in self.table.items())
        return f"transforms={self.transforms}, {table}"

    def forward(self, context: Tensor | None) -> dict[str, Tensor]:
        return _by_name(self._emit(context), self.table)

    def local(self, context: Tensor) -> LocalParameters:
        """What is emitted for each of the contexts, as parameters of their own that start there."""
        with torch.no_grad():
            emitted = self._emit(context)  # without context of its own, the same for all
            shape = (*context.shape[:-1], self.transforms, self.outputs)
            return LocalParameters(emitted.expand(shape), self.table)

    def _emit(self, context: Tensor | None) -> Tensor:
        """``(*, transforms, outputs)``."""
        flat = self.bias.unflatten(0, (self.transforms, self.outputs))  # (K, outputs)
        if self.weight is not None:
            if context is None:
                raise ValueError(f"Expected a context of {self.context} features; got none")
            hidden = self.hidden(context)
            if self.outputs < _WIDE:
                flat = nn.functional.linear(hidden, self.weight, self.bias).unflatten(-1, flat.shape)
            else:
                rows = hidden.reshape(-1, hidden.shape[-1])  # (B, E)
                flat = _linear(rows, self.weight.unflatten(0, flat.shape), flat)  # (K, B, outputs)
                flat = flat.reshape(self.transforms, *hidden.shape[:-1], self.outputs).movedim(0, -2)  # (*, K, outputs)
        return flat


class LocalParameters(nn.Module):
    """In a hypernetwork's place, what it emitted for some contexts: ``(*, transforms, outputs)``, to be learned."""

    context = 0

    def __init__(self, emitted: Tensor, table: dict[str, Output]):
        super().__init__()
        self.table = table
        self.values = nn.Parameter(emitted.detach().clone())

    def forward(self, context: None) -> dict[str, Tensor]:
        return _by_name(self.values, self.table)

    def extra_repr(self) -> str:
        table = ", ".join(f"{name}: {row.shape}" for name, row in self.table.items())
        return f"batch_shape={tuple(self.values.shape[:-2])}, transforms={self.values.shape[-2]}, {table}"


class Amortized(nn.Module):
    """A module whose hypernetwork makes something of a context, and which can do without it."""

    hypernetwork: Hypernetwork | LocalParameters | None

    def local(self, context: Tensor) -> Self:
        """A copy without context, in which what the hypernetwork emits is free; all other parameters are held."""
        assert not isinstance(self.hypernetwork, LocalParameters)
        return self.freed(None if self.hypernetwork is None else self.hypernetwork.local(context))

    def freed(self, parameters: LocalParameters | None) -> Self:
        """A copy with these parameters in the place of the hypernetwork."""
        new = copy.deepcopy(self, {id(self.hypernetwork): parameters}).requires_grad_(False)
        if parameters is not None:
            parameters.requires_grad_(True)
        return new


def _by_name(flat: Tensor, table: dict[str, Output]) -> dict[str, Tensor]:
    parts = flat.split([row.size for row in table.values()], -1)
    return {
        name: part.unflatten(-1, row.shape) if row.shape else part.squeeze(-1)
        for (name, row), part in zip(table.items(), parts, strict=True)
    }


class _Linear(torch.autograd.Function):
    """Rows (B, E) through K linear layers, weights (K, O, E) and biases (K, O), to (K, B, O).

    Each step's outputs lie together. The gradient is torch's, but for the order in which that of the weights is
    written: their own. A tenth less time than one linear layer for all steps, a fifth less than torch's own baddbmm.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(rows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return torch.baddbmm(bias.unsqueeze(1), rows.expand(len(weight), -1, -1), weight.mT)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        rows, weight, bias = inputs
        ctx.save_for_backward(rows, weight)
        ctx.save_for_forward(rows, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rows, weight = ctx.saved_tensors
        grad_weight = torch.bmm(grad.mT, rows.expand(len(weight), -1, -1))
        return torch.bmm(grad, weight).sum(0), grad_weight, grad.sum(1)

    @staticmethod
    def tangent(ctx: Any, *tangents: Tensor | None) -> Tensor:
        rows, weight, _ = ctx.saved_tensors
        rows_dot, weight_dot, bias_dot = (
            torch.zeros_like(value) if dot is None else dot
            for value, dot in zip(ctx.saved_tensors, tangents, strict=True)
        )
        moved = torch.baddbmm(bias_dot.unsqueeze(1), rows_dot.expand(len(weight), -1, -1), weight.mT)
        return moved + rows @ weight_dot.mT


_linear = with_tangent(_Linear)
