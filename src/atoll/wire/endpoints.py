"""How control connections begin: one is dialed, or listened for; by TLS where the address says so."""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from atoll.errors import AccessError, AddressError, AtollError, ConnectError
from atoll.wire.address import Address
from atoll.wire.connection import Connection
from atoll.wire.sockets import attempts, bind, none_answered
from atoll.wire.tls.identity import HANDSHAKE_SECONDS, Identity
from atoll.wire.tls.layer import TlsLayer
from atoll.wire.tls.tls_stream import no_identity
from atoll.wire.unauthenticated import UnauthenticatedConnections


async def connect(
    address: Address,
    message_type: Any,
    on_message: Callable[[Any], None],
    on_lost: Callable[[str], None],
    *,
    name: str,
    timeout: float = 10.0,
    role: str = "controller",
    identity: Identity | None = None,
) -> Connection:
    """Connects to `address` within `timeout` seconds; with TLS where it says so, to a process of that role.

    Of several addresses, to the first that answers. Raises ConnectError that names the address; of its kin AccessError
    where one side does not trust the other.
    """
    for each, seconds in attempts(address, timeout):
        try:
            return await _connect(each, message_type, on_message, on_lost, name, seconds, role, identity)
        except AccessError:
            raise
        except ConnectError as error:
            last = error
    raise none_answered(address, last) from None


async def _connect(
    address: Address,
    message_type: Any,
    on_message: Callable[[Any], None],
    on_lost: Callable[[str], None],
    name: str,
    timeout: float,
    role: str,
    identity: Identity | None,
) -> Connection:
    loop = asyncio.get_running_loop()
    who = f"{name} at {address}"

    def factory() -> Connection:
        return Connection(message_type, on_message, on_lost, name=name)

    try:
        async with asyncio.timeout(timeout):
            if address.is_unix:
                _, connection = await loop.create_unix_connection(factory, address.path)
            elif not address.tls:
                _, connection = await loop.create_connection(factory, address.host, address.port)
            elif identity is None:
                raise no_identity(address, name)
            else:
                secured: asyncio.Future[None] = loop.create_future()
                _, layer = await loop.create_connection(
                    lambda: _dialing(identity.dialing, role, factory, timeout, who, secured),
                    address.host,
                    address.port,
                )
                try:
                    await secured
                except BaseException:
                    layer.abort()
                    raise
                connection = layer.protocol
    except TimeoutError:
        raise ConnectError(f"{who} did not answer within {timeout:.0f} s") from None
    except AtollError:
        raise
    except OSError as error:
        raise ConnectError(f"cannot reach {who}: {_reason(error)}") from None
    return connection


def _dialing(
    context: ssl.SSLContext,
    role: str,
    factory: Callable[[], Connection],
    timeout: float,
    who: str,
    secured: asyncio.Future[None],
) -> TlsLayer:
    """`secured` is done when the handshake is, or has the error."""

    def on_secured(error: ConnectError | None) -> None:
        if secured.done():  # it was cancelled
            return
        if error is None:
            secured.set_result(None)
        else:
            secured.set_exception(error)

    return TlsLayer(context, role, factory, timeout, who, on_secured)


def _admitting(
    context: ssl.SSLContext, factory: Callable[[], Connection], unauthenticated: UnauthenticatedConnections
) -> TlsLayer:
    def on_secured(error: ConnectError | None) -> None:
        if error is not None:
            unauthenticated.refused(layer.peer, str(error))

    layer = TlsLayer(context, "", factory, HANDSHAKE_SECONDS, "a peer", on_secured, unauthenticated)
    return layer


def _reason(error: OSError) -> str:
    if error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)  # asyncio's own text repeats the address
    return error.strerror or str(error)  # of a name's resolution, for instance


async def listen(
    address: Address,
    factory: Callable[[], Connection],
    identity: Identity | None = None,
    unauthenticated: UnauthenticatedConnections | None = None,
) -> tuple[asyncio.Server, Address]:
    """Serves connections at `address` (port 0: any free port). Returns the server and where it listens.

    With TLS a connection is made (`on_made`) once its handshake is done, which has to be in time; until then it is one
    of the `unauthenticated`, as those that `factory` makes may be. Raises AddressError that names the address.
    """
    loop = asyncio.get_running_loop()
    waiting = unauthenticated or UnauthenticatedConnections()
    try:
        sock = bind(address)
        port = 0 if address.is_unix else sock.getsockname()[1]
        if address.is_unix:
            return await loop.create_unix_server(factory, sock=sock), address
        if not address.tls:
            server = await loop.create_server(factory, sock=sock)
        else:
            assert identity is not None, "who listens with TLS has an identity"
            server = await loop.create_server(lambda: _admitting(identity.admitting, factory, waiting), sock=sock)
    except OSError as error:
        raise AddressError(f"cannot listen at {address}: {_reason(error)}") from None
    return server, replace(address, port=port)
