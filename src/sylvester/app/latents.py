"""One image's posterior in the plane of two latents: what is true under a model, and what its q makes of it.

With two latents p(z|x) is known to any accuracy: p(x|z) p(z) on a grid, divided by its sum times the area of a cell.
So is KL(q ‖ p), which is what the bound lacks: log p(x) = ELBO + KL(q ‖ p).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor

from sylvester.app.runs import replacing
from sylvester.evaluation import log_likelihood
from sylvester.vae import VAE

__all__ = ["Plane", "by_gap", "draw", "plane"]

POINTS = 241  # on each side of the grid
WIDTH = 7.0  # standard deviations of the prior to each side, where p(z|x) is sought
CAPTION = "blue: the true posterior p(z|x); orange: q(z|x); 20, 50, 80 and 95 % of their mass; latents differ by model"
TRUE, APPROXIMATE = "Blues", "#d55e00"  # told apart with every kind of colour vision, and in grey


@dataclass(frozen=True)
class Plane:
    """Densities on a grid over z: each (n, n), the first latent along the second axis."""

    side: tuple[Tensor, Tensor]  # the coordinates of either latent, (n,)
    true: Tensor  # p(z|x)
    approximate: Tensor  # q(z|x)
    log_px: float  # from the grid
    gap: float  # KL(q ‖ p), from the grid


@torch.no_grad()
def plane(vae: VAE, image: Tensor, *, points: int = POINTS) -> Plane:
    """The posterior of one image (C, H, W) under a model with two latents, and its q, where either has its mass."""
    if vae.flow.features != 2:
        raise ValueError(f"Expected a model with 2 latents; got one with {vae.flow.features}")
    x = image[None].to(vae.origin)
    posterior = vae.posterior(x)

    def densities(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        z = torch.stack(torch.meshgrid(first, second, indexing="xy"), dim=-1)[:, :, None]  # (n, n, 1, 2)
        joint = vae.decoder(z).log_prob(x) + vae.prior_distribution().log_prob(z)
        return joint[..., 0].double(), posterior.log_prob(z)[..., 0].double()

    wide = torch.linspace(-WIDTH, WIDTH, points).to(vae.origin)
    joint, log_q = densities(wide, wide)
    mass = torch.softmax(joint.flatten(), 0).view_as(joint) + torch.softmax(log_q.flatten(), 0).view_as(log_q)
    side = tuple(_around(wide, mass.sum(axis)) for axis in (0, 1))
    joint, log_q = densities(*side)
    log_area = sum(math.log(float(axis[1] - axis[0])) for axis in side)
    log_px = float(joint.logsumexp((0, 1)) + log_area)
    gap = (log_q.exp() * (log_q - joint + log_px)).sum() * math.exp(log_area)
    first, second = side
    return Plane((first, second), (joint - log_px).exp(), log_q.exp(), log_px, float(gap))


def _around(coordinates: Tensor, mass: Tensor) -> Tensor:
    """As many coordinates where the mass is, with some room."""
    within = coordinates[mass > 1e-3 * mass.max()]
    room = 0.1 * (within[-1] - within[0]) + (coordinates[1] - coordinates[0])
    return torch.linspace(float(within[0] - room), float(within[-1] + room), len(coordinates)).to(coordinates)


def by_gap(vae: VAE, images: Tensor, *, samples: int = 200) -> list[int]:
    """The images in the order of KL(q ‖ p), as importance samples estimate it, the largest first."""
    estimate = log_likelihood(vae, images, samples)
    return (estimate.log_px - estimate.elbo).argsort(descending=True).tolist()


def draw(planes: Mapping[str, Plane], image: Tensor, path: Path) -> None:
    """One panel for each model: the true posterior as an area, q as lines around its mass, at the same shares of it."""
    figure = Figure(figsize=(3.6 * len(planes) + 1.3, 3.9), layout="constrained")
    axes = figure.subplots(1, 1 + len(planes), width_ratios=[1.1, *[3.4] * len(planes)])
    axes[0].imshow(image.float().mean(0), cmap="gray_r", vmin=0, vmax=1)
    axes[0].set(title="x", xticks=[], yticks=[])
    for axis, (name, found) in zip(axes[1:], planes.items(), strict=True):
        first, second = (side.cpu().numpy() for side in found.side)
        true, approximate = found.true.cpu(), found.approximate.cpu()
        axis.contourf(first, second, true, levels=[*_levels(true), float(true.max())], cmap=TRUE)
        axis.contour(first, second, approximate, levels=_levels(approximate), colors=APPROXIMATE, linewidths=1.6)
        axis.set(title=f"{name}\nKL(q ‖ p) = {found.gap:.2f} nats", xlabel="$z_1$", ylabel="$z_2$", aspect="equal")
        axis.set_adjustable("datalim")
    figure.supxlabel(CAPTION, fontsize=9)
    with replacing(path) as file:
        figure.savefig(file, format="png", dpi=150)


def _levels(density: Tensor, shares: tuple[float, ...] = (0.95, 0.8, 0.5, 0.2)) -> list[float]:
    """Densities above which these shares of the mass lie, increasing."""
    values = density.flatten().sort(descending=True).values
    held = values.cumsum(0) / values.sum()
    return [float(values[int((held < share).sum())]) for share in shares]
