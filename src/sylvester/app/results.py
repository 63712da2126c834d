"""The figures of a finished run: what result.json says, and how the test images were scored."""

from __future__ import annotations

import hashlib
import math
import platform
import resource
import sys
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch
from lightning_fabric import Fabric

import sylvester
from sylvester.app import figures, models
from sylvester.app.config import FLOW_SETTINGS, Config
from sylvester.app.runs import Run, RunError, RunFailure, write_json
from sylvester.app.training import History, best_epoch, validate
from sylvester.evaluation import log_likelihood

if TYPE_CHECKING:
    from sylvester.app.data import Dataset

Counter = Callable[[int, int], object]

SCORES = ("neg_elbo", "neg_elbo_std_error", "nll", "nll_mc_error", "nll_std_error")
UNTESTED: dict[str, Any] = {
    **dict.fromkeys(SCORES),
    "bits_per_dim": None,
    "nll_samples": 0,
    "ess": None,
    "khat_share": None,
    "warning": None,
}


def evaluate(
    run: Run, data: Dataset, samples: int, *, seed: int = 0, progress: Counter | None = None
) -> dict[str, Any]:
    """Score the test images with the run's best model, going on where an interrupted evaluation stopped.

    The figures, in nats and for categorical images in bits per dimension too, stay in the run's folder.
    """
    name = f"evaluation-{samples}-seed{seed}"
    # Training may since have found a better model, of which what is finished says nothing.
    model = hashlib.sha256((run.path / "model.safetensors").read_bytes()).hexdigest()[:16]
    partial = run.path / f"{name}-{model}.partial"
    vae = run.load_model(Fabric(devices=1).device)
    try:
        with run.locked(name):
            estimate = log_likelihood(vae, data.test, samples, seed=seed, checkpoint=partial, progress=progress)
    except ValueError as error:  # a file of other images
        raise RunError(str(error)) from error
    summary = estimate.summary()
    if summary["log_px"] is None or summary["elbo"] is None:
        raise RunFailure(f"The model in {run.path} gives some test images no finite likelihood")
    scored = {
        "neg_elbo": -summary["elbo"],
        "neg_elbo_std_error": summary["elbo_std_error"],
        "nll": -summary["log_px"],
        "nll_mc_error": summary["mc_error"],
        "nll_std_error": summary["std_error"],
    }
    result = scored | {
        "bits_per_dim": bits_per_dim(scored, data),
        "nll_samples": samples,
        "ess": summary["ess"],
        "khat_share": summary["khat_share"],  # of the images, how many have a Pareto k̂ too large to trust
        "warning": summary["warning"],
    }
    write_json(run.path / f"{name}.json", result)
    for finished in run.path.glob(f"{name}-*.partial"):
        finished.unlink()
    return result


def bound(run: Run, data: Dataset) -> dict[str, Any]:
    """The test −ELBO alone, from one sample per image; the figures of :func:`evaluate` without the NLL's."""
    fabric = Fabric(devices=1)
    vae = run.load_model(fabric.device)
    scored = {"neg_elbo": validate(fabric, vae, data.test, run.config)["neg_elbo"]}
    absent = UNTESTED | scored
    return absent | {"bits_per_dim": bits_per_dim({key: absent[key] for key in SCORES}, data)}


def bits_per_dim(scored: Mapping[str, float | None], data: Dataset) -> dict[str, float | None] | None:
    """Nats an image to bits a pixel and channel, customary for categorical images only."""
    if data.likelihood != "categorical":
        return None
    scale = 1 / (math.log(2) * data.train[0].numel())
    return {key: None if value is None else value * scale for key, value in scored.items()}


def conclude(run: Run, data: Dataset, history: History, *, progress: Counter | None = None) -> dict[str, Any]:
    """Test the best model of a trained run, draw its pictures, and finish the run with ``result.json``.

    With ``test = "never"`` no test image is looked at, and the test's figures are None.
    """
    config, started = run.config, time.perf_counter()
    samples, shown = config.nll_samples, data.test
    if config.test == "never":
        tested, shown = UNTESTED, data.valid
    elif samples:
        tested = evaluate(run, data, samples, seed=config.seed, progress=progress)
    else:
        tested = bound(run, data)
    evaluation_seconds = time.perf_counter() - started
    vae = run.load_model()
    figures.samples(vae, run.path / "samples.png", 64, seed=config.seed)
    figures.reconstructions(vae, shown[:40], run.path / "reconstructions.png", seed=config.seed)

    best = best_epoch(history)
    train_seconds = sum(line["seconds"] for line in history)
    result = {
        "dataset": {
            "name": data.name,
            "source": data.source,
            "sha256": data.sha256,
            "likelihood": data.likelihood,
            "shape": list(data.image_shape),
            **data.counts,
        },
        "flow": _flow(config),
        "preset": config.preset,
        "seed": config.seed,
        "epochs": len(history),
        "best_epoch": best,
        "valid_neg_elbo": history[best - 1]["valid_neg_elbo"],
        "parameters": models.parameter_counts(vae),
        **tested,
        "timing": {
            "seconds": train_seconds + evaluation_seconds,
            "train_seconds": train_seconds,
            "evaluation_seconds": evaluation_seconds,
            "train_images_per_second": len(history) * len(data.train) / train_seconds,
            "peak_memory_bytes": _peak_memory(),
        },
        "versions": {
            "sylvester": sylvester.__version__,
            "torch": torch.__version__,
            "lightning-fabric": version("lightning-fabric"),
            "python": platform.python_version(),
        },
    }
    write_json(run.path / "result.json", result)
    return result


def _flow(config: Config) -> dict[str, Any]:
    settings = {name: getattr(config, name) for name in FLOW_SETTINGS}
    outputs = {"outputs_per_step": models.outputs_per_step(config)}
    described = {"name": config.flow, "latent": config.latent, **settings, **outputs}
    return {key: value for key, value in described.items() if value is not None}


def _peak_memory() -> int:
    """Of this process, or of the accelerator where there is one."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak  # Linux counts in KiB
