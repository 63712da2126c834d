"""Load a dataset by name or path; say which ones there are, whether their files are here and whole."""

from __future__ import annotations

import difflib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from sylvester.app.data import files
from sylvester.app.data.catalogue import CATALOGUE, Entry, Variant
from sylvester.app.data.custom import load_npz, with_likelihood
from sylvester.app.data.dataset import SPLITS, DataError, Dataset
from sylvester.app.paths import PathError, usable
from sylvester.names import Likelihood

Name = str | os.PathLike[str] | Entry
Folder = str | os.PathLike[str] | None


@dataclass(frozen=True)
class FileReport:
    """A file of a dataset, and whether its checksum is the one that is known."""

    name: str
    path: str | None  # None: not found
    expected: str | None  # None: a user's own file, of which no checksum is known
    got: str | None
    ok: bool


@dataclass(frozen=True)
class Report:
    """Whether a dataset can be loaded from the files at hand; ``problem`` says in one sentence why not."""

    name: str
    source: str
    files: tuple[FileReport, ...]
    counts: dict[str, int]
    ok: bool
    problem: str | None


@dataclass(frozen=True)
class Listing:
    """What is known of a dataset before it is read."""

    name: str
    image: tuple[int, int, int]
    splits: dict[str, int]
    likelihood: str
    dynamic: bool
    licence: str
    attribution: str
    urls: tuple[str, ...]  # empty: comes with the package
    source: str
    present: bool  # the files are here; `check` says whether they are whole


def load(
    name: Name,
    *,
    data_dir: Folder = None,
    seed: int = 0,
    likelihood: Likelihood | None = None,
    progress: bool = False,
) -> Dataset:
    """A dataset of the catalogue by name, or a user's own images by the path of an ``.npz`` archive.

    Files are taken from ``data_dir``, or else from the folder that ``SYLVESTER_DATA`` names, and nothing is
    downloaded; with neither they are downloaded once into the user's cache folder. All are checked. The
    seed decides what a dataset leaves open: the split of Frey Faces, the validation images of Omniglot and
    the binarization of its validation and test images, the validation images of an archive without any.
    ``likelihood`` replaces the dataset's own. An `Entry` of one's own loads like the catalogue's.
    """
    if not 0 <= seed < 2**32:
        raise DataError(f"Expected a seed from 0 to 2³² − 1; got {seed}.")
    entry = _resolve(name)
    if isinstance(entry, Path):
        return load_npz(entry, seed=seed, likelihood=likelihood)
    place = _place(entry, data_dir)
    dataset = _dataset(entry, place, place.read(entry.largest_file, progress=progress), seed)
    return dataset if likelihood is None else with_likelihood(dataset, likelihood)


def fetch(name: Name, *, data_dir: Folder = None, progress: bool = False) -> Report:
    """Make sure that a dataset's files are here and whole, downloading where `load` would."""
    entry = _resolve(name)
    if isinstance(entry, Entry):
        _place(entry, data_dir).read(entry.largest_file, progress=progress)
    report = check(entry, data_dir=data_dir)
    if report.problem is not None:
        raise DataError(report.problem)
    return report


def check(name: Name, *, data_dir: Folder = None) -> Report:
    """Read and check what is here; nothing is downloaded, and what is wrong is reported, not raised."""
    entry = _resolve(name)
    if isinstance(entry, Path):
        return _check_npz(entry)
    place = _place(entry, data_dir)
    contents, reports, problems = [], [], []
    for file in place.variant.files:
        path, got = files.find(file, place.folder), None
        try:
            content = files.read(file, place.folder, entry.largest_file)
            got = content.checksum_like(file.checksum)
            contents.append(files.verify(file, content))
        except DataError as error:
            problems.append(str(error))
        ok = got == file.checksum
        reports.append(FileReport(file.name, None if path is None else str(path), file.checksum, got, ok))
    counts = {}
    if not problems:
        try:
            counts = _dataset(entry, place, contents, seed=0).counts
        except DataError as error:
            problems.append(str(error))
    problem = problems[0] if problems else None
    return Report(entry.name, place.source, tuple(reports), counts, problem is None, problem)


