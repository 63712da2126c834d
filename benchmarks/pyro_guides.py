"""``python -m benchmarks.pyro_guides``, from a checkout: how good a guide a flow is, in Pyro, beside Pyro's own.

    python -m benchmarks.pyro_guides conjugate    posteriors that are known, and how far ours is from them
    python -m benchmarks.pyro_guides schools      eight schools: bounds and quantiles of guides, at each learning rate
    python -m benchmarks.pyro_guides nuts         eight schools: quantiles by NUTS
    python -m benchmarks.pyro_guides tables       what all of them found, as docs/pyro.md shows it

Each writes what it found into the JSON file, docs/pyro.json by default, one run after another, and leaves alone what is
there already: so it may be stopped and called again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import platform
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import MCMC, NUTS, SVI, Predictive, Trace_ELBO
from pyro.infer.autoguide import AutoIAFNormal, AutoMultivariateNormal
from torch import Tensor

from sylvester.contrib.pyro import AutoFlow, log_density
from sylvester.diagnostics import diagnose
from sylvester.flows import AffineIAF, TriangularSylvester

Model = Callable[..., Any]

#: Those before them were spent on choosing defaults.
SEEDS = (3, 4, 5)
RATES = (0.01, 0.03, 0.1)
STEPS, PARTICLES, DRAWS = 600, 16, 100_000
LEVELS = (0.05, 0.5, 0.95)


#: The one named beforehand: two affine autoregressive steps in the direction that is cheap to sample.
OURS = "AutoFlow, affine IAF, 2 steps"
GUIDES: dict[str, Callable[[Model], Any]] = {
    OURS: partial(AutoFlow, flow=partial(AffineIAF, transforms=2)),
    "AutoFlow, T-SNF, 8 steps": partial(AutoFlow, flow=partial(TriangularSylvester, transforms=8)),
    "AutoMultivariateNormal": AutoMultivariateNormal,
    "AutoIAFNormal": AutoIAFNormal,
    "AutoIAFNormal, 2 steps": partial(AutoIAFNormal, num_transforms=2),
}

# Eight schools


EFFECTS = torch.tensor([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
ERRORS = torch.tensor([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])


def centred() -> None:
    mu, tau = pyro.sample("mu", dist.Normal(0.0, 5.0)), pyro.sample("tau", dist.HalfCauchy(5.0))
    with pyro.plate("schools", 8):
        theta = pyro.sample("theta", dist.Normal(mu, tau))
        pyro.sample("y", dist.Normal(theta, ERRORS), obs=EFFECTS)


def non_centred() -> None:
    mu, tau = pyro.sample("mu", dist.Normal(0.0, 5.0)), pyro.sample("tau", dist.HalfCauchy(5.0))
    with pyro.plate("schools", 8):
        theta = pyro.deterministic("theta", mu + tau * pyro.sample("eta", dist.Normal(0.0, 1.0)))
        pyro.sample("y", dist.Normal(theta, ERRORS), obs=EFFECTS)


SCHOOLS: dict[str, Model] = {"centred": centred, "non-centred": non_centred}


def exact_schools(draws: int) -> tuple[float, dict[str, Tensor]]:
    """log Z, and independent draws, by quadrature over log τ: given τ, everything is Gaussian.

    y_j | μ, τ ~ N(μ, s_j² + τ²), so μ | τ, y has precision 1/25 + Σ_j 1/(s_j² + τ²), and θ_j | μ, τ, y that of two
    normal factors.
    """
    y, s = EFFECTS.double(), ERRORS.double()
    log_tau = torch.linspace(-15, 10, 200_001, dtype=torch.float64)
    tau = log_tau.exp()
    variance = s**2 + tau[:, None] ** 2  # (T, 8)
    precision = 1 / 25 + (1 / variance).sum(-1)
    mean = (y / variance).sum(-1) / precision
    # log ∫ N(μ; 0, 25) Π_j N(y_j; μ, s_j² + τ²) dμ
    log_y = -0.5 * ((2 * math.pi * variance).log() + y**2 / variance).sum(-1)
    log_y = log_y + 0.5 * precision * mean**2 - 0.5 * (25 * precision).log()
    log_prior = math.log(2 / (5 * math.pi)) - torch.log1p((tau / 5) ** 2) + log_tau
    joint = log_y + log_prior
    log_z = joint.logsumexp(0).item() + math.log(25 / 200_000)
    generator = torch.Generator().manual_seed(0)
    chosen = torch.multinomial(joint.softmax(0)[::10], draws, replacement=True, generator=generator) * 10
    normal = torch.randn(draws, 9, generator=generator, dtype=torch.float64)
    t = tau[chosen]
    mu = mean[chosen] + normal[:, 0] / precision[chosen].sqrt()
    between = 1 / s**2 + 1 / t[:, None] ** 2
    theta = (y / s**2 + mu[:, None] / t[:, None] ** 2) / between + normal[:, 1:] / between.sqrt()
    return log_z, {"mu": mu, "tau": t, "theta": theta}


# Conjugate models: each with its data, and the exact means and standard deviations of its latents


def regression(x: Tensor, y: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(0.0, 2.0).expand([x.shape[-1]]).to_event(1))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal((x * w).sum(-1), 0.5), obs=y)


def counts(n: Tensor) -> None:
    rate = pyro.sample("rate", dist.Gamma(2.0, 1.0))
    with pyro.plate("data", len(n)):
        pyro.sample("n", dist.Poisson(rate), obs=n)


def tosses(x: Tensor) -> None:
    p = pyro.sample("p", dist.Beta(1.0, 1.0))
    with pyro.plate("data", len(x)):
        pyro.sample("x", dist.Bernoulli(p), obs=x)


def colours(n: Tensor) -> None:
    p = pyro.sample("p", dist.Dirichlet(torch.ones(len(n))))
    pyro.sample("n", dist.Multinomial(probs=p, validate_args=False), obs=n)


def conjugate_models() -> Iterator[tuple[str, Model, tuple[Tensor, ...], Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(20, 3, generator=generator)
    x[:, 1] = x[:, 0] + 0.3 * x[:, 1]  # correlated weights
    y = x @ torch.tensor([1.0, -1.0, 0.5]) + 0.5 * torch.randn(20, generator=generator)
    precision = (torch.eye(3) / 4 + x.T @ x / 0.25).double()
    covariance = precision.inverse()
    yield (
        "normal, three weights",
        regression,
        (x, y),
        covariance @ (x.T @ y / 0.25).double(),
        covariance.diagonal().sqrt(),
    )
    n = torch.tensor([3.0, 1.0, 4.0])
    yield "gamma-Poisson", counts, (n,), *moments(dist.Gamma(2 + n.sum(), 1.0 + len(n)))
    x = torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0])
    yield "beta-Bernoulli", tosses, (x,), *moments(dist.Beta(1 + x.sum(), 1 + (1 - x).sum()))
    n = torch.tensor([1.0, 5.0, 3.0])
    yield "Dirichlet-multinomial", colours, (n,), *moments(dist.Dirichlet(1 + n))


def moments(posterior: Any) -> tuple[Tensor, Tensor]:
    return posterior.mean.double().reshape(-1), posterior.variance.double().sqrt().reshape(-1)


# Runs


def fit(model: Model, guide: Any, data: tuple[Tensor, ...], *, rate: float, steps: int, particles: int) -> None:
    """The same for every guide."""
    optimizer = pyro.optim.ClippedAdam({"lr": rate, "lrd": 0.01 ** (1 / steps)})
    elbo = Trace_ELBO(num_particles=particles, vectorize_particles=True, max_plate_nesting=1)
    svi = SVI(model, guide, optimizer, elbo)
    for _ in range(steps):
        if math.isnan(svi.step(*data)):  # and so for ever
            break


def fresh(make: Callable[[Model], Any], model: Model, seed: int) -> Any:
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    return make(model)


@torch.no_grad()
def draws_of(model: Model, guide: Any, draws: int) -> dict[str, Tensor]:
    pyro.set_rng_seed(12345)
    predictive = Predictive(model, guide=guide, num_samples=draws, return_sites=["mu", "tau", "theta"], parallel=True)
    return {name: value.reshape(draws, -1).squeeze(-1).double() for name, value in predictive().items()}


def run_conjugate(found: Found, sizes: Sizes) -> None:
    for name, model, data, mean, deviation in conjugate_models():
        for seed in sizes.seeds:
            key = f"conjugate/{name}/{seed}"
            if key in found:
                continue
            # An autoregressive step of one variable is affine, and some of these have one.
            guide = fresh(partial(AutoFlow, flow=partial(TriangularSylvester, transforms=4)), model, seed)
            fit(model, guide, data, rate=0.03, steps=sizes.conjugate_steps, particles=sizes.conjugate_particles)
            with torch.no_grad(), pyro.plate("draws", sizes.draws, dim=-2):
                (values,) = guide(*data).values()
            values = values.double().reshape(sizes.draws, -1)
            found[key] = {
                "mean": ((values.mean(0) - mean) / deviation).abs().max().item(),
                "deviation": (values.std(0) / deviation - 1).abs().max().item(),
            }


def run_schools(found: Found, sizes: Sizes) -> None:
    if "schools/exact" not in found:
        log_z, draws = exact_schools(10 * sizes.draws)
        found["schools/exact"] = {"log_z": log_z, "quantiles": of_schools(draws)}
    for name, form in itertools.product(GUIDES, SCHOOLS):
        for rate in sizes.rates:
            run_guide(found, sizes, form, name, rate, sizes.seeds[0])
        for seed in sizes.seeds[1:]:
            run_guide(found, sizes, form, name, best_rate(found, form, name, sizes), seed)


def run_guide(found: Found, sizes: Sizes, form: str, name: str, rate: float, seed: int) -> None:
    key, model = f"schools/{form}/{name}/{rate}/{seed}", SCHOOLS[form]
    if key in found:
        return
    guide = fresh(GUIDES[name], model, seed)
    fit(model, guide, (), rate=rate, steps=sizes.steps, particles=sizes.particles)
    if not all(parameter.isfinite().all() for parameter in guide.parameters()):
        found[key] = {"elbo": None}
        return
    diagnosis = diagnose(log_density(guide), guide.get_posterior(), sizes.draws, seed=1)
    found[key] = {
        "elbo": diagnosis.elbo,
        "error": diagnosis.elbo_error,
        "khat": diagnosis.khat,
        "ess": diagnosis.ess / diagnosis.samples,
        "quantiles": of_schools(draws_of(model, guide, sizes.draws)),
    }


def run_nuts(found: Found, sizes: Sizes) -> None:
    if "schools/NUTS" in found:
        return
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    kernel = NUTS(non_centred, jit_compile=True, ignore_jit_warnings=True, target_accept_prob=0.9)
    chain = MCMC(kernel, num_samples=sizes.nuts, warmup_steps=max(10, sizes.nuts // 4), disable_progbar=True)
    chain.run()
    draws = chain.get_samples()
    draws["theta"] = draws["mu"].unsqueeze(-1) + draws["tau"].unsqueeze(-1) * draws["eta"]
    found["schools/NUTS"] = {"quantiles": of_schools(draws)}


def of_schools(draws: dict[str, Tensor]) -> dict[str, list[float]]:
    levels = torch.tensor(LEVELS, dtype=torch.float64)
    columns = {"μ": draws["mu"], "τ": draws["tau"], "θ₁": draws["theta"].reshape(len(draws["mu"]), -1)[:, 0]}
    return {name: column.double().quantile(levels).tolist() for name, column in columns.items()}


def best_rate(found: Found, form: str, name: str, sizes: Sizes) -> float:
    """That with the largest bound under the first seed, which the other seeds are then run at."""
    return max(sizes.rates, key=lambda rate: elbo(found, form, name, rate, sizes.seeds[0]))


def elbo(found: Found, form: str, name: str, rate: float, seed: int) -> float:
    value = found[f"schools/{form}/{name}/{rate}/{seed}"]["elbo"]
    return -math.inf if value is None else value  # its parameters ended as NaN


def number(value: float, digits: int = 3) -> str:
    return f"{value:.{digits}f}".replace("-", "−") if math.isfinite(value) else "NaN"


def mean_of(values: list[float]) -> float:
    return sum(values) / len(values)


def error_of(values: list[float]) -> float:
    return torch.tensor(values, dtype=torch.float64).std().item() / math.sqrt(len(values))


# What is kept and shown


class Sizes:
    """How much is run: all that the tables need, or next to nothing, to see that it runs."""

    def __init__(self, tiny: bool = False):
        self.seeds = SEEDS[:2] if tiny else SEEDS
        self.rates = RATES[:1] if tiny else RATES
        self.steps, self.particles = (3, 2) if tiny else (STEPS, PARTICLES)
        # Moments to three per cent need less noise than a comparison does.
        self.conjugate_steps, self.conjugate_particles = (3, 2) if tiny else (1000, 256)
        self.draws, self.nuts = (200, 20) if tiny else (DRAWS, 2000)


class Found(dict[str, Any]):
    """Results by key, written to a file whenever there is another."""

    def __init__(self, path: Path):
        super().__init__(json.loads(path.read_text()) if path.exists() else {})
        self.path = path

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        self.path.write_text(json.dumps(self, indent=1, ensure_ascii=False) + "\n")
        print(f"{key}: {value}", file=sys.stderr)


def tables(found: Found, sizes: Sizes) -> str:
    return "\n\n".join([conjugate_table(found, sizes), schools_table(found, sizes), quantiles_table(found, sizes)])


def conjugate_table(found: Found, sizes: Sizes) -> str:
    rows = []
    for name, *_ in conjugate_models():
        runs = [found[f"conjugate/{name}/{seed}"] for seed in sizes.seeds]
        means = ", ".join(f"{run['mean']:.3f}" for run in runs)
        deviations = ", ".join(f"{100 * run['deviation']:.1f} %" for run in runs)
        rows.append([name, means, deviations])
    return table(["model", "means off by, in standard deviations", "standard deviations off by"], rows)


def schools_table(found: Found, sizes: Sizes) -> str:
    log_z, rows = found["schools/exact"]["log_z"], []
    for form in SCHOOLS:
        best = best_rate(found, form, OURS, sizes)
        for name in GUIDES:
            rate = best_rate(found, form, name, sizes)
            runs = [found[f"schools/{form}/{name}/{rate}/{seed}"] for seed in sizes.seeds]
            gaps = ", ".join(number(run["elbo"] - log_z) for run in runs)
            others = [f"{r:g}: {number(elbo(found, form, name, r, sizes.seeds[0]) - log_z)}" for r in sizes.rates]
            differences = [
                elbo(found, form, OURS, best, seed) - run["elbo"] for seed, run in zip(sizes.seeds, runs, strict=True)
            ]
            gain = (
                "" if name == OURS else f"{mean_of(differences):+.3f} ± {error_of(differences):.3f}".replace("-", "−")
            )
            monte_carlo = max(run["error"] for run in runs)
            khat = max(run["khat"] for run in runs)
            rows.append([form, name, "; ".join(others), gaps, f"{monte_carlo:.3f}", gain, f"{khat:.2f}"])
    header = [
        "form",
        "guide",
        "first seed, by learning rate",
        "best rate, each seed",
        "error",
        "ours is better by",
        "k̂",
    ]
    return table(header, rows)


def quantiles_table(found: Found, sizes: Sizes) -> str:
    def shown(name: str, form: str, key: str) -> list[str]:
        columns = found[f"schools/{key}"]["quantiles"].values()
        return [form, name, *(" · ".join(number(value, 2) for value in column) for column in columns)]

    rows = [shown("exact", "", "exact"), shown("NUTS", "", "NUTS")]
    for form, name in itertools.product(SCHOOLS, GUIDES):
        rate = best_rate(found, form, name, sizes)
        rows.append(shown(name, form, f"{form}/{name}/{rate}/{sizes.seeds[0]}"))
    return table(["form", "", "μ", "τ", "θ₁"], rows)


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


RUNS = {"conjugate": run_conjugate, "schools": run_schools, "nuts": run_nuts}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pyro_guides", description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=[*RUNS, "tables"])
    parser.add_argument("--out", type=Path, default=Path("docs/pyro.json"), help="the results' file")
    parser.add_argument("--tiny", action="store_true", help="next to nothing, to see that it runs")
    given = parser.parse_args(arguments)
    found, sizes = Found(given.out), Sizes(given.tiny)
    if given.what in RUNS:
        with pyro.validation_enabled(False):  # a third of the time
            RUNS[given.what](found, sizes)
        found["versions"] = {"python": platform.python_version(), "torch": torch.__version__, "pyro": pyro.__version__}
    else:
        print(tables(found, sizes))


if __name__ == "__main__":
    main()
