"""Buffers that follow from a module's arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["DerivedBuffers"]


class DerivedBuffers(nn.Module):
    """A module with masks, permutations or matrices that its arguments determine.

    They are buffers, so that they follow the module from device to device, but they are never saved and never cast:
    they are made anew wherever the module goes. A module that was made on the meta device, or emptied, has them once
    its parameters are loaded, and one that becomes float64 has them as exact as float64.

    >>> class Flip(DerivedBuffers):
    ...     def __init__(self, features: int):
    ...         super().__init__()
    ...         self.features = features
    ...         self.register_derived()
    ...
    ...     def derived(self) -> dict[str, Tensor]:
    ...         return {"order": torch.arange(self.features).flip(0)}
    >>> Flip(3).order
    tensor([2, 1, 0])
    >>> Flip(3).state_dict()
    OrderedDict()
    """

    def derived(self) -> dict[str, Tensor]:
        """The buffers by name, made from what the constructor was given."""
        return {}

    def register_derived(self) -> None:
        """To be called by the constructor, once it has what they follow from."""
        device = torch.get_default_device()
        for name, tensor in self._made().items():
            if tensor.is_floating_point():
                tensor = tensor.to(torch.get_default_dtype())
            self.register_buffer(name, tensor if device.type == "meta" else tensor.to(device), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        for name, tensor in self._made().items():
            self._buffers[name] = tensor.to(getattr(self, name))
        return self

    def _made(self) -> dict[str, Tensor]:
        with torch.device("cpu"):
            return self.derived()
