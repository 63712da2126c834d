"""Each file of a run, damaged at each stage: named, or made good and said; never another figure."""

from __future__ import annotations

import json
import os
import shutil
import sys
import textwrap
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save

from sylvester.app import cli, data, results, runs, training
from sylvester.app.checksums import signed, verified
from sylvester.app.config import Config, ConfigError, resolve
from sylvester.app.runs import DamagedRun, Run, RunError, RunFailure
from sylvester.app.selection import best_epoch
from tests.app.commands import sylvester
from tests.app.conftest import TINY, Stop, stop_at


def stop_evaluating(done: int, total: int) -> None:
    if done < total:
        raise Stop


FRESH, FIRST, MIDDLE, EVALUATING, FINISHED = STAGES = ("fresh", "first", "middle", "evaluating", "finished")


@pytest.fixture(scope="module")
def stages(archive: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs that differ only in how far they went."""
    # So many samples that the test images are evaluated in three parts. The best epoch of four is not the last.
    config = resolve({"dataset": str(archive), **TINY, "epochs": 4, "nll_samples": 2000, "learning_rate": 0.08})
    images, folder = data.load(archive), tmp_path_factory.mktemp("stages")
    for stage in STAGES:
        run = Run.create(folder / stage, config)
        if stage in (FIRST, MIDDLE):
            with pytest.raises(Stop):
                training.train(run, images, reporting=nullcontext(stop_at(2 if stage == FIRST else 4, 2)))
        elif stage != FRESH:
            history = training.train(run, images)
            if stage == EVALUATING:
                with pytest.raises(Stop):
                    results.conclude(run, images, history, progress=stop_evaluating)
            else:
                results.conclude(run, images, history)
    return folder


def figures(path: Path) -> dict[str, Any]:
    result = json.loads((path / "result.json").read_text())
    del result["timing"]
    return result


def flip(content: bytes, bit: int) -> bytes:
    return content[: bit // 8] + bytes([content[bit // 8] ^ 1 << bit % 8]) + content[bit // 8 + 1 :]


def doubled(content: bytes) -> bytes:
    first, *others = content.splitlines(keepends=True)
    return b"".join([first, first, *others])


def edited(content: bytes) -> bytes:
    """A digit changed, and nothing else."""
    position = next(i for i in range(len(content) // 2, len(content)) if content[i : i + 1] in b"12345678")
    return content[:position] + bytes([content[position] + 1]) + content[position + 1 :]


DAMAGES: dict[str, Callable[[bytes], bytes | None]] = {
    "deleted": lambda content: None,
    "empty": lambda content: b"",
    "cut": lambda content: content[: len(content) // 2],
    "cut at the end": lambda content: content[:-1],
    "first bit": lambda content: flip(content, 0),
    "a bit": lambda content: flip(content, 5 * len(content) + 3),
    "last bit": lambda content: flip(content, 8 * len(content) - 1),
    "longer": lambda content: content + b"x\n",
    "doubled": doubled,
    "edited": edited,
}
TRAINED = ("config.toml", "checkpoint.pt", "checkpoint.previous.pt", "model.safetensors", "metrics.jsonl")
SCORES = "evaluation-2000-seed0"
FILES: dict[str, tuple[str, ...]] = {
    FRESH: ("config.toml",),
    FIRST: ("config.toml", "checkpoint.pt", "model.safetensors", "metrics.jsonl"),
    MIDDLE: TRAINED,
    EVALUATING: (*TRAINED, "*.partial"),
    FINISHED: (*TRAINED, "result.json", f"{SCORES}.safetensors", f"{SCORES}.json"),
}


def may_be_silent(stage: str, pattern: str, damage: str) -> bool:
    """Where nothing is lost, or only what a kill in the midst of writing leaves, too."""
    appended = pattern in ("metrics.jsonl", "*.partial")
    return (
        pattern == f"{SCORES}.json"  # nobody reads it
        or (damage == "deleted" and (appended or pattern in ("checkpoint.previous.pt", "result.json")))
        or (damage in ("empty", "cut", "cut at the end", "last bit") and appended)
        or (damage == "deleted" and (stage, pattern) == (FINISHED, "checkpoint.pt"))
        or (damage, pattern) == ("cut at the end", "result.json")  # the end of the last line
    )


def test_no_file_is_forgotten(stages: Path) -> None:
    others = {"samples.png", "reconstructions.png", "tensorboard"}
    for stage, patterns in FILES.items():
        found = {file.name for file in (stages / stage).iterdir() if not file.name.startswith(".")} - others
        assert found == {file.name for pattern in patterns for file in (stages / stage).glob(pattern)}
    assert best_epoch(Run.open(stages / FINISHED).metrics) < 4


# Variations of others, for the long campaign.
LIKE_OTHERS = ("empty", "cut at the end", "first bit", "last bit", "longer", "doubled")


@pytest.mark.parametrize(
    "damage",
    [pytest.param(damage, marks=pytest.mark.slow if damage in LIKE_OTHERS else []) for damage in DAMAGES],
)
@pytest.mark.parametrize(("stage", "pattern"), [(stage, file) for stage, files in FILES.items() for file in files])
def test_damage_is_named_or_made_good(
    stage: str, pattern: str, damage: str, stages: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run"
    shutil.copytree(stages / stage, path)
    (file,) = path.glob(pattern)
    good = file.read_bytes()
    bad = DAMAGES[damage](good)
    if bad is None:
        file.unlink()
    else:
        assert bad != good
        file.write_bytes(bad)
    named = None
    try:
        cli.resume(path, quiet=True, json=True)
    except (RunError, RunFailure, ConfigError) as error:
        named = str(error)
    said = capsys.readouterr().err
    assert "weights_only" not in f"{named} {said}"
    if named is None:
        assert file.name in said or may_be_silent(stage, pattern, damage)
    else:
        assert str(path) in named
        if pattern == "config.toml":
            file.write_bytes(good)
        else:  # what the sentence advises
            assert "delete" in named.lower() or bad is None
            for name in (file.name, "checkpoint.previous.pt", "result.json"):
                if name in named and (path / name).exists():
                    (path / name).unlink()
        cli.resume(path, quiet=True, json=True)
    assert figures(path) == figures(stages / FINISHED)
    Run.open(path).verify()


@pytest.mark.parametrize("damage", ["empty", "cut"])
def test_another_evaluation_is_made_again_as_advised(damage: str, stages: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    shutil.copytree(stages / FINISHED, path)
    expected = results.evaluate(
        Run.open(path), data.load(Run.open(path).config.dataset), results.Evaluation(20, 1, images=5)
    )
    file = path / expected["evaluation"]["file"]
    content = DAMAGES[damage](file.read_bytes())
    assert content is not None
    file.write_bytes(content)
    command = ["evaluate", str(path), "--samples", "20", "--images", "5", "--seed", "1"]
    advice = f"delete it, and {' '.join(['sylvester', *command])} makes it again"
    with pytest.raises(DamagedRun, match=f"Expected {file} as it was written; got .*: {advice}"):
        cli.evaluate(path, samples=(20,), images=5, seed=1, quiet=True)
    file.unlink()
    done = sylvester(*command, "--json", "--quiet")
    assert json.loads(done.stdout) == expected
    cli.resume(path, quiet=True, json=True)


def test_several_evaluations_at_once_go_on_where_each_stopped(
    stages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "PART", 40)  # two images between two lines
    found = []
    for name in ("whole", "stopped"):
        shutil.copytree(stages / FINISHED, tmp_path / name)
        run = Run.open(tmp_path / name)
        images, how, counts = data.load(run.config.dataset), results.Evaluation(20, images=7), (5, 20)
        if name == "stopped":
            for partial in (2, 3):  # of either number of samples, the last line is lost in turn

                def stop(done: int, total: int, at: int = 2 * partial) -> None:
                    if done >= at:
                        raise KeyboardInterrupt

                with pytest.raises(KeyboardInterrupt):
                    results.evaluate_each(run, images, how, counts, progress=stop)
                files = sorted(run.path.glob(f"evaluation-{counts[partial % 2]}-first7-*.partial"))
                content = files[0].read_bytes()
                files[0].write_bytes(content[: content[:-1].rindex(b"\n") + 1])
        found.append(results.evaluate_each(run, images, how, counts))
        assert not list(run.path.glob("*.partial"))
    assert found[0] == found[1]


@pytest.mark.parametrize("damage", ["deleted", "empty"])
@pytest.mark.parametrize("checkpoint", [True, False])
def test_the_runs_own_evaluation_goes_with_its_result(
    damage: str, checkpoint: bool, stages: Path, tmp_path: Path
) -> None:
    path = tmp_path / "run"
    shutil.copytree(stages / FINISHED, path)
    file = path / f"{SCORES}.safetensors"
    file.unlink() if damage == "deleted" else file.write_bytes(b"")
    for name in () if checkpoint else ("checkpoint.pt", "checkpoint.previous.pt"):
        (path / name).unlink()
    what = "result.json" if damage == "deleted" else "it and result.json"
    done = "makes both" if checkpoint else "does the run"
    advice = f"delete {what}, and sylvester resume {path} {done} again"
    with pytest.raises(DamagedRun, match=f"{advice}$"):
        cli.resume(path, quiet=True)
    if damage != "deleted":
        with pytest.raises(DamagedRun, match=f"{advice}$"):
            cli.evaluate(path, samples=(2000,), quiet=True)


@pytest.mark.parametrize("content", [b"", b"latent = ", b"\xff", b"format = 1\n", b"a = " + b"9" * 5000])
def test_settings_that_cannot_be_read_are_not_advised_to_be_used(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_bytes(content)
    with pytest.raises(DamagedRun, match="or start over with sylvester train --out NEW with the settings you want"):
        Run.open(tmp_path)


def test_settings_that_can_be_read_are_offered(stages: Path, tmp_path: Path) -> None:
    content = (stages / FRESH / "config.toml").read_bytes()
    (tmp_path / "config.toml").write_bytes(content.replace(b"latent = 2", b"latent = 3"))
    with pytest.raises(DamagedRun, match=f"sylvester train --config {tmp_path / 'config.toml'}"):
        Run.open(tmp_path)


def test_no_bit_of_the_settings_can_change(stages: Path, tmp_path: Path) -> None:
    content = (stages / FRESH / "config.toml").read_bytes()
    for bit in range(0, 8 * len(content), 3):
        (tmp_path / "config.toml").write_bytes(flip(content, bit))
        with pytest.raises(DamagedRun, match=r"config\.toml"):
            Run.open(tmp_path)


@pytest.mark.parametrize("name", ["result.json", "metrics.jsonl"])
def test_no_bit_changes_a_figure(name: str, stages: Path, tmp_path: Path) -> None:
    shutil.copytree(stages / FINISHED, tmp_path / "run")
    run = Run.open(tmp_path / "run")
    expected = run.result, run.metrics
    content = (run.path / name).read_bytes()
    named, same, bits = 0, 0, range(0, 8 * len(content), 11)
    for bit in bits:
        (run.path / name).write_bytes(flip(content, bit))
        try:
            found = run.result, run.metrics
        except DamagedRun as error:
            named += name in str(error)
        else:
            assert found == expected
            same += 1
    assert named + same == len(bits)
    assert named > 20 * same  # space between the figures


@pytest.mark.parametrize("name", ["model.safetensors", "checkpoint.pt", f"{SCORES}.safetensors"])
def test_no_bit_of_a_tensor_can_change(name: str, stages: Path, tmp_path: Path) -> None:
    shutil.copytree(stages / FINISHED, tmp_path / "run")
    run = Run.open(tmp_path / "run")
    content = (run.path / name).read_bytes()
    bits = np.random.default_rng(0).integers(0, 8 * len(content), 40).tolist()
    header = range(0, 8 * 400, 97)  # where a safetensors file describes itself
    for bit in [*bits, *header]:
        (run.path / name).write_bytes(flip(content, bit))
        with pytest.raises(DamagedRun, match=name):
            run.verify()


@pytest.mark.parametrize("damage", ["deleted", "empty", "cut", "a bit"])
def test_the_checkpoint_before_the_last_is_used_and_the_user_told(damage: str, stages: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    shutil.copytree(stages / MIDDLE, path)
    run = Run.open(path)
    checkpoint = path / "checkpoint.pt"
    content = DAMAGES[damage](checkpoint.read_bytes())
    checkpoint.unlink() if content is None else checkpoint.write_bytes(content)
    notes: list[str] = []
    history = training.train(run, run.data(), notify=notes.append)
    (note,) = notes
    assert "checkpoint.pt" in note
    assert "going on from the checkpoint before it" in note
    expected = Run.open(stages / FINISHED)
    assert [line["valid_neg_elbo"] for line in history] == [line["valid_neg_elbo"] for line in expected.metrics]
    assert run.about_model() == expected.about_model()


def test_two_damaged_checkpoints_are_named(stages: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    shutil.copytree(stages / MIDDLE, path)
    for name in ("checkpoint.pt", "checkpoint.previous.pt"):
        (path / name).write_bytes(b"")
    with pytest.raises(DamagedRun, match=r"Delete checkpoint\.pt and checkpoint\.previous\.pt"):
        cli.resume(path, quiet=True)


def test_weights_may_be_absent(stages: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run"
    path.mkdir()
    for name in ("config.toml", "metrics.jsonl", "result.json", f"{SCORES}.safetensors"):
        shutil.copy(stages / FINISHED / name, path / name)
    cli.resume(path)
    assert "is finished" in capsys.readouterr().out
    run, whole = Run.open(path), Run.open(stages / FINISHED)
    run.verify()
    assert run.result == whole.result
    assert run.metrics == whole.metrics
    assert len(run.data().test) == len(run.scores()["log_px"])
    with pytest.raises(RunError, match=r"sylvester train --config"):
        run.model()
    (path / "metrics.jsonl").unlink()
    with pytest.raises(DamagedRun, match=r"delete result\.json"):
        cli.resume(path)


def test_a_model_of_another_run_is_not_taken_for_its_own(stages: Path, tmp_path: Path) -> None:
    shutil.copytree(stages / FINISHED, tmp_path / "run")
    shutil.copy(stages / FIRST / "model.safetensors", tmp_path / "run")
    with pytest.raises(DamagedRun, match="is not the one that result"):
        Run.open(tmp_path / "run").verify()


def test_other_images_are_not_taken_for_the_runs_own(stages: Path, tmp_path: Path) -> None:
    run = Run.open(stages / FINISHED)
    images = np.load(run.config.dataset)
    negatives = {split: 1 - images[split] for split in ("train", "valid", "test")}
    np.savez(tmp_path / "halves.npz", **negatives, likelihood="bernoulli")
    other = data.load(tmp_path / "halves.npz")
    with pytest.raises(RunError, match="other files by that name"):
        results.evaluate(run, other, results.Evaluation(10))


def test_the_figures_of_each_image_make_those_of_the_result(stages: Path) -> None:
    run = Run.open(stages / FINISHED)
    result, scores = run.result, run.scores()
    assert result is not None
    assert set(scores) == {"log_px", "mc_error", "ess", "khat", "elbo"}
    assert -scores["log_px"].mean() == pytest.approx(result["nll"], rel=1e-12)
    assert -scores["elbo"].mean() == pytest.approx(result["neg_elbo"], rel=1e-12)
    error = scores["log_px"].std(ddof=1) / np.sqrt(len(scores["log_px"]))
    assert error == pytest.approx(result["nll_std_error"], rel=1e-12)


def test_the_latents_of_the_test_set_are_three_lines(stages: Path) -> None:
    lines = textwrap.dedent((runs.__doc__ or "").split("From Python::\n")[1])
    space: dict[str, Any] = {}
    exec(lines.replace("runs/digits-triangular-sylvester-1", str(stages / FINISHED)), space)
    assert space["z"].shape == (11, 2)
    assert space["z"].isfinite().all()


def test_a_later_format_is_a_sentence(stages: Path, tmp_path: Path) -> None:
    content = verified((stages / FRESH / "config.toml").read_bytes())
    (tmp_path / "config.toml").write_bytes(signed(content.replace(b"format = 1", b"format = 2") + b"novelty = 3\n"))
    with pytest.raises(RunError, match="format 2, which a later version"):
        Run.open(tmp_path)


def as_format_0(run: Run) -> None:
    """Write the files as they were before the format had a number: without checksums, the best model in its file."""
    path = run.path
    (path / "config.toml").write_text(run.config.to_toml())
    metrics, about, weights = run.metrics, run.about_model(), run.weights()
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
    checkpoint = run.load_checkpoint()
    assert checkpoint is not None
    del checkpoint["best"]
    torch.save(checkpoint, path / "checkpoint.pt")
    (path / "checkpoint.previous.pt").unlink(missing_ok=True)
    images = {"images": json.dumps({"shape": about["shape"], "likelihood": about["likelihood"]})}
    (path / "model.safetensors").write_bytes(save(weights, images))
    for file in path.glob("evaluation-*.safetensors"):
        file.unlink()
    if (result := run.result) is not None:
        for part, key in ((result, "checksum"), (result, "evaluation"), (result["timing"], "checksum")):
            del part[key]
        del result["timing"]["machine"]
        (path / "result.json").write_text(json.dumps(result, indent=2) + "\n")


@pytest.mark.parametrize("stage", [MIDDLE, EVALUATING, FINISHED])
def test_format_0_is_read(stage: str, stages: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    shutil.copytree(stages / stage, path)
    as_format_0(Run.open(path))
    run = Run.open(path)
    assert run.format == 0
    run.verify()
    assert run.model().training is False
    cli.resume(path, quiet=True, json=True)
    result, expected = figures(path), figures(stages / FINISHED)
    for added in ("checksum", "evaluation"):
        result.pop(added, None)
        del expected[added]
    assert result == expected
    assert [line["epoch"] for line in Run.open(path).metrics] == [1, 2, 3, 4]


@pytest.mark.parametrize("name", ["config.toml", "checkpoint.pt", "model.safetensors", "metrics.jsonl"])
@pytest.mark.parametrize("damage", ["empty", "cut"])
def test_damage_of_format_0_is_a_sentence(name: str, damage: str, stages: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    shutil.copytree(stages / MIDDLE, path)
    as_format_0(Run.open(path))
    content = DAMAGES[damage]((path / name).read_bytes())
    assert content is not None
    (path / name).write_bytes(content)
    if name == "metrics.jsonl":  # the checkpoint has all of it
        cli.resume(path, quiet=True, json=True)
        assert len(Run.open(path).metrics) == 4
    else:
        with pytest.raises((RunError, RunFailure), match=name):
            cli.resume(path, quiet=True, json=True)


def test_settings_that_no_longer_fit_are_a_sentence(stages: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    shutil.copytree(stages / MIDDLE, path)
    as_format_0(Run.open(path))
    file = path / "config.toml"
    file.write_text(file.read_text().replace("latent = 2", "latent = 3"))
    with pytest.raises(RunError, match="other sizes"):
        Run.open(path).model()
    with pytest.raises(RunFailure, match="other sizes"):
        cli.resume(path, quiet=True)


def kill_at(number: int, path: Path, config: Config) -> bool:
    """Train in a process that dies at its ``number``-th operation on a file of the run; whether it came to that."""
    images = data.load(config.dataset)
    if (child := os.fork()) == 0:
        count = 0

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal count
            if event in ("open", "os.rename", "os.remove", "os.truncate", "os.mkdir") and str(path) in str(arguments):
                count += 1
                if count == number:
                    os._exit(9)

        sys.addaudithook(hook)
        try:
            run = Run.create(path, config)
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), 1)
            cli._complete(run, images, quiet=True, json=True)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) == 9


@pytest.mark.slow
def test_a_kill_at_any_file_operation_leaves_a_run_to_resume(stages: Path, tmp_path: Path) -> None:
    config, number = Run.open(stages / FINISHED).config, 1
    while kill_at(number, path := tmp_path / str(number), config):
        if (path / "config.toml").exists():
            cli.resume(path, quiet=True, json=True)
            assert figures(path) == figures(stages / FINISHED), number
            Run.open(path).verify()
        number += 1
    assert number > 40
