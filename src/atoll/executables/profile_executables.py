"""`profileRequest` of Google's `pathwaysutils`: a program whose first run starts a profile, and whose second stops it.

The hosts write the profile to a directory that the request names. Atoll's plug-in uses another request (`answers`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Sequence
from functools import partial
from typing import Annotated, Any

import msgspec

from atoll.errors import StatusError
from atoll.executables.json_requests import beginnings, read_request, reading
from atoll.executables.loaded_executable import ExecutableWithoutProgram
from atoll.ir.program import HostBuffer, HostToDevice, single
from atoll.ir.types import ArraySpec, Replicated, Sharding
from atoll.protocol import messages as m
from atoll.protocol import profiles as p
from atoll.session.cluster_session import ClusterSession
from atoll.session.profile_queries import ask_hosts, hosts_of

_log = logging.getLogger(__name__)


class _AdvancedValue(msgspec.Struct, frozen=True, rename="camel"):
    bool_value: bool | None = None
    int64_value: int | str | None = None  # protobuf's JSON format uses both types
    string_value: str | None = None

    @property
    def value(self) -> bool | int | str:
        if self.bool_value is not None:
            return self.bool_value
        return int(self.int64_value) if self.int64_value is not None else self.string_value or ""


class _PathwaysOptions(msgspec.Struct, frozen=True, rename="camel"):
    advanced_configuration: dict[str, _AdvancedValue] = {}


class _XprofOptions(msgspec.Struct, frozen=True, rename="camel"):
    trace_directory: str = ""
    host_trace_level: int = 2
    trace_session_name: str = ""
    pw_trace_options: _PathwaysOptions = _PathwaysOptions()


class _Profile(msgspec.Struct, frozen=True, rename="camel"):
    """The fields of a profileRequest that Atoll supports. Resource managers record nothing, as they do not run XLA."""

    trace_location: str = ""
    max_num_hosts: Annotated[int, msgspec.Meta(ge=1)] = 1
    max_duration_secs: float = p.MAX_SECONDS
    xprof_trace_options: _XprofOptions | None = None


class _Request(msgspec.Struct, frozen=True, rename="camel"):
    profile_request: _Profile


PROFILE_REQUESTS = beginnings(_Request)


class ProfileExecutable(ExecutableWithoutProgram):
    """Starts a profile of some hosts at its first run, and ends it at its second, independently of launches.

    With `xprofTraceOptions`, each run returns one string: the directory of the hosts' files. The constructor raises
    INVALID_ARGUMENT.
    """

    def __init__(self, payload: bytes, cluster: ClusterSession) -> None:
        with reading("profileRequest"):
            request = read_request(_Request, payload, "profileRequest").profile_request
            options = request.xprof_trace_options or _XprofOptions()
            recording = p.Recording(
                host_tracer_level=options.host_trace_level,
                advanced={k: each.value for k, each in options.pw_trace_options.advanced_configuration.items()},
                seconds=min(request.max_duration_secs, p.MAX_SECONDS),
            )
            p.decode(p.encode(p.Start(recording)))  # only decoding checks the bounds
        location = request.trace_location or options.trace_directory
        run = options.trace_session_name or time.strftime("%Y_%m_%d_%H_%M_%S")
        self._directory = p.directory_of(location, run)
        self._recording = recording
        hosts = hosts_of(cluster)
        self._hosts = {host: hosts[host] for host in list(hosts)[: request.max_num_hosts]}
        self._running = False
        self._order = asyncio.Lock()
        devices = tuple(self._hosts.values())[:1]
        place = ArraySpec("string", (1,), Sharding(devices, Replicated()))
        super().__init__("profile", devices, () if request.xprof_trace_options is None else (place,))

    def run_on_host(
        self, cluster: ClusterSession, handles: Sequence[int], context: int, launch_id: int
    ) -> Coroutine[Any, Any, None]:
        self._make_outputs(cluster, handles, context)
        return self._run(cluster)

    async def _run(self, cluster: ClusterSession) -> None:
        """Start or end the profile."""
        async with self._order:
            self._running = not self._running
            if self._running:
                try:
                    missing = await ask_hosts(cluster, self._hosts, p.Start(self._recording))
                except StatusError:
                    self._running = False
                    raise
            else:
                missing = await ask_hosts(cluster, self._hosts, p.Collect(directory=self._directory))
        for host, status in missing.items():
            _log.warning("no profile of host %d: %s", host, status)

    def _make_outputs(self, cluster: ClusterSession, handles: Sequence[int], context: int) -> None:
        """Make the outputs under these handles."""
        for handle, spec in zip(handles, self.outputs, strict=True):
            node = HostToDevice((HostBuffer(0, spec.shape, None, None),), (spec,))
            program = cluster.programs.number(("put", node), partial(single, "device_put", (), node, feeds=1))
            feed = cluster.number()
            cluster.upload(cluster.hosts_of(self.devices), feed, [msgspec.msgpack.encode([self._directory.encode()])])
            cluster.launch(program, (), (handle,), (feed,), context)

    def unloaded(self, cluster: ClusterSession) -> None:
        """Drop a profile that is still being recorded, because no run can end it any more."""
        if self._running and cluster.lost is None:
            self._running = False
            for device in self._hosts.values():
                cluster.send(m.Query(cluster.number(), m.QueryKind.PROFILE, device, -1, p.encode(p.Collect())))

    async def text(self, cluster: ClusterSession) -> str:
        return f"a profile of {len(self._hosts)} hosts, to {self._directory}"
