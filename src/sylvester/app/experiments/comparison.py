"""Run folders side by side: grouped by everything but the seed, with paired differences against a baseline.

A difference is paired twice: by seed and by test image. With dᵢₛ the figure of image i in the run of seed s minus the
baseline's, its mean is over both; its error over images is that of the means over seeds, d̄ᵢ, and its error over seeds
that of the means over images, d̄ₛ. Pairing removes what images have in common for both models, which is most of what
they differ by.
"""

from __future__ import annotations

import math
import os
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from sylvester.app.config import FLOW_SETTINGS, FLOW_SIZES, SETTINGS, Config, resolve
from sylvester.app.experiments.identity import identity, settings_of
from sylvester.app.runs import DamagedRun, Run, RunError
from sylvester.names import FLOWS

__all__ = [
    "METRICS",
    "Comparison",
    "Difference",
    "Entry",
    "Group",
    "Summary",
    "compare",
    "differences",
    "find",
    "group",
    "inspect",
    "load",
]

#: One folder or several.
Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]
State = Literal["finished", "unfinished", "damaged"]
#: What runs are compared by, as `result.json` names it.
METRICS = ("neg_elbo", "nll")
_SCORES = {"neg_elbo": "elbo", "nll": "log_px"}  # what each is the negative of, for each image
# A folder with one of these was a run, also where its settings are lost.
_TRACES = ("config.toml", "result.json", "metrics.jsonl", "model.safetensors", "checkpoint.pt")


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


@dataclass(frozen=True)
class Entry:
    """A run folder and how far it got. Of a damaged one, ``problem`` is a sentence, and nothing else is believed."""

    path: Path
    state: State
    run: Run | None = None
    result: Mapping[str, Any] | None = None
    epochs: int = 0  # done
    data: Mapping[str, str] | None = None  # checksums of the images' files; None where the folder does not say yet
    problem: str | None = None
    evaluation: str | None = None  # what the result's test figures are of, where that is not the run's own evaluation

    @property
    def config(self) -> Config:
        assert self.run is not None, "damaged runs have no settings to believe"
        return self.run.config

    @property
    def dataset(self) -> str:
        return Path(self.config.dataset).stem

    @property
    def untested(self) -> bool:
        """Finished, without a look at the test images."""
        return self.result is not None and self.result["neg_elbo"] is None

    @property
    def images_seen(self) -> int:
        """In training, those drawn for refinement included."""
        assert self.result is not None, "unfinished runs have not seen all"
        return self.epochs * self.result["dataset"]["train"]

    @property
    def machine(self) -> str | None:
        """What it was trained on, of a finished run that says so."""
        machine = self.result and self.result["timing"].get("machine")
        if not machine:
            return None
        device = machine["accelerator"] or f"{plural(machine['cores'], 'core')}, {plural(machine['threads'], 'thread')}"
        system = machine["platform"].partition("-")[0]  # without the kernel's build, which says nothing to a reader
        return f"{machine['cpu']}, {device}, {system}"

    def scores(self) -> Mapping[str, Any]:
        """Of each test image, as arrays: see `Run.scores`."""
        assert self.run is not None, "damaged runs have no figures to believe"
        return self.run.scores() if self.evaluation is None else self.run.evaluation(self.evaluation)[1]

    def figures(self) -> Mapping[str, Any]:
        """The final figures in the customary unit: those of a finished run, in bits per dimension for categorical."""
        assert self.result is not None, "unfinished runs have no figures"
        return self.result["bits_per_dim"] or self.result


@dataclass(frozen=True)
class Summary:
    """Mean and sample standard deviation over seeds; None for one run."""

    mean: float
    std: float | None
    count: int


@dataclass(frozen=True)
class Difference:
    """Against the baseline, negative where the group is better."""

    mean: float
    std_error: float | None  # over test images; None for one image
    seed_error: float | None  # over seeds; None for one seed
    images: int
    seeds: tuple[int, ...]


