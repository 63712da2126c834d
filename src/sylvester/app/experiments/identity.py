"""What makes two runs the same run: their settings and their data, not where, when or from what preset they were made.

The identity is a hash of the settings that differ from the schema's defaults and of the checksums of the data. A
setting that a later version adds with a default leaves it as it is. These are no part of it:

- ``preset``: where values came from; the resolved values count
- ``dataset``, where it is a path, and ``data_dir``: the checksums say which images they are
- ``devices``: the same computation to rounding
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sylvester.app.checksums import fingerprint
from sylvester.app.config import Config
from sylvester.names import DATASETS

__all__ = ["identity", "settings_of"]

_APART = ("preset", "data_dir", "devices")


def settings_of(config: Config, *, seed: bool = True) -> dict[str, Any]:
    """The settings that count and differ from their defaults; with ``seed=False``, what runs of one group share."""
    apart = {*_APART, *(() if seed else ("seed",)), *(() if config.dataset in DATASETS else ("dataset",))}
    return config.model_dump(mode="json", exclude=apart, exclude_defaults=True)


def identity(config: Config, data: Mapping[str, str], *, seed: bool = True) -> str:
    """Of a run on images whose files have the checksums ``data``, by name; the names do not count."""
    return fingerprint(settings_of(config, seed=seed), sorted(data.values()))
