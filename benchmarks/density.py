"""How well flows fit densities: ``python -m benchmarks.density``, from a checkout.

    moons        density estimation: MAF, Real NVP and NSF of the library and of zuko, equal widths and steps
    inference    simulation-based inference: the posterior of two moons by both libraries' NSF, on the same test pairs
    activations  ReLU, SiLU and ELU in the library's networks, on two moons, log-densities and a VAE of digits

Progress goes to stderr, tables in Markdown to stdout. Each library has a process of its own, as importing zuko changes
torch. Both get the same data, the same batches and plain Adam; each starts as it does by default.
"""

from __future__ import annotations

import math
import multiprocessing
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from typing import Annotated, Any, Literal

import torch
from cyclopts import App, Parameter
from torch import Tensor, nn

from benchmarks.targets import TARGETS

Library = Literal["sylvester", "zuko"]
LIBRARIES: tuple[Library, ...] = ("sylvester", "zuko")
ACTIVATIONS = ("relu", "silu", "elu")
TRANSFORMS, HIDDEN, BATCH, LEARNING_RATE = 3, (64, 64), 256, 1e-3
TRAIN, TEST = 16_384, 10_000
#: Where activations are compared: in each problem, families that are cheap in the direction it asks for.
PROBLEMS = (
    ("moons", "MAF"),
    ("moons", "RealNVP"),
    ("moons", "NSF"),
    ("banana", "AffineIAF"),
    ("banana", "RealNVP"),
    ("funnel", "IAF"),
    ("funnel", "AffineIAF"),
    ("funnel", "RealNVP"),
    ("eight schools, centred", "AffineIAF"),
    ("eight schools, centred", "RealNVP"),
    ("digits", "IAF"),
    ("digits", "AffineIAF"),
    ("digits", "RealNVP"),
)

app = App(name="python -m benchmarks.density", help_flags=["--help", "-h"], version_flags=[])


def two_moons(n: int, generator: torch.Generator) -> Tensor:
    """Points of two half circles of radius 1 that face each other, with noise of standard deviation 0.1."""
    angle = 2 * math.pi * torch.rand(n, generator=generator)
    lower = (angle > math.pi).float()
    mean = torch.stack([angle.cos() + lower - 0.5, angle.sin() + lower / 2 - 0.25], -1)
    return mean + 0.1 * torch.randn(n, 2, generator=generator)


