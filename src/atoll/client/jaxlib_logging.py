"""Keep jaxlib from logging ordinary events as errors.

At levels that JAX leaves on, jaxlib's client logs that a local channel is not encrypted, that the connection has ended,
even if this process has closed it, and each object that dies afterwards. While a client connects or disconnects, and
after the loss of its proxy, jaxlib logs nothing. JAX raises the errors that a script needs to know.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from atoll.cluster.environment_variables import LOG_LEVEL

_FATAL = 3
_LEVELS = {"DEBUG": 0, "INFO": 0, "WARNING": 1, "WARN": 1, "ERROR": 2, "CRITICAL": _FATAL, "FATAL": _FATAL}

_is_silenced = False


@contextlib.contextmanager
def silenced_jaxlib() -> Iterator[None]:
    """Keep jaxlib from logging until the block ends. If it was silenced before, it remains silenced."""
    was_silenced = _is_silenced
    silence_jaxlib()
    try:
        yield
    finally:
        if not was_silenced:
            unsilence_jaxlib()


def silence_jaxlib() -> None:
    """Keep jaxlib from logging until `unsilence_jaxlib`."""
    global _is_silenced
    _is_silenced = True
    _set_min_level(_FATAL)


def unsilence_jaxlib() -> None:
    """Let jaxlib log again as JAX's settings and the environment say."""
    import jax

    global _is_silenced
    _is_silenced = False
    of_process = LOG_LEVEL.text()
    default = int(of_process) if of_process.isdecimal() else _LEVELS["WARNING"]
    _set_min_level(_LEVELS.get(jax.config.jax_logging_level or "", default))


def _set_min_level(level: int) -> None:
    from jax._src.lib import utils

    utils.absl_set_min_log_level(level)
