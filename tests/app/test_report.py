"""The report, made of real runs and of folders with the paper's settings, and read in a real browser."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch

from sylvester.app import results, training
from sylvester.app.checksums import sealed_tensors
from sylvester.app.config import Config, resolve
from sylvester.app.data import load
from sylvester.app.experiments.comparison import compare
from sylvester.app.report import html_of
from sylvester.app.report.drawings import Line, training_curves
from sylvester.app.runs import Run
from tests.app import chromium
from tests.app.commands import sylvester
from tests.app.conftest import TINY

UGLY = "<img src=x onerror=alert(1)> & $x$ \"quoted\" 'so'"


def kept(path: Path, config: Config, neg_elbo: float, nll: float, *, khat: float = 0.3) -> Run:
    """A finished run as a study keeps it: settings, metrics, result and scores, without weights."""
    run = Run.create(path, config)
    noise = np.random.default_rng(config.seed).normal(size=50)
    noise -= noise.mean()
    scores = {
        "log_px": noise - nll,
        "elbo": noise - neg_elbo,
        "mc_error": np.full(50, 0.1),
        "ess": np.full(50, 70.0),
        "khat": np.full(50, khat),
    }
    content = sealed_tensors({key: torch.tensor(value) for key, value in scores.items()}, {"key": "", "samples": 100})
    (path / "evaluation.safetensors").write_bytes(content)
    lines = [{"epoch": epoch, "valid_neg_elbo": neg_elbo + 100 / epoch, "seconds": 1.0} for epoch in range(1, 1 + 120)]
    run.write_metrics(lines)
    figures = {
        "dataset": {"name": config.dataset, "sha256": {"a": "b"}, "likelihood": "bernoulli", "shape": [1, 28, 28]}
        | {"train": 50_000, "valid": 10_000, "test": 50, "source": "files"},
        "flow": {"name": config.flow},
        "seed": config.seed,
        "epochs": 120,
        "best_epoch": 120,
        "valid_neg_elbo": lines[-1]["valid_neg_elbo"],
        "parameters": {"encoder": 1_000, "flow": 2_000, "decoder": 3_000, "total": 6_000},
        "neg_elbo": neg_elbo,
        "neg_elbo_std_error": 0.14,
        "nll": nll,
        "nll_std_error": 0.14,
        "nll_mc_error": 0.01,
        "bits_per_dim": None,
        "nll_samples": 5000,
        "ess": 70.0,
        "khat_share": float(khat > 0.7),
        "warning": "Pareto k̂ exceeds 0.7 for 50 of 50 images." if khat > 0.7 else None,
        "evaluation": {"file": "evaluation.safetensors", "checksum": _checksum(content), "model": ""},
        "versions": {"sylvester": "0.1.0", "torch": "2"},
    }
    machine = {"cpu": "Abacus", "cores": 2, "threads": 1, "accelerator": None, "platform": "wood"}
    timing = {"seconds": 130.0, "train_seconds": 120.0, "evaluation_seconds": 10.0, "train_images_per_second": 9.0}
    run.write_result(figures, timing | {"peak_memory_bytes": 2**30, "machine": machine})
    return run


def _checksum(content: bytes) -> str:
    from sylvester.app.checksums import about_tensors

    return about_tensors(content)["checksum"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, archive: Path) -> Path:
    """Runs of the paper's settings without weights, small ones with weights, one unfinished, one damaged."""
    folder = tmp_path_factory.mktemp("runs")
    for seed, shift in enumerate((-0.1, 0.0, 0.1)):
        base = {"preset": "paper", "dataset": "mnist", "seed": seed}
        kept(folder / f"vae-{seed}", resolve({**base, "flow": "gaussian"}), 86.55 + shift, 82.14 + shift)
        for steps, better in ((4, 0.0), (8, 0.3), (16, 0.6)):
            config = resolve({**base, "flow": "triangular-sylvester", "transforms": steps})
            kept(folder / f"t-{steps}-{seed}", config, 83.8 - better + shift, 80.6 - better + shift, khat=0.9)
    data = load(str(archive))
    for flow in ("gaussian", "triangular-sylvester"):
        given = {**TINY, "dataset": str(archive), "flow": flow}
        run = Run.create(
            folder / f"{UGLY.replace('/', '')} {flow}",
            resolve({key: value for key, value in given.items() if flow != "gaussian" or key != "transforms"}),
        )
        results.conclude(run, data, training.train(run, data))
    Run.create(folder / "unfinished", resolve({"preset": "paper", "dataset": "mnist", "flow": "planar"}))
    broken = kept(folder / "broken", resolve({"preset": "paper", "dataset": "mnist", "flow": "iaf"}), 10.0, 5.0)
    result = broken.path / "result.json"
    result.write_text(result.read_text().replace('"neg_elbo": 10.0', '"neg_elbo": 9.0'))
    broken.path.rename(folder / UGLY.replace("/", ""))
    return folder


