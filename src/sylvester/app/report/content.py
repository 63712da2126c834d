"""What a report says of a comparison, section by section."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sylvester.app import models
from sylvester.app.config import FLOW_SIZES, PRESETS, SETTINGS, Config
from sylvester.app.experiments.comparison import Comparison, Difference, Entry, Group, Summary, plural
from sylvester.app.experiments.paper import DATASETS, FFJORD, MODELS, TABLE1, TABLE2, TABLE3, Published, Row
from sylvester.app.report.drawings import Line, against_steps, training_curves
from sylvester.app.report.page import (
    Block,
    Cell,
    Column,
    Drawing,
    Facts,
    Pictures,
    Section,
    Table,
    Text,
    html,
    number,
)
from sylvester.diagnostics import KHAT_LIMIT
from sylvester.names import FLOWS

__all__ = ["html_of"]

RUNS_BEHIND = 3  # runs behind each published figure
SHOWN = 40  # images in a sheet of reconstructions
ROWS = 6  # interpolations


def html_of(comparison: Comparison, *, progress: Callable[[int, int], object] = lambda done, total: None) -> str:
    """The page. Drawing pictures of many models takes a while, and ``progress`` is told (done, total)."""
    comparison = replace(comparison, groups=tuple(_ordered(comparison.groups)))
    groups = comparison.groups
    finished = [entry for group in groups for entry in group.finished]
    names = _unique(group.dataset for group in groups)
    sections = [
        Section("runs", "What was run", _what(comparison)),
        Section("results", "Results", _results(comparison)),
        Section("paper", "Beside the paper", _beside_the_paper(groups)),
        Section("steps", "Number of steps", _steps(groups)),
        Section("training", "Training", _training(groups)),
        Section("parameters", "Parameters", _parameters(comparison)),
        Section("pictures", "Pictures", _pictures(groups, progress)),
        Section("trust", "How far to trust the NLL", _trust(comparison)),
        Section("time", "Time and machine", _time(comparison, finished)),
    ]
    title = f"Variational posteriors on {_listing(names)}" if names else "Variational posteriors"
    counts = f"{len(finished)} finished {'run' if len(finished) == 1 else 'runs'}"
    return html(title, f"{counts}, {plural(len(groups), 'setting')}.", sections)


def _what(comparison: Comparison) -> list[Block]:
    groups = comparison.groups
    blocks: list[Block] = [
        Text(
            "Each run trains a variational autoencoder: a decoder p(x|z) that makes images x from latents z, and an "
            "encoder with a posterior q(z|x) that finds the latents of an image. The runs differ in the family of q. "
            "VAE is a Gaussian with independent latents; the others bend a Gaussian by the steps of a normalizing "
            "flow. All figures are per image, and lower is better: −ELBO is the bound that is trained, NLL the "
            "negative log-likelihood, −log p(x), which the bound exceeds by KL(q ‖ p(z|x)), what q lacks."
        )
    ]
    if groups:
        blocks.append(Facts(_shared(groups)))
    rows = []
    for group in groups:
        states = Counter(entry.state for entry in group.entries)
        seeds = ", ".join(str(entry.config.seed) for entry in group.finished) or "–"
        epochs = [entry.epochs for entry in group.entries]
        rows.append(
            [
                *_named(group, comparison),
                Cell(seeds, None),
                Cell(str(states["unfinished"]) if states["unfinished"] else "–", states["unfinished"] or None),
                Cell(_range(epochs), statistics.fmean(epochs)),
            ]
        )
    columns = [*_naming(comparison), Column("finished seeds"), Column("unfinished"), Column("epochs")]
    blocks.append(Table("The settings, and the runs of each", columns, rows))
    for entry in comparison.damaged:
        blocks.append(Text(f"Damaged and left out: {entry.path}. {entry.problem}"))
    for entry in comparison.repeated:
        blocks.append(Text(f"The same run again, counted once: {entry.path}"))
    return blocks


def _shared(groups: Sequence[Group]) -> dict[str, str]:
    """For each dataset its images, and the settings that all its runs have in common."""
    facts = {}
    for dataset, members in _by_dataset(groups):
        parts = []
        for entry in [entry for group in members for entry in group.finished][:1]:
            assert entry.result is not None
            data = entry.result["dataset"]
            sides = " × ".join(map(str, data["shape"]))
            counts = " / ".join(f"{data[split]:,}" for split in ("train", "valid", "test"))
            parts.append(f"{data['likelihood']} images of {sides}; {counts} to train, validate and test")
        same = []
        for name in SETTINGS:
            values = {str(getattr(group.config, name)) for group in members}
            default = str(Config.model_fields[name].default)
            if len(values) == 1 and values != {default} and name not in ("seed", "data_dir", "dataset"):
                same.append(f"{name.replace('_', ' ')} {values.pop()}")
        facts[_title(dataset)] = "; ".join([*parts, ", ".join(same)])
    return facts


def _ordered(groups: Sequence[Group]) -> list[Group]:
    """By dataset, by flow as the paper lists them, by the number of steps and the other sizes."""
    datasets, flows = _unique(group.dataset for group in groups), [*MODELS, *FLOWS]

    def place(group: Group) -> tuple[int, int, list[int]]:
        sizes = [getattr(group.config, name) or 0 for name in FLOW_SIZES]
        return datasets.index(group.dataset), flows.index(group.flow), sizes

    return sorted(groups, key=place)


def _results(comparison: Comparison) -> list[Block]:
    blocks: list[Block] = []
    for dataset, groups in _by_dataset(comparison.groups):
        unit, digits = groups[0].unit, _digits(groups[0])
        against = any(group.against for group in groups)
        same = Comparison(tuple(groups))
        columns = [
            *_naming(same),
            Column("runs"),
            Column("validation −ELBO"),
            Column("test −ELBO"),
            Column("test NLL"),
            Column("± over images"),
        ]
        if against:
            columns += [
                Column(f"−ELBO against {_model(comparison.baseline or '')}"),
                Column(f"NLL against {_model(comparison.baseline or '')}"),
            ]
        rows = []
        for group in groups:
            valid = group.summary("valid_neg_elbo")
            row = [
                *_named(group, same),
                number(len(group.finished), digits=0),
                _mean(valid, digits),
                _mean(group.neg_elbo, digits),
                _mean(group.nll, digits),
                number(_average(group, "nll_std_error"), digits=digits),
            ]
            if against:
                row += [_difference(group.against.get(metric), digits) for metric in ("neg_elbo", "nll")]
            rows.append(row)
        blocks.append(Table(f"{_title(dataset)}, {unit}; ± over seeds where there are several", columns, rows))
    if any(group.against for group in comparison.groups):
        blocks.append(
            Text(
                "Differences are paired: of the same test images and seeds, negative where the setting is better than "
                f"{_model(comparison.baseline or '')}. Their error is over the test images or over the seeds, "
                "whichever is larger; it is small because most of what images differ by is common to both models."
            )
        )
    return blocks


def _beside_the_paper(groups: Sequence[Group]) -> list[Block]:
    """The paper's tables 1, 2 and 3: all rows of the datasets that there are runs of, in the long one of the flows."""
    blocks: list[Block] = []
    others: list[str] = []
    for title, rows in (("Table 1", TABLE1), ("Table 2", TABLE2), ("Table 3", TABLE3)):
        found = {row: [group for group in groups if _matches(group, row)] for row in rows}
        present = {row.dataset for row in rows if found[row]}
        flows = {row.flow for row in rows if found[row]}
        with_nll = title != "Table 3"
        cells: list[list[Cell]] = []
        for row in rows:
            if row.dataset not in present or not (with_nll or row.flow in flows):
                continue
            matching: Sequence[Group | None] = found[row] or [None]
            for group in matching:
                name = [Cell(DATASETS[row.dataset]), Cell(row.model)]
                runs = Cell() if group is None else number(len(group.finished), digits=0)
                cells.append(
                    [
                        *name,
                        runs,
                        *_beside(row.neg_elbo, None if group is None else group.neg_elbo),
                        *(_beside(row.nll, None if group is None else group.nll) if with_nll else ()),
                    ]
                )
        if with_nll:
            for dataset in DATASETS:
                if dataset in present:
                    bar = [Cell(DATASETS[dataset]), Cell("FFJORD (2019)"), Cell(), *_beside(FFJORD[dataset], None)]
                    cells.append([*bar, *[Cell()] * 3])
        if not cells:
            continue
        columns = [Column("data", number=False), Column("model", number=False), Column("runs")]
        for metric in ("−ELBO", "NLL") if with_nll else ("−ELBO",):
            columns += [Column(metric), Column("published"), Column("difference")]
        units = {row.unit for row in rows if row.dataset in present}
        blocks.append(Table(f"{title} of the paper, {_listing(sorted(units))}", columns, cells))
        for row, members in found.items():
            others += [note for group in members if (note := _unlike_the_paper(group, row)) and note not in others]
    if blocks:
        blocks.append(
            Text(
                "Published: van den Berg, Hasenclever, Tomczak and Welling, Sylvester Normalizing Flows for "
                f"Variational Inference, UAI 2018; mean ± standard deviation over {RUNS_BEHIND} runs. Differences are "
                "ours minus theirs, and negative where ours is better; their error is that of both means over runs. Of "
                "a single run the spread is not known, and theirs stands in for it."
            )
        )
        blocks += [Text(note) for note in others]
    return blocks


