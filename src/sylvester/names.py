"""The names that users give to flows, datasets and likelihoods. Imports no torch: ``--help`` answers at once."""

from typing import Literal, get_args

Likelihood = Literal["bernoulli", "categorical", "gaussian"]
LIKELIHOODS: tuple[Likelihood, ...] = get_args(Likelihood)

__all__ = ["DATASETS", "FLOWS"]

#: The families of flows, as the command line names them.
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
    "affine-iaf",
    "maf",
    "nsf",
    "nice",
    "realnvp",
    "coupling-nsf",
)

#: The datasets that the command line knows by name; others are archives of the user's own.
DATASETS = ("digits", "mnist", "omniglot", "caltech101", "freyfaces")
