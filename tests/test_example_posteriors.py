"""Examples that end with a figure, at small size."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from matplotlib.image import imread

EXAMPLES = Path(__file__).parents[1] / "examples"

SMALL = {
    "posterior_in_your_vae.py": ["--steps", "30"],
    "two_moons.py": ["--simulations", "600", "--epochs", "2"],
}


@pytest.mark.parametrize("name", SMALL)
def test_an_example_is_short_and_draws_its_figure(name: str, tmp_path: Path) -> None:
    assert len((EXAMPLES / name).read_text().splitlines()) < 100
    command = [sys.executable, str(EXAMPLES / name), "figure.png", *SMALL[name]]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    assert "nats" in done.stdout
    assert imread(tmp_path / "figure.png").std() > 0.05
