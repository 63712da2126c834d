"""A flow as the posterior of a VAE that is your own: three lines change, here marked with →.

    python examples/posterior_in_your_vae.py docs/figures/your-vae.png

The same model is trained with a Gaussian and with a Sylvester posterior. With two latents the true p(z|x) can be drawn:
blue areas, beside the q that each model has learned for the same digits, orange lines.
"""

from __future__ import annotations

import argparse

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy

from sylvester.app.data import load
from sylvester.flows import Flow, Gaussian, TriangularSylvester


class MyVAE(nn.Module):
    def __init__(self, flow: Flow) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 200), nn.ReLU(), nn.Linear(200, 64))
        self.flow = flow  # → where two linear layers made a mean and a variance
        self.decoder = nn.Sequential(nn.Linear(2, 200), nn.ReLU(), nn.Linear(200, 64))

    def posterior(self, x: Tensor) -> torch.distributions.Distribution:
        return self.flow(self.encoder(x))  # → a torch distribution

    def log_likelihood(self, x: Tensor, z: Tensor) -> Tensor:
        return -cross_entropy(*torch.broadcast_tensors(self.decoder(z), x), reduction="none").sum(-1)

    def bound(self, x: Tensor, beta: float = 1.0) -> Tensor:
        z, log_q = self.posterior(x).rsample_and_log_prob()  # → a sample, and its log-density at no further cost
        return self.log_likelihood(x, z) - beta * (log_q - log_prior(z))


def log_prior(z: Tensor) -> Tensor:
    return torch.distributions.Normal(0.0, 1.0).log_prob(z).sum(-1)


def train(model: MyVAE, x: Tensor, steps: int) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for step in range(steps):
        batch = x[torch.randint(len(x), (100,))]
        loss = -model.bound(batch, beta=min(1.0, 4 * (step + 1) / steps)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


@torch.no_grad()
def draw(models: dict[str, MyVAE], images: Tensor, path: str) -> None:
    side = torch.linspace(-3.5, 3.5, 161)
    z = torch.stack(torch.meshgrid(side, side, indexing="xy"), -1).unsqueeze(-2)  # (n, n, 1, 2)
    figure, axes = plt.subplots(len(models) + 1, len(images), figsize=(8.4, 5.1), layout="constrained")
    for axis, image in zip(axes[0], images, strict=True):
        axis.imshow(image.reshape(8, 8), cmap="gray_r")
    for row, (name, model) in zip(axes[1:], models.items(), strict=True):
        log_joint = model.log_likelihood(images, z) + log_prior(z)
        true = log_joint.flatten(0, 1).softmax(0).unflatten(0, (161, 161))
        q = model.posterior(images).log_prob(z).exp()
        row[0].set_ylabel(name)
        for k, axis in enumerate(row):
            levels, shares = 1.0 * torch.arange(9) / 8, [("#0072b2", level / 8) for level in range(8)]
            axis.contourf(side, side, true[..., k] / true[..., k].max(), levels=levels, colors=shares)
            axis.contour(side, side, q[..., k], levels=4, colors="#d55e00", linewidths=1.2)
            rows, columns = (true[..., k].sum(other) > 1e-5 for other in (1, 0))
            axis.set(xlim=side[columns][[0, -1]].tolist(), ylim=side[rows][[0, -1]].tolist())
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[])
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description="A flow as the posterior of your own VAE.")
    arguments.add_argument("path", nargs="?", default="your-vae.png")
    arguments.add_argument("--steps", type=int, default=2000)
    given = arguments.parse_args()
    data = load("digits")
    train_images, test = data.train.flatten(1), data.test.flatten(1)
    models = {}
    for name, family in {"Gaussian": Gaussian, "Sylvester": TriangularSylvester}.items():
        torch.manual_seed(0)
        models[name] = MyVAE(family(2, context=64, transforms=8))
        train(models[name], train_images, given.steps)
        with torch.no_grad():
            bound = torch.stack([models[name].bound(test) for _ in range(100)]).mean()
        print(f"{name}: test ELBO {bound:.2f} nats")
    draw(models, test[:5], given.path)
