"""The figures of a finished run: what result.json says, and how the test images were scored."""

from __future__ import annotations

import math
import os
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning_fabric import Fabric
from safetensors.torch import load as load_tensors

import sylvester
from sylvester.adaptation import draws_of_a_round
from sylvester.annealing import LEAPFROG
from sylvester.app import figures, models
from sylvester.app.checksums import about_tensors, fingerprint, sealed, sealed_tensors
from sylvester.app.config import FLOW_SETTINGS, RECIPE, Config
from sylvester.app.partials import Partial
from sylvester.app.runs import Run, RunError, RunFailure, replacing, write_json
from sylvester.app.selection import History, best_epoch
from sylvester.app.training import validate
from sylvester.evaluation import Estimate, log_likelihood

if TYPE_CHECKING:
    from sylvester.app.data import Dataset

Counter = Callable[[int, int], object]

# The figures of the test, and what stands in their place where there was none.
TESTED = ("neg_elbo", "neg_elbo_std_error", "nll", "nll_mc_error", "nll_std_error")
UNTESTED: dict[str, Any] = {
    **dict.fromkeys(TESTED),
    "bits_per_dim": None,
    "nll_samples": 0,
    "ess": None,
    "khat_share": None,
    "warning": None,
}
# What is kept of each test image.
SCORES = ("log_px", "mc_error", "ess", "khat", "elbo")
PART = 10_000  # latents between two lines of a partial evaluation
GRADIENT = 3  # takes as long as so many latents


def ignore(*said: object) -> None:
    """Tell nobody."""


@dataclass(frozen=True)
class Evaluation:
    """How test images are scored."""

    samples: int
    seed: int = 0
    adapt: int = 0  # rounds of each image's proposal
    anneal: int = 0  # transitions of each sample
    images: int | None = None  # the first so many test images; all of them where there is no number

    @property
    def name(self) -> str:
        first = f"-first{self.images}" if self.images else ""
        return f"evaluation-{self.samples}{''.join(f'-{way}{n}' for way, n in self.better)}{first}-seed{self.seed}"

    @property
    def better(self) -> list[tuple[str, int]]:
        """What is done beyond plain importance sampling: the setting and its number."""
        return [(way, number) for way, number in (("adapt", self.adapt), ("anneal", self.anneal)) if number]

    @property
    def key(self) -> tuple[int | str, ...]:
        """What the figures of an image depend on; for older ways of sampling, as before there were newer ones."""
        annealed = (self.anneal,) if self.anneal else ()
        adapted = ("adapt", self.adapt) if self.adapt else ()
        return (self.samples, self.seed, *annealed, *adapted)

    def file(self, run: Run) -> Path:
        """What it found for each image."""
        return run.path / f"{self.name}.safetensors"

    def command(self, run: Path, counts: Sequence[int] = ()) -> str:
        """What makes it, or goes on with it; or with those that have other numbers of samples."""
        samples = ",".join(map(str, counts or (self.samples,)))
        better = "".join(f" --{way} {number}" for way, number in self.better)
        first = f" --images {self.images}" if self.images else ""
        return f"sylvester evaluate {run} --samples {samples}{better}{first} --seed {self.seed}"

    def images_at_once(self, latent: int) -> int:
        """Between two lines of a partial evaluation."""
        gradients = self.samples * self.anneal * LEAPFROG + self.adapt * draws_of_a_round(latent)
        return max(1, PART // (self.samples + GRADIENT * gradients))


def evaluate(
    run: Run,
    data: Dataset,
    how: Evaluation,
    *,
    progress: Counter = ignore,
    notify: Callable[[str], object] = ignore,
) -> dict[str, Any]:
    """Score the test images with the run's best model, going on where an interrupted evaluation stopped.

    The figures, in nats and for categorical images in bits per dimension too, stay in the run's folder, and beside
    them those of each image. ``notify`` is told of damage that was made good.
    """
    (figures,) = evaluate_each(run, data, how, (how.samples,), progress=progress, notify=notify)
    return figures


def evaluate_each(
    run: Run,
    data: Dataset,
    how: Evaluation,
    counts: Sequence[int],
    *,
    progress: Counter = ignore,
    notify: Callable[[str], object] = ignore,
) -> list[dict[str, Any]]:
    """The same with each of several numbers of samples in the place of ``how``'s, in the time of the largest."""
    run.require_data(data)
    if how.images is not None and how.images >= len(data.test):
        how = replace(how, images=None)
    model = run.about_model()["checksum"]
    every = [replace(how, samples=count) for count in counts]
    with ExitStack() as locks:
        for one in every:
            locks.enter_context(run.locked(one.name))
        _score(run, data, every, model, progress, notify)
        return [_summarize(run, data, one, model) for one in every]


def _summarize(run: Run, data: Dataset, how: Evaluation, model: str) -> dict[str, Any]:
    """Write the figures of an evaluation whose images are scored."""
    name = how.name
    about, content = _read(run, how)
    summary = Estimate(**load_tensors(content), samples=how.samples, fewer=()).summary()
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
        "nll_samples": how.samples,
        **dict(how.better),
        **({"images": how.images} if how.images else {}),
        "ess": summary["ess"],
        "khat_share": summary["khat_share"],  # of the images, how many have a Pareto k̂ too large to trust
        "warning": summary["warning"],
        "evaluation": {"file": f"{name}.safetensors", "checksum": about["checksum"], "model": model},
    }
    write_json(run.path / f"{name}.json", sealed(result))
    for finished in run.path.glob(f"{name}-*.partial"):
        finished.unlink()
    return result


