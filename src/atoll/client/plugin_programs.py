"""Requests to Atoll as IFRT plugin programs, the only way for JAX's client to send other requests than IFRT's.

The reply is always a loaded executable.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from atoll.client.client_caches import client_cache
from atoll.errors import status_in_text
from atoll.protocol.questions import Question, write_question
from atoll.protocol.submission import Staging, encode

# Held while arguments are staged, since the request that takes them must follow without other threads' requests.
staging = threading.Lock()

_ATOLL = "proxy/atoll"  # jaxlib's name for a client of our proxy


def is_atoll(client: Any) -> bool:
    """Return whether a JAX client's server is Atoll."""
    return bool(client.runtime_type == _ATOLL)


def client_of(array: Any) -> Any:
    """Return the client of a jaxlib array, or None for other objects."""
    device_list = getattr(getattr(array, "sharding", None), "_internal_device_list", None)
    return device_list[0].client if device_list else None


def submit(client: Any, payload: bytes) -> Any:
    """Send `payload` and return the server's executable. Raise jax.errors.JaxRuntimeError if the server refuses."""
    from jax._src.lib import _jax

    plugin: Any = _jax.ifrt_programs
    program = plugin.make_plugin_program(payload)
    return client.compile_ifrt_program(program, plugin.make_plugin_compile_options())


@client_cache(256)
def staging_call(client: Any, devices: tuple[int, ...]) -> Callable[[Iterable[Any]], Any]:
    """Return a function that stages arrays on these devices as arguments of the next request."""
    execute: Callable[[Iterable[Any]], Any] = submit(client, encode(Staging(devices))).execute_sharded
    return execute


def ask(client: Any, question: Question) -> bytes:
    """Return the server's answer to `question`. Raise jax.errors.JaxRuntimeError if the server refuses."""
    return bytes(submit(client, write_question(question)).fingerprint)


@contextmanager
def status_errors() -> Iterator[None]:
    """Raise StatusError in place of JAX's exception if something fails on the cluster. Also a decorator."""
    import jax

    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        status = status_in_text(error)
        raise status.exception() from error
