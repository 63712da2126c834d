"""The same work as a user of the library gets it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks import tasks_reference
from benchmarks.sizes import Size
from benchmarks.tasks_reference import Task, conditioned, counted, forward_backward, images, product, without_gradient
from sylvester.app import models
from sylvester.app import training as app_training
from sylvester.app.config import FLOW_SETTINGS, Config, resolve
from sylvester.app.data import Dataset
from sylvester.evaluation import log_likelihood
from sylvester.flows import FAMILIES, Flow
from sylvester.linalg import HouseholderProduct
from sylvester.linalg import polar as polar_factor
from sylvester.objectives import elbo
from sylvester.vae import VAE


def configure(size: Size, flow: str) -> Config:
    """The application's settings of the paper's run."""
    given = {
        "latent": size.features,
        "transforms": size.transforms,
        "rank": size.rank,
        "reflections": size.reflections,
        "hidden": size.hidden,
        "batch_size": size.batch,
    }
    given = {key: value for key, value in given.items() if flow in FLOW_SETTINGS.get(key, (flow,))}
    return resolve({"preset": "paper", "architecture": "released", "flow": flow, **given})


def build(size: Size, flow: str) -> VAE:
    return models.build(configure(size, flow), (1, size.side, size.side), "bernoulli")


def training(size: Size, flow: str, condition: float | None = None) -> Task:
    vae = build(size, flow)
    if condition is not None:
        fix_condition(vae.flow.groups()[0], size, condition)
    optimizer = app_training.make_optimizer(vae, configure(size, flow))
    x = images(size, size.batch)

    def step() -> None:
        loss = -elbo(vae.log_terms(x)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def fix_condition(steps: Any, size: Size, condition: float) -> None:
    """Let the orthogonal flow orthogonalize matrices of one condition number, whatever the context."""
    hypernetwork = steps.hypernetwork
    sizes = [row.size for row in hypernetwork.table.values()]
    place = list(hypernetwork.table).index("raw_q")
    shape = (hypernetwork.steps, hypernetwork.outputs)
    with torch.no_grad():
        hypernetwork.weight.unflatten(0, shape).split(sizes, 1)[place].zero_()
        hypernetwork.bias.unflatten(0, shape).split(sizes, 1)[place].copy_(conditioned(size, condition).flatten(1))


def nll(size: Size, flow: str, samples: int | None = None) -> Task:
    vae, x = build(size, flow), images(size, 1)
    return lambda: log_likelihood(vae, x, samples or size.samples)


def flow(size: Size, flow: str, backward: bool = False, samples: int = 1, batch: int | None = None) -> Task:
    module = build(size, flow).flow
    h = torch.randn(size.batch if batch is None else batch, size.context)
    return drawing(lambda: module(h).rsample_and_log_prob((samples,)), module, backward)


def family(size: Size, flow: str, conditional: bool, density: bool = False, backward: bool = False) -> Task:
    """A flow that a peer has too, by itself: a sample of the batch with its log-density, or the density of points."""
    options = {"hidden_features": size.hidden} if flow in FLOW_SETTINGS["hidden"] else {}
    make: Callable[..., Flow] = FAMILIES[flow]
    module = make(size.features, size.context if conditional else 0, size.transforms, init="torch", **options)
    contexts = (torch.randn(size.batch, size.context),) if conditional else ()
    shape = () if conditional else (size.batch,)
    points = torch.randn(size.batch, size.features)

    def density_of_points() -> tuple[Tensor, Tensor]:
        return points, module(*contexts).log_prob(points)

    sample = density_of_points if density else lambda: module(*contexts).rsample_and_log_prob(shape)
    return drawing(sample, module, backward)


def drawing(sample: Callable[[], tuple[Tensor, Tensor]], module: torch.nn.Module, backward: bool) -> Task:
    return forward_backward(sample, list(module.parameters())) if backward else without_gradient(sample)


def chain(size: Size, flow: str, inverse: bool = False) -> Task:
    """The steps of one bound flow: z and log q from noise, or log q at points through the inverse."""
    with torch.no_grad():
        posterior = build(size, flow).flow(torch.randn(size.batch, size.context))
        points = posterior.sample()
    noise = torch.randn(size.batch, size.features)
    other = points + 0.01 * noise  # not a sample that the distribution remembers
    return without_gradient(
        (lambda: posterior.log_prob(other)) if inverse else lambda: posterior.rsample_and_log_prob(noise=noise)
    )


def polar(size: Size) -> Task:
    a = torch.randn(size.batch * size.transforms, size.features, size.rank, requires_grad=True)
    return lambda: torch.autograd.grad(polar_factor(a).sum(), a)


def householder(size: Size) -> Task:
    count = size.batch * size.transforms
    v = torch.randn(count, size.reflections, size.features, requires_grad=True)
    z = torch.randn(count, size.features)

    def task() -> None:
        q = HouseholderProduct(v)
        torch.autograd.grad(q.matvec(torch.tanh(q.rmatvec(z))).sum(), v)

    return task


def epoch(size: Size, flow: str, data: str) -> Task:
    """As the application trains: its loop, its figures, its streams of randomness."""
    config = configure(size, flow)
    x = torch.load(data)
    dataset = Dataset(
        name="images",
        train=x,
        valid=x[:1],
        test=x[:1],
        likelihood="bernoulli",
        dynamic=False,
        sha256={},
        source="files",
    )
    fabric = app_training.make_fabric(config)
    vae = build(size, flow)
    model, optimizer = fabric.setup(vae, app_training.make_optimizer(vae, config))
    model.mark_forward_method("log_terms")
    arguments = (fabric, model, optimizer, dataset, config, 1, 1.0, app_training.ignore)
    return lambda: app_training.train_epoch(*arguments)


def decoder(size: Size) -> Task:
    vae, z = build(size, "gaussian"), torch.randn(size.batch, size.features)
    return counted(without_gradient(lambda: vae.decoder(z)), tasks_reference.decoder(size))


def counted_training(size: Size, flow: str) -> Task:
    return counted(training(size, flow), tasks_reference.training(size, flow))


TASKS: dict[str, Callable[..., Task]] = {
    task.__name__: task
    for task in (training, nll, flow, family, chain, polar, householder, epoch, product, decoder, counted_training)
}
