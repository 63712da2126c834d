"""Masked networks (MADE, Germain et al., 2015): the conditioners of autoregressive and coupling steps.

Coordinate i has a position p_i. A hidden unit of degree d sees the coordinates with p < d and, in the next layer, the
units of degree ≤ d; output i sees the units of degree ≤ p_i, and so the coordinates that precede i. Units of degree 0
see the context alone.
"""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.distributions import Transform
from torch.nn.functional import elu, linear

from sylvester.flows.base import Steps, nudge
from sylvester.flows.hypernetwork import Hypernetwork, Init, Output
from sylvester.transforms.elementwise import Conditioner


class MaskedLinear(nn.Linear):
    """A linear layer whose weights are zero outside a mask ``(out, in)``."""

    mask: Tensor

    def __init__(self, mask: Tensor):
        super().__init__(mask.shape[1], mask.shape[0])
        self.register_buffer("mask", mask.to(self.weight.dtype), persistent=False)

    def bind(self) -> Callable[[Tensor], Tensor]:
        """The layer as a function, its weights masked once for however many points come."""
        weight, bias = self.weight * self.mask, self.bias
        return lambda x: linear(x, weight, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.bind()(x)


class MaskedNet(nn.Module):
    """z, context -> (shift, raw scale), as eq. 31: ELU(masked z) + context, then masked layers.

    Args:
        position: ``(D,)``, the place of each coordinate in the order.
        hidden_features: widths of the hidden layers; the context is added to the first.
        scale: whether there is a raw scale beside the shift.
        lowest_degree: of the hidden units; above 0, none of them sees the context alone.
        identity: how far from the identity the step may be at the start; None for torch's default.
        gate: whether the raw scale is that of a gate, which is open (1) rather than closed (0) at the identity.
    """

    position: Tensor

    def __init__(
        self,
        position: Tensor,
        hidden_features: Sequence[int],
        *,
        scale: bool,
        lowest_degree: int = 0,
        identity: float | None = None,
        gate: bool = False,
    ):
        super().__init__()
        self.register_buffer("position", position, persistent=False)
        self.scale = scale
        cycle = int(position.max()) + 1 - lowest_degree
        degrees = [lowest_degree + torch.arange(width) % cycle for width in hidden_features]
        masks = [degrees[0][:, None] > position]
        masks += [after[:, None] >= before for before, after in itertools.pairwise(degrees)]
        masks += [position.repeat(1 + scale)[:, None] >= degrees[-1]]
        self.layers = nn.ModuleList([MaskedLinear(mask) for mask in masks])
        self._start(identity, gate)

    @torch.no_grad()
    def _start(self, identity: float | None, gate: bool) -> None:
        last, features = self._layers()[-1], len(self.position)
        if identity is not None:
            last.weight.mul_(identity / features**0.5)
            last.bias.mul_(identity / features**0.5)
        if gate:
            # The paper's gate bias is 1. At the identity the gates are open but for what the steps may do.
            last.bias[features:] += 1.0 if identity is None else -torch.tensor(identity / (2 * features)).logit()

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
        identity = nudge(len(positions)) if init == "identity" else None
        self.nets = nn.ModuleList(
            MaskedNet(position, widths, scale=scale, lowest_degree=lowest_degree, identity=identity, gate=gate)
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
