"""One schema for everything that a run depends on: defaults < preset < TOML file < flags.

A setting is one entry of :class:`Config`: its name, type, default, help and the heading above it, range or choices,
which flows take it and which argument of theirs it becomes. Flags, ``--help``, the checks and the model follow from it.

Imports no torch, so that ``sylvester --help`` can describe every setting at once.
"""

from __future__ import annotations

import difflib
import math
import re
import reprlib
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, get_args

import tomli_w
from pydantic import (
    BaseModel,
    ConfigDict,
    ValidationError,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)

from sylvester.app.paths import PathError, open_regular, usable
from sylvester.names import DATASETS, FLOWS, LIKELIHOODS, Likelihood

WHOLE = 2**31 - 1  # the largest count of anything
SEED = 2**32 - 1  # the largest seed of the generators that split and binarize images
_LARGEST_FILE = 2**20  # bytes of a file of settings
RUN_FORMAT = 1  # of the latest run folders that this version knows


class ConfigError(ValueError):
    """A setting that cannot be used, in one sentence."""


@dataclass(frozen=True)
class Setting:
    """What a setting is beyond its type and default."""

    help: str
    low: float | None = None  # the smallest value, or with ``between`` the largest that is too small
    high: float | None = None
    between: bool = False
    choices: tuple[str, ...] = ()
    flows: tuple[str, ...] = FLOWS  # which take it: a preset's value for another is dropped, a user's is an error
    argument: str | None = None  # of the flow's class
    unset: str | None = None  # what its absence means to the flows that take it: others need a value
    recipe: bool = False  # says how weights are found, and nothing of the model that has them
    names: tuple[str, ...] = ()  # values that have a name, where others are possible
    group: str = field(kw_only=True)  # the heading under which --help has its flag

    @property
    def of_some_flows(self) -> bool:
        return self.flows != FLOWS

    def holds(self, value: Any) -> bool:
        """Whether a value, or each of several, is in range."""
        if self.low is None or self.high is None:
            return True
        if isinstance(value, tuple):
            return all(map(self.holds, value))
        return self.low < value < self.high if self.between else self.low <= value <= self.high

    def range(self) -> str:
        if self.low is None or self.high is None:
            return ""
        low, high = (f"{bound:,}" if isinstance(bound, int) else f"{bound:g}" for bound in (self.low, self.high))
        return f" between {low} and {high}" if self.between else f" from {low} to {high}"


_PAPERS_SIZES: dict[str, Any] = {
    "transforms": 16,
    "rank": 32,
    "reflections": 8,
    "hidden": 1280,
    "bins": 8,
    "latent": 64,
    "init": "torch",
}

