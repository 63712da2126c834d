"""``python -m benchmarks.energies``, from a checkout: the four energies of Rezende & Mohamed (2015) by each family.

K = 16 steps, M = D for orthogonal Sylvester flows, `inference.fit` with its defaults but 2,000 steps and a tempered
start, the same for all families, from three random starts, all of which are shown. KL(q ‖ p) is a sum over a fine grid.
Results are lines of a JSON-lines file, and those that are there already are not done again.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.fits import append, read
from examples.four_energies import ENERGIES, FAMILIES, divergence
from sylvester import inference

STEPS, TEMPERING = 2000, 0.1
SEEDS = (0, 1, 2)


def fit(energy: str, family: str, seed: int) -> dict[str, Any]:
    """One row: KL(q ‖ p) of a fit, and the mass of q that the grid has found."""
    log_density = ENERGIES[energy]
    start = time.process_time()
    found = inference.fit(log_density, FAMILIES[family], steps=STEPS, tempering=TEMPERING, seed=seed)
    seconds = time.process_time() - start
    kl, mass = divergence(found.flow, log_density)
    return {
        "energy": energy,
        "family": family,
        "seed": seed,
        "kl": kl,
        "mass": mass,
        "seconds": seconds,
        "steps": found.history[-1].step,
        "elbo": found.elbo,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """KL of each start, best first, nats."""
    lines = [f"| family | {' | '.join(ENERGIES)} | CPU seconds a fit |", "|---" * (len(ENERGIES) + 2) + "|"]
    for family in FAMILIES:
        own = [row for row in rows if row["family"] == family]
        cells = [sorted(row["kl"] for row in own if row["energy"] == energy) for energy in ENERGIES]
        if own:
            seconds = sum(row["seconds"] for row in own) / len(own)
            shown = [", ".join(f"{kl:.3f}" for kl in cell) or "–" for cell in cells]
            lines.append(f"| {family} | {' | '.join(shown)} | {seconds:.0f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.energies", description=__doc__.split("\n\n")[0])
    parser.add_argument("--energy", action="append", choices=ENERGIES, help="This one alone; may be repeated.")
    parser.add_argument("--family", action="append", choices=FAMILIES, help="This one alone; may be repeated.")
    parser.add_argument("--out", type=Path, default=Path("docs/energies.jsonl"), help="The file of results.")
    arguments = parser.parse_args()
    rows = read(arguments.out)
    done = {(row["energy"], row["family"], row["seed"]) for row in rows}
    for seed in SEEDS:
        for energy in arguments.energy or ENERGIES:
            for family in arguments.family or FAMILIES:
                if (energy, family, seed) not in done:
                    print(energy, family, seed, file=sys.stderr)
                    rows.append(append(arguments.out, fit(energy, family, seed)))
    print(table(rows))
    worst = max(abs(row["mass"] - 1) for row in rows)
    print(f"\nThe grid holds the mass of every q to {worst:.1g}.")


if __name__ == "__main__":
    main()
