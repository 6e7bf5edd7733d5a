"""How a host agent is started."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.cluster.topology import Seat
from atoll.wire.address import Address


@dataclass(frozen=True)
class AgentOptions:
    """How a host agent is started.

    `advertise` is the host name or address under which the other machines of the cluster reach this one, "" for the
    address from which it reaches the controller; `listen` the one at which its worker listens, "" for the same, or for
    all of the machine's where another is advertised. `meeting` is the address of this machine on the network that the
    hosts of an island compute over, "" for the advertised one. `grace_seconds` is how long it may go on after SIGTERM.
    With `stays` it waits for the next cluster where one has ended. It does not outlive the process `parent`, if any.
    """

    controller: Address
    seat: Seat
    advertise: str = ""
    listen: str = ""
    meeting: str = ""
    group: str = ""
    grace_seconds: float = 25.0
    stays: bool = False
    parent: int = 0
