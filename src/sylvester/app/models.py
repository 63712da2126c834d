"""From settings to a model: the one place where the command line's names meet the library's classes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from sylvester import flows
from sylvester.app.config import Config, ConfigError
from sylvester.vae import VAE, GatedConvDecoder, GatedConvEncoder

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
        encoder = GatedConvEncoder(shape, architecture=config.architecture)  # type: ignore[arg-type]
        flow = family(
            config.latent,
            encoder.context,
            init=config.init,
            variance_bounds=config.variance_bounds,
            **options,
        )
        decoder = GatedConvDecoder(shape, config.latent, likelihood=likelihood)  # type: ignore[arg-type]
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return VAE(encoder, flow, decoder)


def parameter_counts(vae: VAE) -> dict[str, int]:
    parts: dict[str, nn.Module] = {
        "encoder": vae.encoder,
        "flow": vae.flow,
        "decoder": vae.decoder,
        "total": vae,
    }
    return {name: sum(p.numel() for p in part.parameters()) for name, part in parts.items()}


def outputs_per_step(config: Config) -> dict[str, int] | None:
    """Outputs of the hypernetwork for one step of T-SNF, as three sources count them; None for other flows.

    The paper's §5 counts two full matrices and b, its released code predicts one matrix, two diagonals and b,
    and two packed triangles with b waste nothing.
    """
    d = config.latent
    if config.flow != "triangular-sylvester":
        return None
    return {"paper": 2 * d * d + d, "released": d * d + 3 * d, "packed": d * d + 2 * d}
