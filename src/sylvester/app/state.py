"""All that changes while a run trains, which is what its checkpoint holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from lightning_fabric import Fabric
from torch import Tensor

from sylvester.app.averages import OWN, Averages
from sylvester.app.config import Config
from sylvester.app.optimizers import make_optimizer
from sylvester.app.runs import Run, RunError, RunFailure, best_weights
from sylvester.app.selection import History, best_epoch
from sylvester.vae import VAE

if TYPE_CHECKING:
    from sylvester.app.data import Dataset

__all__ = ["State"]


@dataclass
class State:
    """Made by :meth:`start`; every process of a run has an equal one."""

    fabric: Fabric
    config: Config
    vae: VAE
    model: Any  # the same, as the devices share it
    optimizer: Any
    averages: Averages
    history: History = field(default_factory=list)
    best: dict[str, Any] = field(default_factory=dict)  # ``weights`` of the best epoch, and ``about`` them

    @classmethod
    def start(cls, fabric: Fabric, config: Config, vae: VAE) -> State:
        model, optimizer = fabric.setup(vae, make_optimizer(vae, config))
        model.mark_forward_method("log_terms")
        return cls(fabric, config, vae, model, optimizer, Averages(vae, config.averages or ()))

    def begin_refinement(self) -> None:
        """From the best weights on, with the inference network's optimizer and averages of their own."""
        self.vae.load_state_dict(self.best["weights"])
        self._refine()

    def _refine(self) -> None:
        self.optimizer = self.fabric.setup_optimizers(make_optimizer(self.vae, self.config, refining=True))
        self.averages = Averages(self.vae, self.config.averages or ())

    @property
    def is_best(self) -> bool:
        """Whether the last epoch, which was validated, is the best so far."""
        return best_epoch(self.history) == len(self.history)

    def keep_best(self, data: Dataset) -> None:
        """Where the last epoch is the best so far, keep its weights, or the average of them that was better."""
        if not self.is_best:
            return
        line = self.history[-1]
        about = {
            "shape": list(data.image_shape),
            "likelihood": data.likelihood,
            "epoch": len(self.history),
            "valid_neg_elbo": line["valid_neg_elbo"],
            "data": data.sha256,
        }
        if "average" in line:
            about["average"] = line["average"]
        with self.averages.applied(line.get("average", OWN)):
            self.best = {"about": about, "weights": _copy(self.vae)}

    def checkpoint(self, data: Dataset) -> dict[str, Any]:
        in_place = self.is_best and self.history[-1].get("average", OWN) == OWN
        state = {
            "model": self.model.state_dict(),
            "best": self.best | ({"weights": None} if in_place else {}),  # None: the model itself
            "optimizer": self.optimizer.state_dict(),
            "precision": self.fabric.strategy.precision.state_dict(),
            "rng": torch.get_rng_state(),
            "history": self.history,
            "data": data.sha256,
        }
        return state | ({} if self.config.averages is None else {"averages": self.averages.state_dict()})

    def restore(self, checkpoint: Mapping[str, Any], run: Run, data: Dataset) -> None:
        if checkpoint["data"] != data.sha256:
            raise RunFailure(f"Expected the data that {run.path} was started with; got other files by that name")
        self.history = checkpoint["history"]
        if "refine" in self.history[-1]:
            self._refine()
        try:
            self.model.load_state_dict(checkpoint["model"])
        except RuntimeError:
            raise RunFailure(
                f"Expected a checkpoint of the model that {run.path / 'config.toml'} describes; got one of other "
                "sizes: restore the settings that the run was started with"
            ) from None
        self.optimizer.load_state_dict(checkpoint["optimizer"])
        self.fabric.strategy.precision.load_state_dict(checkpoint["precision"])
        torch.set_rng_state(checkpoint["rng"])
        if self.config.averages is not None:
            self.averages.load_state_dict(checkpoint["averages"])
        self.best = _best_of(run, checkpoint)

    def agree(self, run: Run) -> None:
        """Make the run's files those of the checkpoint, which is the truth: a kill before the next leaves others."""
        run.write_metrics(self.history)
        if self.best and self.best["about"] != _about_model(run):
            run.save_model(self.best["weights"], self.best["about"])


def _copy(vae: torch.nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().to("cpu", copy=True) for name, value in vae.state_dict().items()}


def _best_of(run: Run, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    if "best" not in checkpoint:  # format 0 has the best model in its own file alone
        about = run.about_model()
        del about["checksum"]
        return {"about": about, "weights": run.weights()}
    return {"about": checkpoint["best"]["about"], "weights": best_weights(checkpoint)}


def _about_model(run: Run) -> dict[str, Any] | None:
    """What the model's file says of itself, without its checksum; None where there is no whole one."""
    try:
        about = run.about_model()
    except RunError:
        return None
    return {key: value for key, value in about.items() if key != "checksum"}