def two_moons_simulator(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """(θ, x) of Greenberg et al. (2019, appendix A.5.1): the posterior is two thin crescents."""
    theta = 2 * torch.rand(n, 2, generator=generator) - 1
    angle = math.pi * (torch.rand(n, generator=generator) - 0.5)
    radius = 0.1 + 0.01 * torch.randn(n, generator=generator)
    crescent = torch.stack([radius * angle.cos() + 0.25, radius * angle.sin()], -1)
    first, second = theta.unbind(-1)
    return theta, crescent + torch.stack([-(first + second).abs(), second - first], -1) / math.sqrt(2)


def make(library: Library, family: str, context: int = 0, **options: Any) -> nn.Module:
    if library == "sylvester":
        from sylvester import flows as ours

        return getattr(ours, family)(2, context, TRANSFORMS, hidden_features=HIDDEN, **options)
    import zuko

    return getattr(zuko.flows, family)(2, context, transforms=TRANSFORMS, hidden_features=HIDDEN, **options)


def by_likelihood(
    flow: nn.Module, train: Sequence[Tensor], test: Sequence[Tensor], steps: int, generator: torch.Generator
) -> list[float]:
    """log q of the test points, given their contexts where there are any, after so many steps of Adam."""
    optimizer = torch.optim.Adam(flow.parameters(), LEARNING_RATE)
    for _ in range(steps):
        rows = torch.randint(len(train[0]), (BATCH,), generator=generator)
        x, *context = (part[rows] for part in train)
        loss = -flow(*context).log_prob(x).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    x, *context = test
    with torch.no_grad():
        return flow(*context).log_prob(x).tolist()


def moons(library: Library, family: str, seed: int, steps: int, **options: Any) -> list[float]:
    generator = torch.Generator().manual_seed(seed)
    train, test = two_moons(TRAIN, generator), two_moons(TEST, generator)
    torch.manual_seed(seed)
    return by_likelihood(make(library, family, **options), [train], [test], steps, generator)


def inference(library: Library, seed: int, steps: int) -> list[float]:
    """Standardized by the training pairs; densities are those of θ itself."""
    generator = torch.Generator().manual_seed(seed)
    train, test = two_moons_simulator(TRAIN, generator), two_moons_simulator(TEST, generator)
    moments = [(part.mean(0), part.std(0)) for part in train]
    train, test = (
        [(part - loc) / scale for part, (loc, scale) in zip(parts, moments, strict=True)] for parts in (train, test)
    )
    torch.manual_seed(seed)
    found = by_likelihood(make(library, "NSF", 2), train, test, steps, generator)
    log_scale = moments[0][1].log().sum().item()
    return [value - log_scale for value in found]


def bound(target: str, family: str, activation: str, seed: int, steps: int) -> float:
    """E_q[log p − log q] of a fitted flow, less log Z: at most 0."""
    from sylvester import flows as ours
    from sylvester.inference import fit

    features, log_density, log_z = TARGETS[target]
    torch.manual_seed(seed)
    flow = getattr(ours, family)(features, 0, TRANSFORMS, hidden_features=HIDDEN, activation=activation)
    return fit(log_density, flow, steps=steps, learning_rate=5e-3, seed=seed).elbo - log_z()


def digits(family: str, activation: str, seed: int, steps: int) -> float:
    """The bound on the validation digits, nats per image, of a small VAE."""
    from sylvester import flows as ours
    from sylvester.app.data import load
    from sylvester.objectives import elbo
    from sylvester.optim import Adamax
    from sylvester.vae import VAE, MLPDecoder, MLPEncoder

    data, features = load("digits"), 16
    torch.manual_seed(seed)
    shape = data.train.shape[1:]
    flow = getattr(ours, family)(features, 256, 4, hidden_features=HIDDEN, activation=activation)
    vae = VAE(MLPEncoder(shape, 256), flow, MLPDecoder(shape, features, likelihood="bernoulli"))
    optimizer = Adamax(vae.parameters(), lr=2e-3)
    for step in range(steps):
        x = data.train[torch.randint(len(data.train), (100,))]
        loss = -elbo(vae.log_terms(x), min(1.0, 4 * (step + 1) / steps)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        return elbo(vae.log_terms(data.valid, 100)).mean().item()


@contextmanager
def process() -> Iterator[Callable[..., Any]]:
    """Calls functions in a process of its own."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        yield lambda function, *arguments, **options: pool.submit(function, *arguments, **options).result()


def tell(*words: object) -> None:
    sys.stderr.write(" ".join(map(str, words)) + "\n")


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    numbers = torch.tensor(values, dtype=torch.float64)
    return numbers.mean().item(), (numbers.std() / len(numbers) ** 0.5).item()


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in [head, ["---"] * len(head), *rows])


def moons_table(seeds: Sequence[int], steps: int) -> str:
    rows: list[list[str]] = []
    with process() as ours, process() as theirs:
        for family in ("MAF", "RealNVP", "NSF"):
            differences = []
            for seed in seeds:
                pair = [
                    call(moons, name, family, seed, steps) for name, call in zip(LIBRARIES, (ours, theirs), strict=True)
                ]
                (own, _), (other, _) = map(mean_and_error, pair)
                difference, its_error = mean_and_error([a - b for a, b in zip(*pair, strict=True)])
                differences.append(difference)
                tell("moons", family, seed, own, other)
                rows.append([family, str(seed), f"{own:.3f}", f"{other:.3f}", f"{difference:+.3f} ± {its_error:.3f}"])
            rows.append([f"**{family}**", "mean", "", "", f"**{sum(differences) / len(differences):+.3f}**"])
    return table(["family", "seed", "sylvester", "zuko", "difference (paired over test points)"], rows)


def inference_table(seeds: Sequence[int], steps: int) -> str:
    rows, differences = [], []
    with process() as ours, process() as theirs:
        for seed in seeds:
            pair = [call(inference, name, seed, steps) for name, call in zip(LIBRARIES, (ours, theirs), strict=True)]
            (own, _), (other, _) = map(mean_and_error, pair)
            difference, error = mean_and_error([a - b for a, b in zip(*pair, strict=True)])
            differences.append(difference)
            tell("inference", seed, own, other)
            rows.append([str(seed), f"{own:.3f}", f"{other:.3f}", f"{difference:+.3f} ± {error:.3f}"])
    rows.append(["mean", "", "", f"**{sum(differences) / len(differences):+.3f}**"])
    return table(["seed", "sylvester", "zuko", "difference (paired over test pairs)"], rows)


def activations_table(seeds: Sequence[int], steps: int) -> str:
    """Means over the seeds of what is larger where a flow is better."""

    def log_likelihood(family: str, activation: str, seed: int, steps: int) -> float:
        return mean_and_error(moons("sylvester", family, seed, steps, activation=activation))[0]

    scores: dict[str, Callable[..., float]] = {
        "moons": log_likelihood,
        **{target: partial(bound, target) for target in TARGETS},
        "digits": digits,
    }
    rows = []
    for problem, family in PROBLEMS:
        found = {}
        for activation in ACTIVATIONS:
            values = [scores[problem](family, activation, seed, steps) for seed in seeds]
            found[activation] = sum(values) / len(values)
            tell(problem, family, activation, *values)
        best = max(found.values())
        rows.append([problem, family, *(f"**{v:.3f}**" if v == best else f"{v:.3f}" for v in found.values())])
    return table(["problem", "family", *ACTIVATIONS], rows)


TABLES: dict[str, Callable[[Sequence[int], int], str]] = {
    "moons": moons_table,
    "inference": inference_table,
    "activations": activations_table,
}


@app.default
def main(
    *,
    only: Annotated[Literal["moons", "inference", "activations"] | None, Parameter(help="This table alone.")] = None,
    seeds: Annotated[int, Parameter(help="So many, from 0 on.")] = 3,
    steps: Annotated[int, Parameter(help="Of the optimizer.")] = 1000,
) -> None:
    """Print tables of test log-likelihoods (moons, inference) and bounds (activations), in nats: more is better."""
    for name in TABLES if only is None else [only]:
        print(f"\n{name}, seeds 0 to {seeds - 1}, {steps:,} steps\n")
        print(TABLES[name](range(seeds), steps))
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "zuko"))
    print(f"\n{versions}, Python {platform.python_version()}, {torch.get_num_threads()} threads")


if __name__ == "__main__":
    app()
