from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sylvester.app import data
from sylvester.app.config import Config, resolve
from sylvester.app.runs import Run
from sylvester.app.selection import History
from sylvester.app.training import Progress

TINY = {
    "latent": 2,
    "transforms": 2,
    "epochs": 3,
    "warmup": 2,
    "batch_size": 10,
    "nll_samples": 30,
    "patience": 0,
}


@pytest.fixture(scope="session")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Binary 4 x 4 images, bright in one half or the other, in a user's own archive."""
    rng = np.random.default_rng(7)
    bright = rng.random((47, 1, 1)) < 0.5
    left = np.arange(4)[None, None, :] < 2
    images = (rng.random((47, 4, 4)) < np.where(bright == left, 0.9, 0.1)).astype(np.uint8)
    path = tmp_path_factory.mktemp("data") / "halves.npz"
    np.savez(path, train=images[:25], valid=images[25:36], test=images[36:], likelihood="bernoulli")
    return path


@pytest.fixture(scope="session")
def halves(archive: Path) -> data.Dataset:
    return data.load(archive)


@pytest.fixture
def tiny(archive: Path) -> Config:
    """A run of a second: 25 training images in batches of 10, the last one of 5."""
    return resolve({"dataset": str(archive), **TINY})


@pytest.fixture(scope="session")
def flags(archive: Path) -> Callable[..., list[str]]:
    """The same on the command line, with settings that differ."""

    def make(**settings: object) -> list[str]:
        settings = {"dataset": archive, **TINY, **settings}
        return [f"--{key.replace('_', '-')}={value}" for key, value in settings.items()]

    return make


class Stop(Exception):
    """In place of a kill, in the same process."""


def stop_at(epoch: int, batch: int) -> Callable[[Progress], None]:
    def report(progress: Progress) -> None:
        if (progress.epoch, progress.batch) == (epoch, batch):
            raise Stop

    return report


def without_seconds(lines: History) -> list[dict[str, float]]:
    """The metrics, without what differs between equal runs."""
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


def assert_identical(whole: Run, broken: Run, expected: History, got: History) -> None:
    """Everything that a run leaves, but the time it took."""
    assert without_seconds(got) == without_seconds(expected)
    assert without_seconds(broken.metrics) == without_seconds(expected)
    assert (whole.path / "model.safetensors").read_bytes() == (broken.path / "model.safetensors").read_bytes()
    one, other = (run.load_checkpoint() for run in (whole, broken))
    assert one is not None
    assert other is not None
    for part in ("model", "optimizer", "averages"):
        assert same(one.get(part), other.get(part)), part


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return one == other
