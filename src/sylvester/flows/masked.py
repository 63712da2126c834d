"""Masked networks (MADE, Germain et al., 2015): the conditioners of autoregressive and coupling steps.

Coordinate i has a position p_i. A hidden unit of degree d sees the coordinates with p < d and, in the next layer, the
units of degree ≤ d; output i sees the units of degree ≤ p_i, and so the coordinates that precede i. Units of degree 0
see the context alone. Units stand in the order of their degrees, so that masks are staircases and almost half of the
weights need not be touched.
"""

from __future__ import annotations

import itertools
import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Transform
from torch.nn.functional import elu, linear

from sylvester.flows.base import Steps, nudge
from sylvester.flows.hypernetwork import Hypernetwork, Init, Output
from sylvester.transforms.elementwise import Conditioner

# Rows of a block: fewer of them skip more of the weights, more of them make better products.
_BLOCK = 320


class MaskedLinear(nn.Linear):
    """A linear layer whose weights are zero outside a mask ``(out, in)``.

    Its rows are multiplied in blocks, each with the inputs that any of its rows sees: what lies beyond the last of them
    costs nothing.
    """

    mask: Tensor

    def __init__(self, mask: Tensor):
        super().__init__(mask.shape[1], mask.shape[0])
        self.register_buffer("mask", mask.to(self.weight.dtype), persistent=False)
        self.dense = bool(mask.all())
        size = _BLOCK if mask.shape[1] >= _BLOCK else len(mask)  # of few inputs, there is little to skip
        blocks = [slice(start, start + size) for start in range(0, len(mask), size)]
        self.blocks = [(rows, _reach(mask[rows])) for rows in blocks]

    def bind(self) -> Callable[[Tensor], Tensor]:
        """The layer as a function, its weights masked once for however many points come."""
        if self.dense:
            return self
        weights = _MaskedBlocks.apply(self.weight, self.mask, self.blocks)
        layers = [(reach, w, self.bias[rows]) for w, (rows, reach) in zip(weights, self.blocks, strict=True)]

        def layer(x: Tensor) -> Tensor:
            parts = [linear(x[..., :reach], w, bias) for reach, w, bias in layers]
            return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

        return layer

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias) if self.dense else self.bind()(x)


class _MaskedBlocks(torch.autograd.Function):
    """The blocks of a weight, masked. By hand, the gradients of all blocks are written once, into one matrix."""

    generate_vmap_rule = True

    @staticmethod
    def forward(weight: Tensor, mask: Tensor, blocks: list[tuple[slice, int]]) -> tuple[Tensor, ...]:
        return tuple(weight[rows, :reach] * mask[rows, :reach] for rows, reach in blocks)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _, mask, ctx.blocks = inputs
        ctx.save_for_backward(mask)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (mask,) = ctx.saved_tensors
        grad = grads[0].new_zeros(mask.shape)
        for each, (rows, reach) in zip(grads, ctx.blocks, strict=True):
            grad[rows, :reach] = each * mask[rows, :reach]
        return grad, None, None


def _reach(mask: Tensor) -> int:
    """How many columns of a mask come before those that are empty to the end; at least one."""
    return int(mask.any(0).nonzero().max()) + 1 if mask.any() else 1


class MaskedNet(nn.Module):
    """z, context -> (shift, raw scale), as eq. 31: ELU(masked z) + context, then masked layers.

    Args:
        position: ``(D,)``, the place of each coordinate in the order.
        hidden_features: widths of the hidden layers; the context is added to the first.
        scale: whether there is a raw scale beside the shift.
        lowest_degree: of the hidden units; above 0, none of them sees the context alone.
        shrink: a factor of the last layer's initial weights, whose default is torch's.
        scale_bias: what is added to the initial bias of the raw scale.
    """

    position: Tensor

    def __init__(
        self,
        position: Tensor,
        hidden_features: Sequence[int],
        *,
        scale: bool,
        lowest_degree: int = 0,
        shrink: float = 1.0,
        scale_bias: float = 0.0,
    ):
        super().__init__()
        self.register_buffer("position", position, persistent=False)
        self.scale = scale
        cycle = int(position.max()) + 1 - lowest_degree
        degrees = [(lowest_degree + torch.arange(width) % cycle).sort().values for width in hidden_features]
        masks = [degrees[0][:, None] > position]
        masks += [after[:, None] >= before for before, after in itertools.pairwise(degrees)]
        masks += [position.repeat(1 + scale)[:, None] >= degrees[-1]]
        self.layers = nn.ModuleList([MaskedLinear(mask) for mask in masks])
        with torch.no_grad():
            last = self._layers()[-1]
            last.weight.mul_(shrink)
            last.bias.mul_(shrink)
            last.bias[len(position) :] += scale_bias

    def _layers(self) -> list[MaskedLinear]:
        return [layer for layer in self.layers if isinstance(layer, MaskedLinear)]

    def bind(self, context: Tensor | None) -> Conditioner:
        """The network for one context ``(*, hidden_features[0])``, or none."""
        first, *middle, last = [layer.bind() for layer in self._layers()]

        def net(z: Tensor) -> tuple[Tensor, Tensor | None]:
            h = elu(first(z))
            if context is not None:
                h = h + context
            for layer in middle:
                h = elu(layer(h))
            if not self.scale:
                return last(h), None
            shift, raw_scale = last(h).chunk(2, -1)
            return shift, raw_scale

        return net


class MaskedSteps(Steps):
    """K networks and the context vector they share, which the hypernetwork makes (fig. 1, right)."""

    def __init__(
        self,
        positions: Sequence[Tensor],
        context: int,
        *,
        hidden_features: int | Sequence[int] | None,
        scale: bool,
        lowest_degree: int = 0,
        gate: bool = False,
        init: Init,
        hyper_features: Sequence[int],
    ):
        super().__init__()
        widths = _hidden_widths(hidden_features, len(positions[0]))
        count, features = len(positions), len(positions[0])
        shrink, scale_bias = 1.0, 1.0 if gate else 0.0  # the paper's gate bias is 1
        if init == "identity" and gate:
            # Open but for a share that the Gaussian start just allows: a gate learns in proportion to it.
            scale_bias = math.log(count * features**0.5 / 5e-4)
        elif init == "identity":
            shrink = nudge(count) / features**0.5
        self.nets = nn.ModuleList(
            MaskedNet(position, widths, scale=scale, lowest_degree=lowest_degree, shrink=shrink, scale_bias=scale_bias)
            for position in positions
        )
        table = {"context": Output((widths[0],))}
        self.hypernetwork = Hypernetwork(context, table, hyper_features=hyper_features) if context else None

    @abstractmethod
    def step(self, net: MaskedNet, conditioner: Conditioner) -> Transform:
        """One step, given its network and that network bound to the context."""

    def forward(self, context: Tensor | None) -> list[Transform]:
        shared = None if self.hypernetwork is None else self.hypernetwork(context)["context"].squeeze(-2)
        return [self.step(net, net.bind(shared)) for net in self.nets if isinstance(net, MaskedNet)]


def _hidden_widths(hidden_features: int | Sequence[int] | None, features: int) -> tuple[int, ...]:
    """One width stands for two layers of it, as in the paper. Every degree needs a unit in every layer."""
    if hidden_features is None:
        hidden_features = max(64, 2 * features)
    widths = (hidden_features,) * 2 if isinstance(hidden_features, int) else tuple(hidden_features)
    if not widths or min(widths) < features:
        raise ValueError(f"Expected hidden_features of at least features = {features}; got {hidden_features}")
    return widths
