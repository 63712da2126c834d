from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from sylvester.app import machine
from sylvester.app.machine import MachineError, allow_bf16, bf16, require, wait_passively


def test_threads_wait_passively_unless_the_user_said_how() -> None:
    environment = {"OMP_NUM_THREADS": "2"}
    wait_passively(environment)
    assert environment["OMP_WAIT_POLICY"] == "passive"
    assert int(environment["GOMP_SPINCOUNT"]) > 0
    assert environment["OMP_NUM_THREADS"] == "2"
    for said in ({"OMP_WAIT_POLICY": "active"}, {"GOMP_SPINCOUNT": "7"}, {"KMP_BLOCKTIME": "0"}):
        environment = dict(said)
        wait_passively(environment)
        assert environment == said


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {"XDG_CACHE_HOME": str(tmp_path)}


def probe(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """What a child process does to find out."""
    monkeypatch.setattr(machine, "_PROBE", code)


ILLEGAL = "import os, signal; os.kill(os.getpid(), signal.SIGILL)"
LIMITED = f"""
import os
if os.environ.get("ONEDNN_MAX_CPU_ISA") != "AVX512_CORE_FP16":
    {ILLEGAL}
"""
FAILING = "raise RuntimeError('could not create a primitive')"


@pytest.mark.parametrize(
    ("code", "verdict"), [("", "works"), (ILLEGAL, "denied"), (FAILING, "denied"), (LIMITED, "limited")]
)
def test_a_child_process_finds_out_and_it_is_remembered(
    code: str, verdict: str, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    probe(monkeypatch, code)
    assert bf16(environment) == verdict
    probe(monkeypatch, "" if verdict != "works" else ILLEGAL)
    assert bf16(environment) == verdict  # not asked again
    for file in Path(environment["XDG_CACHE_HOME"]).rglob("*.json"):
        file.write_text("{")
    assert bf16(environment) != verdict  # what cannot be read is found out again


def test_the_answer_is_for_one_version_of_torch(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    probe(monkeypatch, "")
    assert bf16(environment) == "works"
    probe(monkeypatch, ILLEGAL)
    monkeypatch.setattr(machine, "version", lambda name: "0.0")
    assert bf16(environment) == "denied"


def test_the_users_own_limit_is_kept(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    probe(monkeypatch, LIMITED)
    assert bf16(environment | {"ONEDNN_MAX_CPU_ISA": "AVX2"}) == "denied"


def test_what_follows_from_the_answer(environment: dict[str, str]) -> None:
    for verdict, limit in (("works", None), ("limited", "AVX512_CORE_FP16")):
        said = environment | {"SYLVESTER_BF16": verdict}
        allow_bf16(said)
        assert said.get("ONEDNN_MAX_CPU_ISA") == limit
    for wrong, message in (("denied", "--precision 32-true"), ("perhaps", "got 'perhaps'")):
        with pytest.raises(MachineError, match=f"Expected .*; got .*{message}" if wrong == "denied" else message):
            allow_bf16(environment | {"SYLVESTER_BF16": wrong})


@pytest.mark.parametrize(
    ("cuda", "cores", "precision", "devices", "refusal"),
    [
        (0, 1, "32-true", 2, None),  # as these tests do
        (0, 1, "32-true", 3, "at most 2 on this machine, by its CPU cores; got 3"),
        (0, 8, "32-true", 8, None),
        (0, 8, "32-true", 9, "at most 8 on this machine, by its CPU cores; got 9"),
        (1, 8, "32-true", 2, "at most 1 on this machine, by its CUDA devices; got 2"),
        (4, 1, "16-mixed", 4, None),
        (0, 8, "16-mixed", 1, "Expected a CUDA device for --precision 16-mixed; got none: --precision bf16-mixed"),
        (0, 8, "bf16-mixed", 1, None),
    ],
)
def test_a_run_has_at_most_the_devices_of_the_machine(
    cuda: int, cores: int, precision: str, devices: int, refusal: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: cuda)
    monkeypatch.setattr(machine, "cores", lambda: cores)
    with pytest.raises(MachineError, match=refusal) if refusal else nullcontext():
        require(precision, devices)


def test_a_folder_that_cannot_be_written_is_no_reason_to_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    probe(monkeypatch, "")
    assert bf16({"XDG_CACHE_HOME": str(tmp_path / "file")}) == "works"


@pytest.mark.usefixtures("bf16")
def test_the_probe_itself_runs() -> None:
    done = subprocess.run([sys.executable, "-c", machine._PROBE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_command_line_asks_before_torch_is_loaded() -> None:
    code = (
        "import os, sys; from sylvester.app import cli; from sylvester.app.config import resolve\n"
        "cli._prepare(resolve({'precision': 'bf16-mixed'}))\n"
        "assert os.environ['ONEDNN_MAX_CPU_ISA'] == 'AVX512_CORE_FP16' and 'torch' not in sys.modules"
    )
    environment = {"SYLVESTER_BF16": "limited", "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
