"""How the process of an island of null devices is started."""

from __future__ import annotations

import msgspec

from atoll.worker.null.model import chosen_model as chosen_model  # engines check it before they start a host


class NullIslandOptions(msgspec.Struct, frozen=True):
    """How to start an island's hosts, numbers `first` and on. `data_address` has {host} for a host's number."""

    controller: str
    data_address: str
    island: int
    first: int
    hosts: int
    devices: int  # of each host
    parent: int
