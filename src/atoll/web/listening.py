"""Where a page is served."""

from __future__ import annotations

import os
import socket

from atoll.errors import AddressError
from atoll.wire.address import Address
from atoll.wire.sockets import bind


def listening_socket(address: Address) -> socket.socket:
    """A socket that listens at HOST:PORT; port 0 is any free one. Raises AddressError."""
    if address.is_unix or address.others:
        raise AddressError(f"{address}: a page is served at one HOST:PORT")
    try:
        return bind(address)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror or str(error)
        raise AddressError(f"cannot listen at {address}: {reason}") from None
