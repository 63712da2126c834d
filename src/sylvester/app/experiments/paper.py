"""The paper's experiments as data: its grid, and every figure of its tables 1, 2 and 3.

A `Row` is one row of a table for one dataset, with the settings that make it: ``resolve({**row.settings, "preset":
"paper"})`` is the run that the paper describes. Means and standard deviations are over three runs, in nats per image,
for Frey Faces in bits per dimension. Table 3 (appendix B) is figure 3 in figures. Where tables 1 and 3 differ for the
same model, both stand here: it is the paper's own noise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from sylvester.app.config import FLOW_SETTINGS, PRESETS, Config

__all__ = [
    "DATASETS",
    "EXPERIMENTS",
    "FFJORD",
    "MODELS",
    "TABLE1",
    "TABLE2",
    "TABLE3",
    "Experiment",
    "Published",
    "Row",
    "Table",
    "Unit",
    "published",
    "published_like",
]

#: The tables of the paper that are here.
Table = Literal["table1", "table2", "table3"]
#: What the figures of a row are in.
Unit = Literal["nats", "bits per dimension"]

# The paper's names of its six posteriors, in the order of its tables.
MODELS: dict[str, str] = {
    "gaussian": "VAE",
    "planar": "Planar",
    "iaf": "IAF",
    "orthogonal-sylvester": "O-SNF",
    "householder-sylvester": "H-SNF",
    "triangular-sylvester": "T-SNF",
}

# The paper's names of its datasets.
DATASETS: dict[str, str] = {
    "mnist": "MNIST",
    "freyfaces": "Freyfaces",
    "omniglot": "Omniglot",
    "caltech101": "Caltech 101",
}

_LETTERS = {"transforms": "K", "hidden": "W", "rank": "M", "reflections": "H"}


@dataclass(frozen=True)
class Published:
    """A figure of a table: mean and standard deviation over runs, where that is given."""

    mean: float
    std: float | None = None


@dataclass(frozen=True)
class Row:
    """One row of a table, for one dataset. What the flow does not take is None."""

    table: Table
    dataset: str
    flow: str
    neg_elbo: Published
    nll: Published | None = None
    transforms: int | None = None
    hidden: int | None = None
    rank: int | None = None
    reflections: int | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that make the row, beyond the preset's."""
        named = {name: getattr(self, name) for name in _LETTERS}
        return {"dataset": self.dataset, "flow": self.flow} | {k: v for k, v in named.items() if v is not None}

    @property
    def model(self) -> str:
        """The row's name in the paper; table 3 alone has the sizes in it, in this order of letters."""
        order = ("transforms", "reflections") if self.reflections else ("hidden", "rank", "transforms")
        sizes = [f"{_LETTERS[name]}={getattr(self, name)}" for name in order if getattr(self, name) is not None]
        return MODELS[self.flow] + (f" ({', '.join(sizes)})" if sizes and self.table == "table3" else "")

    @property
    def unit(self) -> Unit:
        return "bits per dimension" if self.dataset == "freyfaces" else "nats"


_SIZES: dict[str, dict[str, int]] = {
    flow: {name: PRESETS["paper"][name] for name in _LETTERS if flow in FLOW_SETTINGS[name]} for flow in MODELS
}


def _rows(table: Table, dataset: str, figures: Mapping[str, tuple[float, float, float, float]]) -> tuple[Row, ...]:
    """−ELBO, its standard deviation, NLL, its standard deviation, at the sizes of tables 1 and 2."""
    return tuple(
        Row(table, dataset, flow, Published(elbo, elbo_std), Published(nll, nll_std), **_SIZES[flow])
        for flow, (elbo, elbo_std, nll, nll_std) in figures.items()
    )


# Static MNIST, 16 steps: −ELBO and NLL.
TABLE1 = _rows(
    "table1",
    "mnist",
    {
        "gaussian": (86.55, 0.06, 82.14, 0.07),
        "planar": (86.06, 0.31, 81.91, 0.22),
        "iaf": (84.20, 0.17, 80.79, 0.12),
        "orthogonal-sylvester": (83.32, 0.06, 80.22, 0.03),
        "householder-sylvester": (83.40, 0.01, 80.29, 0.02),
        "triangular-sylvester": (83.40, 0.10, 80.28, 0.06),
    },
)

