"""Filters standard error, because jaxlib's client logs ordinary events as errors.

Its C++ code writes to file descriptor 2, at log levels that JAX leaves on: that a local channel is not encrypted, and,
with a stack trace, that the connection has ended, even if this process has closed it. `filtered_stderr` drops those
messages and passes on all others.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
import threading
from collections.abc import Iterator

from atoll.cluster.environment_variables import LOG_LEVEL

_ORDINARY = re.compile(
    rb"grpc_credentials_possibly_insecure_wrapper"
    rb"|IFRT proxy server disconnected"
    rb"|Connection to IFRT proxy server was terminated"
    rb"|Failed to destroy `LoadedExecutable`"
    rb"|Failed to delete host buffer: UNAVAILABLE"
    rb"|Batched response from ifrt proxy server"
)
# Further lines of such a message, since JAX 0.12.
_MORE = re.compile(rb"=== Source Location Trace|external/|; Stack trace:")
_FATAL = 3
_LEVELS = {"DEBUG": 0, "INFO": 0, "WARNING": 1, "WARN": 1, "ERROR": 2, "CRITICAL": _FATAL, "FATAL": _FATAL}
_OUR_OWN = b"atoll: "
_TRACE_ENDS = b"*** End stack trace ***"


@contextlib.contextmanager
def filtered_stderr() -> Iterator[None]:
    """Filter what this process writes to descriptor 2 until the block ends."""
    try:
        sys.stderr.flush()
        original = os.dup(2)
    except (OSError, AttributeError, ValueError):  # standard error is missing, or not a file
        yield
        return
    readable, writable = os.pipe()
    pump = threading.Thread(target=_pump, args=(readable, original), daemon=True)
    try:
        pump.start()
        is_pumped = True
    except RuntimeError:  # an exit handler can start no thread since Python 3.12, so filter the output afterwards
        is_pumped = False
        os.close(readable)
        os.close(writable)
        with tempfile.TemporaryFile() as file:
            readable, writable = os.dup(file.fileno()), os.dup(file.fileno())
    os.dup2(writable, 2)
    os.close(writable)
    try:
        yield
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.flush()
        os.dup2(original, 2)
        if is_pumped:
            pump.join(5.0)
        else:
            os.lseek(readable, 0, os.SEEK_SET)
            _pump(readable, original)
        os.close(original)


def silence_jaxlib() -> None:
    """Keep jaxlib from logging, because its client has lost its server and logs an error for each object that dies."""
    _set_least_level(_FATAL)


def unsilence_jaxlib() -> None:
    """Let jaxlib log again as JAX's settings and the environment say."""
    import jax

    of_process = LOG_LEVEL.text()
    default = int(of_process) if of_process.isdecimal() else _LEVELS["WARNING"]
    _set_least_level(_LEVELS.get(jax.config.jax_logging_level or "", default))


def _set_least_level(level: int) -> None:
    from jax._src.lib import utils

    utils.absl_set_min_log_level(level)


def _pump(readable: int, original: int) -> None:
    tracing = dropped = False
    with open(readable, "rb") as lines:
        for line in lines:
            if line.startswith(_OUR_OWN):
                os.write(original, line)
            elif tracing:
                tracing = _TRACE_ENDS not in line
            elif _ORDINARY.search(line) or (dropped and _MORE.match(line)):
                tracing = b"*** Begin stack trace" in line
                dropped = True
            elif not (dropped and line == b"\n"):  # an empty line ends a dropped message
                dropped = False
                os.write(original, line)
