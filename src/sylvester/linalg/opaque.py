"""What compiled code must not look into.

Kernels whose number of iterations depends on the data are registered as custom operators, so that
``torch.compile(fullgraph=True)`` calls them instead of tracing their loops. Their derivatives are not their business:
each is wrapped by an ``autograd.Function`` with implicit ones, in both modes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def opaque(
    name: str, schema: str, event_dims: tuple[int, ...], fake: Callable[..., Tensor]
) -> Callable[[Callable[..., Tensor]], Any]:
    """Register a kernel over broadcasting batch axes as ``sylvester::name``.

    ``event_dims`` counts each argument's own axes, on the right; whatever lies left of them is batch. Vectorizing
    then means a new first batch axis, and padding so that the other batch axes still meet.
    """

    def register(kernel: Callable[..., Tensor]) -> Any:
        op = torch.library.custom_op(f"sylvester::{name}", kernel, mutates_args=(), schema=schema)
        op.register_fake(fake)
        if hasattr(op, "register_vmap"):  # torch 2.5

            @op.register_vmap
            def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Tensor) -> tuple[Tensor, int]:
                mapped = [
                    arg.unsqueeze(0) if dim is None else arg.movedim(dim, 0)
                    for arg, dim in zip(args, in_dims, strict=True)
                ]
                batch_dims = [arg.dim() - 1 - event for arg, event in zip(mapped, event_dims, strict=True)]
                padded = [
                    arg.reshape(arg.shape[0], *(1,) * (max(batch_dims) - own), *arg.shape[1:])
                    for arg, own in zip(mapped, batch_dims, strict=True)
                ]
                return op(*padded), 0

        return op

    return register


def with_tangent(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """``function.apply``, with ``function.tangent`` as its forward-mode rule.

    torch.compile refuses functions that have one: compiled code gets the plain function.
    """
    both_modes = type(function.__name__, (function,), {"jvp": staticmethod(function.tangent)})  # type: ignore[attr-defined]

    def apply(*args: Any) -> Any:
        return (function if torch.compiler.is_compiling() else both_modes).apply(*args)  # type: ignore[attr-defined]

    return apply
