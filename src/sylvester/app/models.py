"""From settings to a model: the one place where the command line's names meet the library's classes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from sylvester import flows
from sylvester.app import memory
from sylvester.app.config import Config, ConfigError
from sylvester.names import Likelihood
from sylvester.vae import VAE, GatedConvDecoder, GatedConvEncoder, MLPDecoder, MLPEncoder

CONTEXT = 256  # outputs of the encoder
COPIES = 4  # of the weights in training: themselves, their gradient, and the optimizer's two averages


def build(config: Config, shape: Sequence[int], likelihood: Likelihood) -> VAE:
    """The VAE of a run for images of ``shape`` (C, H, W), its weights from torch's global generator."""
    family: Callable[..., flows.Flow] = flows.FAMILIES[config.flow]
    try:
        encoder, decoder = parts(config, shape, likelihood)
        vae = VAE(encoder, family(context=CONTEXT, **config.flow_arguments()), decoder)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    vae.register_load_state_dict_pre_hook(_rename)
    return vae


def rehearse(config: Config, shape: Sequence[int], likelihood: Likelihood) -> dict[str, int]:
    """The parameter counts of the run's model, or a `ConfigError` where this machine cannot train it."""
    free = memory.available()
    wanted = f"a model of latent = {config.latent} for images of {' x '.join(map(str, shape))}"
    try:
        with torch.device("meta"):  # sizes without the numbers
            counts = parameter_counts(build(config, shape, likelihood))
    except RuntimeError as error:
        if not memory.exhausted(error):
            raise
        raise ConfigError(f"Expected a model that fits into memory; got {wanted}") from None
    size = 8 if config.precision == "64-true" else 4
    copies = COPIES + len(config.averages or ())
    needed = config.devices * copies * size * counts["total"]
    if needed > free and not torch.cuda.is_available():
        raise ConfigError(
            f"Expected a model that can be trained with the {memory.readable(free)} of memory that are free; "
            f"got {wanted}, which needs {memory.readable(needed)} for {counts['total']:,} parameters"
        )
    return counts


def parts(config: Config, shape: Sequence[int], likelihood: Likelihood) -> tuple[nn.Module, nn.Module]:
    """Encoder and decoder: the paper's convolutions, or dense layers, which learn small images far sooner."""
    if config.architecture == "mlp":
        return MLPEncoder(shape, CONTEXT), MLPDecoder(shape, config.latent, likelihood=likelihood)
    architecture: Any = config.architecture
    height, width = shape[1:]
    if height % 4 or width % 4:
        raise ConfigError(
            f"Expected image sides that are multiples of 4 for convolutions; got {height} x {width}: "
            f"pad the images to {height + -height % 4} x {width + -width % 4}, or take --architecture mlp"
        )
    return (
        GatedConvEncoder(shape, CONTEXT, architecture=architecture),
        GatedConvDecoder(shape, config.latent, likelihood=likelihood),
    )


def _rename(vae: nn.Module, state: dict[str, Any], *_: object) -> None:
    """Runs of format 0 have other names for the dense encoder's weights and the decoder's scale."""
    for name in list(state):
        new = name.replace("encoder.1.layers.", "encoder.layers.").replace(
            "decoder.log_scale", "decoder.head.log_scale"
        )
        state[new] = state.pop(name)


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
