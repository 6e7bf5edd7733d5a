"""The launches of control flow nodes that are not over: what they await, and their ends.

`control_flow_launches` begins them, and launches their parts. A launch of a node keeps its arrays and programs alive
until it is over.

Pure.
"""

from __future__ import annotations

from atoll.errors import Status
from atoll.launch.shared_parts import SharedParts
from atoll.launch.shared_state import SharedState
from atoll.protocol import messages as m
from atoll.protocol.number_ranges import LOOP_HANDLES
from atoll.state.session import ControlFlowRun, Launch, Session


class ControlFlowRuns:
    """The runs of control flow nodes, by the report that each of them awaits."""

    def __init__(self, shared: SharedState, parts: SharedParts) -> None:
        self._sessions = shared.sessions
        self._resources = shared.resources
        self._dependencies = parts.dependencies
        self._buffers, self._uses = parts.buffers, parts.uses
        self._next_handle = LOOP_HANDLES.start  # of an array that a loop carries
        self._awaited: dict[tuple[int, int], ControlFlowRun] = {}  # by host and gang of the report
        self._ended: dict[tuple[int, int], None] = {}  # keys of `_awaited` whose gang has ended

    def statistics(self) -> dict[str, int]:
        return {"awaited": len(self._awaited)}

    def new_handle(self) -> int:
        """Return a new handle, for an array that a loop carries."""
        self._next_handle += 1
        return self._next_handle - 1

    def await_report(self, whole: ControlFlowRun, host: int, sequence: int) -> None:
        """Note that the next part of a run depends on the number that the host will report for a gang."""
        whole.awaited = host, sequence
        self._awaited[whole.awaited] = whole

    def reported(self, host: int, sequence: int) -> tuple[Session, ControlFlowRun] | None:
        """Return the run that has awaited this report, with its session. Return None if the run is over."""
        whole = self._awaited.pop((host, sequence), None)
        self._ended.pop((host, sequence), None)
        session = None if whole is None else self._sessions.get(whole.session)
        return None if whole is None or session is None else (session, whole)

    def part_ended(self, launch: Launch) -> None:
        """Handle that a part is done, or has failed."""
        whole = launch.part_of
        session = None if whole is None else self._sessions.get(whole.session)
        if whole is None or session is None or self._awaited.get(whole.awaited) is not whole:
            return  # its last part was launched, or it failed
        if launch.error is not None:
            self.fail(session, whole, launch.error)
        elif any(gang.sequence == whole.awaited[1] for node in launch.nodes for gang in node.gangs):
            self._ended[whole.awaited] = None

    def fail_unreported(self, island: int, status: Status) -> None:
        """Fail the launches that await a report of the island's hosts whose gang has ended: the report is lost."""
        hosts = set(self._resources.hosts_of(island))
        for awaited in [each for each in self._ended if each[0] in hosts]:
            whole = self._awaited[awaited]
            self.fail(self._sessions[whole.session], whole, status.within(whole.parts[-1].name))

    def session_closed(self, number: int) -> None:
        for whole in [each for each in self._awaited.values() if each.session == number]:
            self._end(whole)
            self._dependencies.resolve(whole.dependency)

    def fail(self, session: Session, whole: ControlFlowRun, status: Status) -> None:
        """Fail a run: its results become errors, and no further part is launched."""
        self._end(whole)
        session.note_error(status)
        self._buffers.fail(session, whole.results, status)
        for handle in whole.results:
            self._buffers.settle(session, handle, status)
        self._drop_arrays(session, whole)
        self._dependencies.resolve(whole.dependency)
        self._uses.return_credits(session, whole.credits)

    def last_part_launched(self, session: Session, whole: ControlFlowRun) -> None:
        """End a run whose last part was launched."""
        self._end(whole)
        self._drop_arrays(session, whole)

    def _end(self, whole: ControlFlowRun) -> None:
        self._awaited.pop(whole.awaited, None)
        self._ended.pop(whole.awaited, None)
        for program in whole.parts:
            program.waiting -= 1
            self._uses.drop_if_idle(program)

    def _drop_arrays(self, session: Session, whole: ControlFlowRun) -> None:
        """Drop the uses of the arrays that the launch has kept alive."""
        self._buffers.unuse(session, whole.arguments + whole.results)
        self.drop_carried(session, whole, whole.carried)

    def drop_carried(self, session: Session, whole: ControlFlowRun, handles: tuple[int, ...]) -> None:
        """Release arrays that a loop has carried, unless they are its arguments."""
        if isinstance(whole.node, m.RegisterLoop) and handles != whole.arguments[whole.node.constants :]:
            self._buffers.release(session, handles, delete=False)
            self._buffers.unuse(session, handles)
