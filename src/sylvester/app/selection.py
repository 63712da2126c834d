"""Which weights of a run are its model, and when there is nothing better to expect; by validation alone.

The metrics are a line for each epoch, and those of an epoch with a validation have ``valid_neg_elbo``. Where averages
of the weights are tracked, each is a candidate with a curve of its own; where curves are smoothed, a candidate's
score is the mean of its last validations. Epochs of refinement have their number, from 1, as ``refine``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from sylvester.app.config import Config
from sylvester.app.schedules import Stage

__all__ = ["History", "best_epoch", "choose", "is_validated", "next_stage"]

History = list[dict[str, float]]
Lines = Sequence[Mapping[str, float]]


def next_stage(history: Lines, config: Config) -> Stage | None:
    """What is to be done after the epochs so far; None for a run that is finished."""
    trained = [line for line in history if "refine" not in line]
    if len(trained) == len(history) and not _exhausted(trained, config):
        return Stage(len(trained) + 1, config.epochs)
    refined = len(history) - len(trained)
    return Stage(refined + 1, config.refine_epochs, refining=True) if refined < config.refine_epochs else None


def _exhausted(history: Lines, config: Config) -> bool:
    """All epochs done, or ``patience`` epochs, counted from the warmup's end on, without a better one.

    Between two validations nothing can be said: patience ends at the first one that finds it exhausted.
    """
    epoch = len(history)
    if epoch == 0 or epoch >= config.epochs:
        return epoch >= config.epochs
    if "valid_neg_elbo" not in history[-1]:
        return False
    stale = epoch - max(best_epoch(history), config.warmup - 1)
    return 0 < config.patience <= stale


def is_validated(stage: Stage, config: Config) -> bool:
    return stage.epoch % config.validate_every == 0 or stage.epoch == stage.epochs


def choose(history: Lines, found: Mapping[float, Mapping[str, float]], smooth: int) -> dict[str, float]:
    """What a validation adds to the line of its epoch: the figures of the candidate with the best score.

    ``found`` has what it came to for each candidate, by its decay. Beside several stand all their −ELBOs and, as
    ``average``, whose figures were taken; beside smoothed ones the score, ``valid_smoothed``.
    """
    several = len(found) > 1
    bounds = {
        f"valid_neg_elbo_{decay}" if several else "valid_neg_elbo": figures["neg_elbo"]
        for decay, figures in found.items()
    }
    earlier = [line for line in history if "valid_neg_elbo" in line]
    scores = [fmean([*(line[name] for line in earlier), bound][-smooth:]) for name, bound in bounds.items()]
    score, best = min(zip(scores, found, strict=True), key=lambda pair: pair[0])
    line = {f"valid_{key}": value for key, value in found[best].items()}
    if several:
        line |= {"average": best, **bounds}
    if smooth > 1:
        line["valid_smoothed"] = score
    return line


def best_epoch(history: Lines) -> int:
    """The epoch, from 1, of the lowest validation −ELBO, smoothed where that is asked for; the earliest of equals."""
    scores = {
        epoch: line.get("valid_smoothed", line["valid_neg_elbo"])
        for epoch, line in enumerate(history, start=1)
        if "valid_neg_elbo" in line
    }
    return min(scores, key=scores.__getitem__)