PRESETS: dict[str, dict[str, Any]] = {
    # Tuned on the embedded digits: a minute and a half on two cores, evaluation included.
    "quick": {
        "transforms": 8,
        "rank": 8,
        "reflections": 4,
        "hidden": 64,
        "bins": 8,
        "activation": "relu",
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
    # Two latents, so that a posterior can be drawn whole. Tuned on the validation digits: 25 s for the Gaussian and
    # 40 s for T-SNF on one core.
    "demo": {
        "transforms": 8,
        "rank": 2,
        "reflections": 2,
        "hidden": 64,
        "bins": 8,
        "activation": "relu",
        "latent": 2,
        "epochs": 100,
        "patience": 0,
        "warmup": 10,
        "batch_size": 50,
        "learning_rate": 5e-3,
        "architecture": "mlp",
        "init": "identity",
        "nll_samples": 500,
    },
    # The paper's experiments: appendix A and the settings of tables 1 and 2.
    "paper": {
        **_PAPERS_SIZES,
        "epochs": 2000,
        "patience": 100,
        "warmup": 100,
        "batch_size": 100,
        "learning_rate": 5e-4,
        "architecture": "paper",
        "nll_samples": 5000,
    },
    # The paper's networks, sooner. Tuned on the validation images of Caltech 101 (results/recipe.md).
    "fast": {
        **_PAPERS_SIZES,
        "epochs": 120,
        "patience": 0,
        "warmup": 30,
        "warmup_by": "step",
        "validate_every": 5,
        "averages": (0.998,),
        "batch_size": 50,
        "learning_rate": 3e-3,
        "schedule": "cosine",
        "flow_rate": 0.2,
        "warmup_steps": 300,
        "architecture": "released",
        "nll_samples": 500,
    },
}

_FREY_FACES_VARIANCES = (0.01, 7.0)

# Where a preset treats one dataset differently.
EXCEPTIONS: dict[tuple[str, str], dict[str, Any]] = {
    ("quick", "freyfaces"): {"architecture": "paper"},  # dense layers to 256 levels a pixel are too many weights
    ("paper", "caltech101"): {"nll_samples": 2000},
    ("paper", "freyfaces"): {"variance_bounds": _FREY_FACES_VARIANCES},
    # Few images, whose moved and mirrored copies look like others of their kind: digits and letters have one side.
    ("fast", "caltech101"): {"shift": 0.5, "mirror": 0.25},
    # Not tuned: the epochs that have Caltech's numbers of steps, of which it has 82 in each.
    ("fast", "mnist"): {"epochs": 10, "warmup": 2, "validate_every": 1},
    ("fast", "omniglot"): {"epochs": 21, "warmup": 5, "validate_every": 1},
    ("fast", "freyfaces"): {
        "epochs": 308,
        "warmup": 77,
        "validate_every": 11,
        "variance_bounds": _FREY_FACES_VARIANCES,
    },
}


_ALL_BUT_GAUSSIAN = tuple(name for name in FLOWS if name != "gaussian")
_SPLINES = ("nsf", "coupling-nsf")
_NETWORKS = ("iaf", "mean-only-iaf", "affine-iaf", "maf", "nice", "realnvp", *_SPLINES)
_AMORTIZED = tuple(flow for flow in FLOWS if flow not in ("gaussian", *_NETWORKS))


class Config(BaseModel):
    """The resolved settings of a run. ``None`` means that the setting does not apply."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    preset: Annotated[
        str, Setting("Where settings that are not given come from", group="Start", choices=tuple(PRESETS))
    ] = "quick"
    dataset: Annotated[
        str,
        Setting("A dataset by name, or the path of an .npz archive of your own images", group="Data", names=DATASETS),
    ] = "digits"
    likelihood: Annotated[
        Likelihood | None,
        Setting(
            "Distribution of the pixels given z; by default it follows from the images",
            group="Data",
            choices=LIKELIHOODS,
        ),
    ] = None
    flow: Annotated[str, Setting("Family of the posterior", group="Model", choices=FLOWS)] = "triangular-sylvester"
    transforms: Annotated[
        int | None,
        Setting("Steps of the flow", 1, 10_000, group="Model", flows=_ALL_BUT_GAUSSIAN, argument="transforms"),
    ] = None
    rank: Annotated[
        int | None,
        Setting(
            "Columns of Q, at most the size of z",
            1,
            2**20,
            group="Model",
            flows=("orthogonal-sylvester",),
            argument="rank",
        ),
    ] = None
    reflections: Annotated[
        int | None,
        Setting(
            "Householder reflections that make Q",
            1,
            10_000,
            group="Model",
            flows=("householder-sylvester",),
            argument="reflections",
        ),
    ] = None
    hidden: Annotated[
        int | None,
        Setting(
            "Width of the networks inside masked and coupling flows",
            1,
            2**20,
            group="Model",
            flows=_NETWORKS,
            argument="hidden_features",
        ),
    ] = None
    bins: Annotated[
        int | None, Setting("Pieces of each spline", 1, 999, group="Model", flows=_SPLINES, argument="bins")
    ] = None
    activation: Annotated[
        str | None,
        Setting(
            "Between the layers of the networks inside masked and coupling flows",
            group="Model",
            choices=("relu", "silu", "elu", "tanh"),
            flows=_NETWORKS,
            argument="activation",
            unset="elu",  # the paper's, and that of runs from before there was a choice
        ),
    ] = None
    amortize: Annotated[
        str | None,
        Setting(
            "What depends on the image: all of the posterior's parameters, or those of its Gaussian alone",
            group="Model",
            choices=("all", "base"),
            flows=_AMORTIZED,
            argument="amortize",
            unset="all",
        ),
    ] = None
    latent: Annotated[int, Setting("Size of z", 1, 2**20, group="Model", argument="features")]
    epochs: Annotated[int, Setting("Epochs at most", 1, WHOLE, group="Schedule")]
    refine_epochs: Annotated[
        int,
        Setting(
            "Epochs after those, for encoder and flow alone, on images that the best model draws",
            0,
            WHOLE,
            group="Schedule",
            recipe=True,
        ),
    ] = 0
    patience: Annotated[
        int,
        Setting(
            "Stop after so many epochs without a better validation bound, counted from the end of the warmup; 0: never",
            0,
            WHOLE,
            group="Schedule",
        ),
    ]
    warmup: Annotated[
        int, Setting("Epochs over which the weight of the KL term grows to 1", 0, WHOLE, group="Schedule")
    ]
    warmup_by: Annotated[
        str,
        Setting(
            "Whether the weight of the KL term grows every epoch or every step",
            group="Schedule",
            choices=("epoch", "step"),
            recipe=True,
        ),
    ] = "epoch"
    beta_start: Annotated[
        float, Setting("Weight of the KL term at the start of the warmup", 0.0, 1.0, group="Schedule", recipe=True)
    ] = 0.0
    validate_every: Annotated[
        int,
        Setting(
            "Validate and save a checkpoint every so many epochs, and after the last",
            1,
            WHOLE,
            group="Schedule",
            recipe=True,
        ),
    ] = 1
    smooth: Annotated[
        int,
        Setting(
            "Choose the best epoch by the mean of so many validations, its own and those before",
            1,
            WHOLE,
            group="Schedule",
            recipe=True,
        ),
    ] = 1
    averages: Annotated[
        tuple[float, ...] | None,
        Setting(
            "Decays of moving averages of the weights, such as 0.998,0.999 (in a sweep 0.998:0.999); each is validated "
            "beside the weights themselves, and the best is the model",
            0.0,
            1.0,
            group="Schedule",
            between=True,
            recipe=True,
        ),
    ] = None
    objective: Annotated[
        str,
        Setting(
            "Bound to train on; dreg is iwae or, with --alpha, renyi by doubly reparameterized gradients",
            group="Objective",
            choices=("elbo", "iwae", "dreg", "renyi"),
        ),
    ] = "elbo"
    samples: Annotated[int, Setting("Samples of z per image in training", 1, 10_000, group="Objective")] = 1
    alpha: Annotated[
        float | None, Setting("Order of the bound, with the objectives renyi and dreg", 0, 1000, group="Objective")
    ] = None
    path_gradient: Annotated[bool, Setting("Train the ELBO by path gradients", group="Objective")] = False
    batch_size: Annotated[int, Setting("Images per step, over all devices together", 1, WHOLE, group="Optimization")]
    optimizer: Annotated[
        str,
        Setting(
            "Rule that turns gradients into steps",
            group="Optimization",
            choices=("adamax", "adam", "adamw"),
            recipe=True,
        ),
    ] = "adamax"
    learning_rate: Annotated[  # a float32, with room
        float, Setting("Size of the optimizer's steps", 0, 1e37, group="Optimization", between=True)
    ]
    schedule: Annotated[
        str,
        Setting(
            "Whether the learning rate stays, or falls to zero over the epochs, which --patience would cut off",
            group="Optimization",
            choices=("constant", "cosine"),
            recipe=True,
        ),
    ] = "constant"
    refine_rate: Annotated[
        float | None,
        Setting(
            "Learning rate of --refine-epochs, by default the same; a smaller one keeps what is learned",
            0,
            1e37,
            group="Schedule",
            between=True,
            recipe=True,
        ),
    ] = None
    flow_rate: Annotated[
        float,
        Setting(
            "Learning rate of the flow's steps, as a share of everything else's",
            0,
            1e6,
            group="Optimization",
            between=True,
            recipe=True,
        ),
    ] = 1.0
    warmup_steps: Annotated[
        int,
        Setting("Steps over which the learning rate grows from zero", 0, WHOLE, group="Optimization", recipe=True),
    ] = 0
    beta1: Annotated[
        float,
        Setting(
            "Decay of the optimizer's mean of gradients", 0.0, 1.0, group="Optimization", between=True, recipe=True
        ),
    ] = 0.9
    beta2: Annotated[
        float,
        Setting(
            "Decay of the optimizer's size of gradients", 0.0, 1.0, group="Optimization", between=True, recipe=True
        ),
    ] = 0.999
    weight_decay: Annotated[
        float,
        Setting(
            "With adamw, shrink the weights (not the biases) of encoder and flow by this times the learning rate in "
            "each step",
            0.0,
            1e6,
            group="Optimization",
            recipe=True,
        ),
    ] = 0.0
    clip: Annotated[
        float | None,
        Setting(
            "Largest norm of a gradient; longer ones are shortened to it",
            0,
            1e37,
            group="Optimization",
            between=True,
            recipe=True,
        ),
    ] = None
    dropout: Annotated[
        float,
        Setting("Share of the encoder's outputs that training zeroes", 0.0, 0.99, group="Optimization", recipe=True),
    ] = 0.0
    flip: Annotated[
        float,
        Setting(
            "Share of the pixels that training shows inverted to the encoder, and to it alone",
            0.0,
            0.5,
            group="Optimization",
            recipe=True,
        ),
    ] = 0.0
    shift: Annotated[
        float,
        Setting(
            "Share of the training images that are shown moved by one pixel, in one of eight directions",
            0.0,
            1.0,
            group="Optimization",
            recipe=True,
        ),
    ] = 0.0
    mirror: Annotated[
        float,
        Setting(
            "Share of the training images that are shown with left and right exchanged",
            0.0,
            1.0,
            group="Optimization",
            recipe=True,
        ),
    ] = 0.0
    architecture: Annotated[
        str,
        Setting(
            "Dense layers, the convolutions of the paper's appendix, or those of its released code",
            group="Model",
            choices=("mlp", "paper", "released"),
        ),
    ]
    init: Annotated[
        str,
        Setting(
            "Start at the Gaussian posterior, or with torch's default initialization",
            group="Model",
            choices=("identity", "torch"),
            argument="init",
        ),
    ]
    variance_bounds: Annotated[
        tuple[float, float] | None,
        Setting("Smallest and largest variance of z_0", group="Model", argument="variance_bounds"),
    ] = None
    nll_samples: Annotated[
        int, Setting("Importance samples per image of the final test; 0: the ELBO alone", 0, WHOLE, group="Evaluation")
    ]
    test: Annotated[
        str,
        Setting(
            "Score the test images at the end, or leave them to sylvester evaluate",
            group="Evaluation",
            choices=("end", "never"),
        ),
    ] = "end"
    seed: Annotated[int, Setting("Everything random derives from it", 0, SEED, group="Start")] = 0
    data_dir: Annotated[
        Path | None, Setting("Folder of the dataset's files; nothing is downloaded then", group="Data")
    ] = None
    devices: Annotated[int, Setting("Processes, one per device", 1, 1024, group="Where it runs")] = 1
    precision: Annotated[
        str,
        Setting(
            "Arithmetic outside the flow",
            group="Where it runs",
            choices=("32-true", "64-true", "bf16-mixed", "16-mixed"),
        ),
    ] = "32-true"
    compile: Annotated[
        bool,
        Setting(
            "Compile the model's terms with torch.compile: about a minute once, then small models train faster",
            group="Where it runs",
        ),
    ] = False

    @field_validator("*", mode="wrap")
    @classmethod
    def _as_described(cls, value: Any, handler: ValidatorFunctionWrapHandler, info: Any) -> Any:
        """One sentence for whatever is wrong with a value."""
        name: str = info.field_name
        setting, kind = SETTINGS[name], kind_of(name)
        if setting.choices and value is not None:
            return one_of(name, value, setting.choices)
        if isinstance(value, str) and kind is Path:  # TOML has neither paths nor tuples
            value = Path(value)
        if isinstance(value, list) and kind in (tuple, list):
            value = tuple(value)
        try:
            value = handler(value)
        except ValidationError:
            raise refused(name, value) from None
        if value is not None and not setting.holds(value):
            raise refused(name, value)
        return value

    @field_validator("dataset")
    @classmethod
    def _named_or_file(cls, value: str) -> str:
        if not value.endswith(".npz"):
            return one_of("dataset", value, DATASETS, "or a path that ends in .npz")
        # Absolute, because the run may be resumed from another folder.
        return str(_absolute("dataset", Path(value)))

    @field_validator("data_dir")
    @classmethod
    def _folder(cls, value: Path | None) -> Path | None:
        return None if value is None else _absolute("data_dir", value)

    @field_validator("averages")
    @classmethod
    def _different(cls, value: tuple[float, ...] | None) -> tuple[float, ...] | None:
        if value is not None and (not value or len(set(value)) < len(value)):
            raise ConfigError(f"Expected averages to be different numbers, at least one; got {_short(value)}")
        return value

    @model_validator(mode="after")
    def _fits(self) -> Config:
        for name, flows in FLOW_SETTINGS.items():
            value = getattr(self, name)
            if value is not None and self.flow not in flows:
                raise ValueError(
                    f"Expected no {name} with the {self.flow} flow, only with {', '.join(flows)}; got {value}"
                )
            if value is None and self.flow in flows and SETTINGS[name].unset is None:
                raise ValueError(f"Expected a value of {name} for the {self.flow} flow; got none")
        if self.rank is not None and self.rank > self.latent:
            raise ValueError(f"Expected rank to be at most latent = {self.latent}; got {self.rank}")
        if self.hidden is not None and self.hidden < self.latent:
            raise ValueError(f"Expected hidden to be at least latent = {self.latent}; got {self.hidden}")
        bounds = self.variance_bounds
        if bounds is not None and not 0 < bounds[0] < bounds[1] < math.inf:
            raise ValueError(f"Expected variance_bounds to be positive and increasing; got {bounds}")
        if self.weight_decay and self.optimizer != "adamw":
            raise ValueError(
                f"Expected weight_decay with the adamw optimizer alone; got {self.weight_decay:g} with {self.optimizer}"
            )
        if self.refine_rate is not None and not self.refine_epochs:
            raise ValueError(f"Expected no refine_rate without refine_epochs; got {self.refine_rate:g}")
        if self.alpha is None and self.objective == "renyi":
            raise ValueError("Expected a value of alpha for the renyi objective; got none")
        if self.alpha is not None and self.objective not in ("renyi", "dreg"):
            raise ValueError(f"Expected no alpha with the {self.objective} objective; got {self.alpha}")
        if self.path_gradient and self.objective != "elbo":
            raise ValueError(
                "Expected path_gradient with the elbo objective alone, as dreg has it anyway and the others would be "
                f"biased; got {self.objective}"
            )
        if self.objective == "dreg" and self.compile:
            raise ValueError("Expected no compile with the dreg objective, which looks into the model; got compile")
        return self

    def flow_arguments(self) -> dict[str, Any]:
        """What the flow's class is to be called with, beyond the size of its context."""
        values = {
            setting.argument: setting.unset if getattr(self, name) is None else getattr(self, name)
            for name, setting in SETTINGS.items()
            if setting.argument and self.flow in setting.flows
        }
        return {argument: value for argument, value in values.items() if value is not None}

    @property
    def epochs_at_most(self) -> int:
        """Of training and refinement together."""
        return self.epochs + self.refine_epochs

    def to_toml(self) -> str:
        return tomli_w.dumps(self.model_dump(mode="json", exclude_none=True))


SETTINGS: dict[str, Setting] = {
    name: next(item for item in field.metadata if isinstance(item, Setting))
    for name, field in Config.model_fields.items()
}
RECIPE = frozenset(name for name, setting in SETTINGS.items() if setting.recipe)
FLOW_SETTINGS = {name: setting.flows for name, setting in SETTINGS.items() if setting.of_some_flows}
FLOW_SIZES = tuple(name for name in FLOW_SETTINGS if not SETTINGS[name].choices)


def kind_of(name: str) -> type:
    """The setting's type without ``None``: of a pair of numbers tuple, of any number of them list, of words str."""
    annotation = Config.model_fields[name].annotation
    kind = next((part for part in get_args(annotation) if part is not type(None)), annotation)
    if isinstance(kind, type):
        return kind
    return str if SETTINGS[name].choices else list if Ellipsis in get_args(kind) else tuple


_KINDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    Path: "a path",
    tuple: "two numbers",
    list: "numbers",
}


