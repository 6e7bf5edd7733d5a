"""Inboxes: queue the messages of a session while large work for it is done in steps.

Parts of programs and long lists of handles take long to handle, so they always queue, and the lists are divided. Other
messages queue if one turn has brought more of them than it has time for, from all connections together: a launch costs
time per node. Each flush of the controller handles a few messages, takes turns between the sessions, and counts the
cost of each message in steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from msgspec.structs import replace

from atoll.controller.faults import NothingChangedError
from atoll.errors import Code, Status, StatusError
from atoll.launch.large_launches import LARGE_NODES
from atoll.launch.launch_checks import check_credits
from atoll.protocol import messages as m
from atoll.state.programs import RegisteredProgram
from atoll.state.session import Session
from atoll.state.stepped_work import Discards, TurnFailedError, Turns

# Per session: messages, and nodes of the programs in them.
MAX_WAITING = 8192
MAX_WAITING_NODES = 1 << 19
# Per session: bytes that these messages take in memory, as estimated.
MAX_WAITING_BYTES = 256 << 20
# The cost of a message in steps, and items of a large message that are handled in the time of one step.
_STEPS_PER_MESSAGE = 16
_ITEMS_PER_STEP = 4
# Items of messages that are handled at once.
_SMALL_ITEMS = 16
# Programs that are handled at once in one turn, and nodes that count as one more. A program takes a millisecond.
_MAX_AT_ONCE = 4
_NODES_AS_A_PROGRAM = 8
# Of all sessions in one turn, in units of 10 us, about the time to enqueue a node: messages that are handled at once.
_MAX_COST = 2048
_COST = 4
_COST_OF_LAUNCH = 8  # besides its nodes
# Handles that are released or become errors at a time.
_MAX_HANDLES = 256

_OF_PROGRAMS = frozenset((m.ProgramPart, m.RegisterProgram))
# Bytes of a small object, such as a handle, and of a description of an array.
_BYTES = 40
_BYTES_OF_ARRAY = 400
# By type of the messages that may take long to handle: their number of items, which are nodes, or 16 handles each. A
# slice may be chosen among thousands of devices.
_ITEMS: Mapping[type[Any], Callable[[Any], int]] = {
    m.ProgramPart: lambda message: len(message.definition.nodes),
    m.RegisterProgram: lambda message: len(message.definition.nodes),
    m.Release: lambda message: len(message.handles) // 16,
    m.MakeError: lambda message: len(message.handles) // 16,
    m.Publish: lambda message: len(message.handles) // 16,
    m.ReadVersion: lambda message: len(message.results) // 2,
    m.Await: lambda message: len(message.handles) // 16,
    m.RegisterFunction: lambda message: sum(map(len, message.assignment)) // 16,
    m.RegisterSwitch: lambda message: len(message.branches) // 16,
    m.FailureAcknowledged: lambda message: (len(message.hosts) + len(message.resent) + len(message.unsent)) // 16,
    m.HandlesReported: lambda message: len(message.handles or ()) // 16,
    m.AddSlice: lambda message: 256,
}


def _status_bytes(status: Status) -> int:
    return len(status.message) + sum(map(len, status.payloads.values()))


def _definition_bytes(message: m.ProgramPart | m.RegisterProgram) -> int:
    definition = message.definition
    count = len(definition.name) + len(definition.results)
    for node in definition.nodes:
        count += len(node.inputs) + sum([10 + len(spec.sharding.devices) for spec in node.outputs])
        count += 10 * (len(getattr(node, "mappings", ())) + len(getattr(node, "buffers", ())))
    return _BYTES * (count + sum([10 + len(spec.sharding.devices) for spec in definition.arguments]))


# By type of the messages that may be large: the bytes that they take in memory.
_LARGE: Mapping[type[Any], Callable[[Any], int]] = {
    m.Launch: lambda message: _BYTES * _listed(message) + len(message.contents or b""),
    m.ProgramPart: _definition_bytes,
    m.RegisterProgram: _definition_bytes,
    m.Release: lambda message: _BYTES * len(message.handles),
    m.Await: lambda message: _BYTES * len(message.handles),
    m.MakeError: lambda message: _BYTES * len(message.handles) + _status_bytes(message.status),
    m.Publish: lambda message: (
        2 * _BYTES * len(message.handles) + sum(map(len, message.paths)) + len(message.structure)
    ),
    m.ReadVersion: lambda message: sum(
        [_BYTES_OF_ARRAY + _BYTES * len(each.sharding.devices) for each in message.targets]
    ),
    m.Query: lambda message: len(message.payload),
    m.CallsRecorded: lambda message: len(message.calls),
    m.HandlesReported: lambda message: 2 * _BYTES * len(message.handles or ()),
    m.RegisterFunction: lambda message: _BYTES * sum(map(len, message.assignment)),
    m.RegisterSwitch: lambda message: _BYTES * len(message.branches),
    m.FailureAcknowledged: lambda message: (
        _BYTES * (len(message.hosts) + 3 * len(message.resent) + len(message.unsent))
    ),
}


def _bytes_of(message: Any) -> int:
    nbytes = _LARGE.get(type(message))
    return _BYTES if nbytes is None else _BYTES + nbytes(message)


def _listed(message: m.Launch) -> int:
    """Return the number of handles and feeds of a launch."""
    return len(message.arguments) + len(message.results) + len(message.feeds) + len(message.released)


def _launched_nodes(session: Session, message: Any) -> int:
    """Return the number of nodes that are enqueued with a message, without those that a large launch enqueues later."""
    if type(message) is not m.Launch:
        return 0
    program = session.programs.get(message.program)
    nodes = len(program.nodes) if isinstance(program, RegisteredProgram) else 0
    return nodes if nodes <= LARGE_NODES else 0


def _more_of_launch(session: Session, message: m.Launch) -> int:
    """Return what the lists of a launch count, in nodes: sixteen handles or feeds, or a branch, count as one."""
    node = session.control_flow.get(message.program)
    return _listed(message) // 16 + (len(node.branches) if isinstance(node, m.RegisterSwitch) else 0)


def _nodes_of(message: Any) -> int:
    return len(message.definition.nodes) if type(message) in _OF_PROGRAMS else 0


def _divided(message: Any) -> tuple[Any, Any]:
    """Return the part of a message that is handled now, and the rest or None. A list above the limit stays whole."""
    if type(message) not in (m.Release, m.MakeError) or not _MAX_HANDLES < len(message.handles) <= m.MAX_HANDLES:
        return message, None
    handles = message.handles
    return replace(message, handles=handles[:_MAX_HANDLES]), replace(message, handles=handles[_MAX_HANDLES:])


class Inboxes:
    """The inboxes of all sessions. `handle(session, message)` handles a message; `end(session, status)` ends a session.

    After a bug in the check of a message, the session is in `failed`. A session in `failed` has no turn until its end.
    All other bugs in handling a message are reported as `TurnFailedError`.
    """

    def __init__(
        self,
        sessions: Mapping[int, Session],
        handle: Callable[[Session, Any], None],
        end: Callable[[int, Status], None],
        discards: Discards,
    ) -> None:
        self._sessions = sessions
        self._handle = handle
        self._end = end
        self._discards = discards
        self._turns: Turns[Any] = Turns()
        self.waiting = self._turns.waiting
        self._nodes: Counter[int] = Counter()
        self._credits: Counter[int] = Counter()  # of waiting launches, by session
        self._bytes: Counter[int] = Counter()  # of all waiting messages, by session
        self.failed = self._turns.failed
        self._at_once = 0  # programs handled at once in this turn, including their nodes counted as programs
        self._cost = 0  # of the messages in this turn

    def received(self, number: int, message: Any) -> None:
        """Handle a message of the session's proxy, now or when its turn comes.

        Ends the session if the launches that wait exceed its window.
        """
        session = self._sessions.get(number)
        if session is None:
            return
        is_next = not session.in_steps and number not in self.waiting
        if (is_next and self._fits(session, message)) or type(message) is m.Pong:
            self._handle(session, message)
            return
        if type(message) is m.Launch:
            try:
                check_credits(session.credits + self._credits[number], message)
            except StatusError as error:
                self._end(number, error.status)
                return
            self._credits[number] += message.credits
        self._turns.add(number, session.tenant.name, message)
        self._nodes[number] += _nodes_of(message)
        self._bytes[number] += _bytes_of(message)
        if self._bytes[number] > MAX_WAITING_BYTES:
            text = f"messages of more than {MAX_WAITING_BYTES >> 20} MiB of this session are waiting"
            self._end(number, Status(Code.RESOURCE_EXHAUSTED, text))
        elif self._nodes[number] > MAX_WAITING_NODES:
            text = f"more than {MAX_WAITING_NODES} nodes of this session's programs are waiting to be checked"
            self._end(number, Status(Code.RESOURCE_EXHAUSTED, text))
        elif len(self.waiting[number]) > MAX_WAITING:
            text = f"more than {MAX_WAITING} messages of this session are waiting for its large programs"
            self._end(number, Status(Code.RESOURCE_EXHAUSTED, text))

    def _fits(self, session: Session, message: Any) -> bool:
        """Return whether a message may be handled at once, given the others that this turn has handled."""
        kind = type(message)
        if kind is m.Launch:  # as `_launched_nodes`, without a call, since this is on the path of every launch
            program = session.programs.get(message.program)
            nodes = len(program.nodes) if program.__class__ is RegisteredProgram else 0
            self._cost += _COST_OF_LAUNCH + nodes if nodes <= LARGE_NODES else _COST_OF_LAUNCH
            listed = len(message.arguments) + len(message.results) + len(message.feeds)
            if program is None or listed > _SMALL_ITEMS:
                self._cost += _more_of_launch(session, message)
        else:
            self._cost += _COST
            items = _ITEMS.get(kind)
            if items is not None and items(message) > _SMALL_ITEMS:
                return False
            if kind in _OF_PROGRAMS:
                self._at_once += 1 + _nodes_of(message) // _NODES_AS_A_PROGRAM
                if self._at_once > _MAX_AT_ONCE:
                    return False
        return self._cost <= _MAX_COST

    def _steps_of(self, session: Session, message: Any) -> int:
        items = _ITEMS.get(type(message))
        count = items(message) if items is not None else _launched_nodes(session, message)
        if type(message) is m.Launch:
            count += _more_of_launch(session, message)
        return max(_STEPS_PER_MESSAGE, count // _ITEMS_PER_STEP)

    def turn_ended(self) -> None:
        """Begin the next turn: later messages belong to it."""
        self._at_once = self._cost = 0

    def proceed(self, steps: int) -> None:
        """Handle messages, at least one, until they cost `steps` steps. Sessions take turns."""
        while steps > 0 and (number := self._turns.next(self._may_proceed)) is not None:
            waiting, session = self.waiting[number], self._sessions[number]
            whole = waiting[0]
            message, rest = _divided(whole)
            self._bytes[number] -= _bytes_of(whole)
            self._nodes[number] -= _nodes_of(message)
            if type(message) is m.Launch:
                self._credits[number] -= message.credits
            if rest is None:
                self._turns.take(number)
            else:
                waiting[0] = rest
                self._bytes[number] += _bytes_of(rest)
            steps -= self._steps_of(session, message)
            try:
                self._handle(session, message)
            except NothingChangedError as error:
                self._turns.fail(number, error, message)
                self._restore(session, whole, message, rest)
            except Exception as error:
                raise TurnFailedError(session=number) from error

    def _restore(self, session: Session, whole: Any, message: Any, rest: Any) -> None:
        """Undo that a message was taken."""
        number = session.number
        self._bytes[number] += _bytes_of(whole)
        self._nodes[number] += _nodes_of(message)
        if type(message) is m.Launch:
            self._credits[number] += message.credits
        if rest is None:
            self._turns.put_back(number, session.tenant.name, whole)
        else:
            self._bytes[number] -= _bytes_of(rest)
            self.waiting[number][0] = whole

    def _may_proceed(self, number: int) -> bool:
        return not self._sessions[number].in_steps

    def session_closed(self, session: Session) -> None:
        del self._nodes[session.number]
        del self._credits[session.number]
        del self._bytes[session.number]
        self._discards.add(self._turns.remove(session.number), size=m.MAX_PART_NODES)
