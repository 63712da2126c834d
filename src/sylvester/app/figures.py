"""Contact sheets of images as PNG."""

from __future__ import annotations

import io
import math
from pathlib import Path

import matplotlib.image
import numpy as np
import torch
from torch import Tensor

from sylvester.app.runs import replacing
from sylvester.vae import VAE

TILE = 56  # pixels: smaller images are enlarged by a whole factor to about this size


def contact_sheet(images: Tensor, *, columns: int | None = None) -> bytes:
    """A PNG of images (N, C, H, W) with values in [0, 1], row by row with thin lines between them.

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
    content = io.BytesIO()
    matplotlib.image.imsave(content, sheet, format="png")
    return content.getvalue()


def write(sheet: bytes, path: Path) -> None:
    with replacing(path) as file:
        file.write(sheet)


def samples(vae: VAE, count: int, *, seed: int = 0) -> bytes:
    """Means of the decoder at ``count`` draws from the prior."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return contact_sheet(vae.sample(count, mean=True))


def reconstructions(vae: VAE, images: Tensor, *, columns: int = 10, seed: int = 0) -> bytes:
    """Rows of images, each with the row of their reconstructions below it."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        again = vae.reconstruct(images.to(vae.origin))
    pairs = zip(images.split(columns), again.cpu().split(columns), strict=True)
    return contact_sheet(torch.cat([row for pair in pairs for row in pair]), columns=columns)


@torch.no_grad()
def interpolations(vae: VAE, images: Tensor, *, columns: int = 10, seed: int = 0) -> bytes:
    """A row for each two images (2n, C, H, W), first and last: between them, means of the decoder on the way.

    The way is a great circle from one draw of the posterior to the other, its length changing evenly: points of a
    straight line would be nearer to zero than almost all draws from the prior.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        start, end = vae.posterior(images.to(vae.origin)).sample().unflatten(0, (-1, 2)).unbind(1)  # (n, D)
    share = torch.linspace(0, 1, columns - 2).to(start)[:, None, None]  # (T, 1, 1)
    lengths = [z.norm(dim=-1, keepdim=True) for z in (start, end)]
    units = [z / length for z, length in zip((start, end), lengths, strict=True)]
    angle = (units[0] * units[1]).sum(-1, keepdim=True).clamp(-1, 1).acos()
    apart = angle.sin() > 1e-3  # otherwise the circle is a line, or any of many
    safe = torch.where(apart, angle, torch.ones_like(angle))
    turned = [((1 - share) * safe).sin() / safe.sin(), (share * safe).sin() / safe.sin()]
    circle = (turned[0] * units[0] + turned[1] * units[1]) * ((1 - share) * lengths[0] + share * lengths[1])
    z = torch.where(apart, circle, (1 - share) * start + share * end)  # (T, n, D)
    between = vae.decoder(z).mean.transpose(0, 1).to(images)  # (n, T, C, H, W)
    first, last = images.unflatten(0, (-1, 2)).split(1, dim=1)
    return contact_sheet(torch.cat([first, between, last], dim=1).flatten(0, 1), columns=columns)
