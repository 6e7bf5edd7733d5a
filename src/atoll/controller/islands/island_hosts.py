"""Messages of hosts' workers: they join, and report what has ended or failed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from atoll.cluster.lifecycle import HostState
from atoll.cluster.resources import Host
from atoll.controller.islands.overruns import Overruns
from atoll.controller.state import ClusterState
from atoll.launch.compilation import Compilation
from atoll.launch.launches import Launches
from atoll.launch.registry import ProgramRegistry
from atoll.protocol import messages as m
from atoll.state.memory_ledger import MemoryLedger
from atoll.state.session import Session
from atoll.telemetry.trace_requests import Tracing

# CPU time of the worker and the controller for one launch. If the host's devices are its CPUs, all of them are slower
# meanwhile, and the policy charges the launch for this time on each of them.
LAUNCH_NS = 250_000


class HostMessages:
    """Handles messages of workers. `others` are the handlers of messages for only one part of the controller."""

    def __init__(
        self,
        state: ClusterState,
        launches: Launches,
        programs: ProgramRegistry,
        memory: MemoryLedger,
        tracing: Tracing,
        overruns: Overruns,
        compilation: Compilation,
        others: Mapping[type[Any], Callable[[int, Any], None]],
    ) -> None:
        self._resources = state.resources
        self._lifecycle = state.lifecycle
        self._sessions = state.sessions
        self._outbox = state.outbox
        self._settings, self._tenants = state.settings, state.tenants
        self._device_memory = state.settings.device_memory  # bytes per device; 0: what its worker reports
        self._gang_ends = launches.gang_ends
        self._control_flow, self._scheduler = launches.control_flow, launches.scheduler
        self._programs = programs
        self._memory = memory
        self._tracing = tracing
        self._overruns = overruns
        self._compilation = compilation
        self._handlers: Mapping[type[Any], Callable[[int, Any], None]] = {
            m.Done: self._done,
            m.Failed: self._failed,
            m.DeviceFailed: self._device_failed,
            m.Pong: self._pong,
            m.Enqueued: self._enqueued,
            m.ValueReported: self._reported,
            m.FeedsLost: self._feeds_lost,
            **others,
        }

    def _pong(self, host: int, message: m.Pong) -> None:
        self._tracing.host_answered(host, message, self._outbox.seconds)
        self._overruns.host_answered(host, message)
        self._compilation.reported(host, message.compiles)

    def answered(self, pongs: Sequence[m.RelayedPong]) -> None:
        """Handle the answers of hosts to a ping that their relay has forwarded."""
        now = self._outbox.seconds
        for pong in pongs:
            self._tracing.host_answered(pong.host, pong, now - pong.held / 1e9)
            self._overruns.host_answered(pong.host, pong)

    def _device_failed(self, host: int, message: m.DeviceFailed) -> None:
        self._gang_ends.device_failed(host, message.sequence, message.status)

    def _enqueued(self, host: int, message: m.Enqueued) -> None:
        self._gang_ends.enqueued(message.sequence)

    def _reported(self, host: int, message: m.ValueReported) -> None:
        self._control_flow.reported(host, message.sequence, message.value)

    def join(self, ready: m.WorkerReady, hello: m.Hello) -> None:
        """Add a host whose worker is ready and empty. The last host of an island makes the island ready."""
        machines = dict(enumerate(self._resources.islands[ready.island].machines))
        host = Host(
            ready.host,
            ready.island,
            hello.pid,
            HostState.READY,
            ready.devices,
            ready.data_address,
            ready.platform,
            ready.platform_version,
            ready.max_in_flight,
            hello.incarnation,
            machines.get(ready.host - self._resources.topology.first_host(ready.island), ""),
            ready.sandbox,
            ready.compiles_first,
        )
        self._resources.join(host)
        launch_ns = LAUNCH_NS * len(host.devices) if host.has_cpu_devices else 0
        window = self._resources.max_in_flight(ready.island)
        self._scheduler.set_limits(ready.island, window, launch_ns)
        for info in ready.devices:
            self._memory.declare((host.number, info.ordinal), self._device_memory or info.memory_bytes)
        for session in self._sessions.values():
            rules = self._tenants.python_rules(session.tenant, self._settings)
            self._outbox.to_host(
                host.number, m.OpenStore(session.number, session.secret, session.tenant.host_name, rules)
            )
        self._programs.host_joined(host.number)
        if self._resources.has_all_hosts(ready.island):
            self._lifecycle.hosts_joined(ready.island)

    def handle(self, host: int, message: Any) -> None:
        """Handle a valid message of a worker. Raises StatusError if no correct worker sends it in this state."""
        self._handlers[type(message)](host, message)

    def _done(self, host: int, message: m.Done) -> None:
        for sequence, started, ended in message.runs:
            self._gang_ends.parts_ended((host,), sequence, (started, ended))

    def _failed(self, host: int, message: m.Failed) -> None:
        self._gang_ends.part_failed(host, message.sequence, message.status)

    def _feeds_lost(self, host: int, message: m.FeedsLost) -> None:
        """Forward the failure to the host that awaits the feeds, since the connection to it broke."""
        for session, feed in message.feeds:
            self._outbox.to_host(message.host, m.FailFeeds(session, ((feed, 1),), message.status))

    def session_closed(self, session: Session) -> None:
        """Free the session's arrays on all hosts."""
        for host in self._resources.hosts:
            self._outbox.to_host(host, m.CloseStore(session.number))
