"""Masked networks (MADE, Germain et al., 2015): the conditioners of autoregressive and coupling steps.

Coordinate i has a position p_i. A hidden unit of degree d sees the coordinates with p < d and, in the next layer, the
units of degree ≤ d; output i sees the units of degree ≤ p_i, and so the coordinates that precede i. Units of degree 0
see the context alone. Units stand in the order of their degrees, so that masks are staircases and almost half of the
weights need not be touched.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.distributions import Transform
from torch.nn.functional import elu, linear, relu, silu

from sylvester.buffers import DerivedBuffers
from sylvester.flows.hypernetwork import Amortized, Hypernetwork, Init, Output
from sylvester.linalg.opaque import with_tangent
from sylvester.transforms import Elementwise

# Rows of a block: fewer of them skip more of the weights, more of them make better products.
_BLOCK = 320

ActivationName = Literal["elu", "relu", "silu", "tanh"]
Activation = ActivationName | Callable[[Tensor], Tensor]
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"elu": elu, "relu": relu, "silu": silu, "tanh": torch.tanh}


class MaskedLinear(DerivedBuffers, nn.Linear):
    """A linear layer in which a unit of degree d sees the inputs of degree ≤ d.

    Its rows are multiplied in blocks, each with the inputs that any of its rows sees: what lies beyond the last of them
    costs nothing.
    """

    mask: Tensor  # (out, in)

    def __init__(self, before: Tensor, after: Tensor):
        super().__init__(len(before), len(after))
        self.degrees = before, after
        self.register_derived()
        mask = self._mask()
        self.dense = bool(mask.all())
        size = _BLOCK if self.in_features >= _BLOCK else self.out_features  # of few inputs, there is little to skip
        blocks = [slice(start, start + size) for start in range(0, self.out_features, size)]
        self.blocks = [(rows, _reach(mask[rows])) for rows in blocks]

    def _mask(self) -> Tensor:
        before, after = self.degrees
        return after[:, None] >= before

    def derived(self) -> dict[str, Tensor]:
        return {"mask": self._mask().float()}

    def bind(self) -> BoundLayer:
        """The layer as it is now, its weights masked once for however many points come."""
        weight: Tensor = self.weight
        bias: Tensor = self.bias
        if not torch.is_grad_enabled():  # a view of a parameter would ask for gradients all the same
            weight, bias = weight.detach(), bias.detach()
        if self.dense:
            return BoundLayer([(self.in_features, weight, bias)])
        weights = _masked_blocks(weight, self.mask, self.blocks)
        return BoundLayer(
            [(reach, block, bias[rows]) for block, (rows, reach) in zip(weights, self.blocks, strict=True)]
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.bind()(x)


class BoundLayer:
    """Blocks of rows, each with the number of inputs it sees, its weights and its biases."""

    def __init__(self, blocks: Sequence[tuple[int, Tensor, Tensor]]):
        self.blocks = blocks

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(tensor for _, *block in self.blocks for tensor in block)

    def rebuild(self, tensors: Iterable[Tensor]) -> BoundLayer:
        each = iter(tensors)
        return BoundLayer([(reach, next(each), next(each)) for reach, _, _ in self.blocks])

    def __call__(self, x: Tensor) -> Tensor:
        parts = [linear(x[..., :reach], weight, bias) for reach, weight, bias in self.blocks]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


class _MaskedBlocks(torch.autograd.Function):
    """The blocks of a weight, masked. By hand, the gradients of all blocks are written once, into one matrix.

    A layer then takes half the time of slices that autograd joins, and four fifths of one masked product of the whole.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(weight: Tensor, mask: Tensor, blocks: list[tuple[slice, int]]) -> tuple[Tensor, ...]:
        return tuple(weight[rows, :reach] * mask[rows, :reach] for rows, reach in blocks)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _, mask, ctx.blocks = inputs
        ctx.save_for_backward(mask)
        ctx.save_for_forward(mask)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (mask,) = ctx.saved_tensors
        grad = grads[0].new_zeros(mask.shape)
        for each, (rows, reach) in zip(grads, ctx.blocks, strict=True):
            grad[rows, :reach] = each * mask[rows, :reach]
        return grad, None, None

    @staticmethod
    def tangent(ctx: Any, weight_dot: Tensor, *unused: None) -> tuple[Tensor, ...]:
        (mask,) = ctx.saved_tensors
        return tuple(weight_dot[rows, :reach] * mask[rows, :reach] for rows, reach in ctx.blocks)


_masked_blocks = with_tangent(_MaskedBlocks)


