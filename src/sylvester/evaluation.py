"""The importance-sampled log-likelihood, log p(x) ≈ log (1/S) Σ_s p(x, z_s) / q(z_s|x), z_s ~ q(z|x).

Images are taken in small groups. A group is encoded once and its flow parameters are made once; then samples
stream through the decoder in chunks, and one scalar log weight is kept of each. The noise of an image depends
on the seed and on the image's index alone, so neither chunks nor groups nor interruptions change the answer.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sylvester.diagnostics import KHAT_LIMIT, effective_sample_size, log_mean_error, pareto_khat
from sylvester.objectives import log_mean_exp
from sylvester.vae.model import VAE, LogTerms

# The share of images with a large or unknown k̂ beyond which the mean estimate is called into question.
_TOLERATED_SHARE = 0.05
# Noise is drawn in blocks of so many samples, because what torch draws depends on the size of the tensor.
_BLOCK = 16


@dataclass(frozen=True)
class Estimate:
    """Log-likelihood estimates in nats, one entry an image: each (N,), float64, on the CPU."""

    log_px: Tensor  # estimates log p(x); too low on average, by about mc_error²/2
    mc_error: Tensor  # Monte Carlo standard error of log_px; nan for one sample
    ess: Tensor  # effective number of samples
    khat: Tensor  # Pareto k̂; nan where undefined
    elbo: Tensor  # from the same samples
    samples: int

    def summary(self) -> dict[str, Any]:
        """Means over the images, their errors, and ``warning``: a sentence where they are not to be trusted.

        ``std_error`` and ``elbo_std_error`` are over images: what another test set of this size would change.
        ``mc_error`` is what another seed would. None stands for what is undefined.
        """
        count = len(self.log_px)
        defined = self.khat[~self.khat.isnan()]
        return {
            "images": count,
            "samples": self.samples,
            "log_px": _mean(self.log_px),
            "std_error": _finite(self.log_px.std() / math.sqrt(count)) if count > 1 else None,
            "mc_error": _finite(self.mc_error.square().sum().sqrt() / count),
            "elbo": _mean(self.elbo),
            "elbo_std_error": _finite(self.elbo.std() / math.sqrt(count)) if count > 1 else None,
            "ess": _mean(self.ess),
            "khat_share": _mean(defined > KHAT_LIMIT),
            "warning": self._warning(),
        }

    def _warning(self) -> str | None:
        count = len(self.log_px)
        if broken := int((~self.log_px.isfinite()).sum()):
            return f"The estimate is not finite for {broken} of {count} images."
        heavy = int((self.khat > KHAT_LIMIT).sum())
        if heavy > _TOLERATED_SHARE * count:
            return (
                f"Pareto k̂ exceeds {KHAT_LIMIT} for {heavy} of {count} images: their importance weights "
                f"are too heavy-tailed for {self.samples} samples, so log p(x) is probably underestimated "
                "and its Monte Carlo error too small."
            )
        unknown = int((self.khat.isnan() & (self.mc_error != 0)).sum())  # equal weights need no k̂
        if unknown > _TOLERATED_SHARE * count:
            return (
                f"Pareto k̂ is unknown for {unknown} of {count} images, so nothing vouches for the estimate: "
                "k̂ needs arviz-stats and at least 25 samples."
            )
        return None


def log_likelihood(
    vae: VAE,
    x: Tensor,
    samples: int = 5000,
    *,
    seed: int = 0,
    chunk: int | None = None,
    first: int = 0,
    checkpoint: str | os.PathLike[str] | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> Estimate:
    """Estimate log p(x) for each image of x (N, …) with ``samples`` importance samples.

    ``chunk`` is the number of latents decoded at once; by default about a hundred, more where x is small.
    ``first`` is the index of ``x[0]`` in the dataset: parts evaluated apart give what the whole would. With
    ``checkpoint``, finished images are kept in that file, and an interrupted evaluation continues after them;
    the file of another evaluation (other model, images, samples or seed) is refused. ``progress`` is called
    with the number of images done and their total.
    """
    if samples < 1 or len(x) < 1 or (chunk is not None and chunk < 1):
        raise ValueError(
            "Expected at least one image, one sample and a chunk of at least one; "
            f"got x of shape {tuple(x.shape)}, samples={samples}, chunk={chunk}"
        )
    if chunk is None:
        # Large chunks leave the cache and fault in fresh pages; small ones pay more for calls than for work.
        chunk = min(max(100, 80_000 // x[0].numel()), 2000)
    images = max(1, chunk // samples)  # so many share a batch
    rows: list[list[float]] = []
    journal = None
    if checkpoint is not None:
        settings = {"images": len(x), "first": first, "samples": samples, "seed": seed}
        journal = _Journal(Path(checkpoint), {**settings, "fingerprint": _fingerprint(vae, x)})
        rows = journal.rows
    with _evaluating(vae):
        while (start := len(rows)) < len(x):
            group = x[start : start + images].to(vae.origin)
            noise = [_Noise(seed, first + start + i, vae.flow.features) for i in range(len(group))]
            log_w = _log_weights(vae, group, noise, samples, chunk // images)
            new = torch.stack([column(log_w) for column in _COLUMNS.values()], 1).tolist()
            rows += new
            if journal is not None:
                journal.append(new)
            if progress is not None:
                progress(len(rows), len(x))
    columns = torch.tensor(rows, dtype=torch.float64).unbind(1)
    return Estimate(**dict(zip(_COLUMNS, columns, strict=True)), samples=samples)


# What is kept of the log weights (S, B) of a group of images: one number an image for each name.
_COLUMNS: dict[str, Callable[[Tensor], Tensor]] = {
    "log_px": log_mean_exp,
    "mc_error": log_mean_error,
    "ess": effective_sample_size,
    "khat": pareto_khat,
    "elbo": lambda log_w: log_w.mean(0),
}


def _log_weights(vae: VAE, x: Tensor, noise: list[_Noise], samples: int, chunk: int) -> Tensor:
    """Log importance weights (S, B), in float64 on the CPU, ``chunk`` samples of each image at a time."""
    posterior = vae.posterior(x)
    log_w = torch.empty(samples, len(x), dtype=torch.float64)
    for part in log_w.split(chunk):
        epsilon = torch.stack([image.take(len(part)) for image in noise], 1)  # (chunk, B, D)
        terms = vae.log_terms(x, len(part), noise=epsilon.to(vae.origin), posterior=posterior)
        # The terms cancel to a large part: add them up in float64.
        part.copy_(LogTerms(*(term.cpu().double() for term in terms)).log_w)
    return log_w


class _Noise:
    """The standard normal noise of one image, sample after sample: however it is taken, it is the same.

    Drawn on the CPU in float64, it is the same for models on any device and of any precision, too.
    """

    def __init__(self, seed: int, index: int, features: int) -> None:
        # Hashed, so that neighbouring seeds and images share nothing.
        digest = hashlib.blake2b(f"{seed} {index}".encode(), digest_size=8).digest()
        self.generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
        self.rest = torch.empty(0, features, dtype=torch.float64)

    def take(self, count: int) -> Tensor:
        """The next ``count`` samples, (count, D)."""
        blocks = [self.rest]
        for _ in range(len(self.rest), count, _BLOCK):
            shape = (_BLOCK, self.rest.shape[1])
            blocks.append(torch.randn(shape, generator=self.generator, dtype=torch.float64))
        taken, self.rest = torch.cat(blocks).tensor_split([count])
        return taken


class _Journal:
    """Finished images in a file that may be cut off at any moment: a header, then a line of JSON a group.

    The header comes into being whole, by renaming. Lines are only ever appended, and one that was cut off is
    dropped when the file is next opened.
    """

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        self.path = path
        self.rows: list[list[float]] = []
        expected = (json.dumps(header) + "\n").encode()
        if not path.exists():
            partial = path.with_name(path.name + ".part")
            partial.write_bytes(expected)
            partial.replace(path)
        found, *lines = path.read_bytes().splitlines(keepends=True) or [b""]
        if found != expected:
            raise ValueError(
                f"Expected {path} to hold an evaluation with {expected.decode().strip()}; got "
                f"{found[:300].decode(errors='replace').strip()!r}: delete it to start over"
            )
        complete = [line for line in lines if line.endswith(b"\n")]
        if len(complete) < len(lines):
            os.truncate(path, len(found) + sum(map(len, complete)))
        for line in complete:
            self.rows += json.loads(line)

    def append(self, rows: list[list[float]]) -> None:
        with self.path.open("ab") as file:
            file.write((json.dumps(rows) + "\n").encode())


def _fingerprint(vae: VAE, x: Tensor) -> str:
    """A checksum of the model's structure and weights, and of the images."""
    digest = hashlib.sha256(f"{vae!r} {vae.prior!r}".encode())
    for name, tensor in [*vae.state_dict().items(), ("x", x)]:
        data = tensor.detach().cpu().contiguous()
        digest.update(f"{name} {data.dtype} {tuple(data.shape)}".encode())
        digest.update(ctypes.string_at(data.data_ptr(), data.numel() * data.element_size()))
    return digest.hexdigest()


@contextmanager
def _evaluating(vae: VAE) -> Iterator[None]:
    """No gradients, and every module in evaluation mode until the end."""
    modes = {module: module.training for module in vae.modules()}
    vae.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def _mean(values: Tensor) -> float | None:
    return _finite(values.double().mean())


def _finite(value: Tensor) -> float | None:
    return value.item() if value.isfinite() else None
