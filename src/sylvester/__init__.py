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
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_SUBMODULES = frozenset(
    {
        "diagnostics",
        "distributions",
        "evaluation",
        "flows",
        "linalg",
        "names",
        "objectives",
        "optim",
        "transforms",
        "vae",
    }
)
_ATTRIBUTES = {"FlowDistribution": "distributions", "VAE": "vae", "load": "app.runs"}

__all__ = ["FlowDistribution", "VAE", "load", *sorted(_SUBMODULES)]

if TYPE_CHECKING:
    from sylvester import diagnostics as diagnostics
    from sylvester import distributions as distributions
    from sylvester import evaluation as evaluation
    from sylvester import flows as flows
    from sylvester import linalg as linalg
    from sylvester import names as names
    from sylvester import objectives as objectives
    from sylvester import optim as optim
    from sylvester import transforms as transforms
    from sylvester import vae as vae
    from sylvester.app.runs import load as load
    from sylvester.distributions import FlowDistribution as FlowDistribution
    from sylvester.vae import VAE as VAE


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name in _ATTRIBUTES:
        return getattr(importlib.import_module(f"{__name__}.{_ATTRIBUTES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
