from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sylvester.app.config import (
    FLOW_SETTINGS,
    PRESETS,
    SETTINGS,
    Config,
    ConfigError,
    default_of,
    describe,
    from_text,
    parse,
    read_toml,
    resolve,
)
from sylvester.names import FLOWS


def test_flags_beat_the_file_which_beats_the_preset_which_beats_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('preset = "paper"\nlatent = 40\nepochs = 7\n')
    config = resolve({"epochs": 9}, file)
    assert (config.epochs, config.latent, config.batch_size) == (9, 40, 100)
    assert (config.seed, config.devices) == (0, 1)
    assert resolve({"preset": "quick"}, file).batch_size == PRESETS["quick"]["batch_size"]


def test_paths_hold_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = resolve({"dataset": "images.npz", "data_dir": Path("data")})
    assert (config.dataset, config.data_dir) == (str(tmp_path / "images.npz"), tmp_path / "data")


def test_without_settings_it_is_triangular_sylvester_on_the_digits() -> None:
    config = resolve({})
    assert (config.preset, config.dataset, config.flow) == ("quick", "digits", "triangular-sylvester")


def test_the_paper_preset_is_the_papers_run() -> None:
    config = resolve({"preset": "paper", "dataset": "mnist", "flow": "orthogonal-sylvester"})
    assert (config.latent, config.transforms, config.rank) == (64, 16, 32)
    assert (config.epochs, config.warmup, config.patience) == (2000, 100, 100)
    assert (config.batch_size, config.learning_rate, config.nll_samples) == (100, 5e-4, 5000)
    assert (config.architecture, config.init, config.variance_bounds) == ("paper", "torch", None)
    assert resolve({"preset": "paper", "flow": "householder-sylvester"}).reflections == 8
    assert resolve({"preset": "paper", "flow": "iaf"}).hidden == 1280
    assert resolve({"preset": "paper", "dataset": "caltech101"}).nll_samples == 2000
    assert resolve({"preset": "paper", "dataset": "freyfaces"}).variance_bounds == (0.01, 7.0)
    assert resolve({"preset": "quick", "dataset": "freyfaces"}).variance_bounds is None