# Frey Faces (bits per dimension), Omniglot and Caltech 101 Silhouettes, 16 steps: −ELBO and NLL.
TABLE2 = (
    *_rows(
        "table2",
        "freyfaces",
        {
            "gaussian": (4.53, 0.02, 4.40, 0.03),
            "planar": (4.40, 0.06, 4.31, 0.06),
            "iaf": (4.47, 0.05, 4.38, 0.04),
            "orthogonal-sylvester": (4.51, 0.04, 4.39, 0.05),
            "householder-sylvester": (4.46, 0.05, 4.35, 0.05),
            "triangular-sylvester": (4.45, 0.04, 4.35, 0.04),
        },
    ),
    *_rows(
        "table2",
        "omniglot",
        {
            "gaussian": (104.28, 0.39, 97.25, 0.23),
            "planar": (102.65, 0.42, 96.04, 0.28),
            "iaf": (102.41, 0.04, 96.08, 0.16),
            "orthogonal-sylvester": (99.00, 0.29, 93.82, 0.21),
            "householder-sylvester": (99.00, 0.04, 93.77, 0.03),
            "triangular-sylvester": (99.33, 0.23, 93.97, 0.13),
        },
    ),
    *_rows(
        "table2",
        "caltech101",
        {
            "gaussian": (110.80, 0.46, 99.62, 0.74),
            "planar": (109.66, 0.42, 98.53, 0.68),
            "iaf": (111.58, 0.38, 99.92, 0.30),
            "orthogonal-sylvester": (106.08, 0.39, 94.61, 0.83),
            "householder-sylvester": (104.62, 0.29, 93.82, 0.62),
            "triangular-sylvester": (105.29, 0.64, 94.92, 0.73),
        },
    ),
)


def _over_steps(
    flow: str,
    *figures: tuple[float, float],
    hidden: int | None = None,
    rank: int | None = None,
    reflections: int | None = None,
) -> tuple[Row, ...]:
    """−ELBO and its standard deviation with 4, 8 and 16 steps."""
    return tuple(
        Row("table3", "mnist", flow, Published(*found), None, steps, hidden, rank, reflections)
        for steps, found in zip((4, 8, 16), figures, strict=True)
    )


# Static MNIST over the number of steps: −ELBO alone; figure 3 draws it.
TABLE3 = (
    Row("table3", "mnist", "gaussian", Published(86.51, 0.11)),
    *_over_steps("planar", (86.40, 0.08), (86.37, 0.006), (85.71, 0.20)),
    *_over_steps("iaf", (85.04, 0.07), (84.70, 0.08), (84.50, 0.11), hidden=320),
    *_over_steps("iaf", (84.58, 0.06), (84.50, 0.08), (84.29, 0.09), hidden=640),
    *_over_steps("iaf", (84.96, 0.25), (84.55, 0.08), (84.30, 0.16), hidden=1280),
    *_over_steps("orthogonal-sylvester", (84.08, 0.04), (83.71, 0.07), (83.52, 0.09), rank=16),
    *_over_steps("orthogonal-sylvester", (83.76, 0.02), (83.58, 0.03), (83.32, 0.06), rank=32),
    *_over_steps("householder-sylvester", (83.73, 0.05), (83.49, 0.08), (83.36, 0.04), reflections=4),
    *_over_steps("householder-sylvester", (83.72, 0.03), (83.52, 0.01), (83.35, 0.05), reflections=8),
    *_over_steps("triangular-sylvester", (83.74, 0.04), (83.48, 0.03), (83.35, 0.06)),
)

# −ELBO of a later system with the same encoder and decoder, by dataset: Grathwohl et al., FFJORD, ICLR 2019, table 3.
FFJORD: dict[str, Published] = {
    "mnist": Published(82.82),
    "omniglot": Published(98.33),
    "freyfaces": Published(4.39),
    "caltech101": Published(104.03),
}


@dataclass(frozen=True)
class Experiment:
    """A named grid: the settings of each cell without its seed, and the published rows that it stands beside."""

    name: str
    preset: str
    cells: tuple[Mapping[str, Any], ...]
    rows: tuple[Row, ...] = ()

    @staticmethod
    def seeds(dataset: str) -> tuple[int, ...]:
        """Three runs each; for Frey Faces the seeds by which the paper's code shuffled the splits."""
        return (123, 321, 231) if dataset == "freyfaces" else (0, 1, 2)


def _experiment(name: str, rows: tuple[Row, ...]) -> Experiment:
    return Experiment(name, "paper", tuple(row.settings for row in rows), rows)


#: What `sylvester reproduce` knows by name.
EXPERIMENTS: dict[str, Experiment] = {
    "table1": _experiment("table1", TABLE1),
    "table2": _experiment("table2", TABLE2),
    "table3": _experiment("table3", TABLE3),
    "figure3": _experiment("figure3", TABLE3),
    # The paper's six posteriors on the embedded data, which the paper did not use, to early stopping.
    "digits": Experiment(
        "digits", "quick", tuple({"dataset": "digits", "flow": flow, "epochs": 1000} for flow in MODELS)
    ),
}


def published(config: Config, rows: Iterable[Row] = (*TABLE1, *TABLE2, *TABLE3)) -> list[Row]:
    """The rows for a run's dataset, flow and sizes, whatever else its settings say; of several tables, all."""
    return [row for row in rows if all(getattr(config, name) == value for name, value in row.settings.items())]


def published_like(row: Row) -> list[Row]:
    """The rows of other tables for the same model, where they have another −ELBO."""
    rows = (*TABLE1, *TABLE2, *TABLE3)
    return [other for other in rows if other.settings == row.settings and other.neg_elbo != row.neg_elbo]
