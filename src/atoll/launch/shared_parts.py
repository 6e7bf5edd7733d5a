"""The parts of launches that most of the others use. They are made first, and use only each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from atoll.launch.buffer_releases import BufferReleases
from atoll.launch.dependency_tracker import DependencyTracker
from atoll.launch.gang_charges import GangCharges, GangRecorder
from atoll.launch.large_plans import LargePlans
from atoll.launch.launch_builder import LaunchBuilder
from atoll.launch.launch_uses import LaunchUses
from atoll.launch.policy import Policy
from atoll.launch.reservations import Reservations
from atoll.launch.scheduler import Scheduler
from atoll.launch.sequential import SequentialDispatch
from atoll.launch.shared_state import LaunchServices, SharedState
from atoll.state.queued_nodes import Gang
from atoll.state.session import GangRun

# Gangs in flight on a host, until the hosts of its island have reported their own limit.
GANG_WINDOW = 24


@dataclass(frozen=True, eq=False, kw_only=True)
class SharedParts:
    """The parts that other parts use. They change, but are never replaced.

    Attributes:
      in_flight: the gangs that were started, by sequence, in the order of their starts.
      sequential: sequential dispatch in front of the scheduler, if the settings want it.
    """

    services: LaunchServices
    in_flight: dict[int, Gang[GangRun]]
    scheduler: Scheduler[GangRun]
    sequential: SequentialDispatch[GangRun] | None
    reservations: Reservations
    charges: GangCharges
    dependencies: DependencyTracker[GangRun]
    large_plans: LargePlans
    builder: LaunchBuilder
    buffers: BufferReleases
    uses: LaunchUses

    @classmethod
    def of(
        cls, shared: SharedState, services: LaunchServices, trace: GangRecorder, policy: Callable[[], Policy]
    ) -> SharedParts:
        """Make the parts. See `Launches` for the arguments."""
        resources = shared.resources
        scheduler = Scheduler[GangRun](
            resources.islands.values(),
            GANG_WINDOW,
            policy,
            hosts=[each.hosts for each in resources.topology.shapes],
            functions_of=lambda gang: gang.run.spec.functions,
        )
        sequential = SequentialDispatch(scheduler) if shared.settings.sequential else None
        reservations = Reservations(shared.sessions, scheduler, resources, services)
        large_plans = LargePlans(resources, scheduler)
        return cls(
            services=services,
            in_flight={},
            scheduler=scheduler,
            sequential=sequential,
            reservations=reservations,
            charges=GangCharges(trace),
            dependencies=DependencyTracker(scheduler, (sequential or scheduler).enqueue),
            large_plans=large_plans,
            builder=LaunchBuilder(scheduler, shared.quarantine, large_plans, joins=sequential is None),
            buffers=BufferReleases(shared, reservations, services),
            uses=LaunchUses(shared, services),
        )

    @property
    def lines(self) -> Scheduler[GangRun] | SequentialDispatch[GangRun]:
        """Return the part by which nodes join their lines."""
        return self.sequential or self.scheduler