@pytest.fixture(scope="module")
def page(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(html_of(compare([folder], against="gaussian")))
    return path


def cells(text: str, caption: str) -> list[list[str]]:
    """The cells of the table with this caption, row by row."""
    part = text[text.index(f"<caption>{caption}") :]
    rows = re.findall(r"<tr>(.*?)</tr>", part[: part.index("</table>")], re.DOTALL)
    return [re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row, re.DOTALL) for row in rows]


def test_published_values_stand_beside_ours_with_the_difference_and_its_error(page: Path) -> None:
    rows = {row[1]: row for row in cells(page.read_text(), "Table 1 of the paper")}
    assert rows["VAE"][2:6] == ["3", "86.55 ± 0.10", "86.55 ± 0.06", "+0.00 ± 0.07"]  # √(0.1²/3 + 0.06²/3)
    assert rows["T-SNF"][3:6] == ["83.20 ± 0.10", "83.40 ± 0.10", "−0.20 ± 0.08"]
    assert rows["O-SNF"][2:6] == ["–", "–", "83.32 ± 0.06", "–"]
    assert rows["FFJORD (2019)"][4] == "82.82"
    third = {row[1]: row for row in cells(page.read_text(), "Table 3 of the paper")}
    assert third["T-SNF (K=4)"][3:6] == ["83.80 ± 0.10", "83.74 ± 0.04", "+0.06 ± 0.06"]


