"""An experiment of the paper as a sweep: which cells, which seeds, and its table beside the published one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sylvester.app.config import PRESETS, ConfigError, from_text, one_of, resolve, whole
from sylvester.app.experiments.comparison import Comparison
from sylvester.app.experiments.identity import settings_of
from sylvester.app.experiments.paper import EXPERIMENTS, Row
from sylvester.app.experiments.tables import Table, beside_published

__all__ = ["Reproduction", "choose", "table"]

_SELECTABLE = ("dataset", "flow", "transforms", "hidden", "rank", "reflections")
_STEPS = ("table3", "figure3")  # whose rows are about sizes


@dataclass(frozen=True)
class Reproduction:
    """The settings of each run, seed by seed, and of each published row those of its runs without the seed."""

    cells: tuple[Mapping[str, Any], ...]
    rows: Mapping[Row, Mapping[str, Any]]
    baseline: str | None
    notes: tuple[str, ...] = ()


def choose(
    name: str,
    *,
    preset: str | None = None,
    only: str | None = None,
    seeds: str | None = None,
    data_dir: Path | None = None,
) -> Reproduction:
    """The part of an experiment that a user asks for.

    With another preset than the experiment's own, the sizes of tables 1 and 2 are that preset's, and of table 3 those
    rows are left out whose sizes its latents cannot have.
    """
    experiment = EXPERIMENTS[one_of("the experiment", name, EXPERIMENTS)]
    wanted = _selection(only)
    numbers = _seeds(seeds)
    preset = experiment.preset if preset is None else one_of("preset", preset, PRESETS)
    own = preset == experiment.preset
    rows = experiment.rows or (None,) * len(experiment.cells)
    cells: list[Mapping[str, Any]] = []
    kept: dict[Row, Mapping[str, Any]] = {}
    notes = [] if own else [f"The settings are those of the preset {preset}, not the published ones."]
    for row, cell in zip(rows, experiment.cells, strict=True):
        if any(cell.get(key) not in values for key, values in wanted.items()):
            continue
        given = dict(cell) if own or name in _STEPS else {"dataset": cell["dataset"], "flow": cell["flow"]}
        given |= {"preset": preset} | ({} if data_dir is None else {"data_dir": data_dir})
        try:
            resolve(given)
        except ConfigError as error:
            if own or row is None:
                raise
            notes.append(f"{row.model} is left out: {error}.")
            continue
        if row is not None:
            kept[row] = given
        cells += [{**given, "seed": seed} for seed in numbers or experiment.seeds(cell["dataset"])]
    if not cells:
        raise ConfigError(f"Expected --only to leave some of {name}; got {only!r}, which leaves nothing")
    return Reproduction(tuple(cells), kept, None if experiment.rows else "gaussian", tuple(notes))


def _selection(only: str | None) -> dict[str, set[Any]]:
    """``dataset=caltech101,flow=iaf``; a key twice means either."""
    wanted: dict[str, set[Any]] = {}
    for part in [] if only is None else only.split(","):
        key, equals, value = part.partition("=")
        if not equals or key not in _SELECTABLE:
            raise ConfigError(
                f"Expected --only to be SETTING=VALUE,… with the settings {', '.join(_SELECTABLE)}; got {part!r}"
            )
        wanted.setdefault(key, set()).add(from_text(key, value))
    return wanted


def _seeds(words: str | None) -> tuple[int, ...]:
    try:
        return () if words is None else tuple(dict.fromkeys(whole(word) for word in words.split(",")))
    except ValueError:
        raise ConfigError(f"Expected --seeds to be whole numbers separated by commas; got {words!r}") from None


def table(chosen: Reproduction, found: Comparison) -> Table:
    """The runs beside the published rows."""
    groups = {}
    for row, given in chosen.rows.items():
        config = resolve(given)
        wanted = settings_of(config, seed=False)
        groups[row] = next((group for group in found.groups if group.settings == wanted), None)
    return beside_published(tuple(chosen.rows), found, groups)
