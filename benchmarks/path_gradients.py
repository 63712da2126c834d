"""``python -m benchmarks.path_gradients``: what path gradients gain in variance, and what they cost.

Variance: the trace of the covariance of a single draw's gradient, over the parameters of q, with and without path
gradients, from the same noise; where training starts and where it ends. Cost: seconds of one step with them over
seconds without, taken by turns in one process, minima over the repetitions. Tables in Markdown go to stdout.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from benchmarks import tasks_library
from benchmarks.sizes import SIZES, Size
from benchmarks.targets import banana
from benchmarks.tasks_reference import images
from sylvester import flows
from sylvester.app.data import load
from sylvester.inference import fit
from sylvester.objectives import elbo
from sylvester.optim import Adamax
from sylvester.random import stream
from sylvester.vae import VAE, MLPDecoder, MLPEncoder

Bound = Callable[[bool, Tensor], Tensor]

FAMILIES: dict[str, Callable[..., flows.Flow]] = {
    "gaussian": flows.Gaussian,
    "planar": partial(flows.Planar, transforms=8),
    "triangular-sylvester": partial(flows.TriangularSylvester, transforms=8),
    "iaf": partial(flows.IAF, transforms=4),
}


def variance(bound: Bound, parameters: Sequence[Tensor], shape: Sequence[int], draws: int) -> tuple[float, float]:
    """Of the gradient of ``bound(path_gradient, noise)``: without path gradients, and with them."""
    total = []
    for path_gradient in (False, True):
        generator = stream("variance")  # the same noise for both
        sums = [torch.zeros_like(p, dtype=torch.float64) for p in parameters]
        squares = [torch.zeros_like(p, dtype=torch.float64) for p in parameters]
        for _ in range(draws):
            noise = torch.randn(tuple(shape), generator=generator)
            gradients = torch.autograd.grad(bound(path_gradient, noise), parameters, materialize_grads=True)
            for each, square, gradient in zip(sums, squares, gradients, strict=True):
                each += gradient
                square += gradient.double().square()
        spread = (square - each**2 / draws for each, square in zip(sums, squares, strict=True))
        total.append(sum(part.sum().item() for part in spread) / (draws - 1))
    return total[0], total[1]


def correlated(z: Tensor) -> Tensor:
    """A Gaussian of unit variances whose neighbours have correlation 0.9, normalized."""
    slope = 0.9
    noise = math.sqrt(1 - slope**2)
    first, rest = z[..., :1], (z[..., 1:] - slope * z[..., :-1]) / noise
    standard = torch.cat([first, rest], -1)
    features = z.shape[-1]
    return -0.5 * standard.square().sum(-1) - 0.5 * features * math.log(2 * math.pi) - (features - 1) * math.log(noise)


TARGETS: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "Gaussian, D = 8": (correlated, 8),
    "banana": (banana, 2),
}


def densities(steps: int, draws: int) -> Iterator[tuple[str, str, str, str, float, float]]:
    """Rows of what is fitted, family, where, ELBO, and the two variances, for log-densities that are normalized."""
    for target, (log_density, features) in TARGETS.items():
        for name, family in FAMILIES.items():
            torch.manual_seed(0)
            start = family(features)
            result = fit(log_density, start, steps=steps, learning_rate=1e-2, tolerance=0.0, patience=1000)
            for where, flow in (("start", start), ("end", result.flow)):
                flow.requires_grad_(True)

                def bound(path_gradient: bool, noise: Tensor, flow: flows.Flow = flow) -> Tensor:
                    z, log_q = flow().rsample_and_log_prob(noise=noise, path_gradient=path_gradient)
                    return (log_density(z) - log_q).mean()  # noqa: B023

                with torch.no_grad():
                    value = bound(False, torch.randn(20_000, features)).item()
                found = variance(bound, list(flow.parameters()), (1, features), draws)
                yield target, name, where, f"{value:.3f}", *found


def digits(epochs: int, draws: int) -> Iterator[tuple[str, str, str, str, float, float]]:
    """The same for encoder and flow of a VAE on the embedded digits, on one batch of a hundred images."""
    data = load("digits")
    batch = data.train[:100]
    for name, family in FAMILIES.items():
        torch.manual_seed(0)
        vae = VAE(MLPEncoder((1, 8, 8), 256), family(16, context=256), MLPDecoder((1, 8, 8), 16))
        optimizer = Adamax(vae.parameters(), lr=2e-3)
        for epoch in range(epochs + 1):
            if epoch in (0, epochs):
                of_posterior = [*vae.encoder.parameters(), *vae.flow.parameters()]

                def bound(path_gradient: bool, noise: Tensor, vae: VAE = vae) -> Tensor:
                    return elbo(vae.log_terms(batch, len(noise), noise=noise, path_gradient=path_gradient)).mean()

                with torch.no_grad():
                    value = elbo(vae.log_terms(batch, 100)).mean().item()
                found = variance(bound, of_posterior, (1, len(batch), 16), draws)
                yield "VAE on digits", name, "end" if epoch else "start", f"{value:.2f}", *found
            for part in data.train[torch.randperm(len(data.train))].split(50):
                loss = -elbo(vae.log_terms(part)).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()


def by_turns(tasks: Sequence[Callable[[], object]], repetitions: int) -> list[float]:
    """The least seconds of each task, taken by turns."""
    seconds = [math.inf] * len(tasks)
    for repetition in range(repetitions + 1):
        for place, task in enumerate(tasks):
            started = time.perf_counter()
            task()
            if repetition:  # the first time is for caches
                seconds[place] = min(seconds[place], time.perf_counter() - started)
    return seconds


def flow_task(size: Size, name: str, path_gradient: bool) -> Callable[[], object]:
    torch.manual_seed(0)
    flow = tasks_library.make_flow(size, name, size.context)
    h, parameters = torch.randn(size.batch, size.context), list(flow.parameters())

    def step() -> None:
        z, log_q = flow(h).rsample_and_log_prob((1,), path_gradient=path_gradient)
        torch.autograd.grad((-0.5 * z.square().sum(-1) - log_q).mean(), parameters)

    return step


def vae_task(size: Size, name: str, path_gradient: bool) -> Callable[[], object]:
    torch.manual_seed(0)
    vae, x = tasks_library.build(size, name), images(size, size.batch)
    optimizer = tasks_library.make_optimizer(vae)

    def step() -> None:
        loss = -elbo(vae.log_terms(x, path_gradient=path_gradient)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def costs(size: Size, repetitions: int) -> Iterator[tuple[str, str, float, float, float | None]]:
    """Rows of what is timed, family, seconds without and with path gradients, and the most that they may cost."""
    targets = {"the flow alone": (flow_task, 2.0), "a training step of the VAE": (vae_task, 1.15)}
    for what, (make, most) in targets.items():
        for name in ("triangular-sylvester", "planar", "orthogonal-sylvester", "householder-sylvester", "realnvp"):
            tasks = [make(size, name, path_gradient) for path_gradient in (False, True)]
            without, with_them = by_turns(tasks, repetitions)
            yield what, name, without, with_them, most if name == "triangular-sylvester" else None


def main() -> None:
    arguments = argparse.ArgumentParser(prog="python -m benchmarks.path_gradients", description=__doc__)
    arguments.add_argument("--only", choices=("variance", "cost"))
    arguments.add_argument("--size", choices=tuple(SIZES), default="paper", help="of what is timed")
    arguments.add_argument("--repetitions", type=int, default=20, help="of what is timed")
    arguments.add_argument("--steps", type=int, default=2000, help="of the fits")
    arguments.add_argument("--epochs", type=int, default=40, help="of the VAEs")
    arguments.add_argument("--draws", type=int, default=200, help="gradients of which the variance is taken")
    given = arguments.parse_args()
    if given.only != "cost":
        print("| fitted | q | where | ELBO | variance without | with | ratio |\n|---|---|---|---|---|---|---|")
        found = chain(densities(given.steps, given.draws), digits(given.epochs, given.draws))
        for what, name, where, value, without, with_them in found:
            ratio = with_them / without
            print(
                f"| {what} | {name} | {where} | {value} | {without:.3g} | {with_them:.3g} | {ratio:.3g} |", flush=True
            )
    if given.only != "variance":
        print("\n| timed | q | ms without | ms with | ratio | at most |\n|---|---|---|---|---|---|")
        for what, name, without, with_them, most in costs(SIZES[given.size], given.repetitions):
            ratio, limit = with_them / without, "" if most is None else f"{most:g}"
            miss = " **missed**" if most is not None and ratio > most else ""
            seconds = f"{1e3 * without:.1f} | {1e3 * with_them:.1f}"
            print(f"| {what} | {name} | {seconds} | {ratio:.2f} | {limit}{miss} |", flush=True)


if __name__ == "__main__":
    main()
