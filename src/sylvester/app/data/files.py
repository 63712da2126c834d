"""Find, read, check and download the files of a dataset. Only content that matches its checksum is used."""

from __future__ import annotations

import gzip
import hashlib
import os
import zlib
from dataclasses import dataclass
from pathlib import Path

import pooch
import requests
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from sylvester.app.data.catalogue import File
from sylvester.app.data.dataset import DataError, DownloadError
from sylvester.app.paths import PathError, open_regular

ENVIRONMENT = "SYLVESTER_DATA"
_OWN_FOLDER = f"a folder named by --data-dir or {ENVIRONMENT}"


@dataclass(frozen=True)
class Content:
    """The plain content of a file, with its checksums; read once, for the checks and for the parser."""

    path: Path
    data: bytes
    sha256: str

    @classmethod
    def read(cls, path: Path, limit: int) -> Content:
        """At most ``limit`` bytes: a few megabytes of gzip can be gigabytes of plain content."""
        try:
            with open_regular(path) as file:
                data = (gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file).read(limit + 1)
        except PathError as error:
            raise DataError(f"Expected a file at {path}; got {error}.") from error
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise DataError(f"Expected a gzipped file at {path}; got a damaged or truncated one ({error}).") from error
        except OSError as error:
            raise DataError(f"Expected a readable file at {path}; got the error {error.strerror or error}.") from error
        if len(data) > limit:
            raise DataError(f"Expected at most {limit:,} bytes in {path}, plain; got more: it is another file.")
        return cls(path, data, hashlib.sha256(data).hexdigest())

    def checksum_like(self, expected: str) -> str:
        """The checksum by the algorithm that ``expected`` names."""
        algorithm = expected.partition(":")[0]
        digest = self.sha256 if algorithm == "sha256" else hashlib.new(algorithm, self.data).hexdigest()
        return f"{algorithm}:{digest}"


def given_folder(data_dir: str | os.PathLike[str] | None) -> Path | None:
    """The folder the user names, by argument or environment: there nothing is ever downloaded."""
    name = data_dir if data_dir is not None else os.environ.get(ENVIRONMENT) or None
    if name is None:
        return None
    folder = Path(name).expanduser()
    if not folder.is_dir():
        found = "a file" if folder.exists() else "nothing there"
        raise DataError(f"Expected a folder of data files at {folder}; got {found}.")
    return folder


def cache_folder() -> Path:
    return Path(pooch.os_cache("sylvester"))


def find(file: File, folder: Path) -> Path | None:
    """The file in a folder, plain or gzipped."""
    candidates = (folder / file.name, folder / f"{file.name}.gz")
    return next((path for path in candidates if path.exists()), None)


def read(file: File, folder: Path, limit: int) -> Content:
    """A file that must lie in the folder already; not checked yet."""
    path = find(file, folder)
    if path is None:
        how = f"download it from {file.url}" if file.url else "copy it"
        raise DataError(f"Expected {file.name}, plain or .gz, in {folder}; got neither: {how} into that folder.")
    return Content.read(path, limit)


def verify(file: File, content: Content) -> Content:
    got = content.checksum_like(file.checksum)
    if got != file.checksum:
        again = f"download it again from {file.url}" if file.url else "copy it again"
        raise DataError(
            f"Expected {content.path} to have the checksum {file.checksum}; got {got}: "
            f"the file is truncated or altered, so {again}."
        )
    return content


def read_or_download(file: File, limit: int, *, progress: bool) -> Content:
    """A file of the cache, downloaded first where it is missing or damaged."""
    folder = cache_folder()
    try:
        return verify(file, read(file, folder, limit))
    except DataError:  # missing, unreadable or altered
        if file.url is None:
            raise
    return Content.read(_download(file, file.url, folder, progress=progress), limit)


def _download(file: File, url: str, folder: Path, *, progress: bool) -> Path:
    pooch.get_logger().setLevel("WARNING")  # it would announce each download on stderr
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    try:
        with Progress(*columns, console=Console(stderr=True), disable=not progress) as display:
            downloader = pooch.HTTPDownloader(progressbar=_Bar(display, file.name), chunk_size=1 << 16)
            path = pooch.retrieve(url, file.checksum, file.name, folder, downloader=downloader)
    except OSError as error:  # includes every error of requests, and a full disk
        unreachable = isinstance(error, requests.ConnectionError)  # whose own text is a chain of causes
        raise DownloadError(
            f"Expected to download {file.name} from {url} into {folder}; "
            f"got {'no connection to the server' if unreachable else f'the error {error}'}: "
            f"try again, or put the file into {_OWN_FOLDER}."
        ) from error
    except ValueError as error:  # pooch's answer to a checksum that does not match
        raise DownloadError(
            f"Expected {url} to have the checksum {file.checksum}; got other content, which was not kept: "
            f"try again, or put the file into {_OWN_FOLDER}."
        ) from error
    return Path(path)


class _Bar:
    """What pooch asks of a progress bar, shown by rich."""

    def __init__(self, display: Progress, label: str):
        self._display = display
        self._task = display.add_task(label, total=None)

    @property
    def total(self) -> float | None:
        return self._display.tasks[0].total

    @total.setter
    def total(self, size: int) -> None:
        self._display.update(self._task, total=size or None)  # 0: the server did not say

    def update(self, size: int) -> None:
        self._display.advance(self._task, size)

    def reset(self) -> None:
        self._display.update(self._task, completed=0)

    def close(self) -> None:
        """The display closes itself, also after an error."""
