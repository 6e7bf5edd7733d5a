"""The process of an island of null devices, with all of its hosts on one event loop."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from atoll.cluster.processes.bugs import BugTrap
from atoll.cluster.processes.leases import LAPSED_STATUS
from atoll.cluster.processes.lifeline import Lease, watch_in_thread
from atoll.cluster.processes.process_logging import start_logging
from atoll.cluster.processes.process_runtime import freeze_gc, read_options, run_loop
from atoll.cluster.processes.startup_heartbeat import StartupHeartbeat
from atoll.devices.null.model import chosen_model
from atoll.devices.null.null_backend import Collectives
from atoll.devices.null.sim_events import FineClock
from atoll.engines.null_hosts.null_host import NullHost
from atoll.errors import AccessError, ConnectError
from atoll.peers.data_port import DataPort
from atoll.protocol import messages as m
from atoll.retries import Retry
from atoll.security.access import identity_for, token_for
from atoll.security.roles import Role
from atoll.transfers.inbox import Inbox
from atoll.wire.address import check_may_listen, parse_address
from atoll.wire.resumption.dialed_connection import DialedConnection, dial
from atoll.wire.tls.identity import Identity
from atoll.worker.host_group import decoded
from atoll.worker.read_threads import ReadThreads
from atoll.worker.worker_main import CONNECT_SECONDS, RETRY_SECONDS, advertised, introduction
from atoll.worker.worker_options import IslandOptions

_log = logging.getLogger(__name__)

_STACK_BYTES = 256 * 1024  # of each thread; most threads only wait on a socket


class NullIsland:
    """The hosts of an island, each with its connection to the controller.

    `stop` is set when the controller ends a host or when a connection to it is lost.
    """

    def __init__(self, options: IslandOptions, stop: asyncio.Event) -> None:
        self._options = options
        self._stop = stop
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._clock = FineClock(self._loop)
        self._collectives = Collectives()
        self._neighbors: dict[int, Inbox] = {}
        self._hosts: dict[int, NullHost] = {}
        self._connections: list[DialedConnection] = []
        self._readers = ReadThreads()
        self._lease = Lease(self._lapsed)
        self._model = chosen_model()
        self._name = f"hosts {options.first} to {options.first + options.hosts - 1}"
        self._bugs = BugTrap(f"the process of {self._name}")
        self._bugs.watch_threads()
        self._bugs.watch_loop(self._loop)
        self._identity: Identity | None = None
        self._sent = b""  # the last content between hosts, which `_message` decodes
        self._message: m.InGroup = m.MemberDone(0, ())

    async def start(self) -> None:
        options = self._options
        self._identity = await asyncio.to_thread(
            identity_for, parse_address(options.controller), Role.HOST, self._name, CONNECT_SECONDS
        )
        for rank in range(options.hosts):
            await self._start_host(rank)

    async def _start_host(self, rank: int) -> None:
        options = self._options
        number = options.first + rank
        host: NullHost | None = None

        def handle(message: Any) -> None:
            assert host is not None
            try:
                continues = host.handle(message)
            except Exception as error:  # ends the process, since all hosts share state
                self._bugs.end(error)
                raise
            if not continues:
                self._stop.set()

        connection = await self._connect(handle)
        self._connections.append(connection)
        address = parse_address(options.data_address.format(host=number))
        token = token_for(parse_address(options.controller), Role.HOST)
        check_may_listen(address, token)
        host = NullHost(
            number,
            rank,
            options.devices,
            self._model,
            self._clock,
            self._collectives,
            self._neighbors,
            lambda inbox: DataPort(address, inbox, identity=self._identity),
            self._reporter(connection),
            self._lease.renew,
            self._call_soon,
            self._readers,
            self._send,
        )
        self._hosts[number] = host
        where = advertised(host.port.address, options.advertise)
        for message in introduction(options.island, number, host.backend, where, options.incarnation, token):
            connection.send(message)

    async def _connect(self, handle: Callable[[Any], None]) -> DialedConnection:
        """Connect to the controller. Retry for CONNECT_SECONDS, since it may still be starting."""
        reach = partial(
            dial,
            parse_address(self._options.controller),
            m.ToWorker,
            handle,
            lambda _: self._stop.set(),
            name="the controller",
            identity=self._identity,
        )
        retry = Retry(RETRY_SECONDS, patience=CONNECT_SECONDS)
        return await retry.call_async(reach, ConnectError, unless=AccessError)

    def _send(self, host: int, content: bytes, in_pieces: bool = False) -> None:
        """Deliver a message between hosts of a group, which are all in this process. Decode repeated content once."""
        if content != self._sent:
            self._sent, self._message = content, decoded(content)
        self._hosts[host].group.receive_message(self._message)

    def _call_soon(self, call: Callable[[], None]) -> None:
        self._loop.call_soon_threadsafe(call)

    def _reporter(self, connection: DialedConnection) -> Callable[..., None]:
        def report(*messages: Any) -> None:
            if threading.get_ident() != self._thread:
                self._loop.call_soon_threadsafe(partial(report, *messages))
                return
            for message in messages:
                connection.send(message)

        return report

    def _lapsed(self) -> None:
        if any(each.can_resume for each in self._connections):  # the connections wait for the controller's grace time
            return
        _log.error("the controller is silent: this island ends")
        os._exit(LAPSED_STATUS)


async def serve(options: IslandOptions, signs: StartupHeartbeat, stop: asyncio.Event) -> None:
    with signs.waiting("connected to the controller"):
        await NullIsland(options, stop).start()
    signs.ready()
    freeze_gc()
    await stop.wait()


def main() -> None:
    options = read_options(IslandOptions)
    signs = StartupHeartbeat.of_arguments()
    start_logging("null island")
    watch_in_thread(options.parent, lambda: os._exit(0))
    threading.stack_size(_STACK_BYTES)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    try:
        run_loop(partial(serve, options, signs))
    except Exception:
        _log.exception("this island fails")
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    main()
