"""From the bytes of a file to arrays of images. Whatever a parser trips over becomes a `DataError`."""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, BinaryIO

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


class Archive:
    """A NumPy archive, of which arrays are read one by one, without executing pickled objects.

    What an array will take is known from its header and compared with what the archive holds before it is read.
    """

    def __init__(self, file: BinaryIO) -> None:
        try:
            self._zip = zipfile.ZipFile(file)
        except Exception as error:  # zip raises whatever the damage leads it to
            raise DataError(f"Expected an .npz archive of plain arrays; got something else ({error}).") from error

    def __contains__(self, name: object) -> bool:
        return f"{name}.npy" in self._zip.NameToInfo

    @property
    def names(self) -> list[str]:
        return sorted(name.removesuffix(".npy") for name in self._zip.NameToInfo)

    def header(self, name: str) -> tuple[tuple[int, ...], np.dtype]:
        """Shape and dtype of an array that is whole, as far as sizes tell."""
        with self._reading(name) as member:
            return self._header(name, member)

    def array(self, name: str) -> NDArray:
        with self._reading(name) as member:
            self._header(name, member)
        with self._reading(name) as member:
            found = np.lib.format.read_array(member, allow_pickle=False)
            member.read(1)  # the archive's own checksum is compared at the end
        return found

    @contextmanager
    def _reading(self, name: str) -> Iterator[IO[bytes]]:
        try:
            with self._zip.open(f"{name}.npy") as member:
                yield member
        except DataError:
            raise
        except Exception as error:  # zip, zlib and NumPy raise whatever the damage leads them to
            raise DataError(f"Expected {name} to be a plain array; got something else ({error}).") from error

    def _header(self, name: str, member: IO[bytes]) -> tuple[tuple[int, ...], np.dtype]:
        version = np.lib.format.read_magic(member)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(member)
        if dtype.hasobject:
            raise DataError(f"Expected {name} to be a plain array; got Python objects.")
        declared, held = math.prod(shape) * dtype.itemsize, self._zip.NameToInfo[f"{name}.npy"].file_size
        if min(shape, default=0) < 0 or member.tell() + declared != held:
            raise DataError(
                f"Expected {name} of shape {shape} to fill {declared:,} bytes; got {held:,} with its header."
            )
        return shape, dtype


def images(rows: NDArray, image: tuple[int, int, int], *, column_major: bool = False) -> NDArray:
    """Flat pixels (N, C H W) as upright images (N, C, H, W); MATLAB flattens an image column by column."""
    channels, height, width = image
    if rows.ndim != 2 or rows.shape[1] != channels * height * width:
        raise DataError(f"Expected images of {height} x {width} pixels; got an array of shape {rows.shape}.")
    if column_major:
        return rows.reshape(-1, channels, width, height).swapaxes(2, 3)
    return rows.reshape(-1, channels, height, width)