@dataclass(frozen=True)
class Group:
    """Runs that differ by their seeds alone, one for each seed, in the order of the seeds."""

    entries: tuple[Entry, ...]
    against: Mapping[str, Difference] = field(default_factory=dict)  # by metric, where there is a baseline

    @property
    def config(self) -> Config:
        """Of the first run."""
        return self.entries[0].config

    @property
    def dataset(self) -> str:
        return self.entries[0].dataset

    @property
    def flow(self) -> str:
        return self.config.flow

    @property
    def settings(self) -> dict[str, Any]:
        """What the runs share, where it differs from the schema's defaults."""
        return settings_of(self.config, seed=False)

    @property
    def finished(self) -> tuple[Entry, ...]:
        return tuple(entry for entry in self.entries if entry.state == "finished")

    @property
    def unfinished(self) -> tuple[Entry, ...]:
        return tuple(entry for entry in self.entries if entry.state == "unfinished")

    @property
    def unit(self) -> str:
        bits = any(entry.result and entry.result["bits_per_dim"] for entry in self.finished)
        return "bits per dimension" if bits else "nats"

    def summary(self, metric: str) -> Summary | None:
        """Of ``neg_elbo``, ``nll``, or another number of result.json, over the finished runs that have it."""
        values = [
            entry.figures().get(metric, entry.result[metric])  # type: ignore[index]
            for entry in self.finished
        ]
        values = [value for value in values if value is not None]
        if not values:
            return None
        return Summary(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None, len(values))

    @cached_property
    def neg_elbo(self) -> Summary | None:
        return self.summary("neg_elbo")

    @cached_property
    def nll(self) -> Summary | None:
        return self.summary("nll")


@dataclass(frozen=True)
class Comparison:
    """Groups of runs side by side, and what could not be counted."""

    groups: tuple[Group, ...]
    damaged: tuple[Entry, ...] = ()
    repeated: tuple[Entry, ...] = ()  # the same run again, in another folder: counted once
    baseline: str | None = None
    evaluation: str | None = None  # what runs are compared by, where that is not their own evaluation
    without: tuple[Entry, ...] = ()  # the runs that have no such evaluation

    def varying(self) -> tuple[str, ...]:
        """The settings beside dataset and flow in which groups differ, in the schema's order.

        A setting that a flow does not take makes no difference to the flows that do. Of settings that every group has
        from its preset, the preset is named in their place.
        """
        values: dict[str, set[str]] = {name: set() for name in SETTINGS}
        for found in self.groups:
            for name in SETTINGS:
                value = getattr(found.config, name)
                if value is not None or name not in FLOW_SETTINGS:
                    values[name].add(str(value))
        apart = {"dataset", "flow", "seed", "preset", "data_dir", "devices"}
        differing = [name for name in SETTINGS if name not in apart and len(values[name]) > 1]
        if len(values["preset"]) == 1:
            return tuple(differing)
        of_presets = [
            resolve({name: getattr(found.config, name) for name in ("preset", "dataset", "flow")})
            for found in self.groups
        ]
        pairs = list(zip([found.config for found in self.groups], of_presets, strict=True))
        chosen = [name for name in differing if any(getattr(run, name) != getattr(its, name) for run, its in pairs)]
        return (*(("preset",) if len(chosen) < len(differing) else ()), *chosen)


def find(paths: Paths) -> list[Path]:
    """The run folders among the paths and anywhere below them, each once, in order."""
    found: dict[Path, None] = {}
    for path in map(Path, [paths] if isinstance(paths, str | os.PathLike) else paths):
        if not path.is_dir():
            raise RunError(f"Expected the folder of a run, or a folder of runs; got {path}, which is no folder")
        below = _below(path)
        if not below:
            raise RunError(f"Expected a folder with runs; got {path}, which has none")
        found |= dict.fromkeys(below)
    return list(found)


def _below(folder: Path) -> list[Path]:
    if any((folder / name).exists() for name in _TRACES):
        return [folder]
    children = sorted(child for child in folder.iterdir() if child.is_dir() and not child.is_symlink())
    return [run for child in children for run in _below(child)]


