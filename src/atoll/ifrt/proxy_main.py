"""The proxy process, which serves one client on its machine, or listens for any client (`atoll proxy`)."""

from __future__ import annotations

import gc

if __name__ == "__main__":
    gc.disable()  # until `run_loop`, since the objects of modules are permanent

import asyncio
import logging
import os
import shutil
from functools import partial

from atoll.cluster.environment_variables import SESSION_PLATFORM, TOKEN
from atoll.cluster.processes.lifeline import watch_in_loop
from atoll.cluster.processes.process_logging import start_logging
from atoll.cluster.processes.process_runtime import (
    StopEvent,
    freeze_gc,
    read_options,
    run_loop,
    tell_parent,
    write_ready,
)
from atoll.errors import AtollError, reported_name
from atoll.grpc import GrpcServer
from atoll.ifrt.ifrt_service import Service
from atoll.ifrt.ifrt_session import FIRST_MINTED_HANDLE
from atoll.ifrt.proxy_options import END_COMPILATIONS, ProxyOptions, Ready, SessionLost
from atoll.missing import MISSING
from atoll.protocol.messages import FailOnLoss
from atoll.session.cluster_session import ClusterSession
from atoll.session.session_opening import SessionOpener
from atoll.wire.address import Address, check_may_listen, parse_address
from atoll.wire.sockets import cannot_listen
from atoll.wire.unauthenticated import UnauthenticatedConnections

_log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.1


async def serve(options: ProxyOptions, stop: StopEvent) -> None:
    token = TOKEN.text()  # that clients of this proxy have to show
    controller = parse_address(options.controller)
    address = parse_address(options.listen)
    first: list[ClusterSession] = []
    sessions = SessionOpener(
        controller,
        options.label,
        options.client or os.getpid(),
        options.patience,
        FIRST_MINTED_HANDLE,
        SESSION_PLATFORM.text(),
        on_hosts_lost=lambda: _note(options.losses) if options.losses else None,
        run=options.run,
    )

    async def open_one() -> ClusterSession:
        if first:
            return first.pop()
        session = await sessions.open()
        if options.fail_on_loss:
            session.send(FailOnLoss())
        return session

    service = Service(
        open_one,
        token="" if address.is_local else token,
        transfer_directory=options.transfer_directory,
        callback_address=lambda: _beside(address, options.directory),
        on_session_end=stop.set if options.client else lambda: None,
    )
    server = GrpcServer(service.methods(), strangers=UnauthenticatedConnections())
    if options.client:
        asyncio.get_running_loop().add_signal_handler(END_COMPILATIONS, service.end_compilations)
    watch_in_loop(options.parent, stop.set)
    try:
        check_may_listen(address, token)
        opened: ClusterSession | None = None
        if options.client:
            opened = await stop.wait_with(open_one())
            if opened is None:
                return
            first.append(opened)
        if address.is_unix:
            await server.listen_unix(address.path)
            where = str(address)
        else:
            try:
                port = await server.listen_tcp(address.host, address.port)
            except OSError as error:
                raise cannot_listen(address, error) from None
            where = str(Address(host=address.host, port=port))
    except (AtollError, OSError) as error:
        write_ready(options.ready_fd, Ready(error=reported_name(error), message=str(error)))
        return
    write_ready(options.ready_fd, Ready(address=where), is_last=opened is None)
    if opened is not None:
        opened.call_before_loss(partial(tell_parent, options.ready_fd, SessionLost()))
    freeze_gc()
    await stop.wait()
    service.close()
    await server.close()
    if opened is not None:
        opened.close()  # the client may have ended before it used the session
        await _until_left(opened)


async def _until_left(session: ClusterSession) -> None:
    """Wait until the controller, which may be restarting, knows that the session has ended."""
    while not session.has_left:
        await asyncio.sleep(_LOOK_SECONDS)


def _beside(address: Address, directory: str) -> Address:
    """Return the address for the callbacks of this proxy's clients: a socket in its directory, or any port."""
    return Address(path=f"{directory}/callbacks.sock") if directory else Address(host=address.host or "127.0.0.1")


def _note(path: str) -> None:
    """Add a byte to the file at `path`, also if this process has too many open files."""
    try:
        os.truncate(path, os.stat(path).st_size + 1)
    except MISSING:  # the client has ended
        return
    except OSError as error:
        _log.error("the client does not learn that hosts have failed: cannot write %s: %s", path, error)


def main() -> None:
    options = read_options(ProxyOptions)
    start_logging("proxy")
    try:
        run_loop(lambda stop: serve(options, stop))
    finally:
        # `directory` names the other one, so remove it last. If this process is killed, the next client removes both.
        for directory in (options.transfer_directory, options.directory):
            if directory and options.client:
                shutil.rmtree(directory, ignore_errors=True)
    os._exit(0)  # threads may still block on the data channels


if __name__ == "__main__":
    main()
