"""A fake cluster that records what a session sends to it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from atoll.host_services.calls.call_messages import ReadWanted
from atoll.protocol import messages as m
from atoll.session.cluster_session import ClusterSession
from atoll.session.controller_lease import ControllerLease
from atoll.session.outgoing_messages import OutgoingMessages
from atoll.session.session_interfaces import CallbackHandler, HostAccess, OnBroken, OnFeed, Unreached

WINDOW = 4


def welcome(hosts: int = 2, devices_per_host: int = 2) -> m.Welcome:
    """Return a Welcome with one island per host. Device d is on host d // devices_per_host."""
    devices = []
    for number in range(hosts * devices_per_host):
        host, ordinal = divmod(number, devices_per_host)
        info = m.DeviceInfo(
            ordinal, "kind", "fake", ("device", "pinned_host"), "device", (ordinal,), 0, ordinal, 1 << 30
        )
        devices.append(m.VirtualDevice(number, host, host, info))
    addresses = tuple((host, f"unix:/{host}") for host in range(hosts))
    return m.Welcome(5, "secret", tuple(devices), addresses, "fake", "fake 1", WINDOW)


class FakeCluster:
    """Both interfaces of a session, which record all messages. `session` is the session that uses them."""

    def __init__(self, first_handle: int = 1, lease: ControllerLease | None = None, **shape: int) -> None:
        self.uploads: list[tuple[tuple[int, ...], int, bytes]] = []  # hosts, feed, contents
        self.dials: list[tuple[tuple[tuple[int, str], ...], Callable[[Unreached], None]]] = []
        self.patience: list[float] = []  # of each of the dials
        self.disconnected: list[int] = []
        self.kept: list[tuple[int, int]] = []  # host and feed of uploads that are sent again
        self.answers: list[tuple[int, bytes]] = []  # feed, contents
        self.calls: CallbackHandler | None = None
        self.losses = 0  # of hosts, as reported to the front end
        self.closed = False
        self.local: set[int] = set()  # hosts on the machine of the session
        self.reads: list[tuple[int, ReadWanted]] = []  # host and request
        self.far: dict[int, HostAccess] = {}  # hosts that the client's process can reach
        self._sent: list[Any] = []
        self.session = ClusterSession(
            welcome(**shape),
            OutgoingMessages(self),
            self._open_channels,
            lambda: asyncio.get_running_loop().create_future(),
            first_handle,
            on_hosts_lost=self._count_loss,
            lease=lease,
        )

    def _count_loss(self) -> None:
        self.losses += 1

    def _open_channels(self, on_feed: OnFeed, on_broken: OnBroken, awaits: Callable[[], bool]) -> FakeCluster:
        self.on_feed, self.on_broken, self.awaits = on_feed, on_broken, awaits
        return self

    def take(self) -> list[Any]:
        """Return the messages since the last call."""
        sent, self._sent = self._sent, []
        return sent

    # ---- the interfaces

    def send(self, message: Any) -> None:
        self._sent.append(message)

    def set_callback_handler(self, handler: CallbackHandler) -> None:
        self.calls = handler

    def connect(
        self, hosts: Sequence[tuple[int, str]], then: Callable[[Unreached], None], patience: float = 0.0
    ) -> None:
        self.dials.append((tuple(hosts), then))
        self.patience.append(patience)

    def disconnect(self, hosts: Sequence[int]) -> Sequence[tuple[int, int]]:
        self.disconnected.extend(hosts)
        return [each for each in self.kept if each[0] in hosts]

    def forget_uploads(self) -> None:
        self.kept.clear()

    def upload(self, hosts: Sequence[int], feed: int, contents: Sequence[Any], launch: int = 0) -> None:
        self.uploads.append((tuple(hosts), feed, b"".join(bytes(part) for part in contents)))

    def upload_file(self, hosts: Sequence[int], feed: int, nbytes: int, descriptor: int, launch: int = 0) -> None:
        with open(descriptor, "rb") as file:
            self.upload(hosts, feed, [file.read(nbytes)])

    def access(self, host: int) -> HostAccess | None:
        return self.far.get(host)

    def is_local(self, host: int) -> bool:
        return host in self.local

    def read_directly(self, host: int, wanted: ReadWanted) -> bool:
        if host in self.local:
            self.reads.append((host, wanted))
        return host in self.local

    def answer(self, feed: int, contents: Sequence[Any]) -> None:
        self.answers.append((feed, b"".join(bytes(part) for part in contents)))

    def close(self) -> None:
        self.closed = True
