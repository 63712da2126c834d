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
    if config.optimizer == "adamax":
        return Adamax(moved, lr=rate, betas=betas, eps=1e-7)  # the paper's ε
    fused = config.precision != "16-mixed"  # whose gradients are unscaled before they are clipped, and not in the step
    if config.optimizer == "adam":
        return torch.optim.Adam(moved, lr=rate, betas=betas, fused=fused)
    shrunk = {p for p in inference if p.dim() > 1}
    groups = [
        {"params": [p for p in moved if p in shrunk], "weight_decay": config.weight_decay},
        {"params": [p for p in moved if p not in shrunk], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=rate, betas=betas, fused=fused)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
