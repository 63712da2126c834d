"""From settings to a model: the one place where the command line's names meet the library's classes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from sylvester import flows
from sylvester.app.config import Config, ConfigError
from sylvester.vae import VAE, GatedConvDecoder, GatedConvEncoder, MLPEncoder, likelihoods
from sylvester.vae.convolutional import LEVELS

CONTEXT = 256  # outputs of the encoder

# The library's names of the settings that only some flows have.
ARGUMENTS = {
    "transforms": "transforms",
    "rank": "rank",
    "reflections": "reflections",
    "hidden": "hidden_features",
}


def build(config: Config, shape: Sequence[int], likelihood: str) -> VAE:
    """The VAE of a run for images of ``shape`` (C, H, W), its weights from torch's global generator."""
    options: dict[str, Any] = {
        argument: getattr(config, setting)
        for setting, argument in ARGUMENTS.items()
        if getattr(config, setting) is not None
    }
    family: Callable[..., flows.Flow] = flows.FAMILIES[config.flow]
    try:
        encoder, decoder = parts(config, shape, likelihood)
        flow = family(
            config.latent,
            CONTEXT,
            init=config.init,
            variance_bounds=config.variance_bounds,
            **options,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return VAE(encoder, flow, decoder)


def parts(config: Config, shape: Sequence[int], likelihood: Any) -> tuple[nn.Module, nn.Module]:
    """Encoder and decoder: the paper's convolutions, or dense layers, which learn small images far sooner."""
    if config.architecture == "mlp":
        encoder = nn.Sequential(nn.Flatten(), MLPEncoder(math.prod(shape), CONTEXT))
        return encoder, DenseDecoder(shape, config.latent, likelihood=likelihood)
    architecture: Any = config.architecture
    return (
        GatedConvEncoder(shape, CONTEXT, architecture=architecture),
        GatedConvDecoder(shape, config.latent, likelihood=likelihood),
    )


class DenseDecoder(nn.Module):
    """Latents z (*, ``features``) to a distribution over images, with fully connected layers."""

    def __init__(self, shape: Sequence[int], features: int, *, likelihood: str, hidden: int = 256) -> None:
        super().__init__()
        self.shape, self.likelihood = tuple(shape), likelihood
        # One number a pixel, or 256 logits of its levels.
        self.outputs = (*self.shape, LEVELS) if likelihood == "categorical" else self.shape
        self.layers = nn.Sequential(
            nn.Linear(features, hidden),
            nn.ELU(),
            nn.Linear(hidden, hidden),
            nn.ELU(),
            nn.Linear(hidden, math.prod(self.outputs)),
        )
        if likelihood == "gaussian":
            self.log_scale = nn.Parameter(torch.zeros(shape[0], 1, 1))

    def forward(self, z: Tensor) -> Distribution:
        x = self.layers(z).to(z.dtype).unflatten(-1, self.outputs)  # autocast may have lowered the precision
        if self.likelihood == "categorical":
            return likelihoods.PixelLevels(x)
        if self.likelihood == "gaussian":
            return likelihoods.gaussian(x, self.log_scale, 3)
        return likelihoods.bernoulli(x, 3)


def parameter_counts(vae: VAE) -> dict[str, int]:
    modules: dict[str, nn.Module] = {
        "encoder": vae.encoder,
        "flow": vae.flow,
        "decoder": vae.decoder,
        "total": vae,
    }
    return {name: sum(p.numel() for p in module.parameters()) for name, module in modules.items()}


def outputs_per_step(config: Config) -> dict[str, int] | None:
    """Outputs of the hypernetwork for one step of T-SNF, as three sources count them; None for other flows.

    The paper's §5 counts two full matrices and b, its released code predicts one matrix, two diagonals and b,
    and two packed triangles with b waste nothing.
    """
    d = config.latent
    if config.flow != "triangular-sylvester":
        return None
    return {"paper": 2 * d * d + d, "released": d * d + 3 * d, "packed": d * d + 2 * d}
