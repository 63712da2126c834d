"""``python -m benchmarks.fits``, from a checkout: `inference.fit` with its defaults, every family on every target.

Each fit is a line of a JSON-lines file, and those that are there already are not done again. The tables are of
all lines, in Markdown: the bound, from 10⁵ fresh draws, against log Z, which is known; k̂ and ESS of the same draws.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.targets import TARGETS, eight_gaussians
from sylvester import diagnostics, flows, inference

#: The family that is to be within `NEAR` nats of log Z on the banana, the funnel and eight schools.
NAMED = "affine-iaf"
NEAR = 0.05
DRAWS = 100_000
COLLAPSED = "eight Gaussians, collapsed on purpose"

#: Draws of a MAF or NSF take D passes a step: turned round, they are the affine IAF and the "inverted nsf".
FAMILIES: dict[str, Callable[[int], flows.Flow]] = {
    name: make for name, make in flows.FAMILIES.items() if name not in ("maf", "nsf")
}
FAMILIES["inverted nsf"] = lambda features: flows.inverted(flows.NSF(features))
#: The same with ``affine=True``, the one departure from the defaults, for steps that move little at a time.
AFFINE = " + affine"
FAMILIES |= {name + AFFINE: FAMILIES[name] for name in ("planar", "orthogonal-sylvester", "triangular-sylvester")}


def fit(target: str, family: str, seed: int = 0) -> dict[str, Any]:
    """One row: what a fit with defaults comes to."""
    features, log_density, log_z = TARGETS[target]
    start = time.process_time()
    found = inference.fit(log_density, partial(FAMILIES[family], features), affine=family.endswith(AFFINE), seed=seed)
    return _row(target, family, seed, found, log_z(), time.process_time() - start)


def collapsed() -> dict[str, Any]:
    """A Gaussian on one of eight modes: all the figures that its own draws can give are good, and log 8 is missing."""
    start = flows.Gaussian(2)
    with torch.no_grad():
        start.base.hypernetwork.bias.copy_(torch.tensor([4.0, 0.0, -1.25, -1.25]))
    began = time.process_time()
    found = inference.fit(eight_gaussians, start)
    return _row(COLLAPSED, "gaussian", 0, found, 0.0, time.process_time() - began)


def _row(target: str, family: str, seed: int, found: inference.Fit, log_z: float, seconds: float) -> dict[str, Any]:
    fresh = diagnostics.diagnose(found.log_density, found.flow(), DRAWS, seed=seed + 1)
    return {
        "target": target,
        "family": family,
        "seed": seed,
        "gap": log_z - fresh.elbo,
        "log_z_off": fresh.log_z - log_z,
        "seconds": seconds,
        "steps": found.history[-1].step,
        "converged": found.converged,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": platform.processor() or platform.machine(),
        **fresh.summary(),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Gaps in nats, with their standard errors."""
    lines = ["| family | log Z − bound | ± | log Ẑ − log Z | k̂ | ESS, % | steps | CPU seconds |", "|---" * 8 + "|"]
    for row in rows:
        name = f"**{row['family']}**" if row["family"] == NAMED else row["family"]
        name += f", seed {row['seed']}" if row["seed"] else ""
        khat = "–" if row["khat"] is None else f"{row['khat']:.2f}"
        figures = f"{row['gap']:.3f} | {row['elbo_error']:.3f} | {row['log_z_off']:+.3f} | {khat}"
        lines.append(
            f"| {name} | {figures} | {100 * row['ess'] / row['samples']:.0f} | {row['steps']} | {row['seconds']:.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fits", description=__doc__.split("\n\n")[0])
    parser.add_argument("--target", action="append", choices=TARGETS, help="This one alone; may be repeated.")
    parser.add_argument("--family", action="append", choices=FAMILIES, help="This one alone; may be repeated.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("docs/fits.jsonl"), help="The file of results.")
    arguments = parser.parse_args()
    rows = read(arguments.out)
    done = {(row["target"], row["family"], row["seed"]) for row in rows}
    wanted = [
        (target, family, arguments.seed)
        for target in arguments.target or TARGETS
        for family in arguments.family or FAMILIES
    ]
    for key in wanted:
        if key not in done:
            print(*key, file=sys.stderr)
            rows.append(append(arguments.out, fit(*key)))
    if (COLLAPSED, "gaussian", 0) not in done:
        rows.append(append(arguments.out, collapsed()))
    for target in [*TARGETS, COLLAPSED]:
        chosen = [row for row in rows if row["target"] == target]
        if chosen:
            print(f"\n### {target[0].upper()}{target[1:]}\n\n{table(chosen)}")
    (last,) = [row for row in rows if row["target"] == COLLAPSED]
    print(f"\n> {last['verdict']}")


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def append(path: Path, row: dict[str, Any]) -> dict[str, Any]:
    plain = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in row.items()
    }
    with path.open("a") as file:
        file.write(json.dumps(plain) + "\n")
    return plain


if __name__ == "__main__":
    main()
