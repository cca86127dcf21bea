"""Keeping freed memory for the next step."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


def keep_memory() -> bool:
    """Asks the C library (glibc) to keep freed memory instead of handing it back to the system. True if it agreed.

    A training step with heatmaps allocates and frees gigabytes; getting them anew from the system, page by page, can
    take longer than the arithmetic. The process then holds on to the memory of its largest step.

    Example:
        >>> agreed = keep_memory()  # once, before the training loop
    """
    try:
        libc = ctypes.CDLL("libc.so.6")
        return bool(libc.mallopt(_M_MMAP_MAX, 0)) and bool(libc.mallopt(_M_TRIM_THRESHOLD, -1))
    except (OSError, AttributeError):
        return False
