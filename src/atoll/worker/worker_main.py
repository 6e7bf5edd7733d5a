"""The worker process, one per host. Its main thread reads control messages, and other threads do everything else."""

from __future__ import annotations

import gc

if __name__ == "__main__":
    gc.disable()  # until `starting`, since the objects of modules are permanent

import logging
import os
import queue
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from msgspec.structs import replace

from atoll._version import __version__
from atoll.cluster.processes.bugs import BugTrap
from atoll.cluster.processes.client_directories import HOST_DIRECTORIES, sweep
from atoll.cluster.processes.leases import LAPSED_STATUS
from atoll.cluster.processes.lifeline import Lease, watch_in_thread
from atoll.cluster.processes.process_logging import start_logging
from atoll.cluster.processes.process_runtime import freeze_gc, read_options, starting
from atoll.cluster.processes.startup_heartbeat import StartupHeartbeat
from atoll.cluster.sandbox.mechanisms import Mechanisms
from atoll.devices.compilers.compiler_process import limits_from_environment
from atoll.devices.compilers.compiler_server import CompilerServer
from atoll.devices.device import DeviceBackend
from atoll.devices.device_kinds import kind_of
from atoll.devices.partial_jax import partial_jax
from atoll.errors import AccessError, AtollError, ConnectError
from atoll.host_services.calls.call_messages import ReadWanted
from atoll.host_services.calls.client_calls import Calls
from atoll.host_services.calls.direct_channels import OnAnswer
from atoll.host_services.profiles.profile_recorder import ProfileRecorder
from atoll.host_services.python.python_options import PythonHost
from atoll.host_services.python.python_sessions import PythonSessions
from atoll.peers.data_port import DataPort
from atoll.peers.host_watch import neighbors
from atoll.protocol import messages as m
from atoll.retries import Retry
from atoll.security.access import identity_for, token_for
from atoll.security.roles import Role
from atoll.transfers.channel import DataChannel
from atoll.transfers.inbox import Inbox
from atoll.transfers.transfer_kinds import KINDS, ONE_CLIENT_KINDS
from atoll.wire.address import Address, check_may_listen, parse_address
from atoll.wire.blocking import BlockingConnection
from atoll.wire.sockets import free_address
from atoll.wire.tls.identity import Identity
from atoll.worker.compilers import Compilers
from atoll.worker.executor_thread import ExecutorThread
from atoll.worker.host_functions import HostFunctions
from atoll.worker.host_group import HostGroup
from atoll.worker.host_links import HostLinks
from atoll.worker.host_network import DataPortNetwork, feeds_lost
from atoll.worker.host_worlds import HostWorlds
from atoll.worker.message_handler import MessageHandler
from atoll.worker.spill_store import SpillStore
from atoll.worker.step_runner import StepRunner
from atoll.worker.store import TypeKeys
from atoll.worker.worker_options import WorkerOptions

_log = logging.getLogger(__name__)

RETRY_SECONDS = 0.02
_LOOPBACK = "127.0.0.1"


def open_devices(options: WorkerOptions, heartbeat: StartupHeartbeat) -> DeviceBackend:
    """Open this host's devices, of the kind that its platform selects."""
    heartbeat.report("imported what runs its devices")
    kind = kind_of(options.platform)
    with partial_jax(options.platform):
        open_backend = resolve_name(kind.backend)
        with heartbeat.waiting("opened its devices"):  # which waits for the other hosts of the island
            if options.among_islands and kind.among_islands:
                resolve_name(kind.among_islands)(options.membership, options.directory)
            backend: DeviceBackend = open_backend(options.devices, options.cache_directory, options.membership)
    return backend


