"""Distinguish files and processes that do not exist from those that cannot be examined.

An error such as "too many open files", a refused permission or a failing disk says nothing about whether a file or a
process exists. Code that would remove, end or report something because it is missing acts only on `MISSING`. If the
answer is unknown, it does nothing: a poll repeats the question, and a command reports the error.
"""

from __future__ import annotations

import os

# The errors of the operating system that mean "there is no such file" and "there is no such process".
MISSING = (FileNotFoundError, NotADirectoryError, ProcessLookupError)


def exists(path: str | os.PathLike[str]) -> bool:
    """Return whether a file exists. Unlike `Path.exists`, raise OSError if that is unknown."""
    try:
        os.stat(path)
    except MISSING:
        return False
    return True


def read_if_exists(path: str | os.PathLike[str]) -> bytes | None:
    """Return the content of a file, or None if there is no such file. Raise OSError if that is unknown."""
    try:
        with open(path, "rb", 0) as file:  # a `Path` takes longer than the read of a small file
            return file.read()
    except MISSING:
        return None