def _score(
    run: Run,
    data: Dataset,
    every: Sequence[Evaluation],
    model: str,
    progress: Counter,
    notify: Callable[[str], object],
) -> None:
    """Write what each evaluation finds for each image, unless it has been written.

    They differ in the number of samples alone. ``model`` is the checksum of the run's best model.
    """
    # The model's checksum stands for the recipe, so that one of new settings leaves older evaluations as they are.
    settings = run.config.model_dump(mode="json", exclude={"data_dir", *RECIPE})
    keys = {how: fingerprint(settings, model, data.sha256, *how.key) for how in every}
    # Training may since have found a better model.
    keys = {how: key for how, key in keys.items() if not how.file(run).is_file() or _read(run, how)[0]["key"] != key}
    if not keys:
        return
    *fewer, most = sorted(keys, key=lambda how: how.samples)
    partials = {how: Partial(run.path / f"{how.name}-{key}.partial", key) for how, key in keys.items()}
    for partial in partials.values():
        if partial.damaged:
            notify(f"{partial.path} was damaged; from image {len(partial.rows) + 1} on it is made again.")
    vae = run.model(Fabric(devices=1).device)
    if run.about_model()["checksum"] != model:
        raise RunError(
            f"Expected a model that stays the same; got {run.path}, whose training found a better one: try again"
        )
    test = data.test[: most.images]
    # Parts begin at its multiples wherever a kill came: the figures stay the same.
    size = most.images_at_once(run.config.latent)
    while (first := min(len(partial.rows) for partial in partials.values())) < len(test):
        part = test[first : first + size]
        estimate = log_likelihood(
            vae,
            part,
            most.samples,
            fewer=[how.samples for how in fewer],
            adapt=most.adapt,
            anneal=most.anneal,
            seed=most.seed,
            first=first,
        )
        for how, found in zip((*fewer, most), (*estimate.fewer, estimate), strict=True):
            rows = torch.stack([getattr(found, score) for score in SCORES], 1).tolist()
            if lacking := rows[len(partials[how].rows) - first :]:
                partials[how].append(lacking)
        progress(first + len(part), len(test))
    for how, key in keys.items():
        columns = torch.tensor(partials[how].rows, dtype=torch.float64).unbind(1)
        scores = dict(zip(SCORES, columns, strict=True))
        with replacing(how.file(run)) as target:
            target.write(sealed_tensors(scores, {"key": key, "samples": how.samples, "seed": how.seed}))


