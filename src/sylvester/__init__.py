"""Expressive variational posteriors for PyTorch.

    import torch, sylvester
    flow = sylvester.flows.TriangularSylvester(features=64, context=256, transforms=16)
    posterior = flow(h)                               # h: (B, 256)
    z, log_q = posterior.rsample_and_log_prob((8,))   # (8, B, 64), (8, B)
    posterior.log_prob(torch.zeros(64))               # at any z, through the exact inverse

Submodules load on first use, so that ``sylvester --help`` answers without importing torch.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_SUBMODULES = frozenset(
    {
        "adaptation",
        "allocator",
        "annealing",
        "diagnostics",
        "distributions",
        "evaluation",
        "flows",
        "gaps",
        "inference",
        "linalg",
        "names",
        "objectives",
        "optim",
        "random",
        "transforms",
        "vae",
    }
)
_ATTRIBUTES = {"FlowDistribution": "distributions", "VAE": "vae"}

__all__ = ["FlowDistribution", "VAE", "load", *sorted(_SUBMODULES)]

if TYPE_CHECKING:
    import torch

    from sylvester import adaptation as adaptation
    from sylvester import allocator as allocator
    from sylvester import annealing as annealing
    from sylvester import diagnostics as diagnostics
    from sylvester import distributions as distributions
    from sylvester import evaluation as evaluation
    from sylvester import flows as flows
    from sylvester import gaps as gaps
    from sylvester import inference as inference
    from sylvester import linalg as linalg
    from sylvester import names as names
    from sylvester import objectives as objectives
    from sylvester import optim as optim
    from sylvester import random as random
    from sylvester import transforms as transforms
    from sylvester import vae as vae
    from sylvester.distributions import FlowDistribution as FlowDistribution
    from sylvester.vae import VAE as VAE


def load(path: str | Path, *, device: torch.device | str = "cpu") -> VAE:
    """The trained VAE of a run's folder, in eval mode. Needs the extra ``app``."""
    try:
        from sylvester.app.runs import Run

        return Run.open(path).model(device)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("sylvester"):
            raise
        package = error.name.partition(".")[0]
        message = f'sylvester.load needs {package}, which is not installed: pip install "sylvester[app]"'
        raise ModuleNotFoundError(message, name=error.name) from error


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name in _ATTRIBUTES:
        return getattr(importlib.import_module(f"{__name__}.{_ATTRIBUTES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