def inspect(path: Path) -> Entry:
    """How far the run in a folder got. All that a comparison takes from it is read and compared with its checksums."""
    try:
        run = Run.open(path)
        result, metrics = run.result, run.metrics
        if result is None:
            return Entry(path, "unfinished", run, epochs=len(metrics), data=_data_of(run))
        if (result.get("evaluation") or {}).get("file") is not None:
            run.scores()
        missing = [name for name in (*METRICS, "bits_per_dim", "seed", "dataset") if name not in result]
        if missing:
            raise DamagedRun(f"Expected {path / 'result.json'} as it was written; got one without {missing[0]}")
        data = result["dataset"]["sha256"]
        return Entry(path, "finished", run, result, len(metrics), data)
    except RunError as error:
        return Entry(path, "damaged", problem=str(error))


def _data_of(run: Run) -> dict[str, str] | None:
    """Of an unfinished run, what the best model so far was trained on."""
    try:
        return run.about_model().get("data")
    except RunError:  # none yet, or one that resuming makes again
        return None


def load(paths: Paths) -> list[Entry]:
    """Every run in the folders given and below them, as far as each got."""
    return [inspect(path) for path in find(paths)]


def group(entries: Iterable[Entry]) -> tuple[list[Group], list[Entry]]:
    """Groups by dataset, flow and size, and the runs that others repeat.

    A run that does not know its data yet belongs where its settings and its dataset's name do.
    """
    known: dict[str, list[Entry]] = {}
    unknown: list[Entry] = []
    for entry in entries:
        if entry.state == "damaged":
            continue
        if entry.data is None:
            unknown.append(entry)
        else:
            known.setdefault(identity(entry.config, entry.data, seed=False), []).append(entry)
    for entry in unknown:
        key = _settings_key(entry)
        near = [name for name, members in known.items() if _settings_key(members[0]) == key]
        known.setdefault(near[0] if near else key, []).append(entry)
    groups, repeated = [], []
    for members in known.values():
        by_seed: dict[int, Entry] = {}
        # Finished ones first, so that those are the ones that count.
        for entry in sorted(members, key=lambda entry: (entry.state != "finished", str(entry.path))):
            if entry.config.seed in by_seed:
                repeated.append(entry)
            else:
                by_seed[entry.config.seed] = entry
        groups.append(Group(tuple(by_seed[seed] for seed in sorted(by_seed))))
    return sorted(groups, key=_place), repeated


def _place(found: Group) -> tuple[Any, ...]:
    """Datasets by name, flows in their customary order, the smaller model first."""
    sizes = [getattr(found.config, name) or 0 for name in ("latent", *FLOW_SIZES)]
    return found.dataset, FLOWS.index(found.flow), sizes, str(found.settings)


def _settings_key(entry: Entry) -> str:
    return f"{entry.config.dataset} {settings_of(entry.config, seed=False)}"


def compare(paths: Paths, *, against: str | None = None, evaluation: str | None = None) -> Comparison:
    """What is in the folders, with differences against the runs of the flow ``against`` on the same data.

    With ``evaluation``, by what `sylvester evaluate` found in the place of the runs' own test figures: NAME of
    ``evaluation-NAME.json``, with or without its seed.
    """
    entries = load(paths)
    if evaluation is None:
        return compare_entries(entries, against=against)
    evaluated = [_evaluated(entry, evaluation) for entry in entries]
    having = [entry for entry in evaluated if entry is not None]
    if all(entry.state == "damaged" for entry in having):
        known = dict.fromkeys(name for entry in entries if entry.run is not None for name in entry.run.evaluations())
        raise RunError(
            f"Expected an evaluation that a finished run has, {', '.join(known) or 'made by sylvester evaluate'}; "
            f"got {evaluation}"
        )
    without = tuple(entry for entry, found in zip(entries, evaluated, strict=True) if found is None)
    return replace(compare_entries(having, against=against), evaluation=evaluation, without=without)


