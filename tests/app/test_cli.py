from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import resource
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
from safetensors import safe_open

from sylvester.app.display import TrainingBar
from tests.app.commands import command, environment, in_own_process, sylvester

Flags = Callable[..., list[str]]


@pytest.fixture(scope="module")
def finished(flags: Flags, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "run"
    done = in_own_process("train", *flags(), "--out", path, "--quiet")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 3
    assert done.stderr == ""
    return path


def figures(path: Path) -> dict[str, Any]:
    result = json.loads((path / "result.json").read_text())
    del result["timing"]
    return result


def lines(path: Path) -> list[dict[str, float]]:
    parsed = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in ("seconds", "checksum")} for line in parsed]


@pytest.mark.parametrize(
    "words", [["--help"], ["train", "--help"], ["reproduce", "--help"], ["--version"], ["completion", "bash"]]
)
def test_help_imports_no_torch(words: list[str]) -> None:
    code = (
        "import sys; from sylvester.__main__ import main; sys.argv[1:] = sys.argv[1:]\n"
        "try: main()\nexcept SystemExit as end: assert not end.code\n"
        "assert not {'torch', 'numpy', 'lightning_fabric', 'matplotlib'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_train_offers_the_documented_flags() -> None:
    text = sylvester("train", "--help").stdout
    names = (
        "dataset flow transforms rank reflections hidden latent epochs batch-size learning-rate warmup "
        "architecture seed out data-dir preset config nll-samples likelihood test devices precision compile quiet json"
    )
    for name in names.split():
        assert f"--{name} " in text


def test_ray_alone_joins_a_cluster_or_starts_one() -> None:
    text = " ".join(sylvester("sweep", "--help").stdout.replace("│", " ").split())
    assert "without one, on this machine's, which is started if need be." in text


def test_a_run_is_a_folder_with_its_figures(finished: Path, archive: Path) -> None:
    result = json.loads((finished / "result.json").read_text())
    assert result["dataset"]["name"] == "halves"
    assert len(result["dataset"]["sha256"]["halves.npz"]) == 64
    assert result["flow"]["name"] == "triangular-sylvester"
    assert result["flow"]["outputs_per_step"] == {"paper": 10, "released": 10, "packed": 8}
    assert result["epochs"] == 3
    parts = result["parameters"]
    assert parts["encoder"] + parts["flow"] + parts["decoder"] == parts["total"]
    # R and R̃ packed with their diagonals, and b, for each of K = 2 steps at D = 2, then mean and variance.
    assert parts["flow"] == (2 * (2 * 3 + 2) + 2 * 2) * (256 + 1)
    assert result["nll"] <= result["neg_elbo"]
    assert result["nll_mc_error"] > 0
    assert result["nll_std_error"] > 0
    assert result["timing"]["seconds"] > 0
    for name in ("samples.png", "reconstructions.png"):
        assert matplotlib.image.imread(finished / name).std() > 0
    left = {"config.toml", "metrics.jsonl", "checkpoint.pt", "model.safetensors", "result.json"}
    assert left <= set(os.listdir(finished))
    assert not [name for name in os.listdir(finished) if name.endswith((".tmp", ".partial"))]


def test_one_seed_one_result(finished: Path, flags: Flags, tmp_path: Path) -> None:
    again, other = tmp_path / "again", tmp_path / "other"
    done = sylvester("train", *flags(), "--out", again, "--json")
    assert json.loads(done.stdout) == json.loads((again / "result.json").read_text())
    assert figures(again) == figures(finished)
    assert lines(again) == lines(finished)
    sylvester("train", *flags(), "--out", other, "--seed", "1")
    assert figures(other)["neg_elbo"] != figures(finished)["neg_elbo"]


def test_the_runs_own_config_repeats_it(finished: Path, tmp_path: Path) -> None:
    done = sylvester("train", "--config", finished / "config.toml", "--out", tmp_path / "run", "--quiet")
    assert done.returncode == 0, done.stderr
    assert figures(tmp_path / "run") == figures(finished)


def interrupt(flags: list[str], path: Path, signal_number: int, epochs: int) -> subprocess.CompletedProcess[str]:
    """Start a run and send it a signal in the epoch after ``epochs``."""
    process = subprocess.Popen(
        command("train", *flags, "--out", path), stderr=subprocess.PIPE, text=True, env=environment()
    )
    deadline = time.monotonic() + 120
    metrics = path / "metrics.jsonl"
    while not metrics.exists() or len(metrics.read_text().splitlines()) < epochs:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal_number)
    _, errors = process.communicate()
    assert not (path / "result.json").exists()
    return subprocess.CompletedProcess(process.args, process.returncode, "", errors)


