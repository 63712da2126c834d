"""``python -m benchmarks.linear_gaussian_gaps``: the gap report against closed forms.

In a linear-Gaussian VAE, x = W z + σ ε, the posterior has the precision Λ = I + WᵀW/σ² and the mean Λ⁻¹Wᵀx/σ². The
best diagonal Gaussian has this mean and the variances 1/Λ_ii, and lacks ½(Σ log Λ_ii − log|Λ|) nats of log p(x). A
linear encoder can give exactly that: its amortization gap is zero. That of any other is the KL divergence that its q
has beyond it. A table in Markdown goes to stdout.
"""

from __future__ import annotations

import argparse
import math

import torch
from torch import Tensor, nn
from torch.distributions import Independent, MultivariateNormal, Normal, kl_divergence

from sylvester.flows import Flow, Gaussian
from sylvester.gaps import measure
from sylvester.random import stream
from sylvester.vae import VAE

NOISE = 0.6


class Decoder(nn.Module):
    def __init__(self, weight: Tensor):
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, z: Tensor) -> Independent:
        return Independent(Normal(z @ self.weight.T, NOISE), 1)


class LinearGaussian:
    """The model with loadings N(0, scale²), for a given flow or the best linear encoder of a diagonal Gaussian."""

    def __init__(self, features: int, size: int, scale: float, flow: Flow | None = None):
        self.features = features
        self.weight = scale * torch.randn(size, features, generator=stream("loadings"), dtype=torch.float64)
        self.precision = torch.eye(features).double() + self.weight.T @ self.weight / NOISE**2
        self.to_mean = torch.linalg.solve(self.precision, self.weight.T / NOISE**2)
        covariance = self.weight @ self.weight.T + NOISE**2 * torch.eye(size).double()
        self.marginal = MultivariateNormal(torch.zeros(size).double(), covariance)
        self.vae = VAE(nn.Identity(), flow or self._best_encoder(size), Decoder(self.weight)).double()

    def _best_encoder(self, size: int) -> Gaussian:
        gaussian = Gaussian(self.features, context=size).double()
        variance = 1 / self.precision.diagonal()
        with torch.no_grad():
            gaussian.base.hypernetwork.bias.copy_(
                torch.cat([torch.zeros_like(variance), torch.log(torch.expm1(variance))])
            )
            gaussian.base.hypernetwork.weight.copy_(torch.cat([self.to_mean, torch.zeros_like(self.to_mean)]))
        return gaussian

    @torch.no_grad()
    def spoil_encoder(self) -> None:
        """Means that are off by about half a standard deviation, and variances twice as large."""
        hypernetwork = self.vae.flow.base.hypernetwork
        means, variances = hypernetwork.weight[: self.features], hypernetwork.bias[self.features :]
        error = torch.randn(means.shape, generator=stream("error"), dtype=torch.float64)
        error /= self.marginal.variance.sum().sqrt() * self.precision.diagonal().sqrt().unsqueeze(-1)
        means.add_(0.5 * error)
        variances.copy_(torch.log(torch.expm1(2 / self.precision.diagonal())))

    @property
    def approximation_gap(self) -> float:
        return 0.5 * (self.precision.diagonal().log().sum() - self.precision.logdet()).item()

    @torch.no_grad()
    def amortization_gap(self, x: Tensor) -> Tensor:
        """What the encoder's q lacks beyond the approximation gap, (N,)."""
        q = self.vae.posterior(x).base_dist.base_dist
        exact = MultivariateNormal(x @ self.to_mean.T, precision_matrix=self.precision)
        return kl_divergence(MultivariateNormal(q.loc, torch.diag_embed(q.variance)), exact) - self.approximation_gap


def off(values: Tensor, expected: float | Tensor) -> tuple[float, float]:
    """How far the mean is from what is expected, and its standard error."""
    difference = values - expected
    return difference.mean().item(), difference.std().item() / math.sqrt(len(difference))


def main() -> None:
    arguments = argparse.ArgumentParser(prog="python -m benchmarks.linear_gaussian_gaps", description=__doc__)
    arguments.add_argument("--images", type=int, default=40)
    arguments.add_argument("--steps", type=int, default=400)
    arguments.add_argument("--samples", type=int, default=1000)
    given = arguments.parse_args()
    print(
        "| D | loadings | encoder | approximation gap | exact | off by | amortization gap | exact | off by |\n"
        "|---|---|---|---|---|---|---|---|---|"
    )
    for features in (2, 8, 32):
        for scale in (0.1, 1.0, 3.0):
            for encoder in ("best", "spoiled"):
                model = LinearGaussian(features, 2 * features, scale)
                if encoder == "spoiled":
                    model.spoil_encoder()
                torch.manual_seed(0)
                x = model.marginal.sample((given.images,))
                found = measure(model.vae, x, steps=given.steps, samples=given.samples)
                cells = []
                for values, exact in (
                    (found.approximation("own"), torch.full((len(x),), model.approximation_gap)),
                    (found.amortization("own"), model.amortization_gap(x)),
                ):
                    difference, error = off(values, exact)
                    missed = " **missed**" if abs(difference) > max(0.02, 3 * error) else ""
                    mean = f"{values.mean():.3f} | {exact.mean():.3f}"
                    cells.append(f"{mean} | {difference:+.4f} ± {error:.4f}{missed}")
                print(f"| {features} | {scale:g} | {encoder} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
