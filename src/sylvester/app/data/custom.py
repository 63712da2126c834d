"""A user's own images, in one ``.npz`` archive.

    numpy.savez_compressed("mine.npz", train=…, valid=…, test=…)

- ``train``, ``valid``, ``test``: (N, H, W) or (N, C, H, W), of one dtype: uint8 (levels 0…255), float with
  values in [0, 1], or bool. H and W are multiples of 4, the two halvings of the convolutional encoder.
- ``likelihood`` (optional): "bernoulli", "categorical" (256 levels) or "gaussian".
- ``dynamic`` (optional): true where Bernoulli images are grey and binarized afresh at each visit in training;
  validation and test are then binarized once, from the seed.

Anything else in the archive, such as labels, is ignored. Without ``likelihood``:

- images of nothing but 0 and 1 (or the bytes 0 and 255), and dynamic ones, are Bernoulli;
- other bytes are categorical: they are levels, and the likelihood of levels is a probability;
- other floats are refused: a Bernoulli likelihood of grey values is no likelihood, and whether they are to be
  rounded to levels, binarized, or given a density changes every figure, so the archive has to say.

Bytes that never exceed 1 are masks and are taken as 0 and 1, not as the two darkest of 256 levels.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from sylvester.app.data import formats
from sylvester.app.data.dataset import SPLITS, DataError, Dataset, Likelihood
from sylvester.app.data.files import Content
from sylvester.app.data.readers import binarize

_LEVEL_TOLERANCE = 1e-3  # of a level: float32 rounding of k/255 stays far below it


def load_npz(path: Path, *, seed: int) -> Dataset:
    content = Content.read(path)
    try:
        x, likelihood, dynamic = _interpret(formats.npz(content.data))
    except DataError as error:
        raise DataError(f"Cannot use {path}: {error}") from error
    if dynamic:
        random = np.random.RandomState(seed)
        x.update(valid=binarize(x["valid"], random), test=binarize(x["test"], random))
    tensors = {split: torch.from_numpy(np.ascontiguousarray(x[split])) for split in SPLITS}
    return Dataset(
        name=path.stem,
        **tensors,
        likelihood=likelihood,
        dynamic=dynamic,
        sha256={path.name: content.sha256},
        source="files",
    )


def _interpret(archive: dict[str, NDArray]) -> tuple[dict[str, NDArray], Likelihood, bool]:
    missing = [split for split in SPLITS if split not in archive]
    if missing:
        found = ", ".join(sorted(archive)) or "none"
        raise DataError(f"Expected the arrays train, valid and test; got no {missing[0]} (found: {found}).")
    raw = {split: archive[split] for split in SPLITS}
    _check_shapes(raw)
    x = _unit_interval(raw)
    binary = all(np.isin(images, (0, 1)).all() for images in x.values())
    dynamic = bool(_scalar(archive, "dynamic", default=False, dtype_kinds="biu")) and not binary
    likelihood = _likelihood(archive, binary=binary, dynamic=dynamic, levels=raw["train"].dtype == np.uint8)
    if likelihood == "bernoulli" and not (binary or dynamic):
        raise DataError(
            "Expected values 0 and 1 with likelihood 'bernoulli'; got grey values: "
            "store dynamic = True to binarize them at each visit, or another likelihood."
        )
    if likelihood == "categorical":
        x = {split: _snapped(images) for split, images in x.items()}
    return x, likelihood, dynamic


def _check_shapes(raw: dict[str, NDArray]) -> None:
    for split, images in raw.items():
        if images.ndim not in (3, 4):
            raise DataError(f"Expected {split} of shape (N, H, W) or (N, C, H, W); got {images.shape}.")
        if images.size == 0:
            raise DataError(f"Expected at least one image in {split}; got the shape {images.shape}.")
        if images.shape[1:] != raw["train"].shape[1:]:
            raise DataError(
                f"Expected images of one size; got {raw['train'].shape[1:]} in train and {images.shape[1:]} in {split}."
            )
        if images.dtype != raw["train"].dtype:
            raise DataError(
                f"Expected arrays of one dtype; got {raw['train'].dtype} in train and {images.dtype} in {split}."
            )
    height, width = raw["train"].shape[-2:]
    if height % 4 or width % 4:
        raise DataError(
            f"Expected image sides that are multiples of 4; got {height} x {width}: "
            f"pad the images to {height + -height % 4} x {width + -width % 4}."
        )


def _unit_interval(raw: dict[str, NDArray]) -> dict[str, NDArray]:
    """Every split as float32 (N, C, H, W) in [0, 1]."""
    dtype = raw["train"].dtype
    if dtype.kind not in "fb" and dtype != np.uint8:
        raise DataError(f"Expected uint8, bool or float images; got {dtype}.")
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
        channels = images if images.ndim == 4 else images[:, None]
        x[split] = channels.astype(np.float32)
        if dtype == np.uint8 and not masks:
            x[split] /= 255
    return x


def _likelihood(archive: dict[str, NDArray], *, binary: bool, dynamic: bool, levels: bool) -> Likelihood:
    names = get_args(Likelihood)
    name = _scalar(archive, "likelihood", default=None, dtype_kinds="U")
    if name is None:
        if not (binary or dynamic or levels):
            raise DataError(
                "Expected likelihood to be stored beside grey float images; got none: store one of "
                f"{', '.join(names)}, or dynamic = True to binarize them at each visit."
            )
        return "bernoulli" if binary or dynamic else "categorical"
    if name not in names:
        raise DataError(f"Expected likelihood to be one of {', '.join(names)}; got {name!r}.")
    if dynamic and name != "bernoulli":
        raise DataError(f"Expected dynamic = True with likelihood 'bernoulli' only; got {name!r}.")
    return name


def _scalar(archive: dict[str, NDArray], name: str, *, default: Any, dtype_kinds: str) -> Any:
    if name not in archive:
        return default
    value = archive[name]
    if value.size != 1 or value.dtype.kind not in dtype_kinds:
        raise DataError(f"Expected {name} to be one value; got an array of shape {value.shape}, {value.dtype}.")
    return value.item()


def _snapped(x: NDArray) -> NDArray[np.float32]:
    """The nearest levels k/255, to which categorical images must be equal up to rounding."""
    levels = np.rint(255 * x)
    if np.abs(255 * x - levels).max() > _LEVEL_TOLERANCE:
        raise DataError(
            "Expected values k/255 with likelihood 'categorical'; got values between those levels: "
            "store uint8 levels 0 to 255, or likelihood 'gaussian'."
        )
    return levels / np.float32(255)