def test_the_fast_preset_has_the_papers_networks_and_as_many_steps_on_all_its_datasets() -> None:
    for flow in FLOWS:
        sizes = ["latent", "init", *(name for name, flows in FLOW_SETTINGS.items() if flow in flows)]
        fast, paper = (resolve({"preset": preset, "flow": flow}) for preset in ("fast", "paper"))
        assert [getattr(fast, name) for name in sizes] == [getattr(paper, name) for name in sizes]
    images = {"freyfaces": 1565, "omniglot": 23_000, "mnist": 50_000}
    tuned = resolve({"preset": "fast", "dataset": "caltech101"})
    for dataset, count in images.items():
        scaled = resolve({"preset": "fast", "dataset": dataset})
        for name in ("epochs", "warmup"):
            steps = [getattr(scaled, name) * math.ceil(count / 50), getattr(tuned, name) * 82]
            assert steps[0] == pytest.approx(steps[1], rel=0.2), (dataset, name)
        assert (scaled.schedule, scaled.patience) == ("cosine", 0)  # which patience would cut off
        assert scaled.epochs % scaled.validate_every == 0
        assert (scaled.shift, scaled.mirror) == (0, 0)
    assert (tuned.shift, tuned.mirror) == (0.5, 0.25)
    assert resolve({"preset": "fast", "dataset": "freyfaces"}).variance_bounds == (0.01, 7.0)


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("preset", PRESETS)
def test_every_flow_has_what_it_needs_and_survives_its_file(flow: str, preset: str, tmp_path: Path) -> None:
    config = resolve({"flow": flow, "preset": preset, "dataset": "freyfaces", "data_dir": tmp_path})
    file = tmp_path / "config.toml"
    file.write_text(config.to_toml())
    assert parse(read_toml(file)) == config
    assert resolve({}, file) == config


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"batchsize": 3}, ["batchsize", "did you mean 'batch_size'"]),
        ({"flow": "triangular_sylvester"}, ["flow", "did you mean 'triangular-sylvester'"]),
        ({"dataset": "minst"}, ["dataset", "did you mean 'mnist'", ".npz"]),
        ({"preset": "papr"}, ["preset", "did you mean 'paper'"]),
        ({"architecture": "release"}, ["did you mean 'released'"]),
        ({"precision": "bf16"}, ["did you mean 'bf16-mixed'"]),
        ({"flow": "planar", "rank": 4}, ["rank", "planar", "orthogonal-sylvester", "got 4"]),
        ({"flow": "gaussian", "transforms": 4}, ["transforms", "gaussian"]),
        ({"flow": "iaf", "reflections": 2}, ["reflections", "iaf", "householder-sylvester"]),
        ({"hidden": 64}, ["hidden", "triangular-sylvester"]),
        ({"flow": "orthogonal-sylvester", "rank": 30, "latent": 16}, ["rank", "latent = 16", "got 30"]),
        ({"flow": "maf", "hidden": 8, "latent": 16}, ["hidden", "latent = 16", "got 8"]),
        ({"epochs": 0}, ["epochs", "whole number from 1 to", "got 0"]),
        ({"epochs": "many"}, ["epochs", "got 'many'"]),
        ({"learning_rate": float("nan")}, ["learning_rate", "got nan"]),
        ({"variance_bounds": (7.0, 0.01)}, ["variance_bounds", "increasing"]),
        ({"variance_bounds": [0.1, float("inf")]}, ["variance_bounds", "increasing"]),
        ({"variance_bounds": [0.1]}, ["variance_bounds", "two numbers", "got (0.1,)"]),
        ({"epochs": 1.5}, ["epochs", "whole number", "got 1.5"]),
        ({"epochs": 2.0}, ["epochs", "whole number", "got 2.0"]),
        ({"epochs": True}, ["epochs", "whole number", "got True"]),
        ({"epochs": "3"}, ["epochs", "whole number", "got '3'"]),
        ({"learning_rate": "0.1"}, ["learning_rate", "a number", "got '0.1'"]),
        ({"compile": 1}, ["compile", "true or false", "got 1"]),
        ({"seed": 2**64}, ["seed", "4,294,967,295", "got 18446744073709551616"]),
        ({"latent": 10**26}, ["latent", "whole number", "got 1000"]),
        ({"devices": 10**26}, ["devices", "whole number", "got 1000"]),
        ({"data_dir": "a\0b"}, ["data_dir", "NUL"]),
        ({"dataset": "a\0b.npz"}, ["dataset", "NUL"]),
        ({"dataset": "a\udcff.npz"}, ["dataset", "not UTF-8"]),
        ({"dataset": "~nobody-of-that-name/a.npz"}, ["dataset", "home"]),
        ({"likelihood": "bernouli"}, ["did you mean 'bernoulli'"]),
        ({"test": "always"}, ["test", "end, never"]),
        ({"optimizer": "adam-w"}, ["optimizer", "did you mean 'adamw'"]),
        ({"schedule": "cos"}, ["schedule", "did you mean 'cosine'"]),
        ({"weight_decay": 0.1}, ["weight_decay", "adamw", "got 0.1 with adamax"]),
        ({"flow_rate": 0.0}, ["flow_rate", "between 0 and", "got 0.0"]),
        ({"refine_rate": 1e-4}, ["refine_rate", "refine_epochs", "got 0.0001"]),
        ({"averages": []}, ["averages", "at least one", "got ()"]),
        ({"averages": [0.9, 0.9]}, ["averages", "different", "got (0.9, 0.9)"]),
        ({"averages": [0.9, 1.0]}, ["averages", "numbers between 0 and 1", "got (0.9, 1.0)"]),
        ({"averages": 0.9}, ["averages", "numbers", "got 0.9"]),
        ({"clip": 0.0}, ["clip", "got 0.0"]),
        ({"beta2": 1.0}, ["beta2", "between 0 and 1", "got 1.0"]),
        ({"beta_start": -0.1}, ["beta_start", "from 0 to 1", "got -0.1"]),
        ({"dropout": 1.0}, ["dropout", "got 1.0"]),
        ({"flip": 0.6}, ["flip", "from 0 to 0.5", "got 0.6"]),
        ({"shift": 1.5}, ["shift", "from 0 to 1", "got 1.5"]),
        ({"mirror": -0.1}, ["mirror", "from 0 to 1", "got -0.1"]),
        ({"validate_every": 0}, ["validate_every", "got 0"]),
    ],
)
def test_wrong_settings_are_one_sentence_that_names_the_right_one(given: dict[str, object], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(given)
    message = str(caught.value)
    assert message.startswith("Expected")
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("value", [[], {}, [1, 2, 3], {"a": {"b": 1}}, [[1.0], [2.0]]])
def test_lists_and_tables_are_no_settings(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"Expected {name} to be ") as caught:
        resolve({name: value})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [None, b"latent = ", b"\xff\xfe", b"latent = " + b"9" * 5000, b"a = " + b"[" * 100_000, b"#" * 2_000_000],
)
def test_a_file_that_is_no_toml_is_named(content: bytes | None, tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=str(file)):
        resolve({}, file)


