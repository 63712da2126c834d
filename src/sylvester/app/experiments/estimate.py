"""How long runs will take on this machine, from a few steps of each."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from sylvester.app import machine, models
from sylvester.app.config import Config
from sylvester.app.optimizers import make_optimizer
from sylvester.app.training import draw, make_fabric, shard_loss
from sylvester.evaluation import log_likelihood

if TYPE_CHECKING:
    from sylvester.app.data import Dataset

__all__ = ["Speed", "calibrate"]

_STEPS = 2
_LATENTS = 500  # of an evaluation, of one image


@dataclass(frozen=True)
class Speed:
    """Seconds for an epoch with its validation, and for the evaluation."""

    epoch: float
    evaluation: float

    def left(self, config: Config, done: int) -> float:
        """At most: early stopping may end a run long before."""
        return max(0, config.epochs_at_most - done) * self.epoch + self.evaluation


def calibrate(config: Config, data: Dataset) -> Speed:
    """Time real steps of training, validation and evaluation on the run's own images; nothing is kept of them."""
    machine.require(config.precision, devices=1)
    fabric = make_fabric(config.model_copy(update={"devices": 1}))
    with torch.random.fork_rng():
        vae = models.build(config, data.image_shape, data.likelihood)
        model, optimizer = fabric.setup(vae, make_optimizer(vae, config))
        model.mark_forward_method("log_terms")
        shard = draw(data.train[: config.batch_size], (0, "calibration"), config.latent, binarize=data.dynamic)

        def step() -> None:
            loss, _ = shard_loss(fabric, model, shard, 1.0)
            optimizer.zero_grad()
            fabric.backward(loss)
            optimizer.step()

        @torch.no_grad()
        def look() -> None:
            shard_loss(fabric, model, shard, 1.0)

        training, looking = (_seconds(what, fabric.device) for what in (step, look))
        batches, validations = (-(-len(images) // config.batch_size) for images in (data.train, data.valid))
        evaluation = 0.0
        if config.test == "end" and config.nll_samples:
            samples = min(config.nll_samples, _LATENTS)
            images = data.test[:1]

            def score() -> None:
                log_likelihood(vae.eval(), images.to(fabric.device), samples)

            scale = len(data.test) * config.nll_samples / samples
            evaluation = scale * _seconds(score, fabric.device, steps=1)
        elif config.test == "end":
            evaluation = looking * -(-len(data.test) // config.batch_size)
    candidates = 1 + len(config.averages or ())
    return Speed(batches * training + validations * looking * candidates / config.validate_every, evaluation)


def _seconds(what: Callable[[], None], device: torch.device, steps: int = _STEPS) -> float:
    """Of one call, after one that warms up; the fastest, because others may use the machine."""
    times = []
    for _ in range(1 + steps):
        started = time.perf_counter()
        what()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started)
    return min(times[1:])
