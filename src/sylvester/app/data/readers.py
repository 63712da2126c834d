"""From the files of each published dataset to its three splits, as the paper used them.

A reader takes the catalogue's entry, the plain contents of the files in the order of the entry, and a seed.
Randomness comes from a `numpy.random.RandomState` of its own: its streams are frozen for good, so a split is
the same on every platform and version, and the shuffle of Frey Faces is the one the paper's seeds gave.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from sylvester.app.data import formats
from sylvester.app.data.dataset import DataError

if TYPE_CHECKING:
    from sylvester.app.data.catalogue import Entry

Splits = list[NDArray]  # train, valid, test: each (N, C, H, W) with values in [0, 1]

_DIGITS_SEED = 0  # the digits' binarization and split are part of the dataset, whatever the run's seed


def digits(entry: Entry, contents: Sequence[bytes], seed: int) -> Splits:
    pixels = formats.Archive(io.BytesIO(contents[0])).array(
        "images"
    )  # (N, 8, 8), counts 0..16 of dark points in 4 x 4 blocks
    random = np.random.RandomState(_DIGITS_SEED)
    return _shuffled(binarize(pixels[:, None] / 16, random), entry.splits, random)


def mnist(entry: Entry, contents: Sequence[bytes], seed: int) -> Splits:
    pixels = entry.image[1] * entry.image[2]
    return [formats.images(formats.amat(text, pixels), entry.image) for text in contents]


def caltech101(entry: Entry, contents: Sequence[bytes], seed: int) -> Splits:
    """The file draws objects as 0 on a background of 1; the models see objects as 1."""
    matrices = formats.mat(contents[0], "train_data", "val_data", "test_data")
    return [1 - formats.images(rows, entry.image, column_major=True) for rows in matrices]


def freyfaces(entry: Entry, contents: Sequence[bytes], seed: int) -> Splits:
    (columns,) = formats.mat(contents[0], "ff")
    levels = formats.images(columns.T, entry.image)
    return _shuffled(levels / np.float32(255), entry.splits, np.random.RandomState(seed))


def omniglot(entry: Entry, contents: Sequence[bytes], seed: int) -> Splits:
    """Grey training images, from which validation is drawn at random; validation and test are binarized."""
    grey, test = (
        formats.images(_grey(columns.T), entry.image, column_major=True)
        for columns in formats.mat(contents[0], "data", "testdata")
    )
    random = np.random.RandomState(seed)
    train, valid = _shuffled(grey, entry.splits[:2], random)
    return [train, binarize(valid, random), binarize(test, random)]


def binarize(grey: NDArray, random: np.random.RandomState) -> NDArray[np.float32]:
    """One draw of Bernoulli pixels with the grey levels as their means; 0 and 1 stay what they are."""
    return (random.random_sample(grey.shape) < grey).astype(np.float32)


def _grey(pixels: NDArray) -> NDArray[np.float32]:
    """Bytes count 255ths; floats are grey levels already."""
    return pixels.astype(np.float32) / np.float32(255 if pixels.dtype == np.uint8 else 1)


def _shuffled(x: NDArray, counts: Sequence[int], random: np.random.RandomState) -> list[NDArray]:
    """The images in random order, dealt out in parts of the given sizes."""
    if len(x) != sum(counts):
        raise DataError(f"Expected {sum(counts)} images; got {len(x)}.")
    return np.split(x[random.permutation(len(x))], np.cumsum(counts)[:-1])
