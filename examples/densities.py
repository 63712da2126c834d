"""Densities in the plane, learnt from samples by maximum likelihood.

    python examples/densities.py docs/figures/densities.png

Each family fits the same 5,000 points; above each picture the mean log-likelihood of 10,000 new ones, in nats.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import partial

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from torch import Tensor

from sylvester import flows, inference


def moons(n: int) -> Tensor:
    angle, upper = math.pi * torch.rand(n), (torch.rand(n) < 0.5).float()
    x = torch.stack([angle.cos() + 1 - upper, (2 * upper - 1) * angle.sin() + 0.5 * (1 - upper)], -1)
    return 2.3 * (x - torch.tensor([0.5, 0.25])) + 0.15 * torch.randn(n, 2)


def spirals(n: int) -> Tensor:
    turn, sign = 3 * math.pi * torch.rand(n).sqrt(), 2.0 * (torch.rand(n) < 0.5) - 1
    return 0.4 * (sign * turn * torch.stack([turn.cos(), turn.sin()])).T + 0.12 * torch.randn(n, 2)


def checkerboard(n: int) -> Tensor:
    first = 4 * torch.rand(n) - 2
    second = torch.rand(n) + 2 * torch.randint(-1, 1, (n,)) + first.floor() % 2
    return 1.9 * torch.stack([first, second], -1)


def pinwheel(n: int) -> Tensor:
    arm = 2 * math.pi / 5 * torch.randint(5, (n,))
    radius, across = 1.5 + 0.5 * torch.randn(n), 0.12 * torch.randn(n)
    angle = arm + 0.5 * radius
    along, normal = torch.stack([angle.cos(), angle.sin()]), torch.stack([-angle.sin(), angle.cos()])
    return 1.6 * (radius * along + across * normal).T


DATA: dict[str, Callable[[int], Tensor]] = {
    "two moons": moons,
    "two spirals": spirals,
    "checkerboard": checkerboard,
    "pinwheel": pinwheel,
}

#: Those whose log-density takes one pass; a Sylvester flow's does once its steps are turned round.
FAMILIES: dict[str, Callable[[], flows.Flow]] = {
    "Sylvester, inverted": lambda: flows.inverted(flows.TriangularSylvester(2, transforms=16)),
    "Real NVP": partial(flows.RealNVP, 2, transforms=8),
    "NSF": partial(flows.NSF, 2, transforms=4),
}


def main(path: str, *, points: int = 5000, epochs: int = 60, cells: int = 200) -> None:
    torch.manual_seed(0)
    figure, axes = plt.subplots(len(DATA), 1 + len(FAMILIES), figsize=(7.6, 8.2), layout="constrained")
    edge, corners = torch.linspace(-4.5, 4.5, cells), (-4.5, 4.5, -4.5, 4.5)
    grid = torch.cartesian_prod(edge, edge)
    for row, (data, draw) in zip(axes, DATA.items(), strict=True):
        x, new = draw(points), draw(10_000)
        row[0].scatter(*x.T, s=0.6, linewidths=0, color="#fec488")
        row[0].set(xlim=(-4.5, 4.5), ylim=(-4.5, 4.5), aspect="equal", facecolor="#000004")
        row[0].set_title(data, fontsize=9)
        for axis, (name, make) in zip(row[1:], FAMILIES.items(), strict=True):
            q = inference.fit_density(make(), x, epochs=epochs, learning_rate=5e-3).flow()
            with torch.no_grad():
                score = q.log_prob(new).mean().item()
                density = q.log_prob(grid).exp().reshape(cells, cells).T
            print(f"{data}, {name}: {score:.3f} nats")
            axis.imshow(density, origin="lower", extent=corners, cmap="magma", vmax=density.quantile(0.998).item())
            axis.set_title(f"{name}: {score:.2f}", fontsize=9)
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[])
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "densities.png")
