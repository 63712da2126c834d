"""A posterior on a grid, against the closed forms of a linear-Gaussian model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from matplotlib.image import imread
from torch import Tensor, nn
from torch.distributions import Distribution, Independent, MultivariateNormal, Normal, kl_divergence

from sylvester.app.latents import by_gap, draw, plane
from sylvester.flows import Gaussian
from sylvester.vae import VAE

NOISE = 0.7


class Linear(nn.Module):
    """x = W z + b + NOISE ε, as images of 1 x 1 x 3."""

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias

    def forward(self, z: Tensor) -> Distribution:
        mean = (z @ self.weight.T + self.bias).unflatten(-1, (1, 1, 3))
        return Independent(Normal(mean, NOISE), 3)


@pytest.fixture(params=[0.1, 1.0, 3.0])
def case(request: pytest.FixtureRequest) -> tuple[VAE, Tensor, MultivariateNormal, Tensor]:
    """A model, an image, its exact posterior and log p(x)."""
    torch.manual_seed(5)
    weight, bias = request.param * torch.randn(3, 2).double(), torch.randn(3).double()
    vae = VAE(nn.Sequential(nn.Flatten(), nn.Linear(3, 4)), Gaussian(2, context=4), Linear(weight, bias)).double()
    for parameter in vae.flow.parameters():
        nn.init.normal_(parameter, std=0.5)
    x = torch.randn(3).double()
    covariance = torch.linalg.inv(torch.eye(2) + weight.T @ weight / NOISE**2)
    mean = covariance @ weight.T @ (x - bias) / NOISE**2
    marginal = MultivariateNormal(bias, weight @ weight.T + NOISE**2 * torch.eye(3).double())
    return vae, x.view(1, 1, 3), MultivariateNormal(mean, covariance), marginal.log_prob(x)


def test_the_grid_has_the_posterior_the_likelihood_and_the_gap(
    case: tuple[VAE, Tensor, MultivariateNormal, Tensor],
) -> None:
    vae, image, posterior, log_px = case
    found = plane(vae, image)
    z = torch.stack(torch.meshgrid(*found.side, indexing="xy"), -1)
    torch.testing.assert_close(found.true, posterior.log_prob(z).exp(), rtol=2e-2, atol=1e-3)
    assert found.log_px == pytest.approx(float(log_px), abs=1e-2)
    q = vae.posterior(image[None])
    base = q.base_dist.base_dist
    approximate = MultivariateNormal(base.mean[0], torch.diag(base.variance[0]))
    torch.testing.assert_close(found.approximate, approximate.log_prob(z).exp(), rtol=1e-6, atol=1e-9)
    assert found.gap == pytest.approx(kl_divergence(approximate, posterior).item(), rel=2e-2, abs=1e-2)


def test_the_image_with_the_largest_gap_comes_first(case: tuple[VAE, Tensor, MultivariateNormal, Tensor]) -> None:
    vae, image, *_ = case
    images = torch.stack([image, image + 4])
    gaps = [plane(vae, one).gap for one in images]
    assert by_gap(vae, images, samples=2000)[0] == max(range(2), key=gaps.__getitem__)


def test_the_picture_has_a_panel_for_each_model(
    case: tuple[VAE, Tensor, MultivariateNormal, Tensor], tmp_path: Path
) -> None:
    vae, image, *_ = case
    found = plane(vae, image, points=61)
    draw({"one": found, "two": found}, image, tmp_path / "two.png")
    draw({"one": found}, image, tmp_path / "one.png")
    two, one = imread(tmp_path / "two.png"), imread(tmp_path / "one.png")
    assert two.shape[1] > one.shape[1] > 300
    assert two.std() > 0.05


def test_other_numbers_of_latents_are_refused() -> None:
    vae = VAE(nn.Linear(3, 4), Gaussian(3, context=4), Linear(torch.zeros(3, 3), torch.zeros(3)))
    with pytest.raises(ValueError, match="Expected a model with 2 latents; got one with 3"):
        plane(vae, torch.zeros(3))
