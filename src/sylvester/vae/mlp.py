"""Encoder and decoder for vectors: fully connected layers with ELU between them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from sylvester.vae import likelihoods


class MLPEncoder(nn.Module):
    """Vectors (B, ``in_features``) to contexts (B, ``context``)."""

    def __init__(self, in_features: int, context: int = 256, *, hidden_features: Sequence[int] = (256,)) -> None:
        super().__init__()
        self.context = context
        # The context is itself a hidden layer: the flow's hypernetwork is linear in it.
        self.layers = nn.Sequential(*_layers([in_features, *hidden_features, context]), nn.ELU())

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class MLPDecoder(nn.Module):
    """Latents z (*, ``features``) to a distribution over vectors with event (``out_features``,).

    ``"gaussian"``: the mean and one learned scale per feature. ``"bernoulli"``: logits.
    """

    def __init__(
        self,
        out_features: int,
        features: int,
        *,
        hidden_features: Sequence[int] = (256, 256),
        likelihood: Literal["bernoulli", "gaussian"] = "gaussian",
    ) -> None:
        super().__init__()
        if likelihood not in ("bernoulli", "gaussian"):
            raise ValueError(f"Expected likelihood 'bernoulli' or 'gaussian'; got {likelihood!r}")
        self.features, self.likelihood = features, likelihood
        self.layers = nn.Sequential(*_layers([features, *hidden_features, out_features]))
        if likelihood == "gaussian":
            self.log_scale = nn.Parameter(torch.zeros(out_features))

    def forward(self, z: Tensor) -> Distribution:
        x = self.layers(z).to(z.dtype)
        if self.likelihood == "gaussian":
            return likelihoods.gaussian(x, self.log_scale, 1)
        return likelihoods.bernoulli(x, 1)


def _layers(sizes: Sequence[int]) -> list[nn.Module]:
    if min(sizes) < 1:
        raise ValueError(f"Expected positive layer sizes; got {list(sizes)}")
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise(sizes):
        layers += [nn.Linear(fan_in, fan_out), nn.ELU()]
    return layers[:-1]
