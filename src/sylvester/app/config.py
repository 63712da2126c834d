"""One schema for everything that a run depends on: defaults < preset < TOML file < flags.

Imports no torch, so that ``sylvester --help`` can describe every setting at once.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from sylvester.names import DATASETS, FLOWS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found, no-redef]

# Settings that only some flows have. A preset's value for another flow is dropped, a user's is an error.
FLOW_SETTINGS: dict[str, tuple[str, ...]] = {
    "transforms": tuple(name for name in FLOWS if name != "gaussian"),
    "rank": ("orthogonal-sylvester",),
    "reflections": ("householder-sylvester",),
    "hidden": ("iaf", "mean-only-iaf", "maf", "nice", "realnvp"),
}

CHOICES: dict[str, tuple[str, ...]] = {
    "preset": ("quick", "paper"),
    "flow": FLOWS,
    "architecture": ("mlp", "paper", "released"),
    "init": ("identity", "torch"),
    "precision": ("32-true", "64-true", "bf16-mixed", "16-mixed"),
}

PRESETS: dict[str, dict[str, Any]] = {
    # Tuned on the embedded digits: a minute and a half on two cores, evaluation included.
    "quick": {
        "transforms": 8,
        "rank": 8,
        "reflections": 4,
        "hidden": 64,
        "latent": 16,
        "epochs": 120,
        "patience": 25,
        "warmup": 30,
        "batch_size": 50,
        "learning_rate": 2e-3,
        "architecture": "mlp",
        "init": "identity",
        "nll_samples": 100,
    },
    # The paper's experiments: appendix A and the settings of tables 1 and 2.
    "paper": {
        "transforms": 16,
        "rank": 32,
        "reflections": 8,
        "hidden": 1280,
        "latent": 64,
        "epochs": 2000,
        "patience": 100,
        "warmup": 100,
        "batch_size": 100,
        "learning_rate": 5e-4,
        "architecture": "paper",
        "init": "torch",
        "nll_samples": 5000,
    },
}

# Where a preset treats one dataset differently.
EXCEPTIONS: dict[tuple[str, str], dict[str, Any]] = {
    ("quick", "freyfaces"): {"architecture": "paper"},  # dense layers to 256 levels a pixel are too many weights
    ("paper", "caltech101"): {"nll_samples": 2000},
    ("paper", "freyfaces"): {"variance_bounds": (0.01, 7.0)},
}


class ConfigError(ValueError):
    """A setting that cannot be used, in one sentence."""


class Config(BaseModel):
    """The resolved settings of a run. ``None`` means that the setting does not apply."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    preset: str = Field("quick", description="Where unset values come from")
    dataset: str = Field("digits", description=f"One of {', '.join(DATASETS)}, or the path of an .npz file")
    flow: str = Field("triangular-sylvester", description="Family of the posterior")
    transforms: int | None = Field(None, ge=1, description="Steps of the flow")
    rank: int | None = Field(None, ge=1, description="Columns of Q (orthogonal-sylvester)")
    reflections: int | None = Field(None, ge=1, description="Reflections that make Q (householder-sylvester)")
    hidden: int | None = Field(None, ge=1, description="Width of the masked and coupling networks")
    latent: int = Field(ge=1, description="Size of z")
    epochs: int = Field(ge=1, description="Epochs at most")
    patience: int = Field(
        ge=0,
        description="Stop after so many epochs, from the warmup's end on, without a better validation bound; 0: never",
    )
    warmup: int = Field(ge=0, description="Epochs over which the weight of the KL term grows to 1")
    batch_size: int = Field(ge=1, description="Images a step, over all devices together")
    learning_rate: float = Field(gt=0, lt=1e37, description="Step size of Adamax")  # a float32, with room
    architecture: str = Field(
        description="Dense layers, the convolutions of the paper's appendix or those of its released code"
    )
    init: str = Field(description="Start at the Gaussian posterior, or with torch's default initialization")
    variance_bounds: tuple[float, float] | None = Field(None, description="Clamp of the variance of z_0")
    nll_samples: int = Field(ge=0, description="Importance samples an image of the final test; 0: none")
    seed: int = Field(0, ge=0, description="Everything random derives from it")
    data_dir: Path | None = Field(None, description="Folder of the dataset's files; nothing is downloaded then")
    devices: int = Field(1, ge=1, description="Processes, one a device")
    precision: str = Field("32-true", description="Arithmetic outside the flow")
    compile: bool = Field(
        False,
        description="Compile the model's terms with torch.compile: about a minute once, then small models train faster",
    )

    @field_validator(*CHOICES)
    @classmethod
    def _known(cls, value: str, info: Any) -> str:
        return _one_of(info.field_name, value, CHOICES[info.field_name])

    @field_validator("dataset")
    @classmethod
    def _named_or_file(cls, value: str) -> str:
        if value.endswith(".npz"):
            return str(Path(value).expanduser().absolute())  # the run may be resumed from another folder
        return _one_of("dataset", value, DATASETS, "or a path that ends in .npz")

    @field_validator("data_dir")
    @classmethod
    def _absolute(cls, value: Path | None) -> Path | None:
        return None if value is None else value.expanduser().absolute()

    @model_validator(mode="after")
    def _fits(self) -> Config:
        for name, flows in FLOW_SETTINGS.items():
            value = getattr(self, name)
            if value is not None and self.flow not in flows:
                raise ValueError(
                    f"Expected no {name} with the {self.flow} flow, only with {', '.join(flows)}; got {value}"
                )
            if value is None and self.flow in flows:
                raise ValueError(f"Expected a value of {name} for the {self.flow} flow; got none")
        if self.rank is not None and self.rank > self.latent:
            raise ValueError(f"Expected rank to be at most latent = {self.latent}; got {self.rank}")
        if self.hidden is not None and self.hidden < self.latent:
            raise ValueError(f"Expected hidden to be at least latent = {self.latent}; got {self.hidden}")
        if self.variance_bounds is not None and not 0 < self.variance_bounds[0] < self.variance_bounds[1]:
            raise ValueError(f"Expected variance_bounds to be positive and increasing; got {self.variance_bounds}")
        return self

    def to_toml(self) -> str:
        return tomli_w.dumps(self.model_dump(mode="json", exclude_none=True))