def _reach(mask: Tensor) -> int:
    """How many columns of a mask come before those that are empty to the end; at least one."""
    return int(mask.any(0).nonzero().max()) + 1 if mask.any() else 1


class MaskedNet(DerivedBuffers):
    """z, context -> numbers, as eq. 31: activation(masked z) + context, then masked layers.

    Args:
        position: ``(D,)``, the place of each coordinate in the order.
        hidden_features: widths of the hidden layers; the context is added to the first.
        numbers: how many a coordinate gets.
        activation: between the layers.
        lowest_degree: of the hidden units; above 0, none of them sees the context alone.
    """

    position: Tensor

    def __init__(
        self,
        position: Sequence[int],
        hidden_features: Sequence[int],
        numbers: int,
        *,
        activation: Callable[[Tensor], Tensor],
        lowest_degree: int = 0,
    ):
        super().__init__()
        self.place, self.numbers, self.activation = tuple(position), numbers, activation
        self.register_derived()
        places = torch.tensor(self.place, device="cpu")
        cycle = max(position) + 1 - lowest_degree
        degrees = [
            (lowest_degree + torch.arange(width, device="cpu") % cycle).sort().values for width in hidden_features
        ]
        # A coordinate is seen by the units of higher degree; an output sees the units up to its own position.
        chain = [places + 1, *degrees, places.repeat(numbers)]
        self.layers = nn.ModuleList(MaskedLinear(*pair) for pair in itertools.pairwise(chain))

    def derived(self) -> dict[str, Tensor]:
        return {"position": torch.tensor(self.place)}

    def masked_layers(self) -> Iterable[MaskedLinear]:
        return cast(Iterable[MaskedLinear], self.layers)

    def bind(self, context: Tensor | None) -> BoundNet:
        """The network as it is now, for one context ``(*, hidden_features[0])``, or none."""
        layers = [layer.bind() for layer in self.masked_layers()]
        return BoundNet(layers, context, self.position, self.numbers, self.activation)


class BoundNet:
    """A masked network with its weights and its context: points ``(*, D)`` to ``(*, numbers, D)``."""

    def __init__(
        self,
        layers: Sequence[BoundLayer],
        context: Tensor | None,
        position: Tensor,
        numbers: int,
        activation: Callable[[Tensor], Tensor],
    ):
        self.layers, self.context, self.position = layers, context, position
        self.numbers, self.activation = numbers, activation
        self.batch_shape = torch.Size() if context is None else context.shape[:-1]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        weights = tuple(tensor for layer in self.layers for tensor in layer.tensors)
        return weights if self.context is None else (*weights, self.context)

    def rebuild(self, tensors: Sequence[Tensor]) -> BoundNet:
        each = iter(tensors)
        layers = [layer.rebuild(each) for layer in self.layers]
        context = None if self.context is None else next(each)
        return BoundNet(layers, context, self.position, self.numbers, self.activation)

    def __call__(self, z: Tensor) -> Tensor:
        first, *middle, last = self.layers
        h = self.activation(first(z))
        if self.context is not None:
            h = h + self.context
        for layer in middle:
            h = self.activation(layer(h))
        return last(h).unflatten(-1, (self.numbers, z.shape[-1]))


class MaskedSteps(Amortized):
    """K networks and the context vector they share, which the hypernetwork makes (fig. 1, right).

    Args:
        positions: for each step, the place of each coordinate in its order.
        context: the size of the context.
        elementwise: what the steps do to one coordinate.
        bind: makes a transform of a network that is bound to a context.
        hidden_features: one width for two layers, or a width for each; None for a default.
        activation: between the layers: "elu", "relu", "silu", "tanh" or a function of a tensor.
        lowest_degree: see `MaskedNet`.
        init, hyper_features: as for every family. Under ``init="torch"`` weights start from N(0, 2/outputs) and biases
            from 0, as in the paper's experiments.
    """

    def __init__(
        self,
        positions: Sequence[Sequence[int]],
        context: int,
        elementwise: Elementwise,
        bind: Callable[[BoundNet], Transform],
        *,
        hidden_features: int | Sequence[int] | None,
        activation: Activation,
        lowest_degree: int = 0,
        init: Init,
        hyper_features: Sequence[int],
    ):
        super().__init__()
        self.elementwise, self.bind, self.activation = elementwise, bind, _function_of(activation)
        features = len(positions[0])
        self.widths = _hidden_widths(hidden_features, features)
        self.nets = nn.ModuleList(
            MaskedNet(
                position, self.widths, elementwise.numbers, activation=self.activation, lowest_degree=lowest_degree
            )
            for position in positions
        )
        for net in self._nets():
            _start(net, elementwise, len(positions), init)
        table = {"context": Output((self.widths[0],))}
        self.hypernetwork = Hypernetwork(context, table, hyper_features=hyper_features) if context else None
        size = elementwise.start(len(positions), features)[0]
        if init == "identity" and size < 1:
            for net in self._nets():
                _cancel(list(net.masked_layers()), self.hypernetwork, size)

    def _nets(self) -> Iterable[MaskedNet]:
        return cast(Iterable[MaskedNet], self.nets)

    def forward(self, context: Tensor | None) -> list[Transform]:
        shared = None if self.hypernetwork is None else self.hypernetwork(context)["context"].squeeze(-2)
        return [self.bind(net.bind(shared)) for net in self._nets()]

    def extra_repr(self) -> str:
        activation = getattr(self.activation, "__name__", self.activation)
        return (
            f"transforms={len(self.nets)}, hidden_features={self.widths}, activation={activation}, {self.elementwise}"
        )