@pytest.fixture(scope="module")
def long_flags(flags: Flags) -> list[str]:
    """Enough epochs that a signal arrives in the midst of them."""
    return flags(epochs=40)


@pytest.fixture(scope="module")
def uninterrupted(long_flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "run"
    assert sylvester("train", *long_flags, "--out", path, "--quiet").returncode == 0
    return path


@pytest.mark.parametrize("epochs", [pytest.param(0, marks=pytest.mark.slow), 5])
def test_a_killed_run_resumes_to_the_same_figures(
    epochs: int, long_flags: list[str], uninterrupted: Path, tmp_path: Path
) -> None:
    path = tmp_path / "run"
    assert interrupt(long_flags, path, signal.SIGKILL, epochs).returncode == -signal.SIGKILL
    done = sylvester("resume", path, "--quiet")
    assert done.returncode == 0, done.stderr
    assert figures(path) == figures(uninterrupted)
    assert lines(path) == lines(uninterrupted)


def test_ctrl_c_leaves_a_run_and_says_how_to_resume_it(
    long_flags: list[str], uninterrupted: Path, tmp_path: Path
) -> None:
    path = tmp_path / "run"
    stopped = interrupt(long_flags, path, signal.SIGINT, 2)
    assert stopped.returncode == 130
    assert f"sylvester resume {path}" in stopped.stderr
    assert "Traceback" not in stopped.stderr
    assert sylvester("resume", path, "--quiet").returncode == 0
    assert figures(path) == figures(uninterrupted)


def in_terminal(columns: int, *words: str | Path, until: str) -> tuple[int, str]:
    """Run a command in a terminal, and press Ctrl-C twice once it has shown something."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ.pop("COLUMNS", None)
        os.execve(sys.executable, command(*words), {**environment(), "TERM": "xterm"})
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 30, columns, 0, 0))
    seen, pressed = b"", False
    try:
        while chunk := os.read(terminal, 65536):
            seen += chunk
            if not pressed and until.encode() in seen:
                pressed = True
                os.write(terminal, b"\x03")
                time.sleep(0.02)
                os.write(terminal, b"\x03")
    except OSError:  # Linux's way to say that the other side has closed
        pass
    os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), seen.decode()


@pytest.mark.parametrize("columns", [50, pytest.param(80, marks=pytest.mark.slow)])
def test_a_terminal_shows_one_line_and_ctrl_c_ends_it(columns: int, flags: Flags, tmp_path: Path) -> None:
    endless = flags(epochs=100_000)
    code, seen = in_terminal(columns, "train", *endless, "--out", tmp_path / "run", until="valid.")
    assert code == 130, seen
    assert "Traceback" not in seen
    assert seen.count("Interrupted; ") == 1
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", seen)
    drawn = [line for line in re.split(r"[\r\n]+", plain) if line.startswith("epoch ")]
    assert drawn
    # The terminal itself writes ^C, for which there must be room.
    assert max(len(line.replace("^C", "").rstrip()) for line in drawn) <= columns - 2
    assert re.search(r"−ELBO \d+\.\d\d.*, valid\. \d+\.\d\d", drawn[-1])
    assert ("KL" in drawn[-1]) == (columns == 80)


def test_nothing_is_drawn_where_nothing_is_trained(capfd: pytest.CaptureFixture[str]) -> None:
    with TrainingBar(3, quiet=False):
        pass
    assert capfd.readouterr() == ("", "")


def test_a_finished_run_says_so(finished: Path) -> None:
    before = {file: file.stat().st_mtime_ns for file in finished.iterdir()}
    done = sylvester("resume", finished)
    assert done.returncode == 0
    assert "finished" in done.stdout
    assert json.loads(sylvester("resume", finished, "--json").stdout)["epochs"] == 3
    assert {file: file.stat().st_mtime_ns for file in finished.iterdir()} == before


def test_evaluate_scores_and_repeats_the_runs_own_figures(finished: Path) -> None:
    done = sylvester("evaluate", finished, "--samples", "30", "--json", "--quiet")
    assert done.returncode == 0, done.stderr
    evaluated = json.loads(done.stdout)
    result = figures(finished)
    assert {key: result[key] for key in evaluated} == evaluated
    more = json.loads(sylvester("evaluate", finished, "--samples", "300", "--json", "--quiet").stdout)
    assert more["nll"] == pytest.approx(evaluated["nll"], abs=5 * evaluated["nll_mc_error"])
    assert more["nll_mc_error"] < evaluated["nll_mc_error"]
    assert "NLL" in sylvester("evaluate", finished, "--samples", "30").stdout


def test_an_interrupted_evaluation_continues(finished: Path) -> None:
    words = ("evaluate", finished, "--samples", "5000", "--seed", "3")
    process = subprocess.Popen(command(*words, "--quiet"), env=environment())
    deadline = time.monotonic() + 120
    while not (partial := list(finished.glob("*.partial"))) or partial[0].read_bytes().count(b"\n") < 3:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.kill()
    process.wait()
    assert not list(finished.glob("evaluation-5000-seed3.json"))
    continued, afresh = (json.loads(sylvester(*words, "--json", "--quiet").stdout) for _ in range(2))
    assert continued == afresh
    assert not list(finished.glob("*.partial"))


def test_an_evaluation_with_several_numbers_of_samples(finished: Path) -> None:
    words = ("evaluate", finished, "--images", "5", "--quiet", "--json", "--samples")
    alone = json.loads(sylvester(*words, "12").stdout)
    together = json.loads(sylvester(*words, "40,12,7").stdout)
    assert [one["nll_samples"] for one in together] == [7, 12, 40]
    assert together[1] == alone  # which was finished, and is not made again
    assert json.loads(sylvester(*words, "40").stdout) == together[2]
    seven = json.loads(sylvester(*words, "7", "--seed", "0").stdout)
    assert seven == together[0]
    assert sorted(file.name for file in finished.glob("evaluation-*-first5-*")) == sorted(
        f"evaluation-{samples}-first5-seed0.{kind}" for samples in (7, 12, 40) for kind in ("json", "safetensors")
    )
    shown = sylvester(*words[:4], "--samples", "7,40").stdout
    assert "7 samples per image." in shown
    assert "40 samples per image." in shown
    for wrong in ("7,,40", "7,0", "7,x", ","):
        refused = sylvester(*words, wrong)
        assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
        assert "Expected --samples to be a whole number" in refused.stderr


@pytest.mark.parametrize(
    ("way", "number", "how"),
    [
        ("anneal", 20, "32 samples per image, each annealed by 20 transitions."),
        ("adapt", 3, "32 samples per image, of a proposal fitted in 3 rounds."),
    ],
)
def test_an_evaluation_of_some_images_by_better_samples(finished: Path, way: str, number: int, how: str) -> None:
    words = ("evaluate", finished, "--samples", "32", "--images", "5")
    plain, better = (
        json.loads(sylvester(*words, *more, "--json", "--quiet").stdout) for more in ((), (f"--{way}", str(number)))
    )
    # Of the same draws, before they move, which are as many as a round of adaptation takes.
    assert better["neg_elbo"] == pytest.approx(plain["neg_elbo"], rel=1e-6)
    assert better["nll_mc_error"] < plain["nll_mc_error"]
    assert better["nll"] == pytest.approx(plain["nll"], abs=5 * plain["nll_mc_error"])
    assert (better["images"], better[way], better["nll_samples"]) == (5, number, 32)
    with safe_open(finished / better["evaluation"]["file"], "np") as file:
        assert file.get_tensor("log_px").shape == (5,)
    assert how in sylvester(*words, f"--{way}", str(number)).stdout
    assert sylvester("evaluate", finished, "--images", "0").returncode == 2
    refused = sylvester("evaluate", finished, "--adapt", "2", "--anneal", "2")
    assert (refused.returncode, refused.stderr) == (2, "sylvester: Expected --adapt or --anneal, not both\n")


def test_sample_writes_a_picture(finished: Path, tmp_path: Path) -> None:
    target = tmp_path / "nine.png"
    done = sylvester("sample", finished, "-n", "9", "--out", target)
    assert done.stdout == f"{target}\n"
    side = 3 * (4 * 14 + 1) + 1
    assert matplotlib.image.imread(target).shape[:2] == (side, side)
    assert sylvester("sample", finished, "-n", "9", "--seed", "1").returncode == 0
    other = matplotlib.image.imread(finished / "samples-9-seed1.png")
    assert not np.array_equal(other, matplotlib.image.imread(target))


@pytest.mark.parametrize("target", ["/dev/full", ".", "pipe", "nowhere/picture.png", "hangs"])
def test_only_files_are_written(finished: Path, tmp_path: Path, target: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "hangs").symlink_to("/dev/null")
    done = sylvester("sample", finished, "--out", target, cwd=tmp_path)
    assert done.returncode == 2
    assert "Expected a file for the picture; got" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert sorted(os.listdir(tmp_path)) == ["hangs", "pipe"]


def test_links_are_followed(finished: Path, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    link = tmp_path / "link.png"
    link.symlink_to("there/picture.png")
    for _ in range(2):  # dangling, then not
        assert sylvester("sample", finished, "-n", "1", "--out", link).returncode == 0
    assert link.is_symlink()
    assert matplotlib.image.imread(tmp_path / "there" / "picture.png").std() > 0
    assert os.listdir(tmp_path / "there") == ["picture.png"]


def test_a_run_may_leave_the_test_images_alone(flags: Flags, finished: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    done = sylvester("train", *flags(test="never"), "--out", path, "--quiet")
    assert done.returncode == 0, done.stderr
    assert "validation −ELBO" in done.stdout
    untested, tested = figures(path), figures(finished)
    scores = ("neg_elbo", "neg_elbo_std_error", "nll", "nll_mc_error", "nll_std_error", "ess", "khat_share")
    assert all(untested[key] is None for key in scores)
    assert untested["valid_neg_elbo"] == tested["valid_neg_elbo"]
    assert lines(path) == lines(finished)
    assert not list(path.glob("evaluation*"))
    assert "is finished" in sylvester("resume", path).stdout
    later = json.loads(sylvester("evaluate", path, "--samples", "30", "--json", "--quiet").stdout)
    assert later["nll"] == tested["nll"]


@pytest.mark.parametrize("channels", [2, 4])
def test_any_number_of_channels_is_drawn(channels: int, flags: Flags, tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 2, (40, channels, 5, 6)).astype(np.uint8)
    np.savez(tmp_path / "many.npz", train=images[:30], test=images[30:])
    done = sylvester("train", *flags(dataset=tmp_path / "many.npz", epochs=1), "--out", tmp_path / "run", "--quiet")
    assert done.returncode == 0, done.stderr
    assert figures(tmp_path / "run")["dataset"]["shape"] == [channels, 5, 6]
    assert matplotlib.image.imread(tmp_path / "run" / "reconstructions.png").std() > 0


def test_without_nll_samples_there_is_a_bound_alone(flags: Flags, tmp_path: Path) -> None:
    done = sylvester("train", *flags(nll_samples=0), "--out", tmp_path / "run", "--quiet")
    assert done.returncode == 0, done.stderr
    result = figures(tmp_path / "run")
    assert result["nll"] is None
    assert result["neg_elbo"] > 0
    assert "NLL" not in done.stdout


def test_categorical_images_are_in_bits_per_dimension_too(flags: Flags, tmp_path: Path) -> None:
    levels = np.random.default_rng(0).integers(0, 256, (40, 4, 4)).astype(np.uint8)
    archive = tmp_path / "grey.npz"
    np.savez(archive, train=levels[:20], valid=levels[20:30], test=levels[30:], likelihood="categorical")
    done = sylvester("train", *flags(dataset=archive, epochs=1), "--out", tmp_path / "run", "--quiet")
    assert done.returncode == 0, done.stderr
    result = figures(tmp_path / "run")
    assert result["bits_per_dim"]["nll"] == pytest.approx(result["nll"] / (16 * np.log(2)))
    assert "bits per dimension" in done.stdout


def test_datasets_are_listed_and_checked(tmp_path: Path) -> None:
    rows = {row["name"]: row for row in json.loads(sylvester("data", "list", "--json").stdout)}
    assert rows["digits"]["present"]
    assert rows["mnist"]["splits"] == {"train": 50_000, "valid": 10_000, "test": 10_000}
    table = sylvester("data", "list").stdout
    assert "freyfaces" in table
    assert "CC BY 4.0" in table
    assert max(map(len, table.splitlines())) <= 80
    assert any("50,000 / 10,000 / 10,000" in line and "bernoulli" in line for line in table.splitlines())
    for verb in ("check", "fetch"):
        report = json.loads(sylvester("data", verb, "digits", "--json").stdout)
        assert report["ok"]
        assert report["counts"] == {"train": 1197, "valid": 300, "test": 300}
    missing = sylvester("data", "check", "mnist", "--data-dir", tmp_path)
    assert missing.returncode == 2
    assert "binarized_mnist_train.amat" in missing.stderr
    assert missing.stdout.count("not found") == 3


def test_a_download_that_fails_is_no_misuse(tmp_path: Path) -> None:
    nowhere = {**dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:1"), "no_proxy": ""}
    empty = {"XDG_CACHE_HOME": str(tmp_path), "SYLVESTER_DATA": ""}
    for words in (["data", "fetch", "mnist"], ["reproduce", "table1", "--dry-run"]):
        done = sylvester(*words, "--quiet", cwd=tmp_path, **nowhere, **empty)
        assert done.returncode == 1
        assert len(done.stderr.splitlines()) == 1, done.stderr
        assert "got no connection to the server: try again" in done.stderr


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["train", "--flow", "triangular-silvester"], "did you mean 'triangular-sylvester'"),
        (["train", "--flow", "planar", "--rank", "4"], "planar"),
        (["train", "--rnk", "4"], "--rank"),
        (["train", "--epochs", "few"], "few"),
        (["train", "--epochs", "0"], "epochs"),
        (["train", "--epochs", "1.5"], "Expected epochs to be a whole number from 1 to 2,147,483,647; got '1.5'"),
        (["train", "--seed", "1.7"], "Expected seed to be a whole number"),
        (["train", "--devices", str(10**26)], "Expected devices to be a whole number from 1 to 1,024"),
        (["train", "--devices", "1000"], "by its CPU cores; got 1000"),
        (["sweep", "--devices", "1000"], "by its CPU cores; got 1000"),
        (["train", "--latent", str(10**9)], "Expected latent to be a whole number"),
        (["train", "--latent", "1000000"], "Expected a model that can be trained with"),
        (["train", "--flow", "iaf", "--latent", "300000", "--hidden", "300000"], "Expected a model that fits"),
        (["train", "--config", "listed.toml"], "Expected epochs to be a whole number from 1 to 2,147,483,647; got [1]"),
        (["train", "--config", "nul.toml"], "NUL"),
        (["train", "--config", "pipe.npz"], "pipe"),
        (["train", "--dataset", os.fsdecode(b"\xff.npz")], "not UTF-8"),
        (["train", "--dataset", "pipe.npz"], "got a pipe"),
        (["train", "--out", os.fsdecode(b"\xff")], "not UTF-8"),
        (["train", "--precision", "bf16-mixed"], "--precision 32-true works everywhere"),
        (["train", "--precision", "16-mixed"], "got none: --precision bf16-mixed is for CPUs"),
        (["sweep", "--precision", "16-mixed"], "got none: --precision bf16-mixed is for CPUs"),
        (["sweep", "--precision", "16-mixed", "--dry-run"], "got none: --precision bf16-mixed is for CPUs"),
        (["evaluate", ".", "--samples", "1.5"], "Expected --samples to be a whole number from 1"),
        (["sample", ".", "-n", "0"], "Expected -n to be a whole number from 1 to 10,000; got '0'"),
        (["train", "--dataset", "absent.npz"], "absent.npz"),
        (["train", "--dataset", "odd.npz", "--architecture", "paper"], "multiples of 4 for convolutions; got 6 x 8"),
        (["train", "--dataset", "bright.npz"], "[0, 1]"),
        (["train", "--dataset", "torn.npz"], "torn.npz"),
        (["train", "--dataset", "mnist", "--data-dir", "."], "binarized_mnist_train.amat"),
        (["train", "--dataset", "caltech101", "--data-dir", "bad"], "caltech101_silhouettes_28_split1.mat"),
        (["train", "--config", "absent.toml"], "absent.toml"),
        (["train", "--config", "empty.toml"], "Expected settings in empty.toml, such as latent = 16; got none"),
        (["train", "--config", "later.toml"], "got later.toml of format 9, which a later version of sylvester made"),
        (["train", "--config", "typo.toml"], "did you mean 'latent'"),
        (["resume", "."], "Expected the folder of a run"),
        (["resume", "absent"], "Expected the folder of a run"),
        (["evaluate", "."], "Expected the folder of a run"),
        (["sample", "bad"], "Expected the folder of a run"),
        (["data", "check", "absent.npz"], "Expected a readable file at absent.npz; got the error No such file"),
        (["data", "check", "minst"], "did you mean 'mnist'?"),
        (["brain"], "did you mean 'train'?"),
        (["data", "chek"], "Expected the command after sylvester data to be one of list, fetch, check; got 'chek'"),
        (["train", "iaf"], "Expected nothing more after sylvester train but its flags; got 'iaf'"),
        (["train", "--flow="], "coupling-nsf; got ''"),
        (["train", "--flow", "gaussian,iaf"], "one value of flow; got 'gaussian,iaf': sylvester sweep takes several"),
        (["train", "--preset", "papr"], "did you mean 'paper'?"),
        (["train", "--epochs"], "Expected a value of --epochs; got none"),
        (["train", "--seed", "-1"], "Expected seed to be a whole number from 0"),
        (["train", "--seed", "0", "--seed", "1"], "Expected --seed once; got it twice"),
        (["train", "--compile=maybe"], "Expected no value of --compile, which stands alone; got 'maybe'"),
        (["train", "--variance-bounds", "1"], "Expected 2 values of --variance-bounds; got 1"),
        (["train", "--out", "torn.npz"], "Expected a folder for the run; got the file torn.npz"),
        (["train", "--out", "torn.npz/run"], "Expected a folder for the run; got torn.npz/run below the file"),
        (
            ["train", "--out", "/proc/nope/run"],
            "Expected a folder for the run; got /proc/nope/run in /proc, where nothing may be written",
        ),
        (["resume"], "Expected RUN after sylvester resume; got none"),
        (["evaluate", "bad", "run"], "Expected nothing more after sylvester evaluate but its flags; got 'run'"),
        (["evaluate", "bad", "--samples", "0"], "Expected --samples to be a whole number from 1"),
        (["demo", "--out", "bad"], "Expected a new folder, or one of sylvester demo; got bad, which holds other files"),
        (["demo", "--out", "torn.npz"], "Expected a folder for the run; got torn.npz/gaussian below the file"),
        (["compare", "bad"], "Expected a folder with runs; got bad, which has none"),
        (["compare", "--against", "gausian"], "did you mean 'gaussian'?"),
        (["gaps"], "Expected the folders of one run or more; got none"),
        (["gaps", "bad", "--split", "tset"], "Expected --split to be one of test, valid; got 'tset'"),
        (["sweep", "--seed", "0", "--seed", "1"], "got it twice: several values are separated by commas"),
        (["sweep", "--compile", "maybe"], "Expected compile to be true or false; got 'maybe'"),
        (["sweep", "--ray", "here", "there"], "Expected at most 1 value of --ray; got 2"),
        (["sweep", "--cpus", "4"], "Expected --cpus only with --ray; got it without"),
        (["sweep", "--gpus", "0"], "Expected --gpus only with --ray; got it without"),
        (["sweep", "--out", "old"], "Expected a folder for the runs; got old, which is a run itself"),
        (["sweep", "--out", "torn.npz"], "Expected a folder for the runs; got the file torn.npz"),
        (["reproduce", "tabel1"], "digits; got 'tabel1'; did you mean 'table1'?"),
        (["reproduce", "digits", "--preset", "papr"], "did you mean 'paper'?"),
        (["reproduce", "digits", "--seeds", "-1"], "Expected seed to be a whole number from 0"),
        (
            ["reproduce", "digits", "--report", "absent/page.html"],
            "Expected a file for the report; got absent/page.html",
        ),
        (["report", "bad", "--out", "torn.npz/page.html"], "Expected a file for the report; got torn.npz/page.html"),
        (["data", "check", "--data-dir", "absent", "mnist"], "Expected a folder of data files at absent; got nothing"),
        (["completion", "tcsh"], "Expected the shell to be one of bash, zsh, fish; got 'tcsh'"),
    ],
)
def test_bad_input_is_one_sentence_and_leaves_nothing(words: list[str], expected: str, tmp_path: Path) -> None:
    square = np.zeros((4, 8, 8))
    for name, images in (("odd", np.zeros((4, 6, 8))), ("bright", square + 3.0)):
        np.savez(tmp_path / f"{name}.npz", train=images, valid=images, test=images)
    np.savez(tmp_path / "whole.npz", train=square, valid=square, test=square)
    content = (tmp_path / "whole.npz").read_bytes()
    (tmp_path / "torn.npz").write_bytes(content[: len(content) // 2])
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "caltech101_silhouettes_28_split1.mat").write_bytes(b"MATLAB 5.0 MAT-file, torn")
    (tmp_path / "typo.toml").write_text("laten = 4\n")
    (tmp_path / "empty.toml").write_text("# latent = 4\n")
    (tmp_path / "later.toml").write_text("format = 9\nlatent = 4\n")
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "config.toml").write_text("format = 1\n")
    (tmp_path / "listed.toml").write_text("epochs = [1]\n")
    (tmp_path / "nul.toml").write_text('data_dir = "a\\u0000b"\n')
    os.mkfifo(tmp_path / "pipe.npz")
    before = sorted(tmp_path.rglob("*"))
    out = ["--out", "run"] if words[0] == "train" and "--out" not in words else []
    done = sylvester(*words, *out, cwd=tmp_path, SYLVESTER_BF16="denied", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert expected in done.stderr
    assert done.stdout == ""
    assert sorted(tmp_path.rglob("*")) == before


def test_a_folder_in_use_is_left_alone(finished: Path, flags: Flags) -> None:
    before = (finished / "config.toml").read_text()
    done = sylvester("train", *flags(), "--out", finished)
    assert done.returncode == 2
    assert f"sylvester resume {finished}" in done.stderr
    assert (finished / "config.toml").read_text() == before


def test_a_disk_that_takes_no_more_is_a_sentence(flags: Flags, tmp_path: Path) -> None:
    path = tmp_path / "run"
    small = 100_000  # bytes: enough for the settings, too little for the model

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (small, small))

    done = in_own_process("train", *flags(), "--out", path, "--quiet", preexec_fn=limit)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert "File too large" in done.stderr
    assert not [name for name in os.listdir(path) if name.endswith(".tmp")]
    assert sylvester("resume", path, "--quiet").returncode == 0


def test_a_loss_that_explodes_is_a_sentence(flags: Flags, tmp_path: Path) -> None:
    done = sylvester("train", *flags(learning_rate=1e30), "--out", tmp_path / "run", "--quiet")
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert "not finite in epoch 1, batch 2" in done.stderr


def test_runs_of_different_images_have_no_common_gaps(finished: Path, flags: Flags, tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 2, (40, 4, 4)).astype(np.uint8)
    np.savez(tmp_path / "other.npz", train=images[:20], valid=images[20:30], test=images[30:])
    other = tmp_path / "run"
    assert sylvester("train", *flags(dataset=tmp_path / "other.npz"), "--out", other, "--quiet").returncode == 0
    done = sylvester("gaps", finished, other)
    assert done.returncode == 2
    # One line, also where there is no terminal for the bar that was to come.
    assert done.stderr == f"sylvester: Expected runs with the same test images; got {finished} and {other}\n"


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write anywhere")
@pytest.mark.parametrize("words", [["train", "--out"], ["sample", "RUN", "--out"], ["report", "RUN", "--out"]])
def test_a_place_that_may_not_be_written_is_a_sentence(words: list[str], finished: Path, tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    done = sylvester(*(finished if word == "RUN" else word for word in words), closed / "new")
    assert done.returncode == 2
    assert f"in {closed}, where nothing may be written" in done.stderr
    assert len(done.stderr.splitlines()) == 1
