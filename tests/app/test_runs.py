from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import sylvester
from sylvester.app import checksums, models
from sylvester.app.config import Config
from sylvester.app.runs import Run, RunError, replacing


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with replacing(path) as file:
        file.write(b"old")
        assert not path.exists()
    with pytest.raises(TypeError), replacing(path) as file:
        file.writelines([b"ne", "w"])  # type: ignore[list-item]
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_a_run_keeps_its_settings(tiny: Config, tmp_path: Path) -> None:
    Run.create(tmp_path / "a" / "run", tiny)
    assert Run.open(tmp_path / "a" / "run").config == tiny


@pytest.mark.parametrize("calls", [1, 2, 3])
@pytest.mark.parametrize("reason", [KeyboardInterrupt, OSError])
def test_what_ends_the_writing_of_a_checkpoint_is_not_hidden(
    reason: type[BaseException], calls: int, tiny: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = iter(range(1, calls))

    def write(_: object, data: bytes) -> int:
        if next(left, None) is None:
            raise reason
        return len(data)

    run = Run.create(tmp_path / "run", tiny)
    monkeypatch.setattr(checksums.SigningWriter, "write", write)
    with pytest.raises(reason):
        run.save_checkpoint({"weights": torch.zeros(3)})
    assert sorted(os.listdir(run.path)) == [".run.lock", "config.toml"]


def test_only_a_new_or_empty_folder_becomes_a_run(tiny: Config, tmp_path: Path) -> None:
    Run.create(tmp_path / "run", tiny)
    with pytest.raises(RunError, match="sylvester resume"):
        Run.create(tmp_path / "run", tiny)
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").touch()
    with pytest.raises(RunError, match="holds other files"):
        Run.create(tmp_path / "thesis", tiny)
    with pytest.raises(RunError, match="got the file"):
        Run.create(tmp_path / "thesis" / "chapter.tex", tiny)
    assert os.listdir(tmp_path / "thesis") == ["chapter.tex"]
    (tmp_path / "killed").mkdir()
    (tmp_path / "killed" / ".config.toml.tmp").touch()  # what a kill in the very first write leaves
    Run.create(tmp_path / "killed", tiny)


@pytest.mark.parametrize("name", ["absent", "empty"])
def test_other_folders_are_no_runs(name: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunError, match="Expected the folder of a run"):
        Run.open(tmp_path / name)


def test_a_run_without_a_model_says_how_to_get_one(tiny: Config, tmp_path: Path) -> None:
    Run.create(tmp_path / "run", tiny)
    with pytest.raises(RunError, match="sylvester resume"):
        sylvester.load(tmp_path / "run")


def test_the_lock_dies_with_its_process(tiny: Config, tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", tiny)
    code = (
        "import sys, time, pathlib; from sylvester.app.runs import Run\n"
        "with Run.open(pathlib.Path(sys.argv[1])).locked():\n"
        "    print('locked', flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code, str(run.path)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"
        with pytest.raises(RunError, match="in use"), run.locked():
            pass
        with run.locked("evaluation"):
            pass
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.communicate()
    with run.locked():
        pass


def test_metrics_follow_the_checkpoint(tiny: Config, tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", tiny)
    history = [{"epoch": epoch, "valid_neg_elbo": 1.0 / epoch} for epoch in (1, 2, 3)]
    for line in history:
        run.append_metrics(line)
    run.write_metrics(history[:2])
    run.append_metrics(history[2])
    assert run.metrics == history


@pytest.mark.parametrize("likelihood", ["bernoulli", "categorical", "gaussian"])
def test_load_gives_the_saved_model_in_eval_mode(likelihood: str, tiny: Config, tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", tiny)
    vae = models.build(tiny, (1, 8, 4), likelihood)
    run.save_model(vae.state_dict(), {"shape": (1, 8, 4), "likelihood": likelihood})
    loaded = sylvester.load(run.path)
    assert not loaded.training
    x, noise = torch.ones(3, 1, 8, 4), torch.randn(1, 3, 2)
    with torch.no_grad():
        expected, got = vae.eval().log_terms(x, noise=noise), loaded.log_terms(x, noise=noise)
    for one, other in zip(expected, got, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_double_precision_survives_loading(tiny: Config, tmp_path: Path) -> None:
    config = tiny.model_copy(update={"precision": "64-true"})
    run = Run.create(tmp_path / "run", config)
    vae = models.build(config, (1, 4, 4), "bernoulli").double()
    run.save_model(vae.state_dict(), {"shape": (1, 4, 4), "likelihood": "bernoulli"})
    loaded = sylvester.load(run.path)
    for name, value in vae.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name], value, rtol=0, atol=0)
