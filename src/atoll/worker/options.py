"""How a worker is started."""

from __future__ import annotations

import msgspec


class Membership(msgspec.Struct, frozen=True):
    """How a host joins the others of its island: see `worker.xla.island.join`."""

    address: str
    rank: int
    hosts: int
    hostname: str


class WorkerOptions(msgspec.Struct, frozen=True):
    """How to start a worker. `parent` is the process that it must not outlive."""

    controller: str
    data_address: str
    island: int
    host: int
    devices: int
    parent: int
    cache_directory: str = ""
    membership: Membership | None = None  # None: the island has no other host
