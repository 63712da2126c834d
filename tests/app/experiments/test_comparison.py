from __future__ import annotations

import json
import math
import shutil
import statistics
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from sylvester.app import results
from sylvester.app.checksums import sealed, unsealed
from sylvester.app.config import resolve
from sylvester.app.experiments.comparison import compare, find
from sylvester.app.runs import Run, RunError, write_json
from tests.app.experiments.conftest import tiny


def result(path: Path) -> dict:
    return json.loads((path / "result.json").read_text())


def test_groups_have_the_means_of_the_result_files(study: Path) -> None:
    found = compare([study])
    assert [group.flow for group in found.groups] == ["gaussian", "planar"]
    for group in found.groups:
        for metric in ("neg_elbo", "nll"):
            values = [result(study / f"{group.flow}-{seed}")[metric] for seed in (0, 1)]
            summary = group.summary(metric)
            assert summary is not None
            assert summary.mean == pytest.approx(statistics.fmean(values), abs=1e-12)
            assert summary.std == pytest.approx(abs(values[0] - values[1]) / math.sqrt(2))
    assert found.varying() == ()
    assert not found.damaged


def test_differences_are_paired_by_seed_and_image(study: Path) -> None:
    gaussian, planar = compare([study], against="gaussian").groups
    assert not gaussian.against

    def scores(flow: str, name: str) -> np.ndarray:
        return np.stack([load_file(study / f"{flow}-{s}" / f"evaluation-30-seed{s}.safetensors")[name] for s in (0, 1)])

    for metric, name in (("neg_elbo", "elbo"), ("nll", "log_px")):
        d = scores("gaussian", name) - scores("planar", name)
        found = planar.against[metric]
        assert found.mean == pytest.approx(d.mean())
        assert found.mean == pytest.approx(planar.summary(metric).mean - gaussian.summary(metric).mean)  # type: ignore[union-attr]
        per_image = (d[0] + d[1]) / 2
        assert found.std_error == pytest.approx(statistics.stdev(per_image) / math.sqrt(11))
        assert found.seed_error == pytest.approx(abs(d[0].mean() - d[1].mean()) / 2)
        assert (found.images, found.seeds) == (11, (0, 1))


def test_pairs_are_of_seeds_that_both_have(study: Path) -> None:
    shutil.rmtree(study / "gaussian-1")
    _, planar = compare([study], against="gaussian").groups
    assert planar.against["nll"].seeds == (0,)
    assert planar.against["nll"].seed_error is None


def test_unfinished_runs_are_shown_and_not_averaged(study: Path, archive: Path) -> None:
    (study / "planar-1" / "result.json").unlink()
    Run.create(study / "planar-2", tiny(archive, flow="planar", seed=2))
    _, planar = compare([study]).groups
    assert [(entry.config.seed, entry.state, entry.epochs) for entry in planar.entries] == [
        (0, "finished", 2),
        (1, "unfinished", 2),
        (2, "unfinished", 0),
    ]
    assert planar.neg_elbo is not None
    assert planar.neg_elbo.count == 1
    assert planar.neg_elbo.mean == result(study / "planar-0")["neg_elbo"]


@pytest.mark.parametrize("file", ["config.toml", "result.json", "metrics.jsonl", "evaluation-30-seed1.safetensors"])
@pytest.mark.parametrize("missing", [False, True])
def test_damaged_runs_are_named_and_never_averaged(study: Path, file: str, missing: bool) -> None:
    target = study / "planar-1" / file
    if missing and file == "result.json":
        pytest.skip("a run without it is unfinished")
    content = target.read_bytes()
    target.unlink() if missing else target.write_bytes(content.replace(b"1", b"2"))
    found = compare([study], against="gaussian")
    assert [entry.path for entry in found.damaged] == [study / "planar-1"]
    assert file in (found.damaged[0].problem or "")
    assert [entry.config.seed for entry in found.groups[1].entries] == [0]


def test_a_copy_of_a_run_counts_once(study: Path) -> None:
    shutil.copytree(study / "planar-0", study / "again" / "planar")
    found = compare([study])
    assert [len(group.entries) for group in found.groups] == [2, 2]
    assert len(found.repeated) == 1
    assert [entry.path.name for entry in compare([study, study]).groups[0].entries] == ["gaussian-0", "gaussian-1"]


def test_folders_are_one_or_several_as_text_or_paths(study: Path) -> None:
    expected = find([study])
    assert len(expected) == 4
    for paths in (study, str(study), [str(study)], (path for path in expected)):
        assert find(paths) == expected
    assert compare(str(study)) == compare(study) == compare([study])


def test_what_varies_is_named(study: Path, archive: Path) -> None:
    Run.create(study / "more", tiny(archive, flow="planar", transforms=3))
    Run.create(study / "wider", tiny(archive, flow="planar", latent=3))
    assert compare([study]).varying() == ("transforms", "latent")
    assert len(compare([study]).groups) == 4


