"""The published figures against the paper's own text, which ``SYLVESTER_PAPER`` names the folder of."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from sylvester.app.config import resolve
from sylvester.app.experiments import paper
from sylvester.app.experiments.paper import Published, Row

Figures = dict[tuple[str, str], list[tuple[float, float]]]  # by model and dataset: −ELBO and, where given, NLL


def text(name: str) -> str:
    """A file of the folder that holds the paper, or that stands beside the checkout."""
    beside = [parent / "shared" for parent in Path(__file__).resolve().parents]
    for folder in [Path(os.environ["SYLVESTER_PAPER"])] if "SYLVESTER_PAPER" in os.environ else beside:
        if (folder / name).is_file():
            return (folder / name).read_text()
    pytest.skip(f"{name} is not here: SYLVESTER_PAPER names the folder that holds it")


def pairs(cell: str) -> list[tuple[float, float]]:
    return [(float(a), float(b)) for a, b in re.findall(r"(\d+\.\d+)\s*(?:\\pm|±)\s*(\d+\.\d+)", cell)]


def ours(rows: tuple[Row, ...]) -> Figures:
    def pair(figure: Published) -> tuple[float, float]:
        assert figure.std is not None
        return figure.mean, figure.std

    return {
        (row.model, row.dataset): [pair(figure) for figure in (row.neg_elbo, row.nll) if figure is not None]
        for row in rows
    }


def tabular(label: str) -> list[list[str]]:
    """The cells of the paper's table with a label, row by row."""
    tex = text("paper/sylvester-normalizing-flows.tex")
    tables = re.findall(r"\\begin\{table\*?\}.*?\\end\{table\*?\}", tex, re.DOTALL)
    (table,) = [found for found in tables if rf"\label{{{label}}}" in found]
    rows = [[cell.strip() for cell in row.split("&")] for row in table.split(r"\\")]
    return [row for row in rows if pairs(" ".join(row))]


def model(cell: str) -> str:
    """The name in the first cell of a row, after rules and skips, without the signs of mathematics."""
    return cell.splitlines()[-1].replace("$", "").strip()


def test_tables_1_and_3_are_the_papers() -> None:
    for label, rows, count in (("tab:NLL_mnist", paper.TABLE1, 6), ("tab:results_mnist", paper.TABLE3, 28)):
        found: Figures = {(model(row[0]), "mnist"): pairs(" ".join(row[1:])) for row in tabular(label)}
        assert len(found) == count
        assert found == ours(rows)


def test_table_2_is_the_papers() -> None:
    found: Figures = {}
    for name, *cells in tabular("tab:results_freyfaces"):
        values = pairs(" ".join(cells))
        for place, dataset in enumerate(("freyfaces", "omniglot", "caltech101")):
            found[model(name), dataset] = values[2 * place : 2 * place + 2]
    assert len(found) == 18
    assert found == ours(paper.TABLE2)


def test_tables_1_and_2_and_the_later_bar_are_those_of_the_checklist() -> None:
    section = text("PAPER.md").partition("## 5.")[2]
    first, second = section.split("Table 2:")
    names, _, values = [line.strip("|").split("|") for line in first.splitlines() if line.startswith("|")]
    found = {(n.strip(), "mnist"): pairs(v) for n, v in zip(names, values, strict=True)}
    for line in second.splitlines():
        if len(pairs(line)) == 6:
            name, *cells = line.strip("|").split("|")
            for dataset, cell in zip(("freyfaces", "omniglot", "caltech101"), cells, strict=True):
                found[name.strip(), dataset] = pairs(cell)
    assert len(found) == 24
    assert found == ours((*paper.TABLE1, *paper.TABLE2))
    later = dict(re.findall(r"(MNIST|Omniglot|Frey|Caltech) (\d+\.\d+)", second.partition("FFJORD")[2]))
    names_of = {"mnist": "MNIST", "omniglot": "Omniglot", "freyfaces": "Frey", "caltech101": "Caltech"}
    assert {d: float(later[n]) for d, n in names_of.items()} == {d: p.mean for d, p in paper.FFJORD.items()}


@pytest.mark.parametrize("name", [name for name in paper.EXPERIMENTS if name != "digits"])
def test_the_papers_preset_makes_each_row_of_the_grid(name: str) -> None:
    experiment = paper.EXPERIMENTS[name]
    assert len(experiment.cells) == {"table1": 6, "table2": 18, "table3": 28, "figure3": 28}[name]
    for row, cell in zip(experiment.rows, experiment.cells, strict=True):
        config = resolve({**cell, "preset": experiment.preset})
        assert row in paper.published(config, experiment.rows)
        assert len(paper.published(config, experiment.rows)) == 1
        assert config.latent == 64
        assert config.architecture == "paper"
    assert len(paper.EXPERIMENTS["digits"].cells) == 6


def test_tables_1_and_3_both_answer_for_the_same_run() -> None:
    found = paper.published(resolve({"preset": "paper", "dataset": "mnist", "flow": "planar"}))
    assert [(row.table, row.neg_elbo.mean) for row in found] == [("table1", 86.06), ("table3", 85.71)]