class Worker:
    """A worker: its parts, and the messages between them and the control connection.

    Messages pass between the parts in circles. For example, a client's answer arrives at the data port and ends a call,
    and a call uses the data port. So the constructor makes the parts in one order, and passes methods of this object
    where a part needs one that is made later. Nothing calls these methods before the constructor has returned: the data
    port admits no peer before the controller's first message, which `run` reads.
    """

    def __init__(
        self,
        options: WorkerOptions,
        connection: BlockingConnection,
        backend: DeviceBackend,
        bugs: BugTrap,
        identity: Identity | None = None,
    ) -> None:
        self.connection = connection
        self._host = options.host
        self._bugs = bugs
        keys = TypeKeys()
        inbox = Inbox(lambda session, feed: connection.send(m.FeedsArrived(session, (feed,))))
        address = parse_address(options.data_address)
        token = token_for(parse_address(options.controller), Role.HOST)
        check_may_listen(address, token)
        calls = Calls(self._to_proxy, options.host, self._read, self._receive_from_client)
        self._data_port = data_port = DataPort(
            address,
            inbox,
            ONE_CLIENT_KINDS if options.has_one_client else KINDS,
            identity,
            neighbors_of(options),
            on_lost=self._channel_lost,
            on_silent=lambda host, seconds: connection.send(m.PeerSilent(host, seconds)),
            on_control=self._receive_in_group,
            answers=calls,
        )
        self._links = HostLinks(data_port, lambda host, text: connection.send(m.LinkLost(host, text)))
        self._group = HostGroup(options.host, self._handle, self._links.send, connection.send)
        report = self._group.report
        rank = rank_of(options)
        worlds = worlds_of(options, backend, data_port.address, report)
        python = PythonSessions(
            PythonHost(
                options.host,
                rank,
                options.controller,
                options.data_address,
                options.directory,
                options.hidden,
                "" if options.membership is None else options.membership.hostname,
                backend.key_values,
                options.sandbox,
                worlds,
            )
        )
        functions = HostFunctions(
            backend,
            inbox,
            keys,
            report=report,
            calls=calls,
            python=python,
            compilers=compilers_of(backend),
            worlds=worlds,
        )
        network = DataPortNetwork(backend, data_port, options.host)
        messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
        steps = StepRunner(backend, functions, data_port, network, keys, report, messages.put)
        spill_store = SpillStore(backend, inbox, data_port, options.host, steps.holds, report)
        self._executor = executor = ExecutorThread(steps, inbox, report, spill_store, messages)
        lease = Lease(self._lapsed)
        recorder = ProfileRecorder(backend.begin_profile, functions.programs.others, calls, options.host)
        self._handler = MessageHandler(
            backend,
            functions=functions,
            data_port=data_port,
            execute=executor.submit,
            renew=lease.renew,
            units=executor.units,
            report=report,
            recorder=recorder,
            spill_store=spill_store,
            host=options.host,
            worlds=worlds,
        )
        reached_at = advertised(data_port.address, options.advertise)
        connection.send(
            *introduction(
                options.island, options.host, backend, reached_at, options.incarnation, token, options.sandbox
            )
        )

    def run(self) -> None:
        """Handle the controller's messages until it sends Stop, or its connection is lost."""
        freeze_gc()
        for message in self.connection.receive():
            if not self._group.take(message):
                return
        _log.info("the connection to the controller is lost: this worker ends (%s)", self.connection.reason)

    # ---- from parts to those that are made later

    def _to_proxy(self, session: int) -> DataChannel:
        return self._data_port.to_proxy(session)

    def _receive_from_client(self, session: int, channel: DataChannel, on_answer: OnAnswer) -> None:
        self._data_port.receive(session, channel, on_answer)

    def _read(self, session: int, wanted: ReadWanted, otherwise: Callable[[], None]) -> bool:
        return self._executor.read(session, wanted, otherwise)

    def _receive_in_group(self, content: Any) -> None:
        self._group.receive(content)

    def _channel_lost(self, host: int, lost: list[tuple[int, int]], why: str) -> None:
        """Report feeds and control messages that may not have reached another host: the channel to it broke."""
        feeds = [(session, feed) for session, feed in lost if session]
        if feeds:
            self._group.report(feeds_lost(self._host, host, feeds, why))
        if len(feeds) < len(lost):
            self._links.lose(host, f"the connection to host {host} broke")

    def _handle(self, message: Any) -> bool:
        try:
            return self._handler.handle(message)
        except Exception as error:  # on any thread, because this host may have lost the order of messages
            self._bugs.end(error)
            raise

    def _lapsed(self) -> None:
        if self.connection.can_resume:  # the connection itself waits for the controller, as long as that allows
            return
        _log.error("the controller is silent: this worker ends")
        os._exit(LAPSED_STATUS)


def compilers_of(backend: DeviceBackend) -> Compilers | None:
    """Return the compilers of tenants' programs for these devices, if they need any. Raise SettingsError."""
    loader = backend.loader
    if loader is None:
        return None
    return Compilers(CompilerServer(loader.compiler, loader.compiler_devices, limits_from_environment()))


