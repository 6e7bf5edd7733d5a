"""XLA's coordination service, through which the processes of an island or a world find each other."""

from __future__ import annotations

from typing import Any

from jax._src.lib import _jax

from atoll.errors import Code, StatusError
from atoll.wire.address import parse_address
from atoll.wire.sockets import check_is_free


def start_service(address: str, processes: int, **options: Any) -> Any:
    """Start the service for so many processes at `address`, such as unix:/path, and return it.

    `options` are those of jaxlib. Raise UNAVAILABLE if the service cannot listen there: XLA would end this process with
    a segmentation fault.
    """
    try:
        check_is_free(parse_address(address))
    except OSError as error:
        text = f"XLA's coordination service cannot listen at {address}: {error.strerror or error}"
        raise StatusError(Code.UNAVAILABLE, text) from None
    return _jax.get_distributed_runtime_service(address, processes, **options)