def refused(name: str, value: Any) -> ConfigError:
    setting = SETTINGS[name]
    return ConfigError(f"Expected {name} to be {_KINDS[kind_of(name)]}{setting.range()}; got {_short(value)}")


def from_text(name: str, *words: str) -> Any:
    """The value of a setting from the words of a flag."""
    kind = kind_of(name)
    try:
        if kind in (tuple, list):
            return tuple(float(part) for word in words for part in word.split(","))
        (word,) = words
        return whole(word) if kind is int else kind(word)
    except ValueError:
        raise refused(name, " ".join(words)) from None


def whole(word: str) -> int:
    """``int`` takes underscores, blanks and digits of every script; a flag does not."""
    if not re.fullmatch(r"[+-]?[0-9]{1,100}", word):
        raise ValueError(f"Expected a whole number; got {word!r}")
    return int(word)


def describe(name: str) -> str:
    """A sentence for ``--help``, which shows choices and defaults by itself."""
    setting = SETTINGS[name]
    without = [flow for flow in FLOWS if flow not in setting.flows]
    flows = f"all flows but {', '.join(without)}" if len(without) <= 2 else ", ".join(setting.flows)
    return f"{setting.help}{f' ({flows})' if setting.of_some_flows else ''}."


def default_of(name: str) -> str:
    """What a setting is where nothing else is said, first by the default preset, then by those that differ."""
    setting, own = SETTINGS[name], Config.model_fields[name].default
    values = {preset: values.get(name, setting.unset or own) for preset, values in PRESETS.items()}
    usual = values.pop(Config.model_fields["preset"].default)
    others = ", ".join(f"{preset}: {_plain(value)}" for preset, value in values.items() if value != usual)
    if usual is None or usual is False:
        return f"none; {others}" if others else ""
    return f"{_plain(usual)}; {others}" if others else _plain(usual)


