"""The demonstration: in full where there is time, with fewer epochs otherwise."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from sylvester.app import demonstration, display, results, training
from sylvester.app.config import PRESETS, resolve
from sylvester.app.runs import Run, RunError


def make(folder: Path) -> demonstration.Demonstration:
    for flow in demonstration.FLOWS:
        run = demonstration.run(folder, flow)
        if run.result is None:
            data = run.data()
            results.conclude(run, data, training.train(run, data))
    return demonstration.conclude(folder)


def test_two_posteriors_one_comparison_one_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PRESETS, "demo", PRESETS["demo"] | {"epochs": 2, "nll_samples": 20})
    found = make(tmp_path / "demo")
    ours, theirs = (found.results[flow] for flow in ("triangular-sylvester", "gaussian"))
    assert found.neg_elbo.mean == pytest.approx(ours["neg_elbo"] - theirs["neg_elbo"])
    assert found.neg_elbo.images == 300
    assert found.picture.read_bytes().startswith(b"\x89PNG")
    text = "\n".join(display.demonstration(found))
    assert f"−ELBO {-found.neg_elbo.mean:+.3f} ± {found.neg_elbo.std_error:.3f}" in text
    before = (found.folder / "gaussian" / "result.json").stat().st_mtime_ns
    assert make(found.folder).neg_elbo == found.neg_elbo  # finished runs are not repeated
    assert (found.folder / "gaussian" / "result.json").stat().st_mtime_ns == before


def test_a_folder_with_other_settings_is_refused(tmp_path: Path) -> None:
    Run.create(tmp_path / "gaussian", resolve({"preset": "quick", "flow": "gaussian"}))
    with pytest.raises(RunError, match="has other settings"):
        demonstration.run(tmp_path, "gaussian")


@pytest.mark.slow
def test_the_flow_gains_more_than_twice_the_error(tmp_path: Path) -> None:
    started = time.process_time()
    found = make(tmp_path)
    assert time.process_time() - started < 240  # seconds of two cores: two minutes
    assert found.neg_elbo.std_error is not None
    assert -found.neg_elbo.mean > 2 * found.neg_elbo.std_error
