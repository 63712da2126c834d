"""A user's own images, in one ``.npz`` archive.

    numpy.savez_compressed("mine.npz", train=…, valid=…, test=…)

- ``train``, ``test`` and, optionally, ``valid``: (N, H, W), (N, C, H, W) or (N, H, W, C), of one dtype: uint8 (levels
  0…255), float with values in [0, 1], or bool. The last axis is taken for channels where it is 1 or 3 and the second
  is not. Without ``valid``, a tenth of the training images, drawn by the seed, is held out.
- ``likelihood`` (optional): "bernoulli", "categorical" (256 levels) or "gaussian"; the caller may give another.
- ``dynamic`` (optional): true where Bernoulli images are grey and binarized afresh at each visit in training;
  validation and test are then binarized once, from the seed.

Anything else in the archive, such as labels, is never read. Without a likelihood:

- images of nothing but 0 and 1 (or the bytes 0 and 255), and dynamic ones, are Bernoulli;
- other bytes are categorical: they are levels, and the likelihood of levels is a probability;
- other floats are refused: a Bernoulli likelihood of grey values is no likelihood, and whether they are to be
  rounded to levels, binarized, or given a density changes every figure, so somebody has to say.

Bytes that never exceed 1 are masks and are taken as 0 and 1, not as the two darkest of 256 levels.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sylvester.app import memory
from sylvester.app.data.dataset import SPLITS, DataError, Dataset
from sylvester.app.data.formats import Archive
from sylvester.app.data.readers import binarize
from sylvester.app.paths import PathError, open_regular
from sylvester.names import LIKELIHOODS, Likelihood

_LEVEL_TOLERANCE = 1e-3  # of a level: float32 rounding of k/255 stays far below it
_HELD_OUT = 0.1  # of the training images, where the archive has no validation images
_COLOURS = (1, 3)  # channels that nobody takes for a side
_LARGEST_SCALAR = 1000  # bytes


def load_npz(path: Path, *, seed: int, likelihood: Likelihood | None = None) -> Dataset:
    try:
        with open_regular(path) as file:
            x, likelihood, dynamic = _interpret(Archive(file), np.random.RandomState(seed), likelihood)
            file.seek(0)
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    except PathError as error:
        raise DataError(f"Expected a file at {path}; got {error}.") from error
    except OSError as error:
        raise DataError(f"Expected a readable file at {path}; got the error {error.strerror or error}.") from error
    except DataError as error:
        raise DataError(f"Cannot use {path}: {error}") from error
    return Dataset(
        name=path.stem,
        **{split: torch.from_numpy(np.ascontiguousarray(x[split])) for split in SPLITS},
        likelihood=likelihood,
        dynamic=dynamic,
        sha256={path.name: sha256},
        source="files",
    )


def with_likelihood(dataset: Dataset, likelihood: Likelihood) -> Dataset:
    """The same images with another likelihood, if they can have it."""
    x = {split: getattr(dataset, split).numpy() for split in SPLITS}
    x = _fitted(x, likelihood, binary=_binary(x), dynamic=dataset.dynamic)
    train, valid, test = (torch.from_numpy(x[split]) for split in SPLITS)
    return replace(dataset, train=train, valid=valid, test=test, likelihood=likelihood)


def _interpret(
    archive: Archive, random: np.random.RandomState, likelihood: Likelihood | None
) -> tuple[dict[str, NDArray], Likelihood, bool]:
    splits = [split for split in SPLITS if split in archive]
    for needed in ("train", "test"):
        if needed not in splits:
            found = ", ".join(archive.names) or "none"
            raise DataError(f"Expected the arrays train and test, and perhaps valid; got no {needed} (found: {found}).")
    _check_headers({split: archive.header(split) for split in splits})
    raw = {split: archive.array(split) for split in splits}
    if "valid" not in raw:
        raw["train"], raw["valid"] = _held_out(raw["train"], random)
    levels = raw["train"].dtype == np.uint8
    x = _unit_interval(raw)
    del raw
    binary = _binary(x)
    dynamic = bool(_scalar(archive, "dynamic", default=False, dtype_kinds="biu")) and not binary
    stored = _scalar(archive, "likelihood", default=None, dtype_kinds="U")
    likelihood = _likelihood(likelihood or stored, binary=binary, dynamic=dynamic, levels=levels)
    x = _fitted(x, likelihood, binary=binary, dynamic=dynamic)
    if dynamic:
        x.update(valid=binarize(x["valid"], random), test=binarize(x["test"], random))
    return x, likelihood, dynamic


def _check_headers(headers: dict[str, tuple[tuple[int, ...], np.dtype]]) -> None:
    """Everything that is wrong with shapes and types is found before an array is read."""
    first, dtype = headers["train"]
    if dtype.kind not in "fb" and dtype != np.uint8:
        raise DataError(f"Expected uint8, bool or float images; got {dtype}.")
    for split, (shape, own_dtype) in headers.items():
        if len(shape) not in (3, 4):
            raise DataError(f"Expected {split} of shape (N, H, W), (N, C, H, W) or (N, H, W, C); got {shape}.")
        if math.prod(shape) == 0:
            raise DataError(f"Expected at least one image in {split}; got the shape {shape}.")
        if shape[1:] != first[1:]:
            raise DataError(f"Expected images of one size; got {first[1:]} in train and {shape[1:]} in {split}.")
        if own_dtype != dtype:
            raise DataError(f"Expected arrays of one dtype; got {dtype} in train and {own_dtype} in {split}.")
    if len(first) == 4 and not channels_last(first) and first[3] <= 4 < first[1]:
        raise DataError(
            f"Expected train of shape (N, C, H, W); got {first}, whose last axis seems to be the channels: "
            "store numpy.moveaxis(images, -1, 1)."
        )
    # The arrays as stored, as float32, and what the checks need beside them.
    elements = sum(math.prod(shape) for shape, _ in headers.values())
    needed, free = elements * (dtype.itemsize + 8), memory.available()
    if needed > free:
        raise DataError(
            f"Expected images that fit into memory, of which {memory.readable(free)} are free; "
            f"got {elements:,} pixels, which take {memory.readable(needed)}."
        )


def channels_last(shape: tuple[int, ...]) -> bool:
    """(N, H, W, C) and not (N, C, H, W): only the last axis can be the channels."""
    return len(shape) == 4 and shape[3] in _COLOURS and shape[1] not in _COLOURS


def _held_out(train: NDArray, random: np.random.RandomState) -> tuple[NDArray, NDArray]:
    """Training images in their order, and those drawn from them for validation."""
    if len(train) < 2:
        raise DataError("Expected valid, or at least two images in train to hold one out; got one.")
    drawn = np.zeros(len(train), dtype=bool)
    drawn[random.permutation(len(train))[: max(1, round(_HELD_OUT * len(train)))]] = True
    return train[~drawn], train[drawn]


def _unit_interval(raw: dict[str, NDArray]) -> dict[str, NDArray]:
    """Every split as float32 (N, C, H, W) in [0, 1]."""
    dtype = raw["train"].dtype
    masks = all(images.max() <= 1 for images in raw.values()) if dtype == np.uint8 else dtype.kind == "b"
    x = {}
    for split, images in raw.items():
        if dtype.kind == "f" and np.isnan(images).any():
            raise DataError(f"Expected values in [0, 1]; got NaN in {split}.")
        if dtype.kind == "f" and (images.min() < 0 or images.max() > 1):
            raise DataError(
                f"Expected values in [0, 1]; got {images.min():g} to {images.max():g} in {split}: "
                "rescale them, or store uint8 levels 0 to 255."
            )
        if channels_last(images.shape):
            images = np.moveaxis(images, -1, 1)
        x[split] = (images if images.ndim == 4 else images[:, None]).astype(np.float32)
        if dtype == np.uint8 and not masks:
            x[split] /= 255
    return x


def _binary(x: dict[str, NDArray]) -> bool:
    return all(((images == 0) | (images == 1)).all() for images in x.values())


def _likelihood(name: str | None, *, binary: bool, dynamic: bool, levels: bool) -> Likelihood:
    if name is None:
        if not (binary or dynamic or levels):
            raise DataError(
                "Expected a likelihood for grey float images; got none: give --likelihood or store likelihood, one of "
                f"{', '.join(LIKELIHOODS)}, or dynamic = True to binarize them at each visit."
            )
        return "bernoulli" if binary or dynamic else "categorical"
    for likelihood in LIKELIHOODS:
        if name == likelihood:
            return likelihood
    raise DataError(f"Expected likelihood to be one of {', '.join(LIKELIHOODS)}; got {name!r}.")


def _fitted(x: dict[str, NDArray], likelihood: Likelihood, *, binary: bool, dynamic: bool) -> dict[str, NDArray]:
    """The images as the likelihood needs them."""
    if dynamic and likelihood != "bernoulli":
        raise DataError(
            f"Expected likelihood 'bernoulli' for images that are binarized at each visit; got {likelihood!r}."
        )
    if likelihood == "bernoulli" and not (binary or dynamic):
        raise DataError(
            "Expected values 0 and 1 with likelihood 'bernoulli'; got grey values: "
            "store dynamic = True to binarize them at each visit, or take another likelihood."
        )
    return {split: _snapped(images) for split, images in x.items()} if likelihood == "categorical" else x


def _scalar(archive: Archive, name: str, *, default: Any, dtype_kinds: str) -> Any:
    if name not in archive:
        return default
    shape, dtype = archive.header(name)
    if math.prod(shape) != 1 or dtype.kind not in dtype_kinds or dtype.itemsize > _LARGEST_SCALAR:
        raise DataError(f"Expected {name} to be one value; got an array of shape {shape}, {dtype}.")
    return archive.array(name).item()


def _snapped(x: NDArray) -> NDArray[np.float32]:
    """The nearest levels k/255, to which categorical images must be equal up to rounding."""
    levels = np.rint(255 * x)
    if np.abs(255 * x - levels).max() > _LEVEL_TOLERANCE:
        raise DataError(
            "Expected values k/255 with likelihood 'categorical'; got values between those levels: "
            "store uint8 levels 0 to 255, or take likelihood 'gaussian'."
        )
    return levels / np.float32(255)
