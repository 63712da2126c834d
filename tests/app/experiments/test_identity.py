from __future__ import annotations

from pathlib import Path

import pytest

from sylvester.app.config import resolve
from sylvester.app.experiments.identity import identity, settings_of
from tests.app.experiments.conftest import tiny

DATA = {"halves.npz": "5e", "more.npz": "1a"}


@pytest.mark.parametrize(
    "settings",
    [
        {"seed": 1},
        {"flow": "planar"},
        {"latent": 3},
        {"precision": "64-true"},
        {"test": "never"},
        {"averages": (0.99,)},
        {"refine_epochs": 1},
    ],
)
def test_settings_and_data_make_a_run(archive: Path, settings: dict[str, object]) -> None:
    assert identity(tiny(archive, **settings), DATA) != identity(tiny(archive), DATA)
    assert identity(tiny(archive), {**DATA, "halves.npz": "5f"}) != identity(tiny(archive), DATA)


def test_places_devices_and_presets_do_not(archive: Path, tmp_path: Path) -> None:
    here = identity(tiny(archive), DATA)
    assert identity(tiny(tmp_path / "moved.npz"), {"moved.npz": "1a", "b": "5e"}) == here
    assert identity(tiny(archive, data_dir=tmp_path, devices=2), DATA) == here
    paper = resolve({"preset": "paper", "flow": "planar"})
    values = paper.model_dump(exclude={"preset"}, exclude_none=True)
    assert identity(resolve({**values, "preset": "quick"}), DATA) == identity(paper, DATA)


def test_seeds_share_a_group(archive: Path) -> None:
    assert identity(tiny(archive, seed=1), DATA, seed=False) == identity(tiny(archive, seed=2), DATA, seed=False)


def test_a_setting_that_is_added_with_its_default_changes_nothing() -> None:
    """All defaults are left out, as a later version's would be; and the hash is the one that was published."""
    settings = settings_of(resolve({}))
    assert set(settings) == {
        *("transforms", "latent", "epochs", "patience", "warmup", "batch_size"),
        *("learning_rate", "architecture", "init", "nll_samples"),
    }
    fixed = resolve({"preset": "paper", "dataset": "mnist", "flow": "iaf", "seed": 2})
    assert identity(fixed, DATA) == "fb8ec719350cfcafd1776fda842f9c8f"
