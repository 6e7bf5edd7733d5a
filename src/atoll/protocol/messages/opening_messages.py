"""The base class of control messages, and the messages that open a connection."""

from __future__ import annotations

import msgspec

from atoll.cluster.named_runs import UNNAMED, NamedRun
from atoll.cluster.virtual_devices import DeviceInfo as DeviceInfo
from atoll.cluster.virtual_devices import VirtualDevice as VirtualDevice
from atoll.errors import Status

# Version of the protocol. Increase it, once per release, if there is a message that processes of the last release do
# not know, or if the meaning of a message changes. Processes with different versions refuse to work together.
PROTOCOL = 29


class Message(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The base class of all control messages."""


class Hello(Message, frozen=True, tag=1):
    """The first message on any connection to the controller."""

    protocol: int
    role: str  # "proxy", "worker", "relay", "engine", "spare engine", "agent", "operator" or "standby"
    token: str
    pid: int
    version: str
    # Name of the peer for users; for a proxy, the user's script.
    label: str = ""
    host: int = -1  # of a worker
    incarnation: int = 0  # of a worker's island; increases with each start
    platform: str = ""  # of the devices for a proxy's session; "": the platform of the first island
    resumes: bool = False  # whether the peer can resume the connection on another socket: see `wire.resumption`
    run: NamedRun = UNNAMED  # of a proxy's session
    process: str = ""  # of a relay, and of the workers of its process: a name that no other process has
    lease: str = ""  # the name of a standby's external lease
    redials: bool = False  # whether the peer dials again after a ResumeRefused: see `wire.resumption.dialing_link`


class Refused(Message, frozen=True, tag=2):
    """Refuse a Hello. The connection then closes."""

    status: Status
