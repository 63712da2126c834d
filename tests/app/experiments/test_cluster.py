"""A real Ray cluster of this machine, which the test starts."""

from __future__ import annotations

import os
import secrets
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from sylvester.app.config import ConfigError
from sylvester.app.experiments import sweep
from sylvester.app.experiments.sweep import Cell, Status, work
from tests.app.experiments.conftest import finish, tiny
from tests.app.experiments.test_sweep import LONG, processes_on
from tests.app.test_cli import figures

ray = pytest.importorskip("ray", reason="Ray is not installed")

from sylvester.app.experiments.cluster import Cluster  # noqa: E402

SOURCE = Path(sweep.__file__).parents[3]


@pytest.fixture(scope="module", autouse=True)
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Two CPUs, whatever the machine has, and a token of its own; workers find the package where this process did."""
    before = dict(os.environ)
    token = tmp_path_factory.mktemp("ray") / "token"
    token.write_text(secrets.token_hex(32))
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    os.environ["PYTHONPATH"] = os.pathsep.join(str(Path(p).absolute()) for p in (SOURCE, *_given()))
    os.environ["OMP_NUM_THREADS"] = "1"
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()
    os.environ.clear()
    os.environ.update(before)


def _given() -> list[str]:
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]


def test_what_no_cluster_has_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="Expected a machine of the cluster with 1 CPUs and 64 GPUs for a run"):
        Cluster(None, gpus=64)
    with pytest.raises(ConfigError, match=r"Expected a Ray cluster at 127\.0\.0\.1:1; got: Connection refused"):
        Cluster("127.0.0.1:1")
    with pytest.raises(ConfigError, match="Expected a Ray cluster at here:x"):
        Cluster("here:x")
    assert ray.is_initialized()


def test_a_worker_killed_in_mid_run_is_replaced_and_the_figures_are_the_same(archive: Path, tmp_path: Path) -> None:
    cells = [
        Cell(tmp_path / f"seed-{seed}", tiny(archive, **LONG, flow="planar", seed=seed), str(seed)) for seed in (0, 1)
    ]
    killed: list[int] = []

    def kill(status: Status) -> None:
        path = cells[0].path
        if not killed and sweep.epochs(path) > 1:
            (child,) = processes_on(path)
            worker = int(Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[1])
            os.kill(worker, signal.SIGKILL)
            killed.append(worker)

    assert work(cells, Cluster(None), report=kill) == []
    assert killed
    assert killed != [os.getpid()]
    for cell in cells:
        expected = finish(tmp_path / f"expected-{cell.config.seed}", cell.config)
        assert figures(cell.path) == figures(expected.path)