def _matches(group: Group, row: Row) -> bool:
    return bool(group.finished) and all(getattr(group.config, name) == value for name, value in row.settings.items())


def _beside(published: Published | None, ours: Summary | None) -> tuple[Cell, Cell, Cell]:
    theirs = Cell() if published is None else number(published.mean, error=published.std)
    if published is None or ours is None:
        return _mean(ours, 2), theirs, Cell()
    error = None
    if published.std is not None:
        spread = published.std if ours.std is None else ours.std
        error = math.hypot(spread / math.sqrt(ours.count), published.std / math.sqrt(RUNS_BEHIND))
    difference = number(ours.mean - published.mean, error=error, signed=True)
    return _mean(ours, 2), theirs, _toned(difference, error)


def _unlike_the_paper(group: Group, row: Row) -> str | None:
    """Which of the paper's other settings a run does not have; without this, its figures could mislead."""
    paper = {key: value for key, value in PRESETS["paper"].items() if key not in row.settings}
    config = group.config
    differing = [
        f"{key.replace('_', ' ')} {getattr(config, key)} (paper: {value})"
        for key, value in paper.items()
        if getattr(config, key) is not None
        and getattr(config, key) != value
        # Caltech 101 has its own number of importance samples.
        and not (key == "nll_samples" and group.dataset == "caltech101" and config.nll_samples == 2000)
    ]
    if not differing:
        return None
    return f"{_label(group)} on {_title(group.dataset)} was not trained as in the paper: {', '.join(differing)}."


