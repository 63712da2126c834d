"""Keep freed memory for the next step.

Every training step allocates and frees the same large tensors. The C library on Linux returns blocks beyond a threshold
to the operating system and has them handed back page by page, zeroed, at each allocation: about half the time of
writing a gradient of tens of megabytes. Told to keep them, it finds them again. Peak memory is the same; the process
holds on to it until it ends.

``SYLVESTER_ALLOCATOR=system`` in the environment leaves everything as it was.
"""

from __future__ import annotations

import ctypes
import os
import sys

# From malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


def keep_freed_memory() -> bool:
    """Whether the process's allocator is glibc's and agreed."""
    if os.environ.get("SYLVESTER_ALLOCATOR") == "system" or not sys.platform.startswith("linux"):
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return False
    # No block is mapped by itself, and the top of the heap is never trimmed.
    return bool(library.mallopt(_M_MMAP_MAX, 0) and library.mallopt(_M_TRIM_THRESHOLD, -1))
