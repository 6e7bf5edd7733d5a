"""Forks of processes that may have threads."""

from __future__ import annotations

import os
import warnings


def fork_quietly() -> int:
    """Fork without the warnings about threads, and return what `os.fork` does.

    Python and JAX warn of locks that other threads may hold. The child must take none of these, and must end by
    `os._exit`. Raises OSError if there can be no child.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return os.fork()