def test_a_preset_stands_for_what_it_chose(tmp_path: Path) -> None:
    for preset in ("paper", "fast"):
        for transforms in (16, 4):
            given = {"dataset": "caltech101", "preset": preset, "architecture": "released", "nll_samples": 500}
            Run.create(tmp_path / f"{preset}-{transforms}", resolve({**given, "transforms": transforms}))
    found = compare(tmp_path)
    assert len(found.groups) == 4
    assert found.varying() == ("preset", "transforms")
    assert compare([tmp_path / "paper-16", tmp_path / "fast-16"]).varying() == ("preset",)
    # What one of them changed is said, and what it left to the preset is not.
    Run.create(tmp_path / "slower", resolve({**given, "transforms": 16, "learning_rate": 1e-3}))
    assert compare([tmp_path / "paper-16", tmp_path / "slower"]).varying() == ("preset", "learning_rate")


def evaluated(path: Path, samples: int = 40, **how: int) -> dict:
    run = Run.open(path)
    return results.evaluate(run, run.data(), results.Evaluation(samples, **how))


def test_runs_are_compared_by_another_evaluation_that_they_have(study: Path) -> None:
    own = compare(study, against="gaussian")
    better = {name: evaluated(study / name, images=7, seed=5) for name in ("gaussian-0", "gaussian-1", "planar-1")}
    for name in ("40-first7", "40-first7-seed5"):
        found = compare(study, against="gaussian", evaluation=name)
        gaussian, planar = found.groups
        assert [entry.path.name for entry in found.without] == ["planar-0"]
        for metric, score in (("neg_elbo", "elbo"), ("nll", "log_px")):
            expected = statistics.fmean(better[run][metric] for run in ("gaussian-0", "gaussian-1"))
            assert gaussian.summary(metric).mean == pytest.approx(expected, abs=1e-12)  # type: ignore[union-attr]
            theirs, ours = (
                load_file(study / f"{flow}-1" / "evaluation-40-first7-seed5.safetensors")[score]
                for flow in ("gaussian", "planar")
            )
            assert planar.against[metric].mean == pytest.approx((theirs - ours).mean())
            assert (planar.against[metric].images, planar.against[metric].seeds) == (7, (1,))
        assert planar.summary("khat_share").mean == better["planar-1"]["khat_share"]  # type: ignore[union-attr]
    # The runs' own evaluations have a name, too, though each has its seed.
    assert compare(study, against="gaussian", evaluation="30").groups == own.groups


def test_what_is_wrong_with_an_evaluation_is_said(study: Path) -> None:
    with pytest.raises(RunError, match="Expected an evaluation that a finished run has, 30-seed0, 30-seed1; got 3"):
        compare(study, evaluation="3")  # a part of a name is none
    for seed in (1, 2):
        evaluated(study / "planar-0", seed=seed)
    with pytest.raises(RunError, match="planar-0, with its seed, of 40-seed1, 40-seed2; got 40"):
        compare(study, evaluation="40")
    (study / "gaussian-0" / "result.json").unlink()
    found = compare(study, evaluation="40-seed1")
    assert [entry.path.name for entry in found.without] == ["gaussian-0", "gaussian-1", "planar-1"]
    (group,) = found.groups
    assert [entry.path.name for entry in group.entries] == ["planar-0"]


@pytest.mark.parametrize("suffix", ["json", "safetensors"])
def test_a_damaged_evaluation_is_named_and_never_compared(study: Path, suffix: str) -> None:
    for name in ("gaussian-0", "planar-0"):
        evaluated(study / name)
    target = study / "planar-0" / f"evaluation-40-seed0.{suffix}"
    target.write_bytes(target.read_bytes().replace(b"1", b"2"))
    found = compare(study, evaluation="40")
    assert [entry.path.name for entry in found.damaged] == ["planar-0"]
    assert target.name in (found.damaged[0].problem or "")
    assert "sylvester evaluate makes them again" in (found.damaged[0].problem or "")
    assert [group.flow for group in found.groups] == ["gaussian"]


def test_an_evaluation_of_another_model_is_named(study: Path) -> None:
    for name in ("planar-0", "planar-1"):
        evaluated(study / name)
    target = study / "planar-0" / "evaluation-40-seed0.json"
    figures = unsealed(json.loads(target.read_text()))
    figures["evaluation"]["model"] = "another"
    write_json(target, sealed(figures))
    (damaged,) = compare(study, evaluation="40").damaged
    assert "is of another model than result.json" in (damaged.problem or "")


def test_bad_input_is_a_sentence(study: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunError, match=r"Expected a folder with runs; got .*empty, which has none"):
        find([tmp_path / "empty"])
    with pytest.raises(RunError, match="which is no folder"):
        find([tmp_path / "nowhere"])
    with pytest.raises(RunError, match="Expected a flow among the runs to compare with, of gaussian, planar; got iaf"):
        compare([study], against="iaf")