def _steps(groups: Sequence[Group]) -> list[Block]:
    blocks: list[Block] = []
    for index, (dataset, members) in enumerate(_by_dataset(groups)):
        lines = []
        for label, same in _families(members).items():
            points = [
                (group.config.transforms, group.neg_elbo)
                for group in sorted(same, key=lambda group: group.config.transforms or 0)
                if group.neg_elbo is not None and group.config.transforms is not None
            ]
            if len({steps for steps, _ in points}) < 2:
                continue
            lines.append(
                Line(
                    label,
                    same[0].flow,
                    [float(steps) for steps, _ in points],
                    [found.mean for _, found in points],
                    [found.std or 0.0 for _, found in points],
                )
            )
            lines += _published_line(dataset, same[0].config, label)
        if not lines:
            continue
        caption = (
            f"{_title(dataset)}: test −ELBO against the number of steps, as in the paper's figure 3; "
            "bars are standard deviations over seeds"
        )
        if any(line.published for line in lines):
            caption += "; hollow and dotted: published"
        blocks.append(Drawing(caption, against_steps(f"steps{index}", lines, unit=members[0].unit)))
    return blocks


def _families(groups: Sequence[Group]) -> dict[str, list[Group]]:
    """Groups that differ in their number of steps alone."""
    families: dict[tuple[str, str], list[Group]] = {}
    for group in groups:
        others = {key: value for key, value in group.settings.items() if key != "transforms"}
        families.setdefault((group.flow, str(others)), []).append(group)
    labels: dict[str, list[Group]] = {}
    for same in families.values():
        label = _label(same[0])
        labels[label if label not in labels else f"{label} ({len(labels) + 1})"] = same
    return labels


