"""The command line's names of flows and datasets. Imports nothing, so that ``--help`` answers at once."""

__all__ = ["DATASETS", "FLOWS"]

FLOWS = (
    "gaussian",
    "planar",
    "radial",
    "householder",
    "orthogonal-sylvester",
    "householder-sylvester",
    "triangular-sylvester",
    "iaf",
    "mean-only-iaf",
    "maf",
    "nice",
    "realnvp",
)

DATASETS = ("digits", "mnist", "omniglot", "caltech101", "freyfaces")
