"""Hosts: how their workers join, and what these report."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from atoll.cluster.lifecycle import HostState
from atoll.cluster.resources import Host
from atoll.controller.islands.overruns import Overruns
from atoll.controller.state import ClusterState
from atoll.dispatch.launcher import Launcher
from atoll.dispatch.registry import ProgramRegistry
from atoll.protocol import messages as m
from atoll.scheduling.memory_ledger import MemoryLedger
from atoll.scheduling.session import Session
from atoll.telemetry.trace_requests import Tracing


class Hosts:
    """Handles what workers send. `others` are the handlers of what is for one part of the controller alone."""

    def __init__(
        self,
        state: ClusterState,
        launcher: Launcher,
        programs: ProgramRegistry,
        memory: MemoryLedger,
        tracing: Tracing,
        overruns: Overruns,
        others: Mapping[type[Any], Callable[[int, Any], None]],
    ) -> None:
        self._resources = state.resources
        self._lifecycle = state.lifecycle
        self._sessions = state.sessions
        self._outbox = state.outbox
        self._settings, self._tenants = state.settings, state.tenants
        self._device_memory = state.settings.device_memory  # bytes of each device; 0: what its worker says
        self._launcher = launcher
        self._programs = programs
        self._memory = memory
        self._tracing = tracing
        self._overruns = overruns
        self._handlers: Mapping[type[Any], Callable[[int, Any], None]] = {
            m.Done: self._done,
            m.Failed: self._failed,
            m.Pong: self._pong,
            m.Enqueued: self._enqueued,
            m.ValueReported: self._reported,
            m.FeedsLost: self._feeds_lost,
            **others,
        }

    def _pong(self, host: int, message: m.Pong) -> None:
        self._tracing.host_answered(host, message, self._outbox.seconds)
        self._overruns.host_answered(host, message)

    def _enqueued(self, host: int, message: m.Enqueued) -> None:
        self._launcher.enqueued(message.sequence)

    def _reported(self, host: int, message: m.ValueReported) -> None:
        self._launcher.control_flow.reported(host, message.sequence, message.value)

    def join(self, ready: m.WorkerReady, hello: m.Hello) -> None:
        """A host's worker is up, with nothing on it. With the last of an island, the island is ready, or back."""
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
        )
        self._resources.join(host)
        self._launcher.scheduler.set_window(ready.island, self._resources.max_in_flight(ready.island))
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
        """A worker's message, which is valid. Raises StatusError for what no worker sends now."""
        self._handlers[type(message)](host, message)

    def _done(self, host: int, message: m.Done) -> None:
        for sequence, started, ended in message.runs:
            self._launcher.runs_ended((host,), sequence, (started, ended))

    def _failed(self, host: int, message: m.Failed) -> None:
        self._launcher.run_failed(host, message.sequence, message.status)

    def _feeds_lost(self, host: int, message: m.FeedsLost) -> None:
        """The host that awaits them is told, past the connection that broke."""
        for session, feed in message.feeds:
            self._outbox.to_host(message.host, m.FailFeeds(session, ((feed, 1),), message.status))

    def session_closed(self, session: Session) -> None:
        """Its arrays are freed, on all hosts."""
        for host in self._resources.hosts:
            self._outbox.to_host(host, m.CloseStore(session.number))
