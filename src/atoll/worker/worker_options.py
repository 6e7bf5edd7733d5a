"""How the processes of workers are started."""

from __future__ import annotations

import msgspec

from atoll.cluster.sandbox.mechanisms import Mechanisms
from atoll.devices.device_kinds import Membership


class WorkerOptions(msgspec.Struct, frozen=True):
    """How to start the worker of one host. `parent` is the process that it must not outlive.

    `advertise` is the host name or address under which others reach its data port, where that is not the one it listens
    at. `incarnation` is that of its island.

    `directory` is this user's alone, and whoever starts the worker removes it: what sessions' Python processes need is
    in it. Those do not see what is `hidden`.

    `has_one_client`: no other client's work is on this host. The worker then maps the files of the client's large
    transfers, which is quicker than reading them; a client that shortens one of its files ends the worker.
    """

    controller: str
    data_address: str
    island: int
    host: int
    devices: int
    parent: int
    cache_directory: str = ""
    membership: Membership | None = None  # None: the island has no other host
    platform: str = "cpu"  # names the kind of its devices: see `devices.device_kinds`
    has_one_client: bool = False
    advertise: str = ""
    incarnation: int = 0
    directory: str = ""
    hidden: tuple[str, ...] = ()
    sandbox: Mechanisms | None = None  # of this machine; None: not known


class IslandOptions(msgspec.Struct, frozen=True):
    """How to start one process for all hosts of an island, numbers `first` and on.

    `data_address` has {host} for a host's number.
    """

    controller: str
    data_address: str
    island: int
    first: int
    hosts: int
    devices: int  # of each host
    parent: int
    advertise: str = ""
    incarnation: int = 0