def _published_line(dataset: str, config: Config, label: str) -> list[Line]:
    rows = [
        row
        for row in TABLE3
        if row.dataset == dataset
        and row.flow == config.flow
        and (row.hidden, row.rank, row.reflections) == (config.hidden, config.rank, config.reflections)
        and row.transforms is not None
    ]
    if not rows:
        return []
    steps = [float(row.transforms or 0) for row in rows]
    errors = [row.neg_elbo.std or 0.0 for row in rows]
    means = [row.neg_elbo.mean for row in rows]
    return [Line(f"{label}, published", config.flow, steps, means, errors, published=True)]


def _training(groups: Sequence[Group]) -> list[Block]:
    blocks: list[Block] = []
    for index, (dataset, members) in enumerate(_by_dataset(groups)):
        lines = []
        for group in members:
            for entry in group.entries:
                assert entry.run is not None
                metrics = entry.run.metrics
                validated = [(line["epoch"], line["valid_neg_elbo"]) for line in metrics if "valid_neg_elbo" in line]
                if validated:
                    epochs, bounds = zip(*validated, strict=True)
                    lines.append(Line(_label(group), group.flow, epochs, bounds))
        if not lines:
            continue
        start = min(group.config.warmup for group in members)
        caption = f"{_title(dataset)}: −ELBO on the validation images after each epoch, one line per run"
        if start > 0:
            caption += f"; the scale begins at epoch {start}, with the end of the warm-up of the KL term"
        blocks.append(Drawing(caption, training_curves(f"training{index}", lines, unit="nats", from_epoch=start)))
    return blocks


def _parameters(comparison: Comparison) -> list[Block]:
    parts = ("encoder", "flow", "decoder", "total")
    counted = ("paper", "released", "packed")
    rows = []
    outputs_of = {}
    for group in comparison.groups:
        if not group.finished:
            continue
        result = group.finished[0].result
        assert result is not None
        outputs = models.outputs_per_step(group.config)
        outputs_of[group.flow] = outputs
        rows.append(
            [
                *_named(group, comparison),
                *(Cell(f"{result['parameters'][part]:,}", result["parameters"][part]) for part in parts),
                *(Cell() if outputs is None else Cell(f"{outputs[key]:,}", outputs[key]) for key in counted),
            ]
        )
    if not rows:
        return []
    any_outputs = any(outputs_of.values())
    columns = [*_naming(comparison), *(Column(part) for part in parts)]
    if any_outputs:
        columns += [Column("per step, paper"), Column("per step, released code"), Column("per step, ours")]
    else:
        rows = [row[: -len(counted)] for row in rows]
    blocks: list[Block] = [Table("Trained parameters", columns, rows)]
    if any_outputs:
        blocks.append(
            Text(
                "Per step: how many numbers the encoder predicts for one step of T-SNF with D latents. The paper's §5 "
                "counts two full matrices, 2D² + D; its released code predicts one matrix, two diagonals and a vector, "
                "D² + 3D; two packed triangles and a vector, as here, are D² + 2D. The step is the same."
            )
        )
    return blocks


