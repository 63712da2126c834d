"""Encoder and decoder for vectors and small images: fully connected layers with ELU between them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn
from torch.distributions import Distribution

from sylvester.names import Likelihood
from sylvester.vae.likelihoods import Head


class MLPEncoder(nn.Module):
    """x (*, *``shape``) to contexts (*, ``context``); a number as the shape means vectors of so many features.

    >>> import torch
    >>> MLPEncoder((1, 28, 28), context=32)(torch.zeros(5, 1, 28, 28)).shape
    torch.Size([5, 32])
    """

    def __init__(
        self, shape: int | Sequence[int], context: int = 256, *, hidden_features: Sequence[int] = (256,)
    ) -> None:
        super().__init__()
        self.shape, self.context = _shape(shape), context
        # The context is itself a hidden layer: the flow's hypernetwork is linear in it.
        self.layers = nn.Sequential(*_layers([math.prod(self.shape), *hidden_features, context]), nn.ELU())

    def forward(self, x: Tensor) -> Tensor:
        axes = len(self.shape)
        if x.shape[-axes:] != self.shape:
            raise ValueError(f"Expected x of shape (*, {', '.join(map(str, self.shape))}); got {tuple(x.shape)}")
        return self.layers(x.flatten(-axes))


class MLPDecoder(nn.Module):
    """Latents z (*, ``features``) to a distribution over x with event ``shape``, as `likelihoods.Head` makes it.

    >>> import torch
    >>> decoder = MLPDecoder((1, 28, 28), features=8, likelihood="bernoulli")
    >>> decoder(torch.zeros(100, 5, 8)).log_prob(torch.zeros(5, 1, 28, 28)).shape
    torch.Size([100, 5])
    """

    def __init__(
        self,
        shape: int | Sequence[int],
        features: int,
        *,
        hidden_features: Sequence[int] = (256, 256),
        likelihood: Likelihood = "gaussian",
    ) -> None:
        super().__init__()
        self.features = features
        self.head = Head(_shape(shape), likelihood)
        self.layers = nn.Sequential(*_layers([features, *hidden_features, math.prod(self.head.outputs)]))

    def forward(self, z: Tensor) -> Distribution:
        # Autocast may have lowered the layers' precision; the likelihood keeps that of z.
        return self.head(self.layers(z).to(z.dtype).unflatten(-1, self.head.outputs))


def _shape(shape: int | Sequence[int]) -> tuple[int, ...]:
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    if not sizes or min(sizes) < 1:
        raise ValueError(f"Expected a shape of positive sizes; got {shape}")
    return sizes


def _layers(sizes: Sequence[int]) -> list[nn.Module]:
    if min(sizes) < 1:
        raise ValueError(f"Expected positive layer sizes; got {list(sizes)}")
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise(sizes):
        layers += [nn.Linear(fan_in, fan_out), nn.ELU()]
    return layers[:-1]
