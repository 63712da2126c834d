"""Moving averages of the weights, each a candidate for the model that a run keeps.

After t steps with the weights w_1, …, w_t the average with decay d is

    a_t = Σ_s d^(t−s) w_s / Σ_s d^(t−s),    so that    a_t = a_(t−1) + (1 − d) / (1 − d^t) (w_t − a_(t−1)):

as the sum of the weights is divided by, the initial ones, from before the first step, have no part in it, and a slow
average is of use from the start.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

__all__ = ["OWN", "Averages"]

OWN = 0  # stands for the weights themselves among the decays: an average that forgets at once


class Averages:
    """Of the parameters of ``model``, one for each decay."""

    def __init__(self, model: nn.Module, decays: Sequence[float]) -> None:
        self.steps = 0
        self._own = dict(model.named_parameters())
        self._averages = {
            decay: {name: weight.detach().clone() for name, weight in self._own.items()} for decay in decays
        }

    @property
    def candidates(self) -> tuple[float, ...]:
        """The weights themselves, and the averages by their decays."""
        return (OWN, *self._averages)

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights after a step."""
        self.steps += 1
        for decay, average in self._averages.items():
            share = (1 - decay) / (1 - decay**self.steps)
            for name, weight in self._own.items():
                average[name].lerp_(weight, share)

    @contextmanager
    def applied(self, candidate: float) -> Iterator[None]:
        """The model with an average in place of its weights, which are back afterwards, to the bit."""
        if candidate == OWN:
            yield
            return
        own = {name: weight.detach().clone() for name, weight in self._own.items()}
        try:
            self._write(self._averages[candidate])
            yield
        finally:
            self._write(own)

    @torch.no_grad()
    def _write(self, weights: Mapping[str, torch.Tensor]) -> None:
        for name, weight in self._own.items():
            weight.copy_(weights[name])

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "averages": self._averages}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps = state["steps"]
        for decay, average in self._averages.items():
            for name, weight in average.items():
                weight.copy_(state["averages"][decay][name])