def _read(run: Run, how: Evaluation) -> tuple[dict[str, Any], bytes]:
    own = run.config.test == "end" and how == Evaluation(run.config.nll_samples, run.config.seed)
    # The run's own evaluation is made, and made again, with its result.
    with run.naming(how.file(run), None if own else f"delete it, and {how.command(run.path)} makes it again"):
        content = how.file(run).read_bytes()
        return about_tensors(content), content


def bound(run: Run, data: Dataset) -> dict[str, Any]:
    """The test −ELBO alone, from one sample per image; the figures of :func:`evaluate` without the NLL's."""
    run.require_data(data)
    fabric = Fabric(devices=1)
    vae = run.model(fabric.device)
    found = UNTESTED | {"neg_elbo": validate(fabric, vae, data.test, run.config)["neg_elbo"]}
    return found | {"bits_per_dim": bits_per_dim({key: found[key] for key in TESTED}, data)} | _without_scores(run)


def _without_scores(run: Run) -> dict[str, Any]:
    return {"evaluation": {"file": None, "checksum": None, "model": run.about_model()["checksum"]}}


def bits_per_dim(scored: Mapping[str, float | None], data: Dataset) -> dict[str, float | None] | None:
    """Nats an image to bits a pixel and channel, customary for categorical images only."""
    if data.likelihood != "categorical":
        return None
    scale = 1 / (math.log(2) * data.train[0].numel())
    return {key: None if value is None else value * scale for key, value in scored.items()}


def conclude(
    run: Run,
    data: Dataset,
    history: History,
    *,
    progress: Counter = ignore,
    notify: Callable[[str], object] = ignore,
) -> dict[str, Any]:
    """Test the best model of a trained run, draw its pictures, and finish the run with ``result.json``.

    With ``test = "never"`` no test image is looked at, and the test's figures are None.
    """
    config, started = run.config, time.perf_counter()
    samples, shown = config.nll_samples, data.test
    if config.test == "never":
        tested, shown = UNTESTED | _without_scores(run), data.valid
    elif samples:
        tested = evaluate(run, data, Evaluation(samples, config.seed), progress=progress, notify=notify)
    else:
        tested = bound(run, data)
    evaluation_seconds = time.perf_counter() - started
    vae = run.model()
    figures.write(figures.samples(vae, 64, seed=config.seed), run.path / "samples.png")
    figures.write(figures.reconstructions(vae, shown[:40], seed=config.seed), run.path / "reconstructions.png")

    best = best_epoch(history)
    chosen = history[best - 1]
    train_seconds = sum(line["seconds"] for line in history)
    found = {
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
        "valid_neg_elbo": chosen["valid_neg_elbo"],
        **{key: value for key, value in chosen.items() if key in ("valid_smoothed", "average", "refine")},
        "parameters": models.parameter_counts(vae),
        **tested,
        "versions": {
            "sylvester": sylvester.__version__,
            "torch": torch.__version__,
            "lightning-fabric": version("lightning-fabric"),
            "python": platform.python_version(),
        },
    }
    timing = {
        "seconds": train_seconds + evaluation_seconds,
        "train_seconds": train_seconds,
        "evaluation_seconds": evaluation_seconds,
        "train_images_per_second": len(history) * len(data.train) / train_seconds,
        "peak_memory_bytes": _peak_memory(),
        "machine": _machine(history),
    }
    return run.write_result(found, timing)


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


def _machine(history: History) -> dict[str, Any]:
    """What the figures and the seconds depend on beside the settings."""
    return {
        "platform": platform.platform(),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "threads": _threads(history),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def _threads(history: History) -> int:
    """Of most epochs. A resumed run may be concluded with others, and metrics of earlier versions do not say."""
    counts = [int(line["threads"]) for line in history if "threads" in line]
    return statistics.mode(counts) if counts else torch.get_num_threads()


def _cpu() -> str:
    """The processor's name as its maker writes it, where the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