@torch.no_grad()
def _start(net: MaskedNet, elementwise: Elementwise, transforms: int, init: Init) -> None:
    *_, last = layers = list(net.masked_layers())
    features = len(net.place)
    if init == "torch":
        for layer in layers:
            outputs = features if layer is last else layer.out_features
            layer.weight.normal_(0, math.sqrt(2 / outputs))
            layer.bias.zero_()
        biases = elementwise.bias
    else:
        size, biases = elementwise.start(transforms, features)
        last.bias.mul_(size)
    for number, bias in enumerate(biases):
        last.bias[number * features : (number + 1) * features] += bias


@torch.no_grad()
def _cancel(layers: Sequence[MaskedLinear], hypernetwork: Hypernetwork | None, size: float) -> None:
    """Outputs of nearly zero from weights of the usual size: hidden units are twins, equal in all they see and opposite
    in what they say to the outputs, so that they cancel.

    Weights of nearly zero would do that too, but from there Adam's first steps, which know signs alone, move those of
    all hidden units alike, and the units stay alike. Twins part at once, as their gradients are opposite. Units
    without a twin say ``size`` times as much as usual.
    """
    *hidden, last = layers
    if hypernetwork is not None:
        twin = _twins(hidden[0].degrees[1]).to(last.weight.device)
        for parameter in (hypernetwork.weight, hypernetwork.bias):
            if parameter is not None:
                parameter.copy_(_as_elder(parameter, twin))
    inputs = torch.arange(hidden[0].in_features, device=last.weight.device)
    for layer in hidden:
        twin = _twins(layer.degrees[1]).to(inputs.device)
        # A twin sees of each unit what the other one sees of that unit's twin.
        own = torch.arange(len(twin), device=twin.device)
        layer.weight.copy_(torch.where((twin >= own).unsqueeze(-1), layer.weight, layer.weight[twin][:, inputs]))
        layer.bias.copy_(_as_elder(layer.bias, twin))
        inputs = twin
    own = torch.arange(len(inputs), device=inputs.device)
    opposite = torch.where(inputs < own, -last.weight[:, inputs], last.weight)
    last.weight.copy_(torch.where(inputs == own, size * last.weight, opposite))


def _as_elder(values: Tensor, twin: Tensor) -> Tensor:
    """With the rows of the first of two twins in place of the second's."""
    return values[torch.minimum(twin, torch.arange(len(twin), device=twin.device))]


def _twins(degrees: Tensor) -> Tensor:
    """For units in the order of their degrees, the index of each one's twin, of the same degree; or its own."""
    own = torch.arange(len(degrees), device=degrees.device)
    rank = own - torch.searchsorted(degrees, degrees)  # among the units of its degree
    twin = (own + 1 - 2 * (rank % 2)).clamp(max=len(own) - 1)
    return torch.where(degrees[twin] == degrees, twin, own)


def _function_of(activation: Activation) -> Callable[[Tensor], Tensor]:
    if callable(activation):
        return activation
    if not isinstance(activation, str) or activation not in _ACTIVATIONS:
        raise ValueError(f"Expected activation in {tuple(_ACTIVATIONS)} or a function of a tensor; got {activation!r}")
    return _ACTIVATIONS[activation]


def _hidden_widths(hidden_features: int | Sequence[int] | None, features: int) -> tuple[int, ...]:
    """One width stands for two layers of it, as in the paper. Every degree needs a unit in every layer."""
    if hidden_features is None:
        hidden_features = max(64, 2 * features)
    widths = (hidden_features,) * 2 if isinstance(hidden_features, int) else tuple(hidden_features)
    if not widths or min(widths) < features:
        raise ValueError(f"Expected hidden_features of at least features = {features}; got {hidden_features}")
    return widths