def _plain(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(_plain, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def resolve(flags: Mapping[str, Any], file: Path | None = None) -> Config:
    """The run's settings from what the user said: flags over the file over the preset over the defaults."""
    given = {**(_settings_in(file) if file is not None else {}), **flags}
    for key in given:
        one_of("a setting", key, SETTINGS)
    preset, flow, dataset = (given.get(key, Config.model_fields[key].default) for key in ("preset", "flow", "dataset"))
    values = dict(PRESETS[one_of("preset", preset, PRESETS)])
    if isinstance(dataset, str):
        values |= EXCEPTIONS.get((preset, dataset), {})
    values = {key: value for key, value in values.items() if flow in SETTINGS[key].flows}
    return parse(values | given)


def parse(values: Mapping[str, Any]) -> Config:
    """Settings as they are, without a preset's; the first thing wrong is a sentence."""
    for key in values:
        one_of("a setting", key, SETTINGS)
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        if first["type"] == "value_error":  # already a sentence of the validators above
            raise ConfigError(str(first["ctx"]["error"])) from None
        raise ConfigError(f"Expected a value of {first['loc'][0]}; got none") from None


def _settings_in(file: Path) -> dict[str, Any]:
    settings = read_toml(file)
    take_format(settings, file)
    if not settings:
        raise ConfigError(f"Expected settings in {file}, such as latent = 16; got none")
    return settings


def take_format(settings: dict[str, Any], source: Path) -> int:
    """The format of the run folder that settings are from, which is none of them; 0 where they do not say."""
    number = settings.pop("format", 0)
    if number not in range(RUN_FORMAT + 1):
        raise ConfigError(
            f"Expected a run of format {RUN_FORMAT} or earlier; got {source} of format {_short(number)}, "
            "which a later version of sylvester made: upgrade"
        )
    return number


def read_toml(path: Path) -> dict[str, Any]:
    try:
        with open_regular(path) as file:
            content = file.read(_LARGEST_FILE + 1)
        if len(content) > _LARGEST_FILE:
            raise PathError(f"more than {_LARGEST_FILE:,} bytes")
        return tomllib.loads(content.decode())
    except (OSError, ValueError, RecursionError) as error:  # not only the parser's: a number of too many digits
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"Expected a TOML file at {path}; got: {reason}") from None


def _absolute(name: str, path: Path) -> Path:
    try:
        return usable(path.expanduser().absolute())
    except (PathError, RuntimeError) as error:  # or no home folder of that name
        raise ConfigError(f"Expected {name} to be a path that can be used; got {error}") from None


def _short(value: Any) -> str:
    """A value for a sentence, however large it is."""
    printer = reprlib.Repr()
    printer.maxstring = printer.maxother = 100
    return printer.repr(value)


def one_of(what: str, value: Any, choices: Collection[str], alternative: str = "") -> str:
    if isinstance(value, str) and value in choices:
        return value
    text = str(value)[:100]

    def likeness(choice: str) -> float:
        """Of the whole name or, as long ones are abbreviated, of its beginning."""
        return max(difflib.SequenceMatcher(None, text, part).ratio() for part in (choice, choice[: len(text)]))

    near = max(choices, key=likeness)
    listing = f"{', '.join(choices)} {alternative}".strip()
    hint = f"; did you mean {near!r}?" if text and likeness(near) >= 0.5 else ""
    raise ConfigError(f"Expected {what} to be one of {listing}; got {_short(value)}{hint}")
