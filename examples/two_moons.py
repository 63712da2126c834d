"""Simulation-based inference: a posterior from nothing but simulated pairs (θ, x), for any x at once.

    python examples/two_moons.py docs/figures/two-moons.png

θ is uniform on a square; the simulator puts x on a small crescent that θ moves. Its posterior is two thin crescents
(Greenberg et al., 2019). A conditional flow is fitted to the pairs by maximum likelihood, on the square by `onto`, and
drawn for three observations within the exact posterior, which here is known. Another family is one word to change.
"""

from __future__ import annotations

import argparse
import math

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from torch import Tensor
from torch.distributions import constraints

from sylvester.flows import MAF, onto
from sylvester.inference import fit_density

FAMILY = MAF
OBSERVED = torch.tensor([[0.0, 0.0], [-0.3, 0.4], [-0.6, -0.2]])


def simulate(theta: Tensor) -> Tensor:
    angle = math.pi * (torch.rand(len(theta)) - 0.5)
    radius = 0.1 + 0.01 * torch.randn(len(theta))
    crescent = torch.stack([radius * angle.cos() + 0.25, radius * angle.sin()], -1)
    return crescent + shift(theta)


def shift(theta: Tensor) -> Tensor:
    first, second = theta.unbind(-1)
    return torch.stack([-(first + second).abs(), second - first], -1) / math.sqrt(2)


def exact_log_density(theta: Tensor, x: Tensor) -> Tensor:
    """log p(x|θ): a point p of the crescent has the density N(r; 0.1, 0.01²)/(π r), right of its centre."""
    right, up = (x - shift(theta) - torch.tensor([0.25, 0.0])).unbind(-1)
    radius = torch.hypot(right, up)
    log_normal = torch.distributions.Normal(0.1, 0.01).log_prob(radius)
    return torch.where(right > 0, log_normal - (math.pi * radius).log(), -math.inf)


@torch.no_grad()
def draw(flow: torch.nn.Module, path: str) -> None:
    side = torch.linspace(-1, 1, 801)
    grid = torch.stack(torch.meshgrid(side, side, indexing="xy"), -1)
    figure, axes = plt.subplots(1, len(OBSERVED), figsize=(8.4, 3.1), layout="constrained")
    for axis, x in zip(axes, OBSERVED, strict=True):
        log_p = exact_log_density(grid, x)
        theta = flow(x).sample((4000,))
        axis.scatter(*theta.T, s=1.2, c="#d55e00", linewidths=0, alpha=0.7)
        axis.contour(side, side, (log_p - log_p.max()).exp(), levels=[0.05], colors="#0072b2", linewidths=1.2)
        center = (log_p - log_p.max()).exp() > 0.05
        inside = grid[center]
        low, high = inside.amin(0) - 0.1, inside.amax(0) + 0.1
        axis.set(xlim=(low[0], high[0]), ylim=(low[1], high[1]), title=f"x = ({x[0]:.1f}, {x[1]:.1f})")
        axis.set(xlabel=r"$\theta_1$", ylabel=r"$\theta_2$")
    figure.savefig(path, dpi=140)


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description="Two moons: simulation-based inference.")
    arguments.add_argument("path", nargs="?", default="two-moons.png")
    arguments.add_argument("--simulations", type=int, default=20_000)
    arguments.add_argument("--epochs", type=int, default=60)
    given = arguments.parse_args()
    torch.manual_seed(0)
    theta = 2 * torch.rand(given.simulations, 2) - 1
    x = simulate(theta)
    start = onto(FAMILY(2, context=2, transforms=8, hidden_features=64), constraints.interval(-1.0, 1.0))
    result = fit_density(start, theta, context=x, epochs=given.epochs)
    new = 2 * torch.rand(5000, 2) - 1
    observed = simulate(new)
    with torch.no_grad():
        log_q = result.flow(observed).log_prob(new).mean()
    print(result)
    print(f"mean log q(θ|x) of 5,000 new pairs: {log_q:.3f} nats")
    draw(result.flow, given.path)
