"""What a host must know to join the others of its island."""

from __future__ import annotations

import msgspec


class Membership(msgspec.Struct, frozen=True):
    """How a host joins the others of its island: see `devices.xla.xla_island.join`."""

    address: str
    rank: int
    hosts: int
    hostname: str
