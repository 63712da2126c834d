"""The gap report: every run's decoder with every run's family of posteriors.

A decoder favours the q that it was trained with, so families are compared under each of the decoders.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from sylvester import flows
from sylvester.app.config import FLOW_SETTINGS, Config
from sylvester.app.experiments.tables import Table
from sylvester.app.runs import Run, RunError
from sylvester.gaps import Gaps, measure
from sylvester.random import stream

if TYPE_CHECKING:
    from sylvester.app.data import Dataset

__all__ = ["Report", "as_json", "report", "table"]

Counter = Callable[[int, int], object]


@dataclass(frozen=True)
class Report:
    """What each family lacks under the decoder of each run."""

    gaps: dict[str, Gaps]  # by run
    own: dict[str, str]  # by run, its own family
    split: str
    images: tuple[int, ...]  # their indices in the split


def report(
    runs: Sequence[Run],
    data: Sequence[Dataset],
    *,
    number: int,
    split: str,
    samples: int,
    steps: int,
    seed: int = 0,
    progress: Counter | None = None,
) -> Report:
    """Refine the posteriors of all runs' families under each run's decoder, on ``number`` images drawn by the seed.

    ``data`` has the dataset of each run.
    """
    images = [getattr(each, split) for each in data]
    for run, each, found in zip(runs, data, images, strict=True):
        run.require_data(each)
        if found.shape != images[0].shape or not torch.equal(found, images[0]):
            raise RunError(f"Expected runs with the same {split} images; got {runs[0].path} and {run.path}")
        if run.config.latent != runs[0].config.latent:
            raise RunError(
                "Expected runs with the same number of latents, as every family meets every decoder; got "
                f"{runs[0].config.latent} in {runs[0].path} and {run.config.latent} in {run.path}"
            )
    # In their files, images may be sorted by class.
    chosen = torch.randperm(len(images[0]), generator=stream(seed, "gaps"))[:number].sort().values
    x = images[0][chosen]
    names = _names([run.config for run in runs])
    families = dict(zip(names, (run.config for run in runs), strict=True))
    found = {}
    for place, (run, name) in enumerate(zip(runs, names, strict=True)):
        others = {other: _flow(config) for other, config in families.items() if other != name}

        def advance(done: int, total: int, before: int = place) -> None:
            if progress is not None:
                progress(before * total + done, len(runs) * total)

        device = "cuda" if torch.cuda.is_available() else "cpu"
        found[str(run.path)] = measure(
            run.model(device), x, others, name=name, samples=samples, steps=steps, seed=seed, progress=advance
        )
    own = {str(run.path): name for run, name in zip(runs, names, strict=True)}
    return Report(found, own, split, tuple(chosen.tolist()))


def _names(configs: Sequence[Config]) -> list[str]:
    """Families by the names of their flows, and by their sizes where one flow comes in several."""

    def sizes(config: Config) -> str:
        values = {name: getattr(config, name) for name in FLOW_SETTINGS}
        return ", ".join(f"{name}={value}" for name, value in values.items() if value is not None)

    names = []
    for config in configs:
        alike = {sizes(other) for other in configs if other.flow == config.flow}
        names.append(config.flow if len(alike) == 1 else f"{config.flow} ({sizes(config)})")
    return names


def _flow(config: Config) -> flows.Flow:
    """A family at its identity start, whatever the run's own start was; its context carries nothing."""
    family: Callable[..., flows.Flow] = flows.FAMILIES[config.flow]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return family(context=1, **(config.flow_arguments() | {"init": "identity"}))


def table(found: Report) -> Table:
    """A row for each decoder and family; the decoder's own family comes first, with its amortization gap."""
    header = ("decoder of", "q", "−ELBO", "refined", "−log p̂(x)", "approximation gap", "amortization gap")
    rows = []
    summaries = {run: gaps.summary() for run, gaps in found.gaps.items()}
    for run, summary in summaries.items():
        for name, family in summary["families"].items():
            amortized, refined = (family[key]["mean"] for key in ("amortized_elbo", "refined_elbo"))
            rows.append(
                (
                    run,
                    name,
                    _negative(amortized),
                    _negative(refined),
                    _negative(summary["log_px"]["mean"]),
                    _with_error(family["approximation_gap"]),
                    _with_error(family["amortization_gap"]),
                )
            )
    about = (
        f"In nats per image, over {len(found.images):,} {found.split} images, mean ± standard error over images. "
        "−ELBO less −log p̂(x) is the sum of both gaps."
    )
    each = [summary["notes"] for summary in summaries.values()]
    shared = [note for note in each[0] if all(note in notes for notes in each)]
    others = [
        f"{run}: {note}" for run, notes in zip(summaries, each, strict=True) for note in notes if note not in shared
    ]
    return Table(header, tuple(rows), (about, *shared, *others))


def as_json(found: Report) -> dict[str, Any]:
    return {
        "split": found.split,
        "images": list(found.images),
        "runs": [
            {
                "path": run,
                "family": found.own[run],
                **gaps.summary(),
                "per_image": {
                    "log_px": gaps.log_px.tolist(),
                    "mc_error": gaps.mc_error.tolist(),
                    "families": {
                        name: {
                            "refined_elbo": bounds.refined.tolist(),
                            "amortized_elbo": None if bounds.amortized is None else bounds.amortized.tolist(),
                        }
                        for name, bounds in gaps.families.items()
                    },
                },
            }
            for run, gaps in found.gaps.items()
        ],
    }


def _negative(value: float | None) -> str:
    return "" if value is None else f"{-value:.3f}"


def _with_error(value: dict[str, float | None]) -> str:
    mean, error = value["mean"], value["std_error"]
    if mean is None:
        return ""
    return f"{mean:.3f}".replace("-", "−") + (f" ± {error:.3f}" if error is not None else "")
