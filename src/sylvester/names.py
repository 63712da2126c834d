"""The names that users give to flows, datasets and likelihoods. Imports no torch: ``--help`` answers at once."""

from typing import Literal, get_args

Likelihood = Literal["bernoulli", "categorical", "gaussian"]
LIKELIHOODS: tuple[Likelihood, ...] = get_args(Likelihood)

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
    "affine-iaf",
    "maf",
    "nsf",
    "nice",
    "realnvp",
    "coupling-nsf",
)

DATASETS = ("digits", "mnist", "omniglot", "caltech101", "freyfaces")
