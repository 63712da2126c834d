from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from sylvester.app import results, training
from sylvester.app.config import Config, resolve
from sylvester.app.runs import Run
from tests.app.conftest import TINY

Finish = Callable[..., Run]


def tiny(archive: Path, **settings: object) -> Config:
    """Settings of a run of a second; what the flow does not take is left out."""
    values = {"dataset": str(archive), **TINY, "epochs": 2, **settings}
    if values.get("flow") == "gaussian":
        del values["transforms"]
    return resolve(values)


def finish(path: Path, config: Config) -> Run:
    run = Run.create(path, config)
    data = run.data()
    results.conclude(run, data, training.train(run, data))
    return run


@pytest.fixture(scope="session")
def finished_study(archive: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two posteriors, two seeds each."""
    folder = tmp_path_factory.mktemp("study")
    for flow in ("gaussian", "planar"):
        for seed in (0, 1):
            finish(folder / f"{flow}-{seed}", tiny(archive, flow=flow, seed=seed))
    return folder


@pytest.fixture
def study(finished_study: Path, tmp_path: Path) -> Path:
    """A copy of it to damage."""
    return Path(shutil.copytree(finished_study, tmp_path / "study"))