def test_a_page_about_damaged_runs_alone_is_written_and_a_failure(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text("flow = 3")
    page = tmp_path / "report.html"
    done = sylvester("report", tmp_path / "run", "--out", page, "--quiet")
    assert done.returncode == 1
    assert done.stderr.endswith("sylvester: Expected an intact run; got damaged ones alone\n")
    assert str(tmp_path / "run") in page.read_text()


def test_damaged_runs_are_named_and_in_no_table(page: Path) -> None:
    text = page.read_text()
    assert "Damaged and left out" in text
    assert "Expected" in text
    for row in cells(text, "Table 1 of the paper"):
        assert row[1] != "IAF" or row[3] == "–"


def test_heavy_tailed_weights_are_said_to_be(page: Path) -> None:
    rows = {row[1] + row[2]: row for row in cells(page.read_text(), "How well the importance samples")}
    verdicts = [row[-1] for row in rows.values()]
    assert verdicts.count("probably too high") == 3
    assert "can be trusted" in verdicts
    assert "Pareto k̂ exceeds 0.7 for 50 of 50 images." in page.read_text()


def test_steps_are_counted_three_ways(page: Path) -> None:
    rows = cells(page.read_text(), "Trained parameters")
    assert ["8,256", "4,288", "4,224"] in [row[-3:] for row in rows]  # 2D² + D, D² + 3D and D² + 2D for D = 64


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def test_names_are_text_and_nothing_comes_from_elsewhere(page: Path) -> None:
    parser = Tags()
    parser.feed(page.read_text())
    assert not any("onerror" in attributes for _, attributes in parser.tags)
    assert UGLY.split(">")[0].replace("<", "&lt;") in page.read_text()
    for tag, attributes in parser.tags:
        for name in ("src", "href", "data", "action", "srcset"):
            value = attributes.get(name) or "#"
            assert value.startswith(("#", "data:")), (tag, value)
    ids = [attributes["id"] for _, attributes in parser.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    used = re.findall(r'(?:href="#|url\(#)([^")]+)', page.read_text())
    assert set(used) <= set(ids)


def test_a_figure_is_the_same_text_each_time_and_keeps_names_as_they_are() -> None:
    line = Line("cost in $ & <b>", "radial", [1, 2, 3], [3.0, 2.0, 1.0])
    one, two = (training_curves("a", [line], unit="nats", from_epoch=0) for _ in range(2))
    assert one == two
    assert "cost in $ &amp; &lt;b&gt;" in one
    assert "var(--ink)" in one
    assert not re.search(r"#0102|http://(?!www\.w3\.org)", one)


def test_runs_without_a_test_show_validation_alone(tmp_path: Path, archive: Path) -> None:
    run = Run.create(tmp_path / "run", resolve({**TINY, "dataset": str(archive), "test": "never"}))
    data = load(str(archive))
    results.conclude(run, data, training.train(run, data))
    text = html_of(compare([tmp_path]))
    assert "rows of validation images" in text
    assert "How well the importance samples" not in text


def test_on_the_command_line(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "report.html"
    done = sylvester("report", folder / "vae-0", folder / "t-4-0", "-o", target, "--quiet")
    assert (done.returncode, done.stdout) == (0, f"{target}\n"), done.stderr
    assert "−0.00" not in (text := target.read_text())
    assert [row[0] for row in cells(text, "MNIST, nats")[1:]] == ["VAE", "T-SNF"]
    refused = sylvester("report", tmp_path / "nowhere", "-o", target)
    assert refused.returncode == 2
    assert "Expected" in refused.stderr


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[chromium.Browser]:
    if chromium.PROGRAM is None:
        pytest.skip("there is no Chromium: apt-get install chromium")
    with chromium.chromium(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1200], ids=["phone", "desktop"])
def test_in_a_browser(browser: chromium.Browser, page: Path, width: int, dark: bool) -> None:
    browser.errors.clear()
    browser.requests.clear()
    browser.open(page, width=width, dark=dark)
    assert browser.errors == []
    assert [url for url in browser.requests if not url.startswith("data:")] == [page.as_uri()]
    # Nothing is wider than the screen but what scrolls in its own box.
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    figures = browser.evaluate(
        "[...document.querySelectorAll('figure svg, figure img')].map((f) => {"
        "const box = f.getBoundingClientRect(); return [f.tagName, box.width, box.height, f.naturalWidth ?? 1]})"
    )
    assert {tag.lower() for tag, *_ in figures} == {"svg", "img"}
    assert all(min(width, height, natural) > 0 for _, width, height, natural in figures)
    ink, paper = browser.evaluate(
        "(() => {const style = getComputedStyle(document.body); return [style.color, style.backgroundColor]})()"
    )
    assert (brightness(ink) > brightness(paper)) == dark
    text = browser.evaluate("getComputedStyle(document.querySelector('figure svg text')).fill")
    assert (brightness(text) > brightness(paper)) == dark


def brightness(colour: str) -> float:
    return sum(map(float, re.findall(r"[\d.]+", colour)[:3]))


def test_tables_sort_by_value_both_ways(browser: chromium.Browser, page: Path) -> None:
    browser.open(page)

    def click(column: str) -> list[str]:
        return browser.evaluate(
            "(() => {const table = [...document.querySelectorAll('table')].find("
            "(t) => t.caption.textContent.startsWith('Table 1'));"
            f"const head = [...table.tHead.rows[0].cells].find((c) => c.textContent === {column!r});"
            "head.querySelector('button').click();"
            "return [...table.tBodies[0].rows].map((r) => r.cells[head.cellIndex].textContent)})()"
        )

    def values(texts: list[str]) -> list[float]:
        return [float(text.split()[0].replace("−", "-")) for text in texts if text != "–"]

    up, down = click("difference"), click("difference")
    assert values(up) == sorted(values(up))
    assert values(up)[0] < values(up)[-1]
    assert values(down) == values(up)[::-1]
    assert up[-1] == down[-1] == "–"  # what is not there stays below


def test_prints_on_white(browser: chromium.Browser, page: Path) -> None:
    browser.open(page, dark=True)
    browser.call("Emulation.setEmulatedMedia", media="print")
    paper = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    assert paper == "rgb(255, 255, 255)"
    assert browser.pdf().startswith(b"%PDF")