def _evaluated(entry: Entry, name: str) -> Entry | None:
    """The run with the test figures of that evaluation; None if it has none."""
    if entry.run is None:
        return entry  # damaged
    if entry.result is None:
        return None

    def meant(other: str) -> bool:
        return re.fullmatch(rf"{re.escape(name)}(-seed\d+)?", other) is not None

    own = (entry.result.get("evaluation") or {}).get("file")
    if own is not None and meant(Path(own).stem.removeprefix("evaluation-")):
        return entry
    found = [other for other in entry.run.evaluations() if meant(other)]
    if len(found) > 1:
        raise RunError(f"Expected one evaluation of {entry.path}, with its seed, of {', '.join(found)}; got {name}")
    if not found:
        return None
    try:
        figures, _ = entry.run.evaluation(found[0])
    except RunError as error:
        return Entry(entry.path, "damaged", problem=str(error))
    result = {key: value for key, value in entry.result.items() if key != "checksum"}  # of its own figures
    return replace(entry, result=result | figures, evaluation=found[0])


def compare_entries(entries: Sequence[Entry], *, against: str | None = None) -> Comparison:
    groups, repeated = group(entries)
    damaged = tuple(entry for entry in entries if entry.state == "damaged")
    if against is not None:
        if not any(found.flow == against for found in groups):
            flows = ", ".join(dict.fromkeys(found.flow for found in groups)) or "none"
            raise RunError(f"Expected a flow among the runs to compare with, of {flows}; got {against}")
        baselines = [found for found in groups if found.flow == against]
        groups = [
            replace(found, against=differences(found, baseline))
            if found.flow != against and (baseline := _baseline(found, baselines)) is not None
            else found
            for found in groups
        ]
    return Comparison(tuple(groups), damaged, tuple(repeated), against)


def _baseline(found: Group, candidates: Sequence[Group]) -> Group | None:
    """The one on the same data whose other settings are the same; or the only one there is on that data."""
    data = {frozenset(entry.data.values()) for entry in found.entries if entry.data is not None}
    same = [c for c in candidates if any(e.data is not None and frozenset(e.data.values()) in data for e in c.entries)]

    def others(some: Group) -> dict[str, Any]:
        return {k: v for k, v in some.settings.items() if k not in FLOW_SETTINGS and k != "flow"}

    equal = [candidate for candidate in same if others(candidate) == others(found)]
    return next(iter(equal if len(equal) == 1 else same if len(same) == 1 else []), None)


def differences(found: Group, baseline: Group) -> dict[str, Difference]:
    """Paired by seed and test image, for each metric, over the seeds that both groups have finished and scored."""
    import numpy as np

    scored: dict[int, tuple[Mapping[str, Any], Mapping[str, Any]]] = {}
    others = {entry.config.seed: entry for entry in baseline.finished}
    for entry in found.finished:
        other = others.get(entry.config.seed)
        if other is None:
            continue
        try:
            scored[entry.config.seed] = entry.scores(), other.scores()
        except DamagedRun:
            raise
        except RunError:  # tested without figures of each image
            continue
    if not scored:
        return {}
    entry = found.finished[0]
    assert entry.result is not None
    scale = 1.0
    if entry.result["bits_per_dim"] is not None:
        scale = 1 / (math.log(2) * math.prod(entry.result["dataset"]["shape"]))
    result = {}
    for metric, score in _SCORES.items():
        pairs = np.stack([-scale * (ours[score] - theirs[score]) for ours, theirs in scored.values()])  # (S, N)
        by_image, by_seed = pairs.mean(0), pairs.mean(1)
        count = len(by_seed)
        result[metric] = Difference(
            mean=float(pairs.mean()),
            std_error=float(by_image.std(ddof=1) / math.sqrt(len(by_image))) if len(by_image) > 1 else None,
            seed_error=float(by_seed.std(ddof=1) / math.sqrt(count)) if count > 1 else None,
            images=len(by_image),
            seeds=tuple(scored),
        )
    return result
