from __future__ import annotations

import csv
import io
import json
import shutil
import statistics
from pathlib import Path

import pytest

from sylvester.app.config import ConfigError, resolve
from sylvester.app.experiments import reproduction, tables
from sylvester.app.experiments.comparison import Comparison, Entry, Group, compare
from sylvester.app.experiments.paper import TABLE1
from sylvester.app.runs import Run
from sylvester.diagnostics import KHAT_LIMIT
from tests.app.commands import sylvester
from tests.app.experiments.conftest import finish, tiny


def test_json_is_the_result_files(study: Path) -> None:
    done = sylvester("compare", study, "--against", "gaussian", "--format", "json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [group["flow"] for group in found["groups"]] == ["gaussian", "planar"]
    for group in found["groups"]:
        for run in group["runs"]:
            assert run["result"] == json.loads((Path(run["path"]) / "result.json").read_text())
    assert found["groups"][1]["against"]["nll"]["images"] == 11


def test_every_format_has_the_same_figures(study: Path) -> None:
    found = compare([study], against="gaussian")
    mean = found.groups[1].neg_elbo
    assert mean is not None
    assert mean.std is not None
    shown = f"{mean.mean:.2f} ± {mean.std:.2f}"
    table = tables.comparison_table(found)
    assert shown in tables.render(table, "table")
    assert f"| halves | planar | 2 | {shown} |" in tables.render(table, "md")
    assert f"halves & planar & 2 & {shown.replace('±', '$' + chr(92) + 'pm$')} &" in tables.render(table, "tex")
    rows = list(csv.DictReader(io.StringIO(tables.comparison_csv(found))))
    assert float(rows[1]["neg_elbo"]) == mean.mean
    assert float(rows[1]["nll_difference"]) == found.groups[1].against["nll"].mean
    assert rows[0]["nll_difference"] == ""


def test_runs_without_a_test_are_compared_by_validation(archive: Path, study: Path, tmp_path: Path) -> None:
    assert "validation −ELBO" not in tables.comparison_table(compare([study])).header
    settings = {"flow": "planar", "test": "never"}
    search = {f"{seed}-{name}": {"seed": seed, **more} for seed in (0, 1) for name, more in RECIPES.items()}
    runs = {name: finish(tmp_path / name, tiny(archive, **settings, **more)) for name, more in search.items()}
    table = tables.comparison_table(compare([tmp_path / name for name in runs]))
    assert table.header == ("dataset", "flow", "averages", "optimizer", "runs", "validation −ELBO", "−ELBO", "NLL")
    (one, other), found = table.rows, compare([tmp_path / name for name in runs])
    assert {one[2:4], other[2:4]} == {("", "adamax"), ("0.5:0.9", "adam")}
    for row, group in zip(table.rows, found.groups, strict=True):
        bounds = [(entry.result or {})["valid_neg_elbo"] for entry in group.entries]
        assert row[5:] == (f"{statistics.fmean(bounds):.2f} ± {statistics.stdev(bounds):.2f}", "", "")
    rows = list(csv.DictReader(io.StringIO(tables.comparison_csv(found))))
    groups = tables.comparison_json(found)["groups"]
    assert [float(row["valid_neg_elbo"]) for row in rows] == [group["valid_neg_elbo"]["mean"] for group in groups]


RECIPES: dict[str, dict[str, object]] = {"plain": {}, "adam": {"optimizer": "adam", "averages": (0.5, 0.9)}}


def test_columns_of_a_terminal_are_aligned_under_a_hat() -> None:
    table = tables.Table(("k̂ > 0.7", "minutes"), (("98.7 %", "1.5"),))
    header, rule, row = tables.render(table, "table").splitlines()
    assert header.replace("\N{COMBINING CIRCUMFLEX ACCENT}", "") == "k > 0.7  minutes"
    assert (rule, row) == ("───────  ───────", "98.7 %   1.5")


def test_names_are_escaped() -> None:
    table = tables.Table(("a_b", "|"), (("5 %", "x & y"),), ("100 %\nof it",))
    assert tables.render(table, "tex").splitlines()[2:5] == [r"a\_b & | \\", r"\hline", r"5 \% & x \& y \\"]
    assert tables.render(table, "tex").splitlines()[-1] == "% 100 % of it"
    assert tables.render(table, "md").splitlines()[0] == r"| a_b | \| |"


def test_unfinished_and_damaged_runs_are_named_below(study: Path, archive: Path) -> None:
    Run.create(study / "planar-2", tiny(archive, flow="planar", seed=2))
    (study / "gaussian-0" / "result.json").write_text("{}")
    table = tables.comparison_table(compare([study]))
    assert [row[2] for row in table.rows] == ["1", "2 of 3"]
    assert f"{study / 'planar-2'} is unfinished: 0 of at most 2 epochs." in table.notes
    assert any("gaussian-0" in note and "result.json" in note for note in table.notes)


def result(neg_elbo: float, nll: float) -> dict[str, object]:
    return {"neg_elbo": neg_elbo, "nll": nll, "bits_per_dim": None}


@pytest.mark.parametrize("form", ["table", "csv", "json"])
def test_damaged_runs_alone_are_a_failure(form: str, study: Path) -> None:
    for path in (study / "planar-0", study / "planar-1"):
        (path / "result.json").write_text("{}")
    done = sylvester("compare", study, "--format", form)
    assert done.returncode == 0, done.stderr
    done = sylvester("compare", *study.glob("planar-*"), "--format", form)
    assert done.returncode == 1
    assert "planar-1/result.json" in done.stdout + done.stderr
    assert done.stderr.endswith("sylvester: Expected an intact run; got damaged ones alone\n")


def test_published_figures_stand_beside(tmp_path: Path) -> None:
    config = resolve({"preset": "paper", "dataset": "mnist", "flow": "planar"})
    entries = tuple(
        Entry(tmp_path, "finished", Run(tmp_path, config), result(86.0 + gap, 82.0)) for gap in (-0.3, 0.0, 0.3)
    )
    table = tables.beside_published(TABLE1, Comparison((Group(entries),)))
    rows = {row[1]: row for row in table.rows}
    assert rows["VAE"][2:6] == ("0", "", "86.55 ± 0.06", "")
    # √(0.3²/3 + 0.31²/3) = 0.249
    assert rows["Planar"][2:6] == ("3", "86.00 ± 0.30", "86.06 ± 0.31", "−0.06 ± 0.25")
    assert rows["FFJORD (later)"][4] == "82.82"
    assert any("table 3 has −ELBO 85.71 ± 0.2 " in note for note in table.notes)


def test_the_papers_figures_and_what_training_took_stand_beside_on_request(study: Path, tmp_path: Path) -> None:
    plain = tables.comparison_table(compare([study]))
    table = tables.comparison_table(compare([study]), published=True, details=True)
    details = (f"k̂ > {KHAT_LIMIT}", "images seen", "minutes")
    assert table.header == (*plain.header[:-2], "−ELBO", "published", "NLL", "published", *details)
    result = json.loads((study / "planar-0" / "result.json").read_text())
    seen = table.rows[1][-2]
    assert int(seen.replace(",", "")) == result["epochs"] * result["dataset"]["train"]
    assert any(note.startswith("Trained on ") and note.endswith(": 4 runs.") for note in table.notes)
    done = sylvester("compare", study, "--published", "--details", "--format", "md")
    assert done.stdout.rstrip() == tables.render(table, "md"), done.stderr

    config = resolve({"preset": "paper", "dataset": "caltech101", "flow": "planar"})
    figures = {**result, "neg_elbo": 110.0, "nll": 99.0, "khat_share": 0.987}
    figures["timing"] = {**result["timing"], "train_seconds": 90.0}
    found = Comparison((Group((Entry(tmp_path, "finished", Run(tmp_path, config), figures, epochs=3),)),))
    ((*_, elbo, elbo_there, nll, nll_there, share, seen, minutes),) = tables.comparison_table(
        found, published=True, details=True
    ).rows
    assert (elbo, elbo_there, nll, nll_there) == ("110.00", "109.66 ± 0.42", "99.00", "98.53 ± 0.68")
    assert (share, seen, minutes) == ("98.7 %", f"{3 * result['dataset']['train']:,}", "1.5")
    (row,) = csv.DictReader(io.StringIO(tables.comparison_csv(found)))
    assert (float(row["nll_published"]), float(row["khat_share"]), float(row["train_minutes"])) == (98.53, 0.987, 1.5)


def test_figures_of_another_evaluation_are_called_so(study: Path) -> None:
    for flow in ("gaussian", "planar"):
        done = sylvester("evaluate", study / f"{flow}-0", "--samples", 40, "--images", 7, "--quiet")
        assert done.returncode == 0, done.stderr
    done = sylvester("compare", study, "--evaluation", "40-first7", "--against", "gaussian", "--format", "md")
    assert done.returncode == 0, done.stderr
    nll = json.loads((study / "planar-0" / "evaluation-40-first7-seed0.json").read_text())["nll"]
    assert f"| {nll:.2f} |" in done.stdout
    assert "The runs' evaluations 40-first7 of the first 7 images.\n" in done.stdout
    assert f"{study / 'planar-1'} is left out: it has no such evaluation.\n" in done.stdout
    done = sylvester("compare", study, "--evaluation", "nosuch")
    assert (done.returncode, done.stdout) == (2, "")
    assert "Expected an evaluation that a finished run has" in done.stderr


def test_a_part_of_an_experiment_can_be_chosen() -> None:
    whole = reproduction.choose("table2")
    assert len(whole.cells) == 3 * 18
    assert {cell["seed"] for cell in whole.cells if cell["dataset"] == "freyfaces"} == {123, 321, 231}
    part = reproduction.choose("table2", only="dataset=caltech101,flow=iaf,flow=planar", seeds="5")
    assert [(c["dataset"], c["flow"], c["seed"]) for c in part.cells] == [
        ("caltech101", "planar", 5),
        ("caltech101", "iaf", 5),
    ]
    assert len(reproduction.choose("figure3", only="transforms=4").cells) == 3 * 9
    quick = reproduction.choose("table3", preset="quick", only="flow=orthogonal-sylvester")
    assert len(quick.rows) == 3
    assert any("M=32" in note for note in quick.notes)
    assert len(reproduction.choose("digits").cells) == 18


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"name": "table4"},
            "Expected the experiment to be one of table1, table2, table3, figure3, digits; got 'table4'",
        ),
        ({"name": "table1", "only": "flow"}, "Expected --only to be SETTING=VALUE"),
        ({"name": "table1", "only": "flow=maf"}, "which leaves nothing"),
        ({"name": "table1", "seeds": "0,x"}, "Expected --seeds to be whole numbers separated by commas; got '0,x'"),
        ({"name": "table1", "preset": "slow"}, "Expected preset to be one of quick, demo, paper, fast; got 'slow'"),
    ],
)
def test_bad_choices_are_sentences(options: dict[str, str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        reproduction.choose(**options)  # type: ignore[arg-type]


def test_the_study_of_digits_is_finished_and_in_its_table(tmp_path: Path) -> None:
    study = Path(__file__).parents[3] / "results" / "digits"
    copy = shutil.copytree(study, tmp_path / "digits")
    done = sylvester("reproduce", "digits", "--out", copy, "--format", "md", "--report", tmp_path / "report.html")
    assert done.returncode == 0, done.stderr
    assert "All 18 runs are finished already." in done.stderr
    assert done.stdout.split("\n\n")[0] in (study / "README.md").read_text()
    assert "H-SNF" in (tmp_path / "report.html").read_text()
    found = json.loads(sylvester("compare", study, "--format", "json").stdout)
    results = [json.loads(file.read_text()) for file in sorted(study.glob("*/result.json"))]
    shown = [run["result"] for group in found["groups"] for run in group["runs"]]
    assert sorted(map(str, shown)) == sorted(map(str, results))


def test_a_dry_run_says_what_is_left_and_how_long(tmp_path: Path) -> None:
    words = ["reproduce", "digits", "--only", "flow=gaussian", "--seeds", "0", "--dry-run", "--format", "json"]
    done = sylvester(*words, "--quiet", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    (run,) = found["runs"]
    assert (run["state"], run["epochs"]) == ("new", 0)
    assert 0 < found["seconds"] == run["seconds"] < 3600
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["compare"], "Expected run folders, or some in ./runs; got neither"),
        (["compare", "nowhere"], "got nowhere, which is no folder"),
        (["compare", ".", "--format", "pdf"], "Expected --format to be one of table, md, csv, tex, json; got 'pdf'"),
        (["sweep", "--seed", "0,,1"], "Expected seed to be values separated by commas; got '0,,1'"),
        (["sweep", "--seed", "0,one"], "Expected seed to be a whole number"),
        (["sweep", "--workers", "0"], "Expected --workers to be a whole number from 1 to 1,024; got '0'"),
        (["sweep", "--flow", "iaf", "--against", "maf"], "Expected a flow of the sweep to compare with; got maf"),
        (["reproduce", "table9"], "Expected the experiment to be one of"),
        (["reproduce", "digits", "--format", "pdf"], "Expected --format to be one of table, md, csv, tex, json"),
    ],
)
def test_bad_input_is_one_sentence(words: list[str], sentence: str, tmp_path: Path) -> None:
    done = sylvester(*words, cwd=tmp_path)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
