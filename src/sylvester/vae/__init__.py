"""Variational autoencoders: any encoder, any flow as the posterior, any decoder, any prior.

The parts here are the paper's (gated convolutions) and plain ones for vectors; the model asks only that
``encoder(x)`` be a context and ``decoder(z)`` a distribution over x.
"""

from sylvester.vae.convolutional import GatedConvDecoder, GatedConvEncoder
from sylvester.vae.likelihoods import PixelLevels
from sylvester.vae.mlp import MLPDecoder, MLPEncoder
from sylvester.vae.model import VAE, LogTerms, PathTerms

__all__ = [
    "VAE",
    "GatedConvDecoder",
    "GatedConvEncoder",
    "LogTerms",
    "MLPDecoder",
    "MLPEncoder",
    "PathTerms",
    "PixelLevels",
]
