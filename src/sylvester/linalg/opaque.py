"""Numerical kernels whose number of iterations depends on the data.

A kernel is registered as a custom operator, so that ``torch.compile(fullgraph=True)`` calls it instead of
tracing its loops. Its gradient is not its business: each kernel is wrapped by an ``autograd.Function`` with an
implicit backward.
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
