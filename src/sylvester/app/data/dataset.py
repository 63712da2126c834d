"""What every loader returns, and the errors that they raise."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sylvester.names import Likelihood

SPLITS = ("train", "valid", "test")


class DataError(ValueError):
    """Data that cannot be used; its message is one sentence that says what was expected and what to do."""


class DownloadError(DataError):
    """Data that could not be fetched, which may work another time."""


@dataclass(frozen=True, eq=False)
class Dataset:
    """Images in three splits, each a float32 tensor (N, C, H, W) with values in [0, 1].

    Categorical images hold the levels k/255 exactly: ``round(255 x)`` gives k back. With ``dynamic``, the
    training images are grey levels, the means from which binary images are to be drawn afresh each time
    an image is visited; the validation and test images have been binarized once. Images are in the order of
    their files, which may be sorted by class: a part of a split should be drawn, not cut off its start.
    """

    name: str
    train: Tensor
    valid: Tensor
    test: Tensor
    likelihood: Likelihood
    dynamic: bool
    sha256: dict[str, str]  # file name -> checksum of its plain content
    source: str  # "embedded", "files", "download" or "reconstruction"

    @property
    def image_shape(self) -> tuple[int, int, int]:
        channels, height, width = self.train.shape[1:]
        return channels, height, width

    @property
    def counts(self) -> dict[str, int]:
        return {split: len(getattr(self, split)) for split in SPLITS}
