"""What opens a connection to the controller, and how devices are described."""

from __future__ import annotations

import msgspec

from atoll.cluster.virtual_devices import DeviceInfo as DeviceInfo
from atoll.cluster.virtual_devices import VirtualDevice as VirtualDevice
from atoll.errors import Status

# Raised whenever a message changes its meaning: two processes speak together only with equal numbers.
PROTOCOL = 27

# Feeds between hosts, whose numbers the controller gives, start here; proxies count below.
INTERNAL_FEEDS = 1 << 48
# Handles from here up to twice `INTERNAL_HANDLES` are the controller's: first the values that loops carry, then copies
# of arrays that move. Clients have all others.
FIRST_INTERNAL_HANDLE = 1 << 60
INTERNAL_HANDLES = 1 << 61

DEFAULT_TOKEN_VARIABLE = "ATOLL_TOKEN"


class Message(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The base of all control messages."""


class Hello(Message, frozen=True, tag=1):
    """The first message on any connection to the controller."""

    protocol: int
    role: str  # "proxy", "worker", "engine", "agent", "operator" or "standby"
    token: str
    pid: int
    version: str
    # What a person would recognise the peer by: the user's script for a proxy.
    label: str = ""
    host: int = -1  # a worker's
    incarnation: int = 0  # of a worker's island: rises with each start
    platform: str = ""  # whose devices a proxy's session is to have; "": those of the first island
    resumes: bool = False  # it can go on with the connection on another socket: see `wire.resumption`


class Refused(Message, frozen=True, tag=2):
    """The answer to a Hello that is not let in; the connection then closes."""

    status: Status
