"""Slices as sessions ask for them: each request is answered at once, with a slice or with what is free. An exclusive
one may wait until those of a lower priority have made way for it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from atoll.cluster.locations import DeviceLocation, HostDevice
from atoll.cluster.slice_placement import Choice, IslandDevices
from atoll.cluster.slice_requests import check
from atoll.controller.state import ClusterState
from atoll.errors import OK, StatusError
from atoll.protocol import messages as m
from atoll.scheduling.session import Session


class SliceRequests:
    """Handles what sessions ask of the resource manager. `free_bytes` is of a physical device; `evict_for` is that of
    `migration.memory_pressure`.
    """

    def __init__(
        self,
        state: ClusterState,
        free_bytes: Callable[[HostDevice], int],
        evict_for: Callable[[Session, Callable[[], Choice], Callable[[], None]], bool],
    ) -> None:
        self._sessions = state.sessions
        self._resources = state.resources
        self._slices = state.slices
        self._outbox = state.outbox
        self._free_bytes = free_bytes
        self._make_way = evict_for

    def add(self, session: Session, message: m.AddSlice) -> None:
        def choose() -> Choice:
            return self._slices.choose(
                session.number, message.slice_request, self._islands(session.platform), self._free
            )

        try:
            check(message.slice_request)
            self._check_quota(session, message.slice_request.count)
            choice = choose()
        except StatusError as error:
            if message.slice_request.exclusive and self._make_way(
                session, choose, partial(self._add_again, session, message)
            ):
                return
            self._outbox.to_session(session.number, m.SliceAdded(message.request, error.status))
            return
        made = self._slices.add(session.number, choice)
        hosts = tuple(
            (device, location.host) for device, location in zip(choice.devices, choice.locations, strict=True)
        )
        self._outbox.to_session(
            session.number, m.SliceAdded(message.request, OK, made.number, made.devices, made.shape, hosts)
        )

    def _add_again(self, session: Session, message: m.AddSlice) -> None:
        if self._sessions.get(session.number) is session:
            self.add(session, message)

    def _check_quota(self, session: Session, count: int) -> None:
        tenant = session.tenant
        own = (each for each in self._sessions.values() if each.tenant is tenant)
        has = sum(len(each.devices) for other in own for each in other.devices.slices.values())
        (tenant.exceeded("devices", count, has, f"its slices have {has}") or OK).raise_if_error()

    def release(self, session: Session, message: m.ReleaseSlice) -> None:
        if message.slice in session.devices.slices:
            self._slices.release(session.number, message.slice)

    def _islands(self, platform: str) -> list[IslandDevices]:
        islands = self._resources.islands.values()
        return [
            self._resources.devices_for(each.number, platform)
            for each in islands
            if each.was_ready and not each.is_drained
        ]

    def _free(self, location: DeviceLocation) -> int:
        return self._free_bytes((location.host, location.ordinal))
