"""The gap report of runs: every decoder with every family."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from sylvester.app import gaps, training
from sylvester.app.config import resolve
from sylvester.app.experiments.tables import render
from sylvester.app.runs import Run, RunError

from .conftest import TINY

QUICK = {"number": 4, "split": "test", "samples": 20, "steps": 5}


def trained(folder: Path, archive: Path, **settings: object) -> Run:
    run = Run.create(folder, resolve({"dataset": str(archive), **TINY, **settings}))
    training.train(run, run.data())
    return run


@pytest.fixture(scope="module")
def runs(archive: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    folder = tmp_path_factory.mktemp("runs")
    return [
        trained(folder / flow, archive, flow=flow, **settings)
        for flow, settings in {
            "gaussian": {"transforms": None},
            "triangular-sylvester": {},
            "iaf": {"hidden": 8},
        }.items()
    ]


def sylvester(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sylvester", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )


def test_every_family_meets_every_decoder(runs: list[Run]) -> None:
    said: list[tuple[int, int]] = []
    found = gaps.report(runs, [run.data() for run in runs], **QUICK, progress=lambda *at: said.append(at))
    assert said[-1][0] == said[-1][1]
    assert [done for done, _ in said] == sorted(done for done, _ in said)
    names = [run.config.flow for run in runs]
    for run, name in zip(runs, names, strict=True):
        here = found.gaps[str(run.path)]
        assert next(iter(here.families)) == name
        assert set(here.families) == set(names)
        assert [family for family in names if here.amortization(family) is not None] == [name]
        assert found.own[str(run.path)] == name
    table = gaps.table(found)
    assert len(table.rows) == 9
    first = dict(zip(table.header, table.rows[0], strict=True))
    both = (float(first[column].partition(" ")[0].replace("−", "-")) for column in table.header[-2:])
    assert float(first["−ELBO"]) - float(first["−log p̂(x)"]) == pytest.approx(sum(both), abs=2e-3)
    text = render(table, "table")
    assert "4 test images" in text
    assert "too low on average" in text
    assert text.count("too low on average") == 1
    assert f"{runs[2].path}: Of iaf the base" in text
    json.dumps(gaps.as_json(found), allow_nan=False)


def test_one_family_in_two_sizes_goes_by_its_sizes(runs: list[Run], archive: Path, tmp_path: Path) -> None:
    more = trained(tmp_path / "more", archive, transforms=3, epochs=1)
    again = trained(tmp_path / "again", archive, seed=1, epochs=1)
    found = gaps.report([runs[1], more, again], [run.data() for run in (runs[1], more, again)], **QUICK)
    families = {path: list(each.families) for path, each in found.gaps.items()}
    two, three = "triangular-sylvester (transforms=2)", "triangular-sylvester (transforms=3)"
    assert families == {str(runs[1].path): [two, three], str(more.path): [three, two], str(again.path): [two, three]}


def test_runs_that_cannot_be_compared_are_refused(runs: list[Run], archive: Path, tmp_path: Path) -> None:
    wide = trained(tmp_path / "wide", archive, latent=3, epochs=1)
    data = runs[0].data()
    with pytest.raises(RunError, match="Expected runs with the same number of latents"):
        gaps.report([runs[0], wide], [data, data], **QUICK)
    other = type(data)(**{**vars(data), "test": 1 - data.test})
    with pytest.raises(RunError, match="Expected runs with the same test images"):
        gaps.report(runs[:2], [data, other], **QUICK)


def test_the_command_prints_a_table_or_json(runs: list[Run]) -> None:
    options = ("-n", 3, "--steps", 3, "--samples", 20, "--quiet")
    done = sylvester("gaps", runs[0].path, runs[1].path, *options, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found["images"]) == 3
    summary = found["runs"][0]["families"]["gaussian"]
    refined, amortized = (
        torch.tensor(found["runs"][0]["per_image"]["families"]["gaussian"][key])
        for key in ("refined_elbo", "amortized_elbo")
    )
    assert summary["amortization_gap"]["mean"] == pytest.approx((refined - amortized).mean().item(), abs=1e-5)
    done = sylvester("gaps", runs[0].path, *options, "--format", "md", "--split", "valid")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("| decoder of | q |")
    assert "3 valid images" in done.stdout


def test_the_command_refuses_bad_input_in_a_sentence(runs: list[Run], tmp_path: Path) -> None:
    for arguments, message in (
        ((), "Expected the folders of one run or more; got none"),
        ((runs[0].path, "--split", "train"), "Expected --split to be one of test, valid; got 'train'"),
    ):
        done = sylvester("gaps", *arguments)
        assert done.returncode == 2
        assert message in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_ctrl_c_ends_it_and_leaves_nothing(runs: list[Run]) -> None:
    before = sorted(runs[0].path.iterdir())
    command = [sys.executable, "-m", "sylvester", "gaps", str(runs[0].path), "--steps", "1000000", "-n", "2"]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    ) as process:
        assert process.stderr is not None
        time.sleep(4)
        process.send_signal(signal.SIGINT)
        said = process.stderr.read()
        assert process.wait(20) == 130
    assert "Traceback" not in said
    assert sorted(runs[0].path.iterdir()) == before
