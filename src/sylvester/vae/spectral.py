"""Convolutions that keep a map's size, as products in the frequency domain.

A convolution is a product of Fourier transforms, one small matrix product (B x C) · (C x C') for each frequency. The
transforms are products too, with a matrix along each axis of the map: for maps of 7 to 28 points a side and kernels of
5 x 5 everything together takes three to six times fewer multiplications than the sum over the kernel's points, twice as
fast on a CPU, with half its rounding errors.

Only real products appear. The first axis keeps the K = N/2 + 1 frequencies that determine a real signal, each as a real
and an imaginary part. The N points of a period need to exceed the map's n only by the half-width p of the kernel: what
wraps round at one border then falls on the zeros beyond the other.

Memory is ordered (H, W, B, C), where each of these products is one call on contiguous matrices.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sylvester.buffers import DerivedBuffers

# How many more multiplications a second the direct way does: larger products, and fewer passes over memory.
_DIRECT_IS_DENSER = 2.0

# With fewer images than this, transforming the kernel costs more than it saves.
_FEWEST = 16


def applies(x: Tensor) -> bool:
    """Whether this is the faster way for x (B, …): GPUs have their own, low precision needs the direct one."""
    exact = x.dtype in (torch.float32, torch.float64) and not torch.is_autocast_enabled("cpu")
    return exact and x.device.type == "cpu" and len(x) >= _FEWEST


def pays(in_channels: int, out_channels: int, sides: tuple[int, int], kernel: int) -> bool:
    """Whether a map of these sides is convolved faster so, by the number of multiplications for one image."""
    (height, width), (rows, columns) = sides, (side + kernel // 2 for side in sides)
    half = rows // 2 + 1
    transform = 2 * half * height * width + half * 4 * columns * width
    spectral = transform * (in_channels + out_channels) + 4 * half * columns * in_channels * out_channels
    direct = height * width * kernel**2 * in_channels * out_channels
    return direct > _DIRECT_IS_DENSER * spectral


def batched_last(x: Tensor) -> Tensor:
    """A map (B, C, H, W) as (H, W, B, C); `batched_first` undoes it. Nothing is copied but by ``contiguous``."""
    return x.permute(2, 3, 0, 1)


batched_first = batched_last  # the permutation is its own inverse


class SameConvolution(DerivedBuffers):
    """x (H, W, B, C) and a kernel (k, k, C, C') to (H, W, B, C'), zeros beyond the border, k odd.

    y_i = Σ_j x_{i+j} w_j with ``correlate``, as torch's convolutions sum, and Σ_j x_{i−j} w_j without, as its
    transposed ones do; j runs from −p to p along each axis.
    """

    rows: Tensor  # (2K, H)
    columns: Tensor  # (2, N, 2W)
    kernel_rows: Tensor  # (2K, k)
    kernel_columns: Tensor  # (2, N, 2k)
    rows_back: Tensor  # (H, 2K)

    def __init__(self, sides: tuple[int, int], kernel: int, *, correlate: bool) -> None:
        super().__init__()
        if kernel % 2 != 1:
            raise ValueError(f"Expected a kernel with a centre, of odd size; got {kernel}")
        self.sides, self.kernel, self.correlate = sides, kernel, correlate
        self.register_derived()

    def derived(self) -> dict[str, Tensor]:
        (height, width), p = self.sides, self.kernel // 2
        (n_rows, n_columns), half = (height + p, width + p), (height + p) // 2 + 1
        taps = torch.arange(-p, p + 1) * (-1 if self.correlate else 1)
        rows = _real_fourier(torch.arange(height), n_rows)
        # Every frequency but 0 and N/2 stands for its conjugate, too.
        frequency = torch.arange(half)
        weight = torch.where((frequency == 0) | (2 * frequency == n_rows), 1.0, 2.0).double() / (n_rows * n_columns)
        return {
            "rows": rows.flatten(0, 1),
            "columns": _complex_fourier(torch.arange(width), n_columns),
            "kernel_rows": _real_fourier(taps, n_rows).flatten(0, 1),
            "kernel_columns": _complex_fourier(taps, n_columns),
            "rows_back": (rows * weight[:, None, None]).flatten(0, 1).T.contiguous(),
        }

    def forward(self, x: Tensor, kernel: Tensor) -> Tensor:
        batch, out_channels = x.shape[2], kernel.shape[-1]
        x_re, x_im = _spectrum(x, self.rows, self.columns)  # (K·N, B, C) each
        w_re, w_im = _spectrum(kernel, self.kernel_rows, self.kernel_columns)  # (K·N, C, C')
        y_re = torch.bmm(x_re, w_re).baddbmm_(x_im, w_im, alpha=-1)
        y_im = torch.bmm(x_re, w_im).baddbmm_(x_im, w_re)
        # Back along the columns by the transpose, which is N times the inverse; then along the rows.
        re, im = (_each_row(matrix.T, self.rows) for matrix in self.columns)
        shape = (*re.shape[::2], batch * out_channels)  # (K, N, B·C')
        y = torch.bmm(re, y_re.reshape(shape)).baddbmm_(im, y_im.reshape(shape))  # (K, 2W, B·C')
        y = self.rows_back @ y.reshape(len(self.rows), -1)
        return y.reshape(*self.sides, batch, out_channels)


def _spectrum(x: Tensor, rows: Tensor, columns: Tensor) -> list[Tensor]:
    """The transform of x (H, W, B, C) over both its first axes, as real and imaginary parts (K·N, B, C)."""
    height, width, *rest = x.shape
    along_rows = (rows @ x.reshape(height, -1)).reshape(-1, 2 * width, math.prod(rest))  # (K, 2W, B·C)
    return [torch.bmm(_each_row(matrix, rows), along_rows).reshape(-1, *rest) for matrix in columns]


def _each_row(matrix: Tensor, rows: Tensor) -> Tensor:
    return matrix.expand(len(rows) // 2, *matrix.shape)


def _real_fourier(points: Tensor, period: int) -> Tensor:
    """Real signals at ``points`` (n,) to real and imaginary parts at K frequencies, (K, 2, n)."""
    angle = _angles(torch.arange(period // 2 + 1), points, period)
    return torch.stack([angle.cos(), -angle.sin()], 1)


def _complex_fourier(points: Tensor, period: int) -> Tensor:
    """Complex signals, their real parts before their imaginary ones, to both parts at N frequencies, (2, N, 2n)."""
    angle = _angles(torch.arange(period), points, period)
    re, im = angle.cos(), angle.sin()
    return torch.stack([torch.cat([re, im], 1), torch.cat([-im, re], 1)])


def _angles(frequencies: Tensor, points: Tensor, period: int) -> Tensor:
    turns = (frequencies[:, None] * points) % period  # in whole numbers, before anything is rounded
    return turns.double() * (2 * math.pi / period)
