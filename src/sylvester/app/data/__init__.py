"""The application's datasets: embedded, published and the user's own.

``load(name)`` returns a `Dataset` of three splits in [0, 1]; `sylvester.app.data.custom` says how to lay out
one's own images. Loaders touch no global state: what is random in a dataset is a function of the seed.
"""

from sylvester.app.data.dataset import DataError, Dataset, DownloadError
from sylvester.app.data.loading import FileReport, Listing, Report, check, fetch, listing, load

__all__ = [
    "DataError",
    "Dataset",
    "DownloadError",
    "FileReport",
    "Listing",
    "Report",
    "check",
    "fetch",
    "listing",
    "load",
]
