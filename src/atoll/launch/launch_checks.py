"""Checks of a launch before it joins the lines, and of a gang before it starts."""

from __future__ import annotations

from itertools import repeat
from operator import attrgetter, is_not

from atoll.cluster.lifecycle import Island, IslandState
from atoll.cluster.resources import ResourceManager
from atoll.errors import Code, Status, StatusError, invalid
from atoll.protocol import messages as m
from atoll.quantities import counted
from atoll.state.programs import RegisteredProgram
from atoll.state.quarantine import Quarantine
from atoll.state.queued_nodes import Gang
from atoll.state.session import GangRun, Session

# Limit for the credits of a session's launches in flight, at least one per launch. At the limit, the proxy stops
# reading from its client.
LAUNCH_WINDOW = 512
_MAX_CREDITS = 2 * LAUNCH_WINDOW
# Bytes of a session's arrays, with which further launches fail. With those of one more program, the sums that the
# controller stores have 63 bits.
MAX_BYTES = 1 << 60
# Feeds of failed launches and dropped functions that have not arrived. The controller remembers them, to drop them when
# they arrive.
MAX_UNWANTED = 1 << 18
_STATE_OF = attrgetter("state")


def check_window(session: Session, message: m.Launch) -> None:
    """Raise INVALID_ARGUMENT if the session exceeds its window, or if the launch takes too few credits.

    The credits for control flow are checked by `check_cost` when the parts are known.
    """
    # Without a call for each launch:
    if len(session.feeds.unwanted) > MAX_UNWANTED:
        check_unwanted(session)
    if message.credits < (cost := session.costs.get(message.program, 1)):
        check_cost(message, cost)
    if session.credits > LAUNCH_WINDOW:
        check_credits(session.credits, message)


def check_unwanted(session: Session) -> None:
    """Raise RESOURCE_EXHAUSTED if too many buffers of the session that nothing needs have not arrived."""
    if len(session.feeds.unwanted) > MAX_UNWANTED:
        text = f"this session has failed launches with {MAX_UNWANTED} buffers that it has not sent"
        raise StatusError(Code.RESOURCE_EXHAUSTED, text)


def check_credits(before: int, message: m.Launch) -> None:
    """Raise INVALID_ARGUMENT if a launch exceeds the window of a session with so many credits in use."""
    # The count includes launches that were on their way. A launch larger than the window is sent when no other one is
    # in flight.
    if before > LAUNCH_WINDOW and before + message.credits > _MAX_CREDITS:
        raise invalid(f"this session has {before} of {LAUNCH_WINDOW} launches in flight, and launches more")


def check_cost(message: m.Launch, cost: int) -> None:
    """Raise INVALID_ARGUMENT if a launch takes fewer credits of its session's window than its programs cost."""
    if message.credits < cost:
        raise invalid(
            f"a launch of program {message.program} takes {cost} of its session's window, not the "
            f"{message.credits} that its proxy says"
        )


def launch_problem(
    session: Session,
    program: RegisteredProgram | Status | None,
    message: m.Launch,
    quarantine: Quarantine,
    resources: ResourceManager,
) -> Status | None:
    """Return why a launch is impossible, as far as that is known now; None if it is possible."""
    if isinstance(program, Status):
        return program
    if session.tenant.settings.launches and (exceeded := quota_problem(session)) is not None:
        return exceeded
    if program is None:
        return Status(Code.NOT_FOUND, f"program {message.program} does not exist in this session")
    if (len(message.arguments), len(message.results), len(message.feeds)) != (
        program.arguments,
        program.results,
        program.feeds,
    ):
        return Status(
            Code.INVALID_ARGUMENT,
            f"{program.name} takes {counted(program.arguments, 'argument')} and {counted(program.feeds, 'feed')}, and "
            f"returns {counted(program.results, 'result')}; it was launched with {len(message.arguments)}, "
            f"{len(message.feeds)} and {len(message.results)}",
        )
    problem = session.directory.first_problem(message.arguments)
    if problem is not None:
        return problem
    return program_problem(session, program, quarantine, resources)


def size_problem(nbytes: int) -> Status:
    """Return the error of a launch in a session whose arrays have more than `MAX_BYTES`."""
    return Status(Code.RESOURCE_EXHAUSTED, f"the arrays of this session have {nbytes} bytes: delete some")


def quota_problem(session: Session) -> Status | None:
    """Return an error if the session's tenant may not have one more launch in flight."""
    return session.tenant.refused("launches", 1, session.tenant.launches, "these are in flight")


def island_problem(session: Session, island: Island) -> Status | None:
    """Return why the session cannot use the island; None if it can, or if it waits for the island to restart."""
    is_away = island.state is IslandState.RESTARTING and not session.waits_for_islands
    return island.last_failure if is_away else island.removal


def program_problem(
    session: Session, program: RegisteredProgram, quarantine: Quarantine, resources: ResourceManager
) -> Status | None:
    """Return why the program cannot be launched with any arguments; None if it can."""
    if quarantine.refused:
        for name in program.functions:
            if name in quarantine.refused:
                return quarantine.refused[name].within(program.name)
    if session.failed_functions and (failure := session.failed_function(program.functions)) is not None:
        return failure.within(program.name)
    islands, ready = resources.islands, IslandState.READY
    states = map(_STATE_OF, map(islands.__getitem__, program.islands))
    if not any(map(is_not, states, repeat(ready))):  # nearly always; there may be hundreds of islands
        return None
    problems = (island_problem(session, islands[number]) for number in program.islands)
    return next((each for each in problems if each is not None), None)


def gang_problem(session: Session | None, gang: Gang[GangRun]) -> Status | None:
    """Return why a gang that is about to start cannot run, for example an input that has failed since its launch."""
    launch = gang.run.launch
    if launch.error is not None:
        return launch.error
    if session is None:
        return Status(Code.CANCELLED, "its session has ended")
    if session.failed_functions and (failure := session.failed_function(gang.run.spec.functions)) is not None:
        return failure.within(launch.program.name)
    if session.has_errors:
        for position in gang.run.spec.handles:
            entry = session.directory.entries.get(launch.handles[position])
            if entry is not None and entry.error is not None:
                return entry.error
    return None
