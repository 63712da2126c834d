"""Watch a flow bend a Gaussian into two crescents.

    python examples/bend_a_gaussian.py docs/figures/bend.png

The flow is fitted to an unnormalised log-density by maximising the bound E_q[log p(z) − log q(z)]; the picture shows
samples after every other step, blue where they began on the Gaussian's left and orange on its right, and the exact
density q at the end.
"""

from __future__ import annotations

import math
import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from matplotlib.colors import LinearSegmentedColormap

import sylvester


def log_crescents(z: torch.Tensor) -> torch.Tensor:
    """Two crescents facing each other (energy U₁ of Rezende & Mohamed, 2015)."""
    ring = -0.5 * ((z.norm(dim=-1) - 2) / 0.4) ** 2
    left, right = -0.5 * ((z[..., 0] + 2) / 0.6) ** 2, -0.5 * ((z[..., 0] - 2) / 0.6) ** 2
    return ring + torch.logaddexp(left, right)


def fit(flow: sylvester.flows.Flow, steps: int = 2000) -> float:
    optimizer = torch.optim.Adam(flow.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for step in range(steps):
        beta = min(1.0, 0.1 + step / (steps / 2))  # flatten the target first, so that both modes are found
        z, log_q = flow().rsample_and_log_prob((256,))
        bound = (beta * log_crescents(z) - log_q).mean()
        optimizer.zero_grad()
        (-bound).backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        z, log_q = flow().rsample_and_log_prob((20_000,))
        return (log_crescents(z) - log_q).mean().item()


def draw(flow: sylvester.flows.Flow, path: str) -> None:
    with torch.no_grad():
        posterior = flow()
        chain = [z for z, _ in posterior.trajectory((4000,))]
        shown = chain[::2]
        place = chain[0][:, 0].argsort().argsort()
        colours = LinearSegmentedColormap.from_list("ends", ["#2e9fe6", "#f4f4f4", "#ff9500"])
        figure, axes = plt.subplots(1, len(shown) + 1, figsize=(8.4, 1.65), layout="constrained")
        for k, (axis, z) in enumerate(zip(axes, shown, strict=False)):
            axis.scatter(*z.T, c=place, cmap=colours, s=0.9, linewidths=0)
            axis.set_title(f"{2 * k} steps" if k else "Gaussian", fontsize=9)
        grid = torch.cartesian_prod(*[torch.linspace(-4, 4, 161)] * 2)
        density = posterior.log_prob(grid).exp().reshape(161, 161).T
        axes[-1].imshow(density, origin="lower", extent=(-4, 4, -4, 4), cmap="magma")
        axes[-1].set_title("exact density q", fontsize=9)
    for axis in axes:
        axis.set(xlim=(-4, 4), ylim=(-4, 4), xticks=[], yticks=[], aspect="equal", facecolor="#000004")
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    torch.manual_seed(0)
    flow = sylvester.flows.TriangularSylvester(features=2, transforms=8)
    bound = fit(flow)
    grid = torch.cartesian_prod(*[torch.linspace(-8, 8, 801)] * 2)
    log_z = torch.logsumexp(log_crescents(grid), 0) + 2 * math.log(16 / 800)
    print(f"bound {bound:.3f} of at most {log_z:.3f} nats")
    draw(flow, sys.argv[1] if len(sys.argv) > 1 else "bend.png")
