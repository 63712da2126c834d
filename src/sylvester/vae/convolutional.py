"""The paper's encoder and decoder (appendix A): gated convolutions, (W * x + b) ⊙ σ(V * x + c).

W and V are one convolution of twice the width, and everything runs in the channels-last layout, which the
CPU's and the GPU's convolutions prefer: the weights are stored so and the activations follow. On a CPU, layers that
keep the size of the map are products in the frequency domain (`spectral`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from sylvester.names import Likelihood
from sylvester.vae import spectral
from sylvester.vae.likelihoods import Head

Architecture = Literal["paper", "released"]


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
    def forward(self, x: Tensor) -> Tensor:
        """``self.convolution(x)``, gated, by whatever way is fastest."""


def gate(y: Tensor) -> Tensor:
    """On the last axis, where channels lie side by side: glu over another has a backward that loses the layout."""
    return nn.functional.glu(y, dim=-1)


class GatedConv(Gated):
    """The general case, for convolutions and transposed ones."""

    def forward(self, x: Tensor) -> Tensor:
        return gated_directly(self.convolution, x)


def gated_directly(convolution: nn.Conv2d | nn.ConvTranspose2d, x: Tensor) -> Tensor:
    y = convolution(x.contiguous(memory_format=torch.channels_last))
    return gate(y.movedim(1, -1)).movedim(-1, 1)


class GatedSame(Gated):
    """A kernel of odd size with stride 1, on maps of given ``sides`` that it keeps."""

    def __init__(
        self,
        kind: type[nn.Conv2d] | type[nn.ConvTranspose2d],
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        sides: tuple[int, int],
    ) -> None:
        super().__init__(kind, in_channels, out_channels, kernel_size, padding=kernel_size // 2)
        self.same = same(self.convolution, sides)

    def forward(self, x: Tensor) -> Tensor:
        if self.same is None or not spectral.applies(x):
            return gated_directly(self.convolution, x)
        return spectral.batched_first(gate(convolve_same(self.same, self.convolution, x)))


class SameConv(nn.Conv2d):
    """`GatedSame` without a gate."""

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int, sides: tuple[int, int]) -> None:
        super().__init__(in_channels, out_channels, kernel_size, padding=kernel_size // 2)
        self.same = same(self, sides)

    def forward(self, x: Tensor) -> Tensor:
        if self.same is None or not spectral.applies(x):
            return super().forward(x)
        return spectral.batched_first(convolve_same(self.same, self, x))


def same(convolution: nn.Conv2d | nn.ConvTranspose2d, sides: tuple[int, int]) -> spectral.SameConvolution | None:
    """The way through the frequency domain, where it pays."""
    channels, kernel = (convolution.in_channels, convolution.out_channels), convolution.kernel_size[0]
    if not spectral.pays(*channels, sides, kernel):
        return None
    return spectral.SameConvolution(sides, kernel, correlate=not convolution.transposed)


def convolve_same(way: spectral.SameConvolution, convolution: nn.Conv2d | nn.ConvTranspose2d, x: Tensor) -> Tensor:
    """``convolution(x)`` as (H, W, B, C')."""
    # Torch stores (C', C, k, k), and of transposed convolutions (C, C', k, k).
    order = (2, 3, 0, 1) if convolution.transposed else (2, 3, 1, 0)
    return way(spectral.batched_last(x), convolution.weight.permute(order)) + convolution.bias


class PointConv(nn.Conv2d):
    """A kernel of one point: a matrix product."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__(in_channels, out_channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        if not spectral.applies(x):
            return super().forward(x)
        y = nn.functional.linear(spectral.batched_last(x), self.weight.flatten(1), self.bias)
        return spectral.batched_first(y)


class GatedCollapse(Gated):
    """A map (B, C, H, W) to one point (B, C', 1, 1): the kernel covers the map.

    That is a matrix product, which torch's convolution does not notice: five times faster with its backward.
    """

    def __init__(self, in_channels: int, out_channels: int, kernel_size: tuple[int, int]) -> None:
        super().__init__(nn.Conv2d, in_channels, out_channels, kernel_size)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.convolution.weight.movedim(1, -1).flatten(1)  # (C', H·W·C), a view in channels-last
        y = nn.functional.linear(x.movedim(1, -1).flatten(1), weight, self.convolution.bias)
        return gate(y)[:, :, None, None]


class GatedSpread(Gated):
    """One point (B, C, 1, 1) to a map (B, C', H, W): `GatedCollapse` transposed."""

    def __init__(self, in_channels: int, out_channels: int, kernel_size: tuple[int, int]) -> None:
        super().__init__(nn.ConvTranspose2d, in_channels, out_channels, kernel_size)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.convolution.weight.movedim(1, -1)  # (C, H, W, C')
        y = (x.flatten(1) @ weight.flatten(1)).unflatten(1, weight.shape[1:]) + self.convolution.bias
        return gate(y).movedim(-1, 1)


class GatedConvEncoder(nn.Module):
    """Images (B, C, H, W) to contexts (B, ``context``): seven gated convolutions.

    The last kernel covers what two strides of 2 have left of the image, so H and W must be multiples of 4.
    ``architecture="released"`` leaves out one of the two 64 → 64 layers before it, as the authors' code did.
    """

    def __init__(self, shape: Sequence[int], context: int = 256, *, architecture: Architecture = "paper") -> None:
        super().__init__()
        if architecture not in ("paper", "released"):
            raise ValueError(f"Expected architecture 'paper' or 'released'; got {architecture!r}")
        channels, (whole, half, quarter) = _sides(shape)
        self.shape, self.context = tuple(shape), context
        repeats = 2 if architecture == "paper" else 1
        self.layers = nn.Sequential(
            GatedSame(nn.Conv2d, channels, 32, 5, whole),
            GatedConv(nn.Conv2d, 32, 32, 5, padding=2, stride=2),
            GatedSame(nn.Conv2d, 32, 64, 5, half),
            GatedConv(nn.Conv2d, 64, 64, 5, padding=2, stride=2),
            *(GatedSame(nn.Conv2d, 64, 64, 5, quarter) for _ in range(repeats)),
            GatedCollapse(64, context, quarter),
        )
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # unknown to torch's stubs

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() != 4 or x.shape[1:] != self.shape:
            raise ValueError(f"Expected images of shape (B, {self.shape}); got {tuple(x.shape)}")
        return self.layers(x).flatten(1)


class GatedConvDecoder(nn.Module):
    """Latents z (*, ``features``) to a distribution over images with batch shape (*) and event (C, H, W).

    Six gated transposed convolutions, the mirror image of the encoder, then the numbers that the likelihood's
    `Head` asks for: one per pixel and channel from a 1 x 1 convolution, or the logits of 256 levels from a 5 x 5
    convolution to 256·C channels and a 1 x 1 convolution that mixes them.

    z is decoded in one batch: feed it in pieces of about a hundred where memory or cache matters.
    """

    def __init__(self, shape: Sequence[int], features: int = 64, *, likelihood: Likelihood = "bernoulli") -> None:
        super().__init__()
        channels, (whole, half, quarter) = _sides(shape)
        self.features = features
        self.head = Head(shape, likelihood)
        upsample = {"padding": 2, "stride": 2, "output_padding": 1}
        width = self.head.levels * channels
        last = (
            [PointConv(32, width)]
            if self.head.levels == 1
            else [SameConv(32, width, 5, whole), PointConv(width, width)]
        )
        self.layers = nn.Sequential(
            GatedSpread(features, 64, quarter),
            GatedSame(nn.ConvTranspose2d, 64, 64, 5, quarter),
            GatedConv(nn.ConvTranspose2d, 64, 32, 5, **upsample),
            GatedSame(nn.ConvTranspose2d, 32, 32, 5, half),
            GatedConv(nn.ConvTranspose2d, 32, 32, 5, **upsample),
            GatedSame(nn.ConvTranspose2d, 32, 32, 5, whole),
            *last,
        )
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # unknown to torch's stubs

    def forward(self, z: Tensor) -> Distribution:
        if z.shape[-1] != self.features:
            raise ValueError(f"Expected latents of shape (*, {self.features}); got {tuple(z.shape)}")
        # Autocast may have lowered the layers' precision; the likelihood keeps that of z.
        x = self.layers(z.reshape(-1, self.features, 1, 1)).to(z.dtype)
        if self.head.levels > 1:
            # In channels-last memory the levels of a pixel lie side by side: only the view changes.
            x = x.permute(0, 2, 3, 1).unflatten(-1, (-1, self.head.levels)).permute(0, 3, 1, 2, 4)
        return self.head(x.reshape(*z.shape[:-1], *self.head.outputs))


def _sides(shape: Sequence[int]) -> tuple[int, tuple[tuple[int, int], ...]]:
    """(C, H, W) to C and the sides (H, W) of maps at full, half and quarter size."""
    if len(shape) != 3 or min(shape) < 1 or shape[1] % 4 or shape[2] % 4:
        raise ValueError(f"Expected an image shape (C, H, W) whose sides are multiples of 4; got {tuple(shape)}")
    channels, height, width = shape
    return channels, tuple((height // part, width // part) for part in (1, 2, 4))