def listing(*, data_dir: Folder = None) -> tuple[Listing, ...]:
    """Every dataset of the catalogue, and whether its files are here."""
    listings = []
    for entry in CATALOGUE.values():
        place = _place(entry, data_dir)
        listings.append(
            Listing(
                name=entry.name,
                image=entry.image,
                splits=dict(zip(SPLITS, entry.splits, strict=True)),
                likelihood=entry.likelihood,
                dynamic=entry.dynamic,
                licence=entry.licence,
                attribution=entry.attribution,
                urls=tuple(file.url for file in entry.variants[0].files if file.url),
                source=place.source,
                present=all(files.find(file, place.folder) for file in place.variant.files),
            )
        )
    return tuple(listings)


@dataclass(frozen=True)
class _Place:
    """The variant of a dataset to use and the folder that it is, or will be, in."""

    variant: Variant
    folder: Path
    cache: bool  # files may be downloaded into the folder

    @property
    def source(self) -> str:
        return self.variant.source or ("download" if self.cache else "files")

    def read(self, limit: int, *, progress: bool) -> list[files.Content]:
        if self.cache:
            return [files.read_or_download(file, limit, progress=progress) for file in self.variant.files]
        return [files.verify(file, files.read(file, self.folder, limit)) for file in self.variant.files]


def _place(entry: Entry, data_dir: Folder) -> _Place:
    """The first variant of which something is here, or else the one to download."""
    given = files.given_folder(data_dir)
    places = [
        _Place(
            variant,
            folder=variant.folder or given or files.cache_folder(),
            cache=variant.folder is None and given is None,
        )
        for variant in entry.variants
    ]
    for place in places:
        if any(files.find(file, place.folder) for file in place.variant.files):
            return place
    return places[0]


def _resolve(name: Name) -> Entry | Path:
    if isinstance(name, Entry):
        return name
    if str(name) in CATALOGUE:
        return CATALOGUE[str(name)]
    try:
        path = usable(Path(name).expanduser())
    except (PathError, RuntimeError) as error:  # or no home folder of that name
        raise DataError(f"Expected the name of a dataset or a path that can be used; got {error}.") from None
    if path.suffix == ".npz" or path.exists():
        return path
    near = difflib.get_close_matches(str(name), CATALOGUE, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    raise DataError(f"Expected one of {', '.join(CATALOGUE)}, or the path of an .npz archive; got {str(name)!r}{hint}")


def _dataset(entry: Entry, place: _Place, contents: Sequence[files.Content], seed: int) -> Dataset:
    try:
        arrays = entry.read(entry, [content.data for content in contents], seed)
        for split, images, count in zip(SPLITS, arrays, entry.splits, strict=True):
            if images.shape != (count, *entry.image):
                raise DataError(f"Expected {split} images of shape {(count, *entry.image)}; got {images.shape}.")
    except DataError as error:
        paths = ", ".join(str(content.path) for content in contents)
        raise DataError(f"Cannot use {paths}: {error}") from error
    train, valid, test = (torch.from_numpy(np.ascontiguousarray(images, dtype=np.float32)) for images in arrays)
    return Dataset(
        name=entry.name,
        train=train,
        valid=valid,
        test=test,
        likelihood=entry.likelihood,
        dynamic=entry.dynamic,
        sha256={file.name: content.sha256 for file, content in zip(place.variant.files, contents, strict=True)},
        source=place.source,
    )


def _check_npz(path: Path) -> Report:
    try:
        dataset = load_npz(path, seed=0)
    except DataError as error:
        found = str(path) if path.exists() else None
        file = FileReport(path.name, found, expected=None, got=None, ok=False)
        return Report(path.stem, "files", (file,), counts={}, ok=False, problem=str(error))
    file = FileReport(path.name, str(path), None, f"sha256:{dataset.sha256[path.name]}", ok=True)
    return Report(dataset.name, dataset.source, (file,), dataset.counts, ok=True, problem=None)
