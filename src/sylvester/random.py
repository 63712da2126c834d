"""Randomness as a function of a key: who asks for the same key gets the same numbers, in any process and any order."""

from __future__ import annotations

import hashlib
import operator

import torch

__all__ = ["stream"]


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


def _plain(part: int | str) -> int | str:
    """The integers of numpy and torch, which print differently, are integers like any other."""
    try:
        return part if isinstance(part, str) else operator.index(part)
    except TypeError:
        raise ValueError(f"Expected a key of integers and strings; got {part!r}") from None
