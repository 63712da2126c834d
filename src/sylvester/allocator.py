"""Keep freed memory for the next step, where a process does little else than train or evaluate."""

from __future__ import annotations

import ctypes
import os
import sys

__all__ = ["keep_freed_memory"]

# From malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


def keep_freed_memory() -> bool:
    """Tell the C library to keep the memory that this process frees; whether it is glibc and agreed.

    Every training step allocates and frees the same large tensors. glibc returns blocks beyond a threshold to the
    operating system and has them handed back page by page, zeroed, at each allocation: about half the time of
    writing a gradient of tens of megabytes. Told to keep them, it finds them again.

    The cost: from then on the whole process, and not this library alone, holds on to the most memory that it ever
    used, until it ends. A freed tensor of 1 GiB stays resident, and because blocks that are kept can fragment, large
    temporaries of different sizes may add up. Worth it in a process of its own; the command line does it for
    itself and its children. ``SYLVESTER_ALLOCATOR=system`` in the environment makes this a no-op.
    """
    if os.environ.get("SYLVESTER_ALLOCATOR") == "system" or not sys.platform.startswith("linux"):
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return False
    # No block is mapped by itself, and the top of the heap is never trimmed.
    return bool(library.mallopt(_M_MMAP_MAX, 0) and library.mallopt(_M_TRIM_THRESHOLD, -1))
