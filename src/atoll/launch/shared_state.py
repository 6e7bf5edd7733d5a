"""The records that the parts of launches share with each other and with the rest of the controller."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from atoll.cluster.resources import ResourceManager
from atoll.cluster.settings import ClusterSettings
from atoll.launch.connections import Connections
from atoll.launch.outbox import Outbox
from atoll.state.buffer_directory import SpilledArray
from atoll.state.offenses import TenantOffenses
from atoll.state.programs import RegisteredProgram
from atoll.state.quarantine import Quarantine
from atoll.state.rates import TenantRates
from atoll.state.session import Session
from atoll.state.stepped_work import Discards, Remains

if TYPE_CHECKING:
    from atoll.errors import Status
    from atoll.launch.memory_waits import MemoryWait
    from atoll.state.queued_nodes import QueuedNode
    from atoll.state.session import GangRun


@dataclass(frozen=True, eq=False, kw_only=True)
class SharedState:
    """Records that make no decisions. They change, but are never replaced."""

    settings: ClusterSettings
    resources: ResourceManager
    connections: Connections
    outbox: Outbox
    rates: TenantRates
    sessions: dict[int, Session] = field(default_factory=dict)  # open ones, by number
    quarantine: Quarantine = field(default_factory=Quarantine)
    offenses: TenantOffenses = field(default_factory=TenantOffenses)
    remains: Remains = field(default_factory=Remains)  # of closed sessions
    discards: Discards = field(default_factory=Discards)


class LaunchServices(Protocol):
    """The services that launches need from parts which launch programs themselves, and so are made later."""

    def drop_program(self, program: RegisteredProgram) -> None:
        """Drop a released program. The last of its gangs has started or was dropped."""

    def restore_spilled(self, session: Session, handles: Sequence[int]) -> None:
        """Make the spilled arrays with these handles available to launches."""

    def drop_spilled(self, session: Session, spilled: SpilledArray) -> None:
        """Drop a spilled array that is not needed any more."""

    def cause_of(self, node: QueuedNode[GangRun]) -> Status | None:
        """Return why the world of a node in flight was replaced, or None."""

    def reclaim(self, waiting: MemoryWait, missing: int, is_last: bool) -> bool:
        """Free memory of a device for a node that waits for it.

        Return whether some will be free soon. If not, and if `is_last` is true, the node fails.
        """
        ...
