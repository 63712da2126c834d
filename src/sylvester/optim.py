"""Adamax, in pieces that stay in the cache.

The hypernetwork of a Sylvester flow has tens of millions of weights, and torch's Adamax passes over all of them once
for every operation. On the CPU the same operations on a piece at a time read and write memory once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["Adamax"]

# Five streams of so many numbers fit the last-level cache, and are enough to share among threads: torch gives each at
# least 2¹⁵.
_PIECE = 1 << 18


class Adamax(torch.optim.Adamax):
    """torch's Adamax (the paper's optimizer), with the same arguments, state and results."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        plain = all(_plain(group) for group in self.param_groups)
        if not plain:
            super().step()
            return loss
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return loss

    def _update(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            state["exp_inf"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        state["step"] += 1
        beta_1, beta_2 = group["betas"]
        rate = group["lr"] / (1 - beta_1 ** state["step"].item())
        tensors = [parameter, grad, state["exp_avg"], state["exp_inf"]]
        for p, g, mean, largest in zip(*(tensor.split(_PIECE) for tensor in _flat(tensors)), strict=True):
            mean.lerp_(g, 1 - beta_1)
            torch.maximum(largest.mul_(beta_2), g.abs().add_(group["eps"]), out=largest)
            p.addcdiv_(mean, largest, value=-rate)


def _plain(group: dict[str, Any]) -> bool:
    """Whether a group asks for nothing but the update itself, on the CPU."""
    options = ("weight_decay", "maximize", "foreach", "differentiable", "capturable")
    return not any(group.get(option) for option in options) and all(
        p.device.type == "cpu" and not p.is_complex() and not (p.grad is not None and p.grad.is_sparse)
        for p in group["params"]
    )


def _flat(tensors: list[Tensor]) -> list[Tensor]:
    """The same memory as vectors, in an order common to all."""
    first = tensors[0]
    # Stride order instead of axis order: channels-last weights are dense, too.
    order = sorted(range(first.dim()), key=first.stride, reverse=True)
    permuted = [tensor.permute(order) for tensor in tensors]
    if all(tensor.is_contiguous() for tensor in permuted):
        return [tensor.view(-1) for tensor in permuted]
    return [tensor.unsqueeze(0) for tensor in tensors]