def _pictures(groups: Sequence[Group], progress: Callable[[int, int], object]) -> list[Block]:
    """Of the first run of each group that has its weights; reconstructions only where the images are here too."""
    from sylvester.app.runs import RunError

    blocks: list[Block] = []
    for done, group in enumerate(groups):
        progress(done, len(groups))
        for entry in group.entries:
            assert entry.run is not None
            if not (entry.path / "model.safetensors").is_file():
                continue
            try:
                files = _sheets(entry)
            except RunError as error:
                blocks.append(Text(f"{_label(group)}: no pictures. {error}"))
            else:
                blocks.append(Pictures(f"{_label(group)} on {_title(group.dataset)}, seed {entry.config.seed}", files))
            break
    return blocks


def _sheets(entry: Entry) -> dict[str, bytes]:
    from sylvester.app import figures
    from sylvester.app.data.dataset import DataError

    assert entry.run is not None
    vae, seed = entry.run.model(), entry.config.seed
    sheets = {"Samples: draws from the prior, decoded": figures.samples(vae, 64, seed=seed)}
    try:
        data = entry.run.data()
    except DataError:  # the dataset's files are not on this machine
        return sheets
    split, images = ("validation", data.valid) if entry.config.test == "never" else ("test", data.test)
    caption = f"Reconstructions: rows of {split} images, and below each what is made of it"
    sheets[caption] = figures.reconstructions(vae, images[:SHOWN], seed=seed)
    pairs = images[: 2 * min(ROWS, len(images) // 2)]
    if len(pairs):
        caption = f"Interpolations: from one {split} image, left, to another, right, along the latents between"
        sheets[caption] = figures.interpolations(vae, pairs, seed=seed)
    return sheets


def _trust(comparison: Comparison) -> list[Block]:
    rows = []
    warnings: list[str] = []
    for group in comparison.groups:
        scored = [entry for entry in group.finished if entry.figures().get("nll") is not None]
        if not scored:
            continue
        share, ess = _average(group, "khat_share"), _average(group, "ess")
        samples = _unique(str(entry.result["nll_samples"]) for entry in scored if entry.result)
        doubted = [entry for entry in scored if entry.result and entry.result["warning"]]
        verdict = Cell("can be trusted", tone="good")
        if doubted:
            verdict = Cell("probably too high", tone="bad")
            warnings += [
                f"{_label(group)} on {_title(group.dataset)}, seed {entry.config.seed}: {entry.result['warning']}"
                for entry in doubted
                if entry.result
            ]
        elif share is None:
            verdict = Cell("unknown")
        rows.append(
            [
                *_named(group, comparison),
                Cell(", ".join(samples), float(samples[0])),
                Cell() if share is None else Cell(f"{100 * share:.1f} %", share),
                number(ess, digits=1),
                number(_average(group, "nll_mc_error"), digits=_digits(group) + 1),
                verdict,
            ]
        )
    if not rows:
        return []
    columns = [
        *_naming(comparison),
        Column("samples per image"),
        Column(f"images with k̂ > {KHAT_LIMIT}"),
        Column("effective samples"),
        Column("Monte Carlo error"),
        Column("the NLL", number=False),
    ]
    text = (
        "The NLL is estimated by importance sampling from q. Pareto k̂ measures how heavy the tail of the importance "
        f"weights is: above {KHAT_LIMIT} the estimate of that image is not reliable, and its error is larger than it "
        "looks. The NLL is then more likely too high than too low; more samples or a better q help."
    )
    return [
        Text(text),
        Table("How well the importance samples cover the posteriors", columns, rows),
        *map(Text, warnings),
    ]


def _time(comparison: Comparison, finished: Sequence[Entry]) -> list[Block]:
    rows = []
    machines: Counter[str] = Counter()
    versions: Counter[str] = Counter()
    for group in comparison.groups:
        timings = [entry.result["timing"] for entry in group.finished if entry.result]
        if not timings:
            continue

        def mean(key: str, timings: Sequence[Mapping[str, Any]] = timings) -> float:
            return statistics.fmean(timing[key] for timing in timings)

        per_epoch = statistics.fmean(
            timing["train_seconds"] / max(1, entry.epochs)
            for timing, entry in zip(timings, group.finished, strict=True)
        )
        memory = max(timing["peak_memory_bytes"] for timing in timings)
        rows.append(
            [
                *_named(group, comparison),
                *(Cell(_duration(mean(key)), mean(key)) for key in ("train_seconds", "evaluation_seconds")),
                number(per_epoch, digits=2),
                Cell(f"{mean('train_images_per_second'):,.0f}", mean("train_images_per_second")),
                Cell(f"{memory / 2**20:,.0f} MiB", memory),
            ]
        )
    if not rows:
        return []
    for entry in finished:
        assert entry.result is not None
        if entry.machine is not None:
            machines[entry.machine] += 1
        versions[", ".join(f"{name} {text}" for name, text in entry.result["versions"].items())] += 1
    columns = [
        *_naming(comparison),
        Column("training"),
        Column("evaluation"),
        Column("seconds per epoch"),
        Column("images per second"),
        Column("peak memory"),
    ]
    facts = {f"machine, {plural(count, 'run')}": machine for machine, count in machines.items()}
    facts |= {f"versions, {plural(count, 'run')}": text for text, count in versions.items()}
    return [Table("Mean over the runs of each setting", columns, rows), Facts(facts)]


def _naming(comparison: Comparison) -> list[Column]:
    first = [Column("data", number=False)] if _several(comparison) else []
    return [
        *first,
        Column("posterior", number=False),
        *(Column(name.replace("_", " ")) for name in _varying(comparison)),
    ]


def _named(group: Group, comparison: Comparison) -> list[Cell]:
    first = [Cell(_title(group.dataset))] if _several(comparison) else []
    values = [getattr(group.config, name) for name in _varying(comparison)]
    return [*first, Cell(_model(group.flow)), *(_setting(value) for value in values)]


def _varying(comparison: Comparison) -> list[str]:
    """The settings in which runs on the same data differ; what runs on other data have is no difference."""
    apart = [Comparison(tuple(groups)).varying() for _, groups in _by_dataset(comparison.groups)]
    return [name for name in SETTINGS if any(name in names for names in apart)]


def _several(comparison: Comparison) -> bool:
    return len({group.dataset for group in comparison.groups}) > 1


def _setting(value: object) -> Cell:
    if value is None:
        return Cell()
    return Cell(str(value), float(value) if isinstance(value, int | float) else None)


def _by_dataset(groups: Sequence[Group]) -> list[tuple[str, list[Group]]]:
    return [(name, [group for group in groups if group.dataset == name]) for name in _unique(g.dataset for g in groups)]


def _model(flow: str) -> str:
    return MODELS.get(flow, flow)


def _label(group: Group) -> str:
    sizes = {"M": group.config.rank, "H": group.config.reflections, "W": group.config.hidden}
    given = ", ".join(f"{letter} = {value}" for letter, value in sizes.items() if value is not None)
    return f"{_model(group.flow)} ({given})" if given else _model(group.flow)


def _title(dataset: str) -> str:
    return DATASETS.get(dataset, dataset)


def _digits(group: Group) -> int:
    return 3 if group.unit == "bits per dimension" else 2


def _mean(summary: Summary | None, digits: int) -> Cell:
    return Cell() if summary is None else number(summary.mean, digits=digits, error=summary.std)


def _difference(found: Difference | None, digits: int) -> Cell:
    if found is None:
        return Cell()
    error = max((error for error in (found.std_error, found.seed_error) if error is not None), default=None)
    return _toned(number(found.mean, digits=digits, error=error, signed=True), error)


def _toned(cell: Cell, error: float | None) -> Cell:
    """Coloured where the difference is more than twice its error; the sign says the same."""
    if error is None or cell.value is None or abs(cell.value) <= 2 * error:
        return cell
    return Cell(cell.text, cell.value, "good" if cell.value < 0 else "bad")


def _average(group: Group, key: str) -> float | None:
    summary = group.summary(key)
    return None if summary is None else summary.mean


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"


def _range(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low} to {high}"


def _listing(names: Sequence[str]) -> str:
    titles = [_title(name) for name in names]
    return titles[0] if len(titles) == 1 else f"{', '.join(titles[:-1])} and {titles[-1]}"


def _unique(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))
