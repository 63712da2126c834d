"""The way to the benchmarks, which live outside the package so that what they race against imports nothing of it."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from sylvester.app.config import ConfigError


def benchmarks(module: str) -> Any:
    """A module of the benchmarks: from inside the installed package, or from the checkout round it."""
    package = Path(__file__).parents[1]
    for root in (package / "shipped", package.parents[1]):
        if (root / "benchmarks" / "suite.py").is_file():
            if str(root) not in sys.path:
                sys.path.insert(0, str(root))
            return importlib.import_module(f"benchmarks.{module}")
    raise ConfigError(f"Expected the benchmarks in {package} or in a checkout round it; got neither")