@pytest.mark.parametrize("content", ["", "# latent = 2\n", "format = 1\n"])
def test_a_file_without_settings_is_refused(content: str, tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(content)
    with pytest.raises(ConfigError, match=f"Expected settings in {file}.*; got none"):
        resolve({"seed": 1}, file)


@pytest.mark.parametrize("number", ["9", "-1", '"1"', "[1]"])
def test_settings_of_a_later_format_are_refused(number: str, tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(f"format = {number}\nlatent = 2\n")
    with pytest.raises(ConfigError, match=f"Expected a run of format 1 or earlier; got {file} of format"):
        resolve({}, file)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "settings.toml")
    with pytest.raises(ConfigError, match="got: a pipe"):
        resolve({}, tmp_path / "settings.toml")


@pytest.mark.parametrize(
    ("name", "words", "value"),
    [
        ("epochs", ["12"], 12),
        ("learning_rate", ["1e-3"], 1e-3),
        ("variance_bounds", ["0.01", "7"], (0.01, 7.0)),
        ("averages", ["0.998,0.999"], (0.998, 0.999)),
        ("averages", ["0.99"], (0.99,)),
        ("averages", ["0.998,"], None),
        ("data_dir", ["a b"], Path("a b")),
        ("flow", ["iaf"], "iaf"),
        ("epochs", ["1.5"], None),
        ("epochs", ["1e3"], None),
        ("epochs", ["1_000"], None),
        ("epochs", ["٣"], None),
        ("seed", ["1.7"], None),
        ("seed", ["9" * 5000], None),
        ("learning_rate", ["fast"], None),
        ("variance_bounds", ["a", "b"], None),
    ],
)
def test_words_of_a_flag(name: str, words: list[str], value: object) -> None:
    if value is not None:
        assert from_text(name, *words) == value
        return
    with pytest.raises(ConfigError, match=f"Expected {name} to be .*; got") as caught:
        from_text(name, *words)
    assert len(str(caught.value)) < 300


def test_a_setting_the_flow_needs_is_asked_for() -> None:
    values = resolve({}).model_dump()
    with pytest.raises(ConfigError, match="Expected a value of rank for the orthogonal-sylvester flow"):
        parse({**values, "flow": "orthogonal-sylvester"})


def test_defaults_and_presets_are_what_the_settings_say() -> None:
    assert set(SETTINGS) == set(Config.model_fields)
    for name, setting in SETTINGS.items():
        values = [preset[name] for preset in PRESETS.values() if name in preset]
        if not Config.model_fields[name].is_required():
            values.append(Config.model_fields[name].default)
        assert values
        for value in values:
            assert value is None or not setting.choices or value in setting.choices
            assert value is None or setting.holds(value)
        assert describe(name).startswith(setting.help)


@pytest.mark.parametrize(
    "settings",
    [
        {"objective": "renyi"},
        {"objective": "iwae", "alpha": 0.5},
        {"objective": "iwae", "path_gradient": True},
        {"objective": "renyi", "alpha": 0.5, "path_gradient": True},
        {"objective": "dreg", "compile": True},
    ],
)
def test_objectives_that_do_not_fit_together_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"Expected .*; got"):
        resolve(settings)


@pytest.mark.parametrize("flow", FLOWS)
def test_a_flow_takes_its_settings_and_no_others(flow: str) -> None:
    from sylvester.flows import FAMILIES

    arguments = resolve({"flow": flow, "latent": 8}).flow_arguments()
    assert FAMILIES[flow](context=3, **arguments).features == 8
    for name, flows in FLOW_SETTINGS.items():
        argument = SETTINGS[name].argument
        assert argument is not None
        assert (argument in arguments) == (flow in flows)
        if flow not in flows and flow != "gaussian":  # which takes a number of steps, and makes none
            with pytest.raises(TypeError, match=argument):
                FAMILIES[flow](context=3, **arguments, **{argument: 2})


def test_the_schema_needs_no_torch() -> None:
    code = "import sys, sylvester.app.config, sylvester.app.runs; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", [name for name in SETTINGS if name != "preset"])
def test_the_defaults_that_help_shows_are_those_that_count(name: str) -> None:
    setting = SETTINGS[name]
    flow = setting.flows[0] if setting.of_some_flows else Config.model_fields["flow"].default
    usual, _, others = default_of(name).partition("; ")
    shown = dict(other.split(": ") for other in filter(None, others.split(", ")))
    for preset in PRESETS:
        value = getattr(resolve({"preset": preset, "flow": flow}), name)
        value = setting.unset if value is None else value
        text = shown.get(preset, usual)
        if value is None or value is False:
            assert text == ("none" if shown else "")
        else:
            assert (from_text(name, text) if isinstance(value, int | float | tuple) else text) == value
