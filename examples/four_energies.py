"""The four energies of Rezende & Mohamed (2015), fitted by each family.

    python examples/four_energies.py docs/figures/energies.png

p(z) ∝ e^−U(z), known up to its integral; K = 16 steps; below each picture KL(q ‖ p), a sum over a grid. The waves go on
for ever and have no integral: here they fade out beyond |z_1| = 4.
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


def crescents(z: Tensor) -> Tensor:
    sides = [-0.5 * ((z[..., 0] + side) / 0.6) ** 2 for side in (-2, 2)]
    return torch.logaddexp(*sides) - 0.5 * ((z.norm(dim=-1) - 2) / 0.4) ** 2


def ridge(z: Tensor, width: float, below: Tensor | float = 0.0) -> Tensor:
    wave, window = torch.sin(math.pi / 2 * z[..., 0]), -0.5 * (z[..., 0] / 4) ** 4
    return -0.5 * ((z[..., 1] - wave + below) / width) ** 2 + window


def parting(z: Tensor) -> Tensor:
    return torch.logaddexp(ridge(z, 0.35), ridge(z, 0.35, 3 * torch.exp(-0.5 * ((z[..., 0] - 1) / 0.6) ** 2)))


def fork(z: Tensor) -> Tensor:
    return torch.logaddexp(ridge(z, 0.4), ridge(z, 0.35, 3 * torch.sigmoid((z[..., 0] - 1) / 0.3)))


#: Minus the energies U_1, …, U_4.
ENERGIES: dict[str, Callable[[Tensor], Tensor]] = {
    "U1": crescents,
    "U2": lambda z: ridge(z, 0.4),
    "U3": parting,
    "U4": fork,
}

STEPS = 16
FAMILIES: dict[str, Callable[[], flows.Flow]] = {
    "planar": partial(flows.Planar, 2, transforms=STEPS),
    "radial": partial(flows.Radial, 2, transforms=STEPS),
    "orthogonal-sylvester": partial(flows.OrthogonalSylvester, 2, transforms=STEPS, rank=2),
    "householder-sylvester": partial(flows.HouseholderSylvester, 2, transforms=STEPS),
    "triangular-sylvester": partial(flows.TriangularSylvester, 2, transforms=STEPS),
    "affine-iaf": partial(flows.AffineIAF, 2, transforms=STEPS),
}


def square(half_width: float, cells: int) -> Tensor:  # the middles of its cells, (cells², 2)
    edge = torch.linspace(-half_width, half_width, 2 * cells + 1, dtype=torch.float64)[1::2]
    return torch.cartesian_prod(edge, edge)


@torch.no_grad()
def divergence(flow: flows.Flow, log_p: Callable[[Tensor], Tensor], cells: int = 300) -> tuple[float, float]:
    """KL(q ‖ p), and the mass of q that the grid has found: both are right where that is one. Makes q float64."""
    points, log_cell = square(9.0, cells), 2 * math.log(18.0 / cells)
    q = flow.double()()
    log_q = torch.cat([q.log_prob(part) for part in points.split(60_000)]) + log_cell
    log_ratio = log_q - log_p(points).log_softmax(0)
    return (log_q.exp() * log_ratio).sum().item(), log_q.exp().sum().item()


def main(path: str, *, steps: int = 3000, cells: int = 300) -> None:
    figure, axes = plt.subplots(4, 1 + len(FAMILIES), figsize=(8.4, 5.8), layout="constrained")
    points, shown = square(4.5, cells), {"origin": "lower", "extent": (-4.5, 4.5, -4.5, 4.5), "cmap": "magma"}
    for row, (energy, log_p) in zip(axes, ENERGIES.items(), strict=True):
        row[0].imshow(log_p(points).exp().reshape(cells, cells).T, **shown)
        row[0].set_ylabel(energy)
        for axis, (name, make) in zip(row[1:], FAMILIES.items(), strict=True):
            flow = inference.fit(log_p, make, steps=steps, tempering=0.1).flow
            kl, _ = divergence(flow, log_p, cells)
            print(f"{energy} {name}: KL(q ‖ p) = {kl:.3f} nats")
            axis.imshow(flow().log_prob(points).exp().reshape(cells, cells).T, **shown)
            axis.set_xlabel(f"{kl:.3f}", fontsize=8)
    for axis, name in zip(axes[0], ["p", *FAMILIES], strict=True):
        axis.set_title(name.replace("-", "\n"), fontsize=8)
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[])
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "energies.png")
