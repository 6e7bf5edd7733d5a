"""What is checked before a launch joins the lines, and again before a gang of it starts."""

from __future__ import annotations

from atoll.cluster.lifecycle import Island, IslandState
from atoll.cluster.resources import ResourceManager
from atoll.errors import Code, Status, invalid
from atoll.protocol import messages as m
from atoll.state.programs import RegisteredProgram
from atoll.state.quarantine import Quarantine
from atoll.state.queued_nodes import Gang
from atoll.state.session import GangRun, Session

# Launches that a session may have in the system; its proxy stops reading from its client beyond.
LAUNCH_WINDOW = 512
_MOST_CREDITS = 2 * LAUNCH_WINDOW


def check_window(session: Session, message: m.Launch) -> None:
    """Raises INVALID_ARGUMENT where the session has launched more than its proxy lets through, or says that it takes
    less of the window than it does. Control flow is checked by `check_cost`, when its parts are known.
    """
    check_cost(message, session.costs.get(message.program, 1))
    before = session.credits
    # It may be ahead by what is on its way; a launch that is larger than the window goes alone.
    if before > LAUNCH_WINDOW and before + message.credits > _MOST_CREDITS:
        raise invalid(f"this session has {before} of {LAUNCH_WINDOW} launches in flight, and launches more")


def check_cost(message: m.Launch, cost: int) -> None:
    """Raises INVALID_ARGUMENT where a launch says that it takes less of its session's window than its programs cost."""
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
    """Why a launch cannot be, as far as that is known now; None where it can."""
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
            f"{program.name} takes {program.arguments} arguments, {program.feeds} feeds and gives "
            f"{program.results} results; launched with {len(message.arguments)}, {len(message.feeds)} and "
            f"{len(message.results)}",
        )
    for handle in message.arguments:
        problem = session.directory.problem(handle)
        if problem is not None:
            return problem
    return program_problem(session, program, quarantine, resources)


def quota_problem(session: Session) -> Status | None:
    """Why one more launch would be too many for the session's tenant."""
    return session.tenant.exceeded("launches", 1, session.tenant.launches, "these are in flight")


def island_problem(session: Session, island: Island) -> Status | None:
    """Why what the session needs the island for fails; None where it works, or where the session waits for it."""
    is_away = island.state is IslandState.RESTARTING and not session.waits_for_islands
    return island.last_failure if is_away else island.removal


def program_problem(
    session: Session, program: RegisteredProgram, quarantine: Quarantine, resources: ResourceManager
) -> Status | None:
    """Why no launch of the program can be, whatever it takes."""
    if quarantine.refused:
        for name in program.functions:
            if name in quarantine.refused:
                return quarantine.refused[name].within(program.name)
    for number in program.islands:
        island = resources.islands[number]
        if island.state is not IslandState.READY and (loss := island_problem(session, island)) is not None:
            return loss
    return None


def gang_problem(session: Session | None, gang: Gang[GangRun]) -> Status | None:
    """Why a gang that is next cannot run: an input that failed since its launch."""
    launch = gang.run.launch
    if launch.error is not None:
        return launch.error
    if session is None:
        return Status(Code.CANCELLED, "its session has ended")
    if session.has_errors:
        for position in gang.run.spec.handles:
            entry = session.directory.entries.get(launch.handles[position])
            if entry is not None and entry.error is not None:
                return entry.error
    return None