def worlds_of(
    options: WorkerOptions, backend: DeviceBackend, data_address: Address, report: Callable[..., None]
) -> HostWorlds | None:
    """Return the worlds of these devices, if they can join any.

    Hosts whose data ports are Unix sockets are on one machine, so that their worlds need no network either.
    """
    if backend.worlds is None:
        return None
    if data_address.is_unix:
        prefix = str(Path(data_address.path).parent / f"world-{options.host}-{os.getpid()}")
        return HostWorlds(backend.worlds, report, lambda world: f"unix:{prefix}-{world}", _LOOPBACK)
    host = options.hostname or options.advertise or data_address.host
    return HostWorlds(backend.worlds, report, lambda _: free_address(host), host)


def rank_of(options: WorkerOptions) -> int:
    return 0 if options.membership is None else options.membership.rank


def neighbors_of(options: WorkerOptions) -> frozenset[int]:
    """Return the hosts of its island that the worker watches."""
    if options.membership is None:
        return frozenset()
    first = options.host - options.membership.rank
    return neighbors(options.host, range(first, first + options.membership.hosts))


def advertised(address: Address, host: str) -> str:
    """Return the address under which others reach a port at `address`, with `host` in it if that is given."""
    return str(replace(address, host=host) if host and not address.is_unix else address)


def introduction(
    island: int,
    host: int,
    backend: DeviceBackend,
    data_address: str,
    incarnation: int = 0,
    token: str = "",
    sandbox: Mechanisms | None = None,
    process: str = "",
) -> tuple[m.Hello, m.WorkerReady]:
    """Return the first messages of a worker. `process` is the name of its process if that has a relay."""
    pid = os.getpid()
    return (
        m.Hello(
            m.PROTOCOL,
            "worker",
            token,
            pid,
            __version__,
            host=host,
            incarnation=incarnation,
            resumes=True,
            process=process,
            redials=True,
        ),
        m.WorkerReady(
            island,
            host,
            backend.describe(),
            backend.platform,
            backend.platform_version,
            data_address,
            backend.max_in_flight,
            sandbox,
            compiles_first=backend.loader is not None and backend.loader.loads_apart,
        ),
    )


def _connect(options: WorkerOptions, identity: Identity | None) -> BlockingConnection:
    """Connect to the controller. It starts at the same time as its workers, so retry until it listens."""
    address = parse_address(options.controller)
    patience = options.connect_seconds
    dial = partial(
        BlockingConnection.dial, address, m.ToWorker, name="the controller", patience=patience, identity=identity
    )
    return Retry(RETRY_SECONDS, patience=patience).call(dial, ConnectError, unless=AccessError)


def _orphaned(directory: str) -> None:
    """Remove the worker's directory and exit, because the process that started this worker has ended."""
    sweep(Path(directory).parent, HOST_DIRECTORIES)
    os._exit(0)


def main() -> None:
    options = read_options(WorkerOptions)
    heartbeat = StartupHeartbeat.of_arguments()
    start_logging("worker")
    # A thread ends this process with its parent even if XLA hangs or computes for long inside a call.
    watch_in_thread(options.parent, lambda: _orphaned(options.directory))
    # Several threads share the interpreter lock, and the default of 5 ms would be most of a launch's latency.
    sys.setswitchinterval(5e-4)
    try:
        with starting():
            backend = open_devices(options, heartbeat)
        address = parse_address(options.controller)
        with heartbeat.waiting("connected to the controller"):
            identity = identity_for(address, Role.HOST, f"the worker of host {options.host}", options.connect_seconds)
            connection = _connect(options, identity)
            bugs = BugTrap(f"the worker of host {options.host}", lambda text: connection.send(m.WorkerFails(text)))
            bugs.watch_threads()
            worker = Worker(options, connection, backend, bugs, identity)
        heartbeat.ready()
    except AtollError as error:
        _log.error("this worker cannot start: %s", error)
        os._exit(1)
    except Exception:
        _log.exception("this worker cannot start")
        os._exit(1)
    try:
        worker.run()
    except AtollError as error:
        _log.error("this worker ends: %s", error)
        os._exit(1)
    except Exception as error:
        bugs.end(error)
    # Threads may still be inside XLA. The system frees what they hold.
    os._exit(0)


if __name__ == "__main__":
    main()
