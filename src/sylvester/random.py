"""Randomness as a function of a key: who asks for the same key gets the same numbers, in any process and any order."""

from __future__ import annotations

import hashlib
import operator

import torch
from torch import Tensor

__all__ = ["Noise", "stream"]

# Noise is drawn in blocks of so many samples, because what torch draws depends on the size of the tensor.
_BLOCK = 16


def stream(*key: int | str) -> torch.Generator:
    """A random stream of its own for each key, on the CPU so that devices do not matter.

    The key is hashed: neighbouring seeds, epochs or images share nothing.

    >>> first, again, other = stream(0, "noise", 7), stream(0, "noise", 7), stream(0, "noise", 8)
    >>> x = torch.randn(3, generator=first)
    >>> torch.equal(x, torch.randn(3, generator=again)), torch.equal(x, torch.randn(3, generator=other))
    (True, False)
    """
    digest = hashlib.blake2b(repr(tuple(map(_plain, key))).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)


class Noise:
    """Standard normal noise, sample after sample: however it is taken, it is the same.

    Drawn on the CPU in float64, it is the same for models on any device and of any precision, too.

    >>> whole = Noise(stream("doctest"), 3).take(5)
    >>> parts = Noise(stream("doctest"), 3)
    >>> torch.equal(whole, torch.cat([parts.take(2), parts.take(3)]))
    True
    """

    def __init__(self, generator: torch.Generator, features: int) -> None:
        self.generator = generator
        self.rest = torch.empty(0, features, dtype=torch.float64)

    def take(self, count: int) -> Tensor:
        """The next ``count`` samples, (count, features)."""
        blocks = [self.rest]
        for _ in range(len(self.rest), count, _BLOCK):
            shape = (_BLOCK, self.rest.shape[1])
            blocks.append(torch.randn(shape, generator=self.generator, dtype=torch.float64))
        taken, self.rest = torch.cat(blocks).tensor_split([count])
        return taken


def _plain(part: int | str) -> int | str:
    """The integers of numpy and torch, which print differently, are integers like any other."""
    try:
        return part if isinstance(part, str) else operator.index(part)
    except TypeError:
        raise ValueError(f"Expected a key of integers and strings; got {part!r}") from None
