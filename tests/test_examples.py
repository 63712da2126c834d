"""The examples run, at small size, and end with a figure; the gallery shows them; their shared targets are right."""

from __future__ import annotations

import importlib.util
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import matplotlib.image
import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from scipy import special, stats

from benchmarks import targets
from sylvester import flows

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"

#: Those whose ``main`` takes a path and sizes, with the smallest ones that show anything.
SMALL = {
    "four_energies": {"steps": 2, "cells": 30},
    "densities": {"points": 200, "epochs": 1, "cells": 20},
    "logistic_regression": {"steps": 20, "draws": 30, "warmup": 20},
}

#: Those that take them on the command line.
FLAGS = {
    "posterior_in_your_vae": ["--steps", "30"],
    "two_moons": ["--simulations", "600", "--epochs", "2"],
}


def load(name: str, folder: Path = EXAMPLES) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_is_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) < 100


@pytest.mark.parametrize("name", SMALL)
def test_an_example_ends_with_a_figure(name: str, tmp_path: Path) -> None:
    if name == "logistic_regression":
        pytest.importorskip("pyro")
        pytest.importorskip("sklearn")
    path = tmp_path / "figure.png"
    with torch.random.fork_rng():
        load(name).main(str(path), **SMALL[name])
    check_figure(path)


@pytest.mark.parametrize("name", ["posterior_in_your_vae", pytest.param("two_moons", marks=pytest.mark.slow)])
def test_an_example_draws_its_figure_as_a_command(name: str, tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), "figure.png", *FLAGS[name]]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    assert "nats" in done.stdout
    check_figure(tmp_path / "figure.png")


def test_a_gaussian_bends(tmp_path: Path) -> None:
    example = load("bend_a_gaussian")
    path = tmp_path / "figure.png"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        flow = flows.TriangularSylvester(features=2, transforms=8)
        bounds = [example.fit(flow, steps) for steps in (1, 100)]
        example.draw(flow, str(path))
    assert bounds[1] > bounds[0] + 0.5
    check_figure(path)


def check_figure(path: Path) -> None:
    pixels = matplotlib.image.imread(path)
    assert min(pixels.shape[:2]) > 200
    assert pixels.std() > 0.05  # it is not blank


def test_the_gallery_shows_every_example_that_draws() -> None:
    gallery = load("gallery", ROOT / "docs")
    page = (ROOT / "docs" / "gallery.md").read_text()
    drawing = {path.stem for path in EXAMPLES.glob("*.py") if "savefig" in path.read_text()}
    assert set(gallery.EXAMPLES) == drawing
    for example, name in gallery.EXAMPLES.items():
        assert f"\npython examples/{example}.py docs/figures/{name}.png\n" in page
        assert f"python examples/{example}.py docs/figures/{name}.png\n" in (EXAMPLES / f"{example}.py").read_text()
        shades = []
        for kind, suffix in (("light", ""), ("dark", "-dark")):
            file = f"figures/{name}{suffix}.png"
            assert re.search(rf"!\[.{{20,}}\]\({file}\){{\.only-{kind}}}", page)
            assert (ROOT / "docs" / file).stat().st_size < gallery.BYTES
            shades.append(matplotlib.image.imread(ROOT / "docs" / file)[0, 0, :3].mean())
        assert shades[0] > 0.99  # the corners
        assert shades[1] < 0.1


def test_dark_pages_get_light_letters() -> None:
    """White is the page, black the letters and frames; what has a colour of its own keeps it."""
    figure, axis = plt.subplots()
    axis.plot([0, 1], [0, 1], color="#d55e00")
    axis.set(title="title", xlabel="label")
    axis.text(0, 0, "blue", color="#0072b2")
    gallery = load("gallery", ROOT / "docs")
    gallery.darken(figure)
    figure.canvas.draw()
    pixels = np.asarray(figure.canvas.buffer_rgba())[..., :3].reshape(-1, 3)
    plt.close(figure)
    found = {tuple(colour) for colour in np.unique(pixels, axis=0).tolist()}
    expected = (gallery.BACKGROUND, gallery.FOREGROUND, "#d55e00", "#0072b2")
    assert {tuple(bytes.fromhex(colour[1:])) for colour in expected} <= found
    darkest = bytes.fromhex(gallery.BACKGROUND[1:])
    assert (pixels.max(1) >= min(darkest)).all()  # no black is left


def test_the_integral_of_eight_schools() -> None:
    """Given μ and τ the schools are independent: over both, on a grid, with scipy's densities."""
    mu, log_tau = np.linspace(-30, 30, 301)[:, None], np.linspace(-14, 8, 441)
    tau = np.exp(log_tau)
    schools = [
        stats.norm.logpdf(effect, mu, np.hypot(error, tau))
        for effect, error in zip(targets.EFFECTS, targets.ERRORS, strict=True)
    ]
    log_p = stats.norm.logpdf(mu, 0, 5) + stats.halfcauchy.logpdf(tau, scale=5) + log_tau + sum(schools)
    found = special.logsumexp(log_p) + math.log(60 / 300 * 22 / 440)
    assert targets.eight_schools_log_z() == pytest.approx(found, abs=1e-4)


def test_both_forms_of_eight_schools_are_one_model() -> None:
    """θ = μ + τη: the densities differ by τ⁸."""
    z = torch.randn(50, 10, dtype=torch.float64)
    theta = torch.cat([z[:, :2], z[:, :1] + z[:, 1:2].exp() * z[:, 2:]], 1)
    centred, other = (targets.eight_schools(x, centred=c) for x, c in ((theta, True), (z, False)))
    torch.testing.assert_close(centred + 8 * z[:, 1], other)


def test_normalized_targets_are() -> None:
    """Each by importance sampling from draws that know its shape."""
    generator = torch.Generator().manual_seed(0)
    v = 3.5 * torch.randn(100_000, 1, generator=generator, dtype=torch.float64)
    x = torch.randn(100_000, 9, generator=generator, dtype=torch.float64)
    log_q = (
        stats.norm.logpdf(v.numpy(), scale=3.5).sum(-1) + stats.norm.logpdf(x.numpy()).sum(-1) - 4.5 * v[:, 0].numpy()
    )
    z = torch.cat([v, (v / 2).exp() * x], 1)
    assert (targets.funnel(z) - torch.from_numpy(log_q)).exp().mean().item() == pytest.approx(1.0, abs=0.01)
    edge = torch.linspace(-12, 30, 1401, dtype=torch.float64)
    grid = torch.cartesian_prod(edge, edge)
    for target in (targets.banana, targets.eight_gaussians):
        assert target(grid).exp().sum().item() * 0.03**2 == pytest.approx(1.0, abs=1e-4)


def test_the_divergence_of_gaussians() -> None:
    """KL(N(m, s²) ‖ N(0, 1)) for two coordinates, by the grid."""
    flow = flows.Gaussian(2)
    with torch.no_grad():
        flow.base.hypernetwork.bias.copy_(torch.tensor([0.5, 0.0, math.log(math.e - 1), -0.5]))
    normal = flow().base_dist.base_dist
    expected = torch.distributions.kl_divergence(normal, torch.distributions.Normal(0.0, 1.0)).sum().item()
    found, mass = load("four_energies").divergence(flow, lambda z: 3.0 - 0.5 * z.square().sum(-1), 300)
    assert mass == pytest.approx(1.0, abs=1e-4)
    assert found == pytest.approx(expected, abs=1e-3)
