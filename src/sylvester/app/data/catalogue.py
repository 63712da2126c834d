"""The published datasets: where they come from, how to recognise their files, what is in them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sylvester.app.data import readers
from sylvester.names import Likelihood


@dataclass(frozen=True)
class File:
    name: str
    checksum: str  # "sha256:…" or "md5:…" of the plain, not gzipped, content
    url: str | None = None


@dataclass(frozen=True)
class Variant:
    """One set of files that a dataset can be read from."""

    files: tuple[File, ...]
    source: str | None = None  # what a result says of it; by default whether it was downloaded
    folder: Path | None = None  # where it always lies, for files that come with the package


@dataclass(frozen=True)
class Entry:
    name: str
    image: tuple[int, int, int]  # (C, H, W)
    splits: tuple[int, int, int]  # train, valid, test
    likelihood: Likelihood
    variants: tuple[Variant, ...]  # in order of preference; the first is the one to download
    read: Callable[[Entry, Sequence[bytes], int], readers.Splits]
    licence: str
    attribution: str
    dynamic: bool = False

    @property
    def largest_file(self) -> int:
        """Bytes that no file of the dataset exceeds: all its pixels as float64, and room for labels."""
        return 8 * sum(self.splits) * math.prod(self.image) + 2**24


_MNIST = "http://www.cs.toronto.edu/~larocheh/public/datasets/binarized_mnist/binarized_mnist_{}.amat"
_MNIST_CHECKSUMS = {
    "train": "sha256:ad693b29f94c14277b095f5238ddefbbdaaae0939789dd2f4f0205278cee3e4d",
    "valid": "sha256:1de3d397c40fe8eeb33dafd4099a1f665ec01e96d9be234aaeeac8a34930e2e2",
    "test": "sha256:e6687bfea3f820c174f33b7865140b2a2dd2930ef786f35d45795fc193b5ab2c",
}

_ENTRIES = (
    Entry(
        name="digits",
        image=(1, 8, 8),
        splits=(1197, 300, 300),
        likelihood="bernoulli",
        variants=(
            Variant(
                (
                    File(
                        "digits.npz",
                        "sha256:798a3d979f383d93069a29ccc241e438e6c6f18b8563fc238bc11d19f010248f",
                    ),
                ),
                source="embedded",
                folder=Path(__file__).parent,
            ),
        ),
        read=readers.digits,
        licence="CC BY 4.0",
        attribution="E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, 1998, "
        "https://doi.org/10.24432/C50P49",
    ),
    Entry(
        name="mnist",
        image=(1, 28, 28),
        splits=(50_000, 10_000, 10_000),
        likelihood="bernoulli",
        variants=(
            Variant(
                tuple(
                    File(f"binarized_mnist_{split}.amat", checksum, _MNIST.format(split))
                    for split, checksum in _MNIST_CHECKSUMS.items()
                )
            ),
        ),
        read=readers.mnist,
        licence="none stated for the binarized files; MNIST is commonly distributed under CC BY-SA 3.0",
        attribution="Y. LeCun, C. Cortes and C. Burges, MNIST; binarized once as in R. Salakhutdinov and "
        "I. Murray, 2008; files by H. Larochelle",
    ),
    Entry(
        name="omniglot",
        image=(1, 28, 28),
        splits=(23_000, 1_345, 8_070),
        likelihood="bernoulli",
        variants=(
            Variant(
                (
                    File(
                        "chardata.mat",
                        "md5:21ecaf34373511aa7691cf2e0802aa3d",
                        "https://github.com/yburda/iwae/raw/master/datasets/OMNIGLOT/chardata.mat",
                    ),
                )
            ),
            Variant(
                (
                    File(
                        "omniglot_reconstructed.mat",
                        "sha256:ab2189d931101d9943a5f56b9739c07e69b86bdd9d781cb92aad43b43ae97c17",
                    ),
                ),
                source="reconstruction",
            ),
        ),
        read=readers.omniglot,
        licence="MIT",
        attribution="B. Lake, R. Salakhutdinov and J. Tenenbaum, Omniglot, 2015; 28 x 28 version by "
        "Y. Burda, R. Grosse and R. Salakhutdinov, 2016",
        dynamic=True,
    ),
    Entry(
        name="caltech101",
        image=(1, 28, 28),
        splits=(4_100, 2_264, 2_307),
        likelihood="bernoulli",
        variants=(
            Variant(
                (
                    File(
                        "caltech101_silhouettes_28_split1.mat",
                        "sha256:eb6735e8d84b1850fabc5590124aab1755e90c9fd28123585324398405e1e42a",
                        "https://people.cs.umass.edu/~marlin/data/caltech101_silhouettes_28_split1.mat",
                    ),
                )
            ),
        ),
        read=readers.caltech101,
        licence="none stated",
        attribution="B. Marlin, K. Swersky, B. Chen and N. de Freitas, Caltech 101 Silhouettes, 2010, from "
        "the annotations of Caltech 101 by L. Fei-Fei, R. Fergus and P. Perona, 2004",
    ),
    Entry(
        name="freyfaces",
        image=(1, 28, 20),
        splits=(1_565, 200, 200),
        likelihood="categorical",
        variants=(
            Variant(
                (
                    File(
                        "frey_rawface.mat",
                        "sha256:265a83a23adb081755cd3de375509828e690324d1d60f076b8ecebc840d59c64",
                        "https://cs.nyu.edu/~roweis/data/frey_rawface.mat",
                    ),
                )
            ),
        ),
        read=readers.freyfaces,
        licence="none stated",
        attribution="B. Frey and S. Roweis, Frey Faces",
    ),
)

CATALOGUE = {entry.name: entry for entry in _ENTRIES}
