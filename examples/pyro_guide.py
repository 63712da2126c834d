"""A flow as Pyro's guide: eight schools, whose posterior is a funnel that no Gaussian fits.

    python examples/pyro_guide.py docs/figures/pyro.png

The picture shows draws by NUTS, by Pyro's Gaussian guide and by a flow, after the same number of steps at the same
learning rate. A larger rate suits the Gaussian better, and leaves it a Gaussian.
"""

from __future__ import annotations

import argparse
from functools import partial

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.infer import MCMC, NUTS, SVI, Predictive, Trace_ELBO
from pyro.infer.autoguide import AutoGuide, AutoMultivariateNormal
from pyro.infer.reparam import LocScaleReparam
from torch import Tensor

from sylvester.contrib.pyro import AutoFlow, log_density
from sylvester.diagnostics import diagnose
from sylvester.flows import AffineIAF

EFFECTS = torch.tensor([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
ERRORS = torch.tensor([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])


def schools() -> None:
    """What coaching does in eight schools (Rubin, 1981): effects theta that differ by tau."""
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = pyro.sample("tau", dist.HalfCauchy(5.0))
    with pyro.plate("schools", 8):
        theta = pyro.sample("theta", dist.Normal(mu, tau))
        pyro.sample("y", dist.Normal(theta, ERRORS), obs=EFFECTS)


def fit(guide: AutoGuide, steps: int) -> dict[str, Tensor]:
    pyro.clear_param_store()
    optimizer = pyro.optim.ClippedAdam({"lr": 0.03, "lrd": 0.01 ** (1 / steps)})
    svi = SVI(schools, guide, optimizer, Trace_ELBO(num_particles=16, vectorize_particles=True, max_plate_nesting=1))
    for _ in range(steps):
        svi.step()
    print(f"{type(guide).__name__}: {diagnose(log_density(guide), guide.get_posterior())}")
    with torch.no_grad():
        return Predictive(schools, guide=guide, num_samples=4000, parallel=True)()


def nuts(samples: int) -> dict[str, Tensor]:
    flat = poutine.reparam(schools, config={"theta": LocScaleReparam(0.0)})  # the funnel stops NUTS, too
    kernel = NUTS(flat, jit_compile=True, ignore_jit_warnings=True)
    chain = MCMC(kernel, samples, warmup_steps=samples // 4, disable_progbar=True)
    chain.run()
    draws = chain.get_samples()
    theta = draws["mu"].unsqueeze(-1) + draws["tau"].unsqueeze(-1) * draws["theta_decentered"]
    return draws | {"theta": theta}


def draw(columns: dict[str, dict[str, Tensor]], path: str) -> None:
    figure, axes = plt.subplots(1, 4, figsize=(8.4, 2.5), layout="constrained")
    colours = ["#808080", "#d55e00", "#0072b2"]  # told apart with every kind of colour vision
    for axis, colour, (name, draws) in zip(axes, colours, columns.items(), strict=False):
        tau, theta = draws["tau"].reshape(-1), draws["theta"].reshape(-1, 8)[:, 0]
        axis.scatter(theta, tau.log(), s=2, alpha=0.35, linewidths=0, color=colour)
        axis.set(xlim=(-25, 45), ylim=(-4, 4), xlabel=r"$\theta_1$", yticks=[-4, -2, 0, 2, 4])
        axis.set_title(name, fontsize=9)
        axes[-1].hist(
            tau, bins=60, range=(0, 20), density=True, histtype="step", color=colour, linewidth=1.5, label=name
        )
    axes[0].set_ylabel(r"$\log\,\tau$")
    axes[-1].set(xlabel=r"$\tau$", yticks=[])
    axes[-1].set_title("how much schools differ", fontsize=9)
    axes[-1].legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", nargs="?", default="pyro.png", help="the picture's file")
    parser.add_argument("--steps", type=int, default=1000, help="of each guide; as many samples of NUTS")
    given = parser.parse_args()
    pyro.set_rng_seed(0)
    columns = {
        "NUTS": nuts(given.steps),
        "Gaussian guide": fit(AutoMultivariateNormal(schools), given.steps),
        "flow": fit(AutoFlow(schools, partial(AffineIAF, transforms=2)), given.steps),
    }
    draw(columns, given.path)
