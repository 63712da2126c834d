"""Bayesian logistic regression on real data: flows beside NUTS.

    pip install scikit-learn pyro-ppl
    python examples/logistic_regression.py docs/figures/logistic.png

Breast cancer in Wisconsin: malignant or benign from ten measurements of cells, of which several say nearly the same, so
that the posterior is narrow in some directions, long in others, and skewed. One log-density serves both.
"""

from __future__ import annotations

import sys
import time
from functools import partial

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from pyro.infer import MCMC, NUTS
from sklearn.datasets import load_breast_cancer
from torch import Tensor
from torch.distributions import Bernoulli, Normal

from sylvester import flows, inference

NAMES = ["intercept", *load_breast_cancer().feature_names[:10]]
FAMILIES = {
    "Gaussian": flows.Gaussian,
    "Sylvester": partial(flows.TriangularSylvester, transforms=8),
    "affine IAF": partial(flows.AffineIAF, transforms=4),
}
COLOURS = ["#808080", "#d55e00", "#0072b2", "#009e73"]  # told apart with every kind of colour vision
LEVELS = torch.tensor([0.05, 0.25, 0.5, 0.75, 0.95])


def data() -> tuple[Tensor, Tensor]:
    """Standardized measurements with a column of ones, and whether the tumour is malignant."""
    x, benign = load_breast_cancer(return_X_y=True)
    x = torch.tensor(x[:, :10], dtype=torch.float32)
    return torch.cat([torch.ones(len(x), 1), (x - x.mean(0)) / x.std(0)], 1), torch.tensor(1.0 - benign).float()


X, Y = data()


def log_density(w: Tensor) -> Tensor:
    """log p(y, w) for weights w ~ N(0, 5²)."""
    return Normal(0.0, 5.0).log_prob(w).sum(-1) + Bernoulli(logits=w @ X.T).log_prob(Y).sum(-1)


def nuts(draws: int, warmup: int) -> Tensor:
    kernel = NUTS(potential_fn=lambda parameters: -log_density(parameters["w"]), full_mass=True)
    sampler = MCMC(kernel, draws, warmup_steps=warmup, initial_params={"w": torch.zeros(11)}, disable_progbar=True)
    sampler.run()
    return sampler.get_samples()["w"]


def main(path: str, *, steps: int = 5000, draws: int = 2000, warmup: int = 500) -> None:
    torch.manual_seed(0)
    began = time.perf_counter()
    truth = nuts(draws, warmup)
    print(f"NUTS: {draws} draws in {time.perf_counter() - began:.0f} s")
    quantiles, spread = truth.quantile(LEVELS, 0), truth.std(0)
    found = {}
    for name, make in FAMILIES.items():
        began = time.perf_counter()
        fit = inference.fit(log_density, partial(make, 11), steps=steps)
        found[name] = fit.draws(draws, resample=False)
        off = ((found[name].quantile(LEVELS, 0) - quantiles) / spread).abs().max()
        print(f"{name}: quantiles off by at most {off:.2f} sd, {time.perf_counter() - began:.0f} s. {fit.diagnosis}")
    centred = (truth - truth.mean(0)) / spread
    skewed = centred.pow(3).mean(0).abs().argmax().item()
    correlation = torch.corrcoef(truth.T).fill_diagonal_(0)
    first, second = divmod(correlation.abs().argmax().item(), 11)
    figure = plt.figure(figsize=(8.4, 3.9), layout="constrained")
    left, right = figure.subfigures(1, 2)
    axis = left.subplots()
    axes = right.subplots(2, 2, sharex=True, sharey=True).flat
    bins = torch.linspace(*truth[:, skewed].aminmax(), 41)
    for plane, colour, (name, z) in zip(axes, COLOURS, ({"NUTS": truth} | found).items(), strict=True):
        axis.hist(z[:, skewed].numpy(), bins, density=True, histtype="step", color=colour, label=name, linewidth=1.4)
        plane.scatter(z[:, first], z[:, second], s=1.5, color=colour, linewidths=0)
        plane.set_title(name, fontsize=9)
    axis.set(xlabel=f"weight of {NAMES[skewed]}", yticks=[])
    axis.legend(fontsize=8, frameon=False)
    right.supxlabel(f"weight of {NAMES[first]}", fontsize=10)
    right.supylabel(f"weight of {NAMES[second]}", fontsize=10)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "logistic.png")
