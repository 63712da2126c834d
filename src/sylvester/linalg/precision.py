"""Flows never run below float32, whoever calls them.

Densities are sums of hundreds of terms that cancel, and inverses amplify what was rounded: in bfloat16 a log-density is
off by tenths of a nat. Autocast around a model therefore ends where a flow begins.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")

_TOO_LOW = (torch.float16, torch.bfloat16)


def full_precision(function: Callable[P, R]) -> Callable[P, R]:
    """Run ``function`` with autocast off, and with tensors below float32 raised to it."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        tensor, low = None, False
        for arg in (*args, *kwargs.values()) if kwargs else args:
            if isinstance(arg, Tensor):
                tensor, low = arg, low or arg.dtype in _TOO_LOW
        if low:
            args, kwargs = tuple(map(_raised, args)), {name: _raised(arg) for name, arg in kwargs.items()}  # type: ignore[assignment]
        # Every step and every small product comes through here: a tensor's device takes a while, and is asked for once.
        device = "cpu" if tensor is None else tensor.device.type
        if device != "meta" and torch.is_autocast_enabled(device):
            with torch.autocast(device, enabled=False):
                return function(*args, **kwargs)
        return function(*args, **kwargs)

    return run


def _raised(argument: Any) -> Any:
    return argument.float() if isinstance(argument, Tensor) and argument.dtype in _TOO_LOW else argument
