"""The standard output of commands, whose errors end a command with one line instead of a traceback."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

OUTPUT_CLOSED = 141  # as of a process that SIGPIPE has ended


class OutputError(Exception):
    """Standard output cannot be written. `is_closed` if its reader has ended, as with `| head -1`.

    It is no OSError, because Typer ends a command silently with status 1 for one with EPIPE, also of a connection.
    """

    def __init__(self, error: OSError) -> None:
        super().__init__(f"cannot write to standard output: {error.strerror}")
        self.is_closed = isinstance(error, BrokenPipeError)


class _Descriptor(io.FileIO):
    """Standard output without a buffer. Its writes raise OutputError."""

    def write(self, data: io.ReadableBuffer, /) -> int | None:  # type: ignore[name-defined,override,unused-ignore]
        try:
            return super().write(data)
        except OSError as error:
            raise OutputError(error) from None


@contextmanager
def checked_output() -> Iterator[None]:
    """Write the block's standard output completely, or raise OutputError.

    If standard output was closed when this process started, discard it.
    """
    if sys.stdout is None or sys.stdout is sys.__stdout__:
        sys.stdout = _open(sys.stdout)
    try:
        yield
    finally:
        try:
            sys.stdout.flush()
        except OutputError:
            _discard()
            raise


def _open(before: io.TextIOBase | None) -> io.TextIOWrapper:
    """Return a stream like `before`, on the same descriptor."""
    encoding, errors = (before.encoding, before.errors) if before is not None else ("utf-8", "replace")
    raw = _Descriptor(1, "wb", closefd=False)
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding, errors, line_buffering=raw.isatty())


def _discard() -> None:
    """Discard what is buffered, because Python writes it again when it exits, and reports the error again."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)
    with suppress(OutputError, ValueError):
        sys.stdout.flush()
