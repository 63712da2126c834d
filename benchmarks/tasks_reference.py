"""The work as the reference does it. A task is built once and called as often as it is timed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.reference import Orthogonal, ReferenceVAE, log_likelihood, orthogonalize, reflections_multiplied
from benchmarks.sizes import Size

Task = Callable[[], object]


def build(size: Size, flow: str) -> ReferenceVAE:
    sizes = asdict(size)
    return ReferenceVAE(flow, **{key: sizes[key] for key in sizes if key not in ("batch", "samples", "product")})


def images(size: Size, count: int) -> Tensor:
    return (torch.rand(count, 1, size.side, size.side) < 0.5).float()


def forward_backward(sample: Callable[[], tuple[Tensor, Tensor]], parameters: list[nn.Parameter]) -> Task:
    """Draw, and differentiate something that takes in all of z and log q."""

    def task() -> None:
        z, log_q = sample()
        torch.autograd.grad(z.sum() + log_q.sum(), parameters, allow_unused=True)

    return task


def without_gradient(sample: Callable[[], object]) -> Task:
    def task() -> None:
        with torch.no_grad():
            sample()

    return task


def training(size: Size, flow: str, condition: float | None = None) -> Task:
    """One step of Adamax on the bound of a batch; ``condition`` is that of the matrices O-SNF orthogonalizes."""
    model = build(size, flow)
    if condition is not None:
        assert isinstance(model.steps, Orthogonal)
        q = model.steps.q
        with torch.no_grad():
            q.weight.zero_()
            q.bias.copy_(conditioned(size, condition).flatten())
    step = stepper(model)
    x = images(size, size.batch)
    return lambda: step(x)


def stepper(model: ReferenceVAE) -> Callable[[Tensor], None]:
    optimizer = torch.optim.Adamax(model.parameters(), lr=5e-4, eps=1e-7)

    def step(x: Tensor) -> None:
        terms = model(x, torch.randn(len(x), model.features))
        loss = -(terms.log_px_z + terms.log_pz - terms.log_q).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def conditioned(size: Size, condition: float) -> Tensor:
    """A matrix (D, M) for each step of the flow, with singular values from 1 down to 1/condition."""
    u = torch.linalg.qr(torch.randn(size.transforms, size.features, size.rank)).Q
    v = torch.linalg.qr(torch.randn(size.transforms, size.rank, size.rank)).Q
    return u * torch.logspace(0, -math.log10(condition), size.rank) @ v


def counted(task: Task, reference: Task) -> Task:
    """A task whose floating-point operations are those the reference needs for it: doing more of them earns nothing."""
    with FlopCounterMode(display=False) as counter:
        reference()
    task.flops = counter.get_total_flops()  # type: ignore[attr-defined]
    return task


def counted_training(size: Size, flow: str) -> Task:
    task = training(size, flow)
    return counted(task, task)


def decoder(size: Size) -> Task:
    """A batch of latents to images."""
    model, z = build(size, "gaussian"), torch.randn(size.batch, size.features, 1, 1)
    task = without_gradient(lambda: model.decoder(z))
    return counted(task, task)


def product(size: Size) -> Task:
    """The matrix product that stands for what the machine can do."""
    a, b = torch.randn(2, size.product, size.product)

    def task() -> Tensor:
        return a @ b

    return counted(task, task)


def nll(size: Size, flow: str, samples: int | None = None) -> Task:
    """log p(x) of one image."""
    model, x = build(size, flow).eval(), images(size, 1)
    return lambda: log_likelihood(model, x, samples or size.samples)


def flow(size: Size, flow: str, backward: bool = False, samples: int = 1, batch: int | None = None) -> Task:
    """From contexts to z and log q; several samples of a context are a batch of its copies, 500 at a time."""
    model = build(size, flow)
    h = torch.randn(size.batch if batch is None else batch, size.context).repeat(samples, 1)
    if backward:
        parameters = [*model.mean.parameters(), *model.variance.parameters(), *model.steps.parameters()]
        return forward_backward(lambda: model.posterior(h, torch.randn(len(h), size.features)), parameters)
    return without_gradient(
        lambda: [model.posterior(part, torch.randn(len(part), size.features)) for part in h.split(500)]
    )


def polar(size: Size) -> Task:
    """All matrices of a training batch, with the gradient."""
    a = torch.randn(size.batch * size.transforms, size.features, size.rank, requires_grad=True)
    return lambda: torch.autograd.grad(orthogonalize(a).sum(), a)


def householder(size: Size) -> Task:
    """Q tanh(Qᵀz) for all steps of a training batch, with the gradient."""
    count = size.batch * size.transforms
    v = torch.randn(count, size.reflections, size.features, requires_grad=True)
    z = torch.randn(count, size.features, 1)

    def task() -> None:
        q = reflections_multiplied(v)
        torch.autograd.grad(torch.bmm(q, torch.tanh(torch.bmm(q.transpose(1, 2), z))).sum(), v)

    return task


def epoch(size: Size, flow: str, data: str) -> Task:
    """Every training image once, in random order."""
    x = torch.load(data)
    step = stepper(build(size, flow))

    def task() -> None:
        for rows in torch.randperm(len(x)).split(size.batch):
            step(x[rows])

    return task


TASKS: dict[str, Callable[..., Task]] = {
    task.__name__: task for task in (training, nll, flow, polar, householder, epoch, product, decoder, counted_training)
}
