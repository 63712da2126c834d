"""The optimizers of training, which weights they move and which they shrink."""

from __future__ import annotations

import torch

from sylvester.app.config import Config
from sylvester.optim import Adamax
from sylvester.vae import VAE

__all__ = ["make_optimizer", "set_learning_rate"]


def make_optimizer(vae: VAE, config: Config, *, refining: bool = False) -> torch.optim.Optimizer:
    """Of all parameters or, for refinement, of the inference network's: encoder and flow."""
    rate, betas = config.learning_rate, (config.beta1, config.beta2)
    inference = [*vae.encoder.parameters(), *vae.flow.parameters()]
    moved = inference if refining else list(vae.parameters())
    shrunk = {p for p in inference if p.dim() > 1} if config.optimizer == "adamw" else set()
    steps = {p for name, p in vae.flow.named_parameters() if name.startswith("steps.")}
    slowed = steps if config.flow_rate != 1 else set()
    groups = [
        {
            "params": [p for p in moved if (p in shrunk, p in slowed) == (shrinks, slows)],
            "weight_decay": config.weight_decay if shrinks else 0.0,
            "share": config.flow_rate if slows else 1.0,
        }
        for slows in (False, True)
        for shrinks in (True, False)
    ]
    groups = [group for group in groups if group["params"]]
    if config.optimizer == "adamax":
        return Adamax(groups, lr=rate, betas=betas, eps=1e-7)  # the paper's ε
    kind = torch.optim.AdamW if config.optimizer == "adamw" else torch.optim.Adam
    fused = config.precision != "16-mixed"  # whose gradients are unscaled before they are clipped, and not in the step
    return kind(groups, lr=rate, betas=betas, fused=fused)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("share", 1.0)  # checkpoints of before there were shares have none
