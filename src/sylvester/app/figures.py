"""Contact sheets of images as PNG files."""

from __future__ import annotations

import math
from pathlib import Path

import matplotlib.image
import numpy as np
import torch
from torch import Tensor

from sylvester.app.runs import replacing
from sylvester.vae import VAE

TILE = 56  # pixels: smaller images are enlarged by a whole factor to about this size


def contact_sheet(images: Tensor, path: Path, *, columns: int | None = None) -> None:
    """Images (N, C, H, W) with values in [0, 1], row by row with thin lines between them.

    Three channels are colours; of any other number each is grey, from left to right.
    """
    if images.shape[1] not in (1, 3):
        images = torch.cat(images.split(1, dim=1), dim=3)
    count, _, height, width = images.shape
    columns = columns or math.ceil(math.sqrt(count))
    rows, scale = math.ceil(count / columns), max(1, TILE // max(height, width))
    tiles = images.detach().float().clamp(0, 1).permute(0, 2, 3, 1).cpu().numpy()
    tiles = tiles.repeat(scale, axis=1).repeat(scale, axis=2)  # (N, h, w, C)
    step_y, step_x = scale * height + 1, scale * width + 1
    sheet = np.full((rows * step_y + 1, columns * step_x + 1, 3), 0.5, dtype=np.float32)
    for index, tile in enumerate(tiles):
        y, x = 1 + index // columns * step_y, 1 + index % columns * step_x
        sheet[y : y + scale * height, x : x + scale * width] = tile
    with replacing(path) as file:
        matplotlib.image.imsave(file, sheet, format="png")


def samples(vae: VAE, path: Path, count: int, *, seed: int = 0) -> None:
    """Means of the decoder at ``count`` draws from the prior."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        contact_sheet(vae.sample(count, mean=True), path)


def reconstructions(vae: VAE, images: Tensor, path: Path, *, columns: int = 10, seed: int = 0) -> None:
    """Rows of images, each with the row of their reconstructions below it."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        again = vae.reconstruct(images.to(vae.origin))
    pairs = zip(images.split(columns), again.cpu().split(columns), strict=True)
    contact_sheet(torch.cat([row for pair in pairs for row in pair]), path, columns=columns)