def describe(name: str) -> str:
    """One line for ``--help``."""
    description = Config.model_fields[name].description
    return f"{description}: {', '.join(CHOICES[name])}." if name in CHOICES else f"{description}."


def resolve(flags: Mapping[str, Any], file: Path | None = None) -> Config:
    """The run's settings from what the user said: flags over the file over the preset over the defaults."""
    given = {**(read_toml(file) if file is not None else {}), **flags}
    given.pop("format", None)  # of a run's own config.toml
    for key in given:
        _one_of("a setting", key, Config.model_fields)
    preset = _one_of("preset", given.get("preset", "quick"), PRESETS)
    flow = given.get("flow", Config.model_fields["flow"].default)
    values = PRESETS[preset] | EXCEPTIONS.get((preset, given.get("dataset", "")), {})
    values = {key: value for key, value in values.items() if flow in FLOW_SETTINGS.get(key, (flow,))}
    return parse(values | given)


def parse(values: Mapping[str, Any]) -> Config:
    """Settings as they are, without a preset's; the first thing wrong is a sentence."""
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        if first["type"] == "value_error":  # already a sentence of the validators above
            raise ConfigError(str(first["ctx"]["error"])) from None
        key = first["loc"][0] if first["loc"] else "settings"
        reason = first["msg"][0].lower() + first["msg"][1:]
        raise ConfigError(f"Expected a valid {key} ({reason}); got {first['input']!r}") from None


def read_toml(path: Path) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"Expected a TOML file at {path}; got: {reason}") from None


def _one_of(what: str, value: Any, choices: Collection[str], alternative: str = "") -> str:
    if value in choices:
        return str(value)

    def likeness(choice: str) -> float:
        """Of the whole name or, as long ones are abbreviated, of its beginning."""
        return max(
            difflib.SequenceMatcher(None, str(value), part).ratio() for part in (choice, choice[: len(str(value))])
        )

    near = max(choices, key=likeness)
    listing = f"{', '.join(choices)} {alternative}".strip()
    hint = f"; did you mean {near!r}?" if likeness(near) >= 0.5 else ""
    raise ConfigError(f"Expected {what} to be one of {listing}; got {value!r}{hint}")
