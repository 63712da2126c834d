"""The networks of autoregressive and coupling steps: functions from points ``(*, D)`` to numbers ``(*, numbers, D)``.

Any function will do. One whose tensors are known can be differentiated implicitly: a module, or an object that lists
the tensors it depends on and makes itself again from others in their place:

    net.tensors -> tuple of tensors        net.rebuild(tensors) -> the same function of other tensors
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor, nn
from torch.func import functional_call

Conditioner = Callable[[Tensor], Tensor]
Rebuilt = Callable[[Sequence[Tensor]], Conditioner]


class Rebuildable(Protocol):
    @property
    def tensors(self) -> tuple[Tensor, ...]: ...

    def rebuild(self, tensors: Sequence[Tensor]) -> Conditioner: ...


class _Module:
    """A module as a function of its parameters."""

    def __init__(self, module: nn.Module) -> None:
        self.module, parameters = module, dict(module.named_parameters())
        self.names, self.tensors = tuple(parameters), tuple(parameters.values())

    def rebuild(self, tensors: Sequence[Tensor]) -> Conditioner:
        parameters = dict(zip(self.names, tensors, strict=True))
        return lambda z: functional_call(self.module, parameters, (z,))


def rebuildable(net: Conditioner) -> Rebuildable | None:
    """What is known of a network's tensors, if anything."""
    if isinstance(net, nn.Module):
        return _Module(net)
    return net if hasattr(net, "tensors") and hasattr(net, "rebuild") else None
