"""The paper's encoder and decoder (appendix A): gated convolutions, (W * x + b) ⊙ σ(V * x + c).

W and V are one convolution of twice the width, and everything runs in the channels-last layout, which the
CPU's and the GPU's convolutions prefer: the weights are stored so and the activations follow.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from sylvester.vae import likelihoods

Architecture = Literal["paper", "released"]
Likelihood = Literal["bernoulli", "categorical", "gaussian"]

LEVELS = 256


class Gated(nn.Module, ABC):
    """One convolution of twice the width whose first half is gated by the sigmoid of its second.

    Each half starts as torch would have started it alone. That matters for transposed convolutions, whose
    fan-in torch takes from the *output* channels: plainly doubled, they would start √2 too small.
    """

    def __init__(
        self,
        kind: type[nn.Conv2d] | type[nn.ConvTranspose2d],
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        **options: Any,
    ) -> None:
        super().__init__()
        self.convolution = kind(in_channels, 2 * out_channels, kernel_size, **options)
        halves = [kind(in_channels, out_channels, kernel_size, **options) for _ in range(2)]
        output_axis = 1 if self.convolution.transposed else 0
        with torch.no_grad():
            self.convolution.weight.copy_(torch.cat([half.weight for half in halves], output_axis))
            bias = self.convolution.bias
            assert bias is not None
            bias.copy_(torch.cat([half.bias for half in halves if half.bias is not None]))

    @abstractmethod
    def convolve(self, x: Tensor) -> Tensor:
        """``self.convolution(x)``, by whatever way is fastest."""

    def forward(self, x: Tensor) -> Tensor:
        # Along the last axis of the channels-last view: glu(dim=1) has a backward that loses the layout.
        return nn.functional.glu(self.convolve(x).movedim(1, -1), dim=-1).movedim(-1, 1)


class GatedConv(Gated):
    """The general case, for convolutions and transposed ones."""

    def convolve(self, x: Tensor) -> Tensor:
        return self.convolution(x)


class GatedCollapse(Gated):
    """A map (B, C, H, W) to one point (B, C', 1, 1): the kernel covers the map.

    That is a matrix product, which torch's convolution does not notice: five times faster with its backward.
    """

    def __init__(self, in_channels: int, out_channels: int, kernel_size: tuple[int, int]) -> None:
        super().__init__(nn.Conv2d, in_channels, out_channels, kernel_size)

    def convolve(self, x: Tensor) -> Tensor:
        weight = self.convolution.weight.movedim(1, -1).flatten(1)  # (C', H·W·C), a view in channels-last
        y = nn.functional.linear(x.movedim(1, -1).flatten(1), weight, self.convolution.bias)
        return y[:, :, None, None]


class GatedSpread(Gated):
    """One point (B, C, 1, 1) to a map (B, C', H, W): `GatedCollapse` transposed."""

    def __init__(self, in_channels: int, out_channels: int, kernel_size: tuple[int, int]) -> None:
        super().__init__(nn.ConvTranspose2d, in_channels, out_channels, kernel_size)

    def convolve(self, x: Tensor) -> Tensor:
        weight = self.convolution.weight.movedim(1, -1)  # (C, H, W, C')
        y = (x.flatten(1) @ weight.flatten(1)).unflatten(1, weight.shape[1:]) + self.convolution.bias
        return y.movedim(-1, 1)


class GatedConvEncoder(nn.Module):
    """Images (B, C, H, W) to contexts (B, ``context``): seven gated convolutions.

    The last kernel covers what two strides of 2 have left of the image, so H and W must be multiples of 4.
    ``architecture="released"`` leaves out one of the two 64 → 64 layers before it, as the authors' code did.
    """

    def __init__(self, shape: Sequence[int], context: int = 256, *, architecture: Architecture = "paper") -> None:
        super().__init__()
        if architecture not in ("paper", "released"):
            raise ValueError(f"Expected architecture 'paper' or 'released'; got {architecture!r}")
        channels, quarter = _quartered(shape)
        self.shape, self.context = tuple(shape), context
        repeats = 2 if architecture == "paper" else 1
        self.layers = nn.Sequential(
            GatedConv(nn.Conv2d, channels, 32, 5, padding=2),
            GatedConv(nn.Conv2d, 32, 32, 5, padding=2, stride=2),
            GatedConv(nn.Conv2d, 32, 64, 5, padding=2),
            GatedConv(nn.Conv2d, 64, 64, 5, padding=2, stride=2),
            *(GatedConv(nn.Conv2d, 64, 64, 5, padding=2) for _ in range(repeats)),
            GatedCollapse(64, context, quarter),
        )
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # unknown to torch's stubs

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() != 4 or x.shape[1:] != self.shape:
            raise ValueError(f"Expected images of shape (B, {self.shape}); got {tuple(x.shape)}")
        return self.layers(x.contiguous(memory_format=torch.channels_last)).flatten(1)


class GatedConvDecoder(nn.Module):
    """Latents z (*, ``features``) to a distribution over images with batch shape (*) and event (C, H, W).

    Six gated transposed convolutions, the mirror image of the encoder, then a head:

    - ``"bernoulli"``: logits from a 1 x 1 convolution;
    - ``"categorical"``: 256 logits for each pixel and channel, from a 5 x 5 convolution to 256·C channels and
      a 1 x 1 convolution that mixes them (channels of one pixel are independent given z);
    - ``"gaussian"``: the mean from a 1 x 1 convolution, and one learned scale per channel. A scale of its own
      for each pixel would let the likelihood grow without bound on constant pixels.

    z is decoded in one batch: feed it in pieces of about a hundred where memory or cache matters.
    """

    def __init__(self, shape: Sequence[int], features: int = 64, *, likelihood: Likelihood = "bernoulli") -> None:
        super().__init__()
        channels, quarter = _quartered(shape)
        self.shape, self.features, self.likelihood = tuple(shape), features, likelihood
        upsample = {"padding": 2, "stride": 2, "output_padding": 1}
        head: list[nn.Module]
        if likelihood == "categorical":
            width = LEVELS * channels
            head = [nn.Conv2d(32, width, 5, padding=2), nn.Conv2d(width, width, 1)]
        elif likelihood in ("bernoulli", "gaussian"):
            head = [nn.Conv2d(32, channels, 1)]
        else:
            raise ValueError(f"Expected likelihood 'bernoulli', 'categorical' or 'gaussian'; got {likelihood!r}")
        self.layers = nn.Sequential(
            GatedSpread(features, 64, quarter),
            GatedConv(nn.ConvTranspose2d, 64, 64, 5, padding=2),
            GatedConv(nn.ConvTranspose2d, 64, 32, 5, **upsample),
            GatedConv(nn.ConvTranspose2d, 32, 32, 5, padding=2),
            GatedConv(nn.ConvTranspose2d, 32, 32, 5, **upsample),
            GatedConv(nn.ConvTranspose2d, 32, 32, 5, padding=2),
            *head,
        )
        if likelihood == "gaussian":
            self.log_scale = nn.Parameter(torch.zeros(channels, 1, 1))
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # unknown to torch's stubs

    def forward(self, z: Tensor) -> Distribution:
        if z.shape[-1] != self.features:
            raise ValueError(f"Expected latents of shape (*, {self.features}); got {tuple(z.shape)}")
        batch, (channels, height, width) = z.shape[:-1], self.shape
        # Autocast may have lowered the layers' precision; the likelihood keeps that of z.
        x = self.layers(z.reshape(-1, self.features, 1, 1)).to(z.dtype)
        if self.likelihood == "categorical":
            # In channels-last memory the levels of a pixel lie side by side: only the view changes.
            x = x.permute(0, 2, 3, 1).unflatten(-1, (channels, LEVELS)).permute(0, 3, 1, 2, 4)
            return likelihoods.PixelLevels(x.reshape(*batch, channels, height, width, LEVELS))
        x = x.reshape(*batch, channels, height, width)
        if self.likelihood == "gaussian":
            return likelihoods.gaussian(x, self.log_scale, 3)
        return likelihoods.bernoulli(x, 3)


def _quartered(shape: Sequence[int]) -> tuple[int, tuple[int, int]]:
    """(C, H, W) to C and (H/4, W/4)."""
    if len(shape) != 3 or min(shape) < 1 or shape[1] % 4 or shape[2] % 4:
        raise ValueError(f"Expected an image shape (C, H, W) whose sides are multiples of 4; got {tuple(shape)}")
    channels, height, width = shape
    return channels, (height // 4, width // 4)
