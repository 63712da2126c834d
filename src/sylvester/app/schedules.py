"""What changes from step to step, as functions of where training stands: there is nothing to save and to resume."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sylvester.app.config import Config
from sylvester.objectives import linear_beta

__all__ = ["Stage", "kl_weight", "learning_rate"]


@dataclass(frozen=True)
class Stage:
    """An epoch's place, from 1, among those of its phase: training itself, or the refinement after it."""

    epoch: int
    epochs: int
    refining: bool = False


def kl_weight(config: Config, stage: Stage, step: int, steps: int) -> float:
    """β at a step of an epoch, both from 1: it grows linearly over the epochs of ``warmup``, in each or with each step.

    A model that is refined is a finished one, and has β = 1.
    """
    if stage.refining:
        return 1.0
    within = {"step": step, "steps": steps} if config.warmup_by == "step" else {}
    return linear_beta(stage.epoch, config.warmup, start=config.beta_start, **within)


def learning_rate(config: Config, stage: Stage, step: int, steps: int) -> float:
    """At step t of the phase's T, with W steps of warm-up: η t / W up to t = W, then η, or with cosine

        η (1 + cos(π (t − 1 − W) / (T − W))) / 2,

    which is η at the first step after the warm-up, and would be 0 at the first after the last. Refinement has an η of
    its own.
    """
    rate, warmup = config.learning_rate, config.warmup_steps
    if stage.refining and config.refine_rate is not None:
        rate = config.refine_rate
    taken = (stage.epoch - 1) * steps + step
    if taken <= warmup:
        return rate * taken / warmup
    if config.schedule == "constant":
        return rate
    return rate * (1 + math.cos(math.pi * (taken - 1 - warmup) / (stage.epochs * steps - warmup))) / 2
