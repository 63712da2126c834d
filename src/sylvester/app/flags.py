"""The words of the command line: its flags with their help, and what is said where words make no command.

The flags of a run are the fields of `config.Config`, and so are those of a sweep, where each takes several values.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import (
    App,
    CoercionError,
    ConsumeMultipleError,
    CycloptsError,
    Group,
    MissingArgumentError,
    Parameter,
    RepeatArgumentError,
    Token,
    UnknownCommandError,
    UnknownOptionError,
    UnusedCliTokensError,
)

from sylvester.app import completion
from sylvester.app.config import (
    PRESETS,
    SETTINGS,
    ConfigError,
    default_of,
    describe,
    from_text,
    kind_of,
    one_of,
    refused,
    whole,
)
from sylvester.app.experiments.paper import EXPERIMENTS
from sylvester.app.experiments.tables import FORMATS
from sylvester.app.paths import PathError, usable
from sylvester.names import DATASETS, FLOWS

# The headings of --help, in their order.
_HEADINGS = ("Start", "Data", "Model", "Schedule", "Optimization", "Objective", "Evaluation", "Where it runs", "Output")
GROUPS = {name: Group(name, sort_key=place) for place, name in enumerate(_HEADINGS)}
_SETTINGS = sorted(SETTINGS, key=lambda name: SETTINGS[name].recipe)  # what is tuned seldom stands last
_METAVARS = {int: "N", float: "X", str: "NAME", Path: "FOLDER", tuple: "LOW HIGH", list: "X,X"}


def _one_of(choices: Iterable[str], what: str | None = None, **shown: Any) -> Any:
    """A word of some; near misses are told so by the sentence of the settings."""
    known = tuple(choices)

    def convert(_: object, tokens: Sequence[Token]) -> str:
        return one_of(what or str(tokens[0].keyword), tokens[0].value, known)

    return Annotated[Literal[known], Parameter(converter=convert, metavar="NAME", **shown)]  # type: ignore[valid-type]


def _word(_: object, tokens: Sequence[Token]) -> str:
    return tokens[0].value


if TYPE_CHECKING:
    Flags = Any
    Values = Any
    Flow = str
    Format = str
    Split = str
    Shell = completion.Shell
    Preset = str
    Experiment = str
    DatasetName = str
else:

    def _flag(name: str) -> Any:
        """A flag whose words the schema converts; cyclopts would round 1.5 epochs to 2."""
        kind, known = kind_of(name), SETTINGS[name].choices or SETTINGS[name].names

        def convert(_: object, tokens: Sequence[Token]) -> Any:
            words = [token.value for token in tokens]
            if kind in (int, float, str) and "," in words[0] and not words[0].endswith(".npz"):
                raise ConfigError(f"Expected one value of {name}; got {words[0]!r}: sylvester sweep takes several")
            return from_text(name, *words)

        how = {} if kind is bool else {"converter": convert, "metavar": _METAVARS[kind]}
        if kind is list:  # one word, with commas
            how |= {"n_tokens": 1, "allow_repeating": False}
        hint = Literal[known] | str if known else {tuple: tuple[float, float], list: tuple}.get(kind, kind)
        return Annotated[hint | None, _shown(name, **how)]

    def _shown(name: str, **how: Any) -> Parameter:
        group = GROUPS[SETTINGS[name].group]
        return Parameter(help=describe(name), group=group, negative="", show_default=default_of(name) or False, **how)

    # The flags are the schema's fields. One that is not given is None, and file and preset decide.
    Flags = make_dataclass(
        "Flags",
        [(name, _flag(name), None) for name in _SETTINGS],
        kw_only=True,
        namespace={"__module__": __name__},
    )

    def _values(name: str) -> Any:
        """A flag with several values of a setting, separated by commas; numbers of one value by colons."""

        def convert(_: object, tokens: Sequence[Token]) -> Any:
            words = tokens[0].value.split(",")
            if not all(words):
                raise ConfigError(f"Expected {name} to be values separated by commas; got {tokens[0].value!r}")
            return tuple(dict.fromkeys(_value(name, word) for word in words))

        kind, known = kind_of(name), SETTINGS[name].choices or SETTINGS[name].names
        known = ("true", "false") if kind is bool else known
        metavar = {tuple: "LOW:HIGH", list: "X:X", bool: "true"}.get(kind) or _METAVARS[kind]
        shown = _shown(name, metavar=f"{metavar},…", n_tokens=1, allow_repeating=False, converter=convert)
        return Annotated[(Literal[known] | tuple if known else tuple) | None, shown]

    def _value(name: str, word: str) -> Any:
        kind = kind_of(name)
        if kind is bool:
            if word not in ("true", "false"):
                raise refused(name, word)
            return word == "true"
        return from_text(name, *(word.split(":") if kind in (tuple, list) else [word]))

    # One folder of data for all of a sweep; everything else may vary.
    Values = make_dataclass(
        "Values",
        [(name, _values(name), None) for name in _SETTINGS if name != "data_dir"],
        kw_only=True,
        namespace={"__module__": __name__},
    )

    Flow = _one_of(FLOWS, show_choices=False)
    Format = _one_of(FORMATS, group=GROUPS["Output"], help="How the table is printed.")
    Split = _one_of(("test", "valid"))
    Shell = _one_of(completion.SHELLS, "the shell")
    # These are checked where they are used.
    Preset, Experiment, DatasetName = (
        Annotated[Literal[tuple(names)] | str, Parameter(converter=_word, metavar="NAME")]
        for names in (PRESETS, EXPERIMENTS, DATASETS)
    )


def _in_range(word: str, keyword: str | None, low: int, high: int) -> int:
    try:
        value = whole(word)
    except ValueError:
        value = low - 1
    if not low <= value <= high:
        raise ConfigError(f"Expected {keyword} to be a whole number from {low:,} to {high:,}; got {word!r}")
    return value


def _fraction(_: object, tokens: Sequence[Token]) -> float:
    try:
        value = float(tokens[0].value)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1024:
        raise ConfigError(f"Expected {tokens[0].keyword} to be a number from 0 to 1,024; got {tokens[0].value!r}")
    return value


def path(_: object, tokens: Sequence[Token]) -> Path:
    try:
        return usable(Path(tokens[0].value))
    except PathError as error:
        raise ConfigError(f"Expected a path that can be used; got {error}") from None


def count(low: int, high: int, help: str, **shown: Any) -> Parameter:
    def convert(_: object, tokens: Sequence[Token]) -> int:
        return _in_range(tokens[0].value, tokens[0].keyword, low, high)

    return Parameter(converter=convert, metavar="N", help=help, **shown)


def counts(low: int, high: int, help: str, **shown: Any) -> Parameter:
    """Numbers separated by commas, in their order, each once."""

    def convert(_: object, tokens: Sequence[Token]) -> tuple[int, ...]:
        words = tokens[0].value.split(",")
        return tuple(sorted({_in_range(word, tokens[0].keyword, low, high) for word in words}))

    how: Any = {"metavar": "N,…", "n_tokens": 1, "allow_repeating": False, "negative": ""}
    return Parameter(converter=convert, help=help, **how, **shown)


def place(help: str, metavar: str = "FOLDER", group: str = "Output", **shown: Any) -> Parameter:
    return Parameter(converter=path, metavar=metavar, group=GROUPS[group], help=help, **shown)


def _of_cluster(help: str, default: str) -> Parameter:
    group = GROUPS["Where it runs"]
    return Parameter(converter=_fraction, metavar="X", group=group, help=help, show_default=default)


RunFolder = Annotated[Path, Parameter(converter=path, help="The run's folder.")]
Folders = Annotated[
    Path,
    Parameter(name="RUN", converter=path, show_default="runs", help="Folders of runs, or folders of such folders."),
]
TomlFile = Annotated[
    Path | None, place("Settings from a TOML file, such as a run's config.toml; flags override it.", "FILE", "Start")
]
DataDir = Annotated[Path | None, place("Folder of the dataset's files; nothing is downloaded then.", group="Data")]
Quiet = Annotated[bool, Parameter(negative="", show_default=False, group=GROUPS["Output"], help="Show no progress.")]
Json = Annotated[
    bool, Parameter(negative="", show_default=False, group=GROUPS["Output"], help="Print the result as JSON.")
]
DryRun = Annotated[
    bool,
    Parameter(
        negative="",
        show_default=False,
        group=GROUPS["Where it runs"],
        help="Train nothing; show what is done and what is left, with an estimate of the time.",
    ),
]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Where:
    """Where the runs of a sweep are done."""

    workers: Annotated[
        int,
        count(
            1, 1024, "Runs at a time on this machine, with their share of the threads.", group=GROUPS["Where it runs"]
        ),
    ] = 1
    ray: Annotated[
        tuple[str, ...] | None,
        Parameter(
            consume_multiple=(0, 1),
            negative="",
            metavar="[ADDRESS]",
            group=GROUPS["Where it runs"],
            help="On the Ray cluster at this address; without one, on this machine's, which is started if need be.",
        ),
    ] = None
    cpus: Annotated[float | None, _of_cluster("CPUs of the cluster per run.", "1")] = None
    gpus: Annotated[float | None, _of_cluster("GPUs of the cluster per run.", "0")] = None
    retries: Annotated[
        int,
        count(0, 1000, "How often a run is started again whose process was killed.", group=GROUPS["Where it runs"]),
    ] = 2

    def __post_init__(self) -> None:
        for name in ("cpus", "gpus"):
            if self.ray is None and getattr(self, name) is not None:
                raise ConfigError(f"Expected --{name} only with --ray; got it without: --workers shares this machine")


def misread(error: CycloptsError) -> str:
    """Words that make no command, in the form of all other sentences."""
    command = " ".join(("sylvester", *(error.command_chain or ())))
    about = f"; {command} --help shows them all"
    match error:
        case UnknownCommandError(unused_tokens=[word, *_], app=App() as parent):
            known = [name for name in parent if not name.startswith("-")]
            try:
                return one_of(f"the command after {command}", word, known)
            except ConfigError as unknown:
                return str(unknown)
        case UnknownOptionError(token=token, argument_collection=arguments):
            flag = (token.keyword or token.value).partition("=")[0]
            near = difflib.get_close_matches(flag, [name for each in arguments for name in each.names], n=1)
            return f"Expected a flag of {command}; got {flag}{f'; did you mean {near[0]}?' if near else about}"
        case UnusedCliTokensError(unused_tokens=[word, *_]):
            return f"Expected nothing more after {command} but its flags; got {word!r}"
        case RepeatArgumentError(token=token):
            several = ": several values are separated by commas" if error.command_chain == ("sweep",) else ""
            return f"Expected {token.keyword} once; got it twice{several}"
        case ConsumeMultipleError(argument=argument) if argument:
            return f"Expected at most {error.max_allowed} value of {argument.name}; got {error.actual_count}"
        case MissingArgumentError(argument=argument) if argument:
            name, count = error.keyword or argument.name, argument.token_count()[0]
            if not name.startswith("-"):
                return f"Expected {name} after {command}; got none"
            values = "a value" if count == 1 else f"{count} values"
            return f"Expected {values} of {name}; got {len(error.tokens_so_far) or 'none'}"
        case CoercionError(argument=argument, token=token, target_type=kind) if argument and token and kind is bool:
            return f"Expected no value of {argument.name}, which stands alone; got {token.value!r}"
    return str(error)


def given(flags: Any) -> dict[str, Any]:
    """What the user said on the command line, by the schema's names and in its order."""
    found = {field.name: getattr(flags, field.name) for field in fields(flags)} if flags is not None else {}
    return {name: found[name] for name in SETTINGS if found.get(name) is not None}
