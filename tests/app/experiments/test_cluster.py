"""A real Ray cluster of this machine, with a token of its own, which the command starts."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
from pathlib import Path

import pytest

from sylvester.app.config import ConfigError
from sylvester.app.experiments import sweep
from sylvester.app.experiments.sweep import plan
from tests.app.commands import command, environment
from tests.app.experiments.conftest import finish
from tests.app.experiments.test_sweep import LONG, data_of, processes_on, settings, until
from tests.app.test_cli import figures

pytest.importorskip("ray", reason="Ray is not installed")

from sylvester.app.experiments.cluster import Cluster


def test_an_address_where_nobody_listens_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match=r"Expected a Ray cluster at 127\.0\.0\.1:1; got: Connection refused"):
        Cluster("127.0.0.1:1")
    with pytest.raises(ConfigError, match="Expected a Ray cluster at here:x"):
        Cluster("here:x")


@pytest.mark.slow
def test_a_worker_killed_in_mid_run_is_replaced_and_the_figures_are_the_same(archive: Path, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(secrets.token_hex(32))
    given = settings(archive, **LONG)
    flags = [f"--{key.replace('_', '-')}={value}" for key, value in given.items()]
    cells = plan(tmp_path / "s", [{**given, "seed": seed} for seed in (0, 1)], load=data_of)
    process = subprocess.Popen(
        command("sweep", *flags, "--seed", "0,1", "--out", tmp_path / "s", "--quiet", "--ray"),
        env={**environment(), "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)},
        stdout=subprocess.PIPE,
        text=True,
    )
    path = cells[0].path
    until(lambda: sweep.epochs(path) > 1)
    (child,) = processes_on(path)
    worker = int(Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[1])
    assert worker != process.pid
    os.kill(worker, signal.SIGKILL)
    assert not (path / "result.json").exists()
    output, _ = process.communicate()
    assert process.returncode == 0
    assert "halves   planar  2 " in output
    for cell in cells:
        expected = finish(tmp_path / f"expected-{cell.config.seed}", cell.config)
        assert figures(cell.path) == figures(expected.path)
