"""From the bytes of a file to arrays of images. Whatever a parser trips over becomes a `DataError`."""

from __future__ import annotations

import io

import numpy as np
import scipy.io
from numpy.typing import NDArray

from sylvester.app.data.dataset import DataError


def amat(data: bytes, pixels: int) -> NDArray[np.uint16]:
    """Rows of ``pixels`` digits 0 or 1, each followed by a blank or, at the row's end, a newline.

    A digit and its separator are two bytes, so the text is an array already: what is left of it after an
    exclusive or with a row of zeros are the pixels, or something greater than 1 where the text is not such.
    """
    zeros = np.frombuffer(b"0 " * (pixels - 1) + b"0\n", dtype="<u2")
    if not data or len(data) % zeros.nbytes:
        raise DataError(f"Expected rows of {pixels} digits separated by blanks; got {len(data)} bytes, not whole rows.")
    rows = np.frombuffer(data, dtype="<u2").reshape(-1, pixels) ^ zeros
    if rows.max() > 1:
        raise DataError(f"Expected rows of {pixels} digits 0 or 1 separated by blanks; got other text.")
    return rows


def mat(data: bytes, *names: str) -> list[NDArray]:
    """The named matrices of a MATLAB file."""
    try:
        content = scipy.io.loadmat(io.BytesIO(data), variable_names=names)
    except Exception as error:  # scipy documents none of the many exceptions that damaged files raise in it
        raise DataError(f"Expected a MATLAB file; got a damaged or truncated one ({error}).") from error
    missing = [name for name in names if name not in content]
    if missing:
        raise DataError(f"Expected the matrices {', '.join(names)} in the MATLAB file; got no {missing[0]}.")
    return [content[name] for name in names]


def npz(data: bytes) -> dict[str, NDArray]:
    """All arrays of a NumPy archive, without executing pickled objects."""
    try:
        return dict(np.lib.npyio.NpzFile(io.BytesIO(data), allow_pickle=False))
    except Exception as error:  # zip, zlib and NumPy raise whatever the damage leads them to
        raise DataError(f"Expected an .npz archive of plain arrays; got something else ({error}).") from error


def images(rows: NDArray, image: tuple[int, int, int], *, column_major: bool = False) -> NDArray:
    """Flat pixels (N, C H W) as upright images (N, C, H, W); MATLAB flattens an image column by column."""
    channels, height, width = image
    if rows.ndim != 2 or rows.shape[1] != channels * height * width:
        raise DataError(f"Expected images of {height} x {width} pixels; got an array of shape {rows.shape}.")
    if column_major:
        return rows.reshape(-1, channels, width, height).swapaxes(2, 3)
    return rows.reshape(-1, channels, height, width)
