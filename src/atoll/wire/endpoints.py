"""Dials and accepts control connections on an event loop, with TLS if the address has it."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from atoll.errors import AtollError, ConnectError
from atoll.wire.address import Address
from atoll.wire.connection import Connection
from atoll.wire.resumption.link_messages import AnyLinkMessage
from atoll.wire.sockets import attempts, bind, cannot_dial, cannot_listen, none_answered
from atoll.wire.tls.identity import HANDSHAKE_SECONDS, Identity
from atoll.wire.tls.layer import TlsLayer
from atoll.wire.tls.tls_errors import no_identity
from atoll.wire.unauthenticated import UnauthenticatedConnections


async def connect(
    address: Address,
    message_type: Any,
    on_message: Callable[[Any], None],
    on_lost: Callable[[str], None],
    *,
    name: str,
    on_link: Callable[[AnyLinkMessage], None] | None = None,
    timeout: float = 10.0,
    role: str = "controller",
    identity: Identity | None = None,
) -> Connection:
    """Connect to the first of the addresses in `address` that answers, within `timeout` seconds.

    With TLS, the peer's certificate must have `role`. Raise ConnectError if the connection fails, and its subclass
    AccessError if one side does not trust the other, and no other address answers either.
    """

    def factory() -> Connection:
        return Connection(message_type, on_message, on_lost, name=name, on_link=on_link)

    if identity is not None:
        if address.tls and identity.has_expired:
            await asyncio.to_thread(identity.await_renewal)
        address = identity.ordered(address)
    elif address.tls:
        raise no_identity(address, name)
    errors = []
    for each, seconds in attempts(address, timeout):
        try:
            return await _connect(each, factory, name, seconds, role, identity)
        except ConnectError as error:
            errors.append(error)
    raise none_answered(address, errors) from None


async def _connect(
    address: Address,
    factory: Callable[[], Connection],
    name: str,
    timeout: float,
    role: str,
    identity: Identity | None,
) -> Connection:
    loop = asyncio.get_running_loop()
    target = f"{name} at {address}"
    try:
        async with asyncio.timeout(timeout):
            if address.is_unix:
                _, connection = await loop.create_unix_connection(factory, address.path)
            elif not address.tls:
                _, connection = await loop.create_connection(factory, address.host, address.port)
            else:
                assert identity is not None, "a process that dials with TLS has an identity"
                secured: asyncio.Future[None] = loop.create_future()
                _, layer = await loop.create_connection(
                    lambda: _dialing_layer(identity.dialing, role, factory, timeout, target, secured),
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
        raise ConnectError(f"{target} did not answer within {timeout:.0f} s") from None
    except AtollError:
        raise
    except OSError as error:
        raise cannot_dial(target, error) from None
    return connection


def _dialing_layer(
    context: ssl.SSLContext,
    role: str,
    factory: Callable[[], Connection],
    timeout: float,
    target: str,
    secured: asyncio.Future[None],
) -> TlsLayer:
    """Return the TLS layer of a dialed connection, which sets `secured` when the handshake ends."""

    def on_secured(error: ConnectError | None) -> None:
        if secured.done():  # it was cancelled
            return
        if error is None:
            secured.set_result(None)
        else:
            secured.set_exception(error)

    return TlsLayer(context, role, factory, timeout, target, on_secured)


def _admitting_layer(
    context: ssl.SSLContext, factory: Callable[[], Connection], unauthenticated: UnauthenticatedConnections
) -> TlsLayer:
    def on_secured(error: ConnectError | None) -> None:
        if error is not None:
            unauthenticated.refused(layer.peer, str(error))

    layer = TlsLayer(context, "", factory, HANDSHAKE_SECONDS, "a peer", on_secured, unauthenticated)
    return layer


async def listen(
    address: Address,
    factory: Callable[[], Connection],
    identity: Identity | None = None,
    unauthenticated: UnauthenticatedConnections | None = None,
) -> tuple[asyncio.Server, Address]:
    """Serve connections at `address` (port 0: any free port). Return the server and its actual address.

    With TLS, `factory` runs after the handshake, which must end in time; until then, `unauthenticated` counts the
    connection. Raise AddressError if the process cannot listen at the address.
    """
    loop = asyncio.get_running_loop()
    pending = unauthenticated or UnauthenticatedConnections()
    try:
        sock = bind(address)
        port = 0 if address.is_unix else sock.getsockname()[1]
        if address.is_unix:
            return await loop.create_unix_server(factory, sock=sock), address
        if not address.tls:
            server = await loop.create_server(factory, sock=sock)
        else:
            assert identity is not None, "a process that listens with TLS has an identity"
            server = await loop.create_server(lambda: _admitting_layer(identity.admitting, factory, pending), sock=sock)
    except OSError as error:
        raise cannot_listen(address, error) from None
    return server, replace(address, port=port)
