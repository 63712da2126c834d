"""What a flow is for: the same small VAE with a Gaussian and with a Sylvester posterior, compared and drawn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sylvester.app.config import resolve
from sylvester.app.experiments.comparison import Difference, compare
from sylvester.app.runs import Run, RunError

__all__ = ["FLOWS", "Demonstration", "conclude", "run"]

FLOWS = ("gaussian", "triangular-sylvester")


@dataclass(frozen=True)
class Demonstration:
    folder: Path
    results: Mapping[str, Mapping[str, Any]]  # by flow, what result.json says
    neg_elbo: Difference  # the flow's against the Gaussian's, paired
    nll: Difference
    gaps: Mapping[str, float]  # by flow, KL(q ‖ p) of the image in the picture
    picture: Path


def run(folder: Path, flow: str) -> Run:
    """The run of one of the two flows, new, half done or finished."""
    path, config = folder / flow, resolve({"preset": "demo", "flow": flow})
    if folder.is_dir() and any(folder.iterdir()) and not any((folder / each).is_dir() for each in FLOWS):
        raise RunError(f"Expected a new folder, or one of sylvester demo; got {folder}, which holds other files")
    if not (path / "config.toml").exists():
        return Run.create(path, config)
    found = Run.open(path)
    if found.config != config:
        raise RunError(
            f"Expected a new folder, or one of sylvester demo; got {folder}, whose {flow} has other settings"
        )
    return found


def conclude(folder: Path) -> Demonstration:
    """Compare the two finished runs, and draw the posterior of the validation image that the Gaussian fits worst."""
    from sylvester.app import latents

    runs = {flow: Run.open(folder / flow) for flow in FLOWS}
    results = {flow: run.result for flow, run in runs.items()}
    found = compare([run.path for run in runs.values()], against=FLOWS[0])
    (against,) = [group.against for group in found.groups if group.against]
    models = {flow: run.model() for flow, run in runs.items()}
    images = runs[FLOWS[0]].data().valid
    image = images[latents.by_gap(models[FLOWS[0]], images)[0]]
    planes = {flow: latents.plane(model, image) for flow, model in models.items()}
    picture = folder / "posterior.png"
    latents.draw(planes, image, picture)
    return Demonstration(
        folder=folder,
        results={flow: result for flow, result in results.items() if result is not None},
        neg_elbo=against["neg_elbo"],
        nll=against["nll"],
        gaps={flow: plane.gap for flow, plane in planes.items()},
        picture=picture,
    )
