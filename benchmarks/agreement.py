"""Which weight of the reference is which of the library, so that both can be given the same and compared.

Each entry of :func:`correspondence` pairs a parameter of the reference with a function that finds the same numbers in
the library's parameters. What it reads there, ``read`` decides: values, gradients or anything else of that shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.reference import ReferenceVAE

Read = Callable[[Tensor], Tensor]
Find = Callable[[Read], Tensor]
Pair = tuple[nn.Parameter, Find]


def copy_weights(vae: Any, model: ReferenceVAE) -> None:
    """Give the reference the weights of a library VAE of the same flow and sizes."""
    with torch.no_grad():
        for parameter, find in correspondence(vae, model):
            parameter.copy_(find(lambda tensor: tensor))


def correspondence(vae: Any, model: ReferenceVAE) -> Iterator[Pair]:
    for ours, theirs in ((vae.encoder.layers, model.encoder), (vae.decoder.layers, model.decoder)):
        for layer, gated in zip(ours, theirs, strict=False):  # the reference has its sigmoid besides
            yield from convolution(layer, gated)
    base = outputs(vae.flow.base.hypernetwork)
    yield from linear(model.mean, base["loc"])
    yield from linear(model.variance, base["raw_variance"])
    for group in vae.flow.steps:
        yield from {"Planar": planar, "IAF": iaf}.get(type(model.steps).__name__, sylvester)(group, model.steps)


def at(parameter: Tensor, pick: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> Find:
    """A part of one parameter."""
    return lambda read: pick(read(parameter))


def half(which: int, axis: int = 0, order: Any = slice(None)) -> Callable[[Tensor], Tensor]:
    """The first or the second half along an axis, its rows in an order."""
    return lambda tensor: tensor.chunk(2, axis)[which][order]


def convolution(layer: Any, gated: Any) -> Iterator[Pair]:
    if isinstance(layer, nn.Conv2d):
        assert layer.bias is not None
        yield gated.weight, at(layer.weight)
        yield gated.bias, at(layer.bias)
        return
    whole = layer.convolution
    for which, part in enumerate((gated.value, gated.gate)):
        yield part.weight, at(whole.weight, half(which, 1 if whole.transposed else 0))
        yield part.bias, at(whole.bias, half(which))


def outputs(hypernetwork: Any) -> dict[str, Find]:
    """For each row of the table the weights and the bias that make it: (K, *shape, E + 1)."""

    def finder(columns: slice, shape: tuple[int, ...]) -> Find:
        def find(read: Read) -> Tensor:
            both = torch.cat([read(hypernetwork.weight), read(hypernetwork.bias).unsqueeze(1)], 1)
            both = both.unflatten(0, (hypernetwork.transforms, hypernetwork.outputs))[:, columns]
            return both.reshape(hypernetwork.transforms, *shape, both.shape[-1])

        return find

    found, position = {}, 0
    for name, row in hypernetwork.table.items():
        found[name] = finder(slice(position, position + row.size), row.shape)
        position += row.size
    return found


def linear(layer: Any, find: Find) -> Iterator[Pair]:
    yield layer.weight, lambda read: find(read).flatten(0, -2)[:, :-1]
    yield layer.bias, lambda read: find(read).flatten(0, -2)[:, -1]


def planar(group: Any, steps: Any) -> Iterator[Pair]:
    for name, find in outputs(group.hypernetwork).items():
        yield from linear(getattr(steps, name), find)


def sylvester(group: Any, steps: Any) -> Iterator[Pair]:
    found = outputs(group.hypernetwork)
    packed = found["packed"]  # (K, M, M, E + 1)
    off_diagonal = 1 - torch.eye(steps.rank, dtype=steps.upper.dtype).unsqueeze(-1)
    # The reference throws the diagonal of its full matrix away: zeros here, in value and in gradient.
    yield from linear(steps.full, lambda read: packed(read) * off_diagonal)
    yield from linear(steps.diagonal, lambda read: packed(read).diagonal(dim1=1, dim2=2).movedim(-1, 1))
    yield from linear(steps.diagonal_tilde, found["raw_diagonal"])
    yield from linear(steps.b, found["b"])
    for ours, theirs in (("raw_q", "q"), ("v", "v")):
        if ours in found:
            yield from linear(getattr(steps, theirs), found[ours])


def iaf(group: Any, steps: Any) -> Iterator[Pair]:
    hidden, features = steps.context.out_features, len(steps.steps[0].mean.bias)
    # The reference deals degrees to its units in turn, the library keeps them in order.
    units = (torch.arange(hidden) % features).argsort(stable=True).argsort()
    context = outputs(group.hypernetwork)["context"]
    yield from linear(steps.context, lambda read: context(read)[:, units])
    for net, step in zip(group.nets, steps.steps, strict=True):
        yield from masked(net, step, units)


def masked(net: Any, step: Any, units: Tensor) -> Iterator[Pair]:
    first, second, last = net.layers
    order = net.position.argsort()  # the coordinates as the flipped z shows them to the reference
    yield step.first.weight, at(first.weight, lambda weight: weight[units][:, order])
    yield step.first.bias, at(first.bias, lambda bias: bias[units])
    yield step.second.weight, at(second.weight, lambda weight: weight[units][:, units])
    yield step.second.bias, at(second.bias, lambda bias: bias[units])
    for which, head in enumerate((step.mean, step.gate)):
        whole = half(which, order=order)
        yield head.weight, at(last.weight, lambda weight, whole=whole: whole(weight)[:, units])
        yield head.bias, at(last.bias, whole)
