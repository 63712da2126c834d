"""The same work as a user of the library gets it.

Public names alone at the top, so that another version of the library can be given the same work (``--against``); a task
that knows more about the inside imports it for itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks import tasks_reference
from benchmarks.sizes import Size
from benchmarks.tasks_reference import Task, conditioned, counted, forward_backward, images, product, without_gradient
from sylvester.evaluation import log_likelihood
from sylvester.flows import FAMILIES, Flow
from sylvester.objectives import elbo
from sylvester.optim import Adamax
from sylvester.vae import VAE, GatedConvDecoder, GatedConvEncoder


def make_flow(size: Size, flow: str, context: int) -> Flow:
    options = {
        "orthogonal-sylvester": {"rank": size.rank},
        "householder-sylvester": {"reflections": size.reflections},
        **{name: {"hidden_features": size.hidden} for name in ("iaf", "mean-only-iaf", "maf", "nice", "realnvp")},
    }
    make: Callable[..., Flow] = FAMILIES[flow]
    return make(size.features, context, size.transforms, init="torch", **options.get(flow, {}))


def build(size: Size, flow: str) -> VAE:
    """The model of the paper's run."""
    shape = (1, size.side, size.side)
    return VAE(
        GatedConvEncoder(shape, size.context, architecture="released"),
        make_flow(size, flow, size.context),
        GatedConvDecoder(shape, size.features, likelihood="bernoulli"),
    )


def make_optimizer(vae: VAE) -> torch.optim.Optimizer:
    return Adamax(vae.parameters(), lr=5e-4, eps=1e-7)


def training(size: Size, flow: str, condition: float | None = None) -> Task:
    vae = build(size, flow)
    if condition is not None:
        fix_condition(vae.flow.steps[0], size, condition)
    optimizer = make_optimizer(vae)
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
    shape = (hypernetwork.transforms, hypernetwork.outputs)
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
    module = make_flow(size, flow, size.context if conditional else 0)
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
    from sylvester.linalg import polar as polar_factor

    a = torch.randn(size.batch * size.transforms, size.features, size.rank, requires_grad=True)
    return lambda: torch.autograd.grad(polar_factor(a).sum(), a)


def householder(size: Size) -> Task:
    from sylvester.linalg import HouseholderProduct

    count = size.batch * size.transforms
    v = torch.randn(count, size.reflections, size.features, requires_grad=True)
    z = torch.randn(count, size.features)

    def task() -> None:
        q = HouseholderProduct(v)
        torch.autograd.grad(q.matvec(torch.tanh(q.rmatvec(z))).sum(), v)

    return task


def epoch(size: Size, flow: str, data: str) -> Task:
    """As the application trains: its loop, its figures, its streams of randomness."""
    from sylvester.app import training as app_training
    from sylvester.app.config import resolve
    from sylvester.app.data import Dataset
    from sylvester.app.schedules import Stage
    from sylvester.app.state import State

    settings = {"latent": size.features, "batch_size": size.batch}
    config = resolve({"preset": "paper", "architecture": "released", "flow": flow, **settings})
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
    state = State.start(app_training.make_fabric(config), config, build(size, flow))
    stage = Stage(config.warmup, config.epochs)  # with the whole of the KL term
    return lambda: app_training.train_epoch(state, stage, dataset, app_training.ignore)


def decoder(size: Size) -> Task:
    vae, z = build(size, "gaussian"), torch.randn(size.batch, size.features)
    return counted(without_gradient(lambda: vae.decoder(z)), tasks_reference.decoder(size))


def counted_training(size: Size, flow: str) -> Task:
    return counted(training(size, flow), tasks_reference.training(size, flow))


TASKS: dict[str, Callable[..., Task]] = {
    task.__name__: task
    for task in (training, nll, flow, family, chain, polar, householder, epoch, product, decoder, counted_training)
}
