"""The options of worker processes."""

from __future__ import annotations

import msgspec

from atoll.cluster.sandbox.mechanisms import Mechanisms
from atoll.devices.device_kinds import IslandMembership

CONNECT_SECONDS = 60.0  # by default, for the controller


class WorkerOptions(msgspec.Struct, frozen=True):
    """The options of the worker of one host.

    `directory` belongs to this user, and holds the files that sessions' Python processes need. The process that starts
    the worker removes it. Python processes cannot see the paths in `hidden`.

    If `has_one_client` is set, only one client uses this host. The worker then maps the files of the client's large
    transfers, which is faster than reading them. If the client shortens such a file, the worker dies.
    """

    controller: str
    data_address: str
    island: int
    host: int
    devices: int
    parent: int  # pid; the worker ends with this process
    cache_directory: str = ""
    membership: IslandMembership | None = None  # None if the island has no other host
    platform: str = "cpu"  # selects the kind of devices: see `devices.device_kinds`
    has_one_client: bool = False
    advertise: str = ""  # host name or address of the data port for others, if it differs from `data_address`
    incarnation: int = 0  # of the island
    directory: str = ""
    hidden: tuple[str, ...] = ()
    sandbox: Mechanisms | None = None  # of this machine; None if unknown
    hostname: str = ""  # address at which collectives of other islands' hosts reach this one; "" for the data port's
    among_islands: bool = False  # whether the cluster had several islands when this worker was started
    connect_seconds: float = CONNECT_SECONDS  # for the controller, which may start at the same time


class IslandOptions(msgspec.Struct, frozen=True):
    """The options of one process for all hosts of an island."""

    controller: str
    data_address: str  # with {host} in place of a host's number
    island: int
    first: int  # the number of its first host
    hosts: int
    devices: int  # per host
    parent: int
    advertise: str = ""
    incarnation: int = 0
    connect_seconds: float = CONNECT_SECONDS  # for the controller, which may start at the same time
