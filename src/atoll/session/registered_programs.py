"""The registered programs of a session.

A program with control flow nodes becomes several launches: `atoll.ir.control_flow_split` splits it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from typing import Any, Protocol

import msgspec
from msgspec.structs import replace

from atoll.ir.control_flow_split import SplitLaunch, SwitchPrograms, has_control_flow, parts_of, split
from atoll.ir.program import Program, credits_of
from atoll.ir.validation import check_definition
from atoll.protocol import messages as m

MAX_PROGRAMS = 4096


class SendLaunch(Protocol):
    """Launches a registered program, like `ClusterSession.launch`."""

    def __call__(
        self,
        program: int,
        arguments: Sequence[int],
        results: Sequence[int],
        feeds: Sequence[int] = (),
        traceback_id: int = 0,
    ) -> None: ...


class _Split(msgspec.Struct, frozen=True):
    results: tuple[int, ...]  # values of the program
    pieces: tuple[tuple[int, SplitLaunch], ...]  # the launches with the numbers of their programs
    programs: tuple[int, ...]  # all programs that are registered for it


def in_parts(number: int, program: Program) -> Iterator[m.ProgramPart | m.RegisterProgram]:
    """Yield the messages that register a program, several for a large program."""
    left = program
    while (count := _nodes_of_part(left)) < len(left.nodes):
        yield m.ProgramPart(number, replace(left, nodes=left.nodes[:count], results=()))
        left = Program("", (), left.nodes[count:], left.results)
    yield m.RegisterProgram(number, left)


def _nodes_of_part(program: Program) -> int:
    """Return how many of the program's nodes one message may have."""
    count = min(len(program.nodes), m.MAX_PART_NODES)
    while count > 1 and len(msgspec.msgpack.encode(program.nodes[:count])) > m.MAX_PART_BYTES:
        count //= 2
    return count


class RegisteredPrograms:
    """Registers and launches programs, and splits programs with control flow.

    `number` and `mint` return new numbers and handles. `devices` is a live view of the session's virtual devices.
    Invariant: each definition that is sent is valid, since the controller ends a session that sends an invalid
    definition.
    """

    def __init__(
        self, send: Callable[[Any], None], number: Callable[[], int], mint: Callable[[], int], devices: Collection[int]
    ) -> None:
        self._send = send
        self._number = number
        self._mint = mint
        self._devices = devices
        self._known: dict[int, _Split] = {}
        self._credits: dict[int, int] = {}  # credits of a launch by program, if more than 1

    def __contains__(self, number: int) -> bool:
        return number in self._known

    def register(self, program: Program) -> int:
        """Register a program; return its number. Raise INVALID_ARGUMENT if it is invalid or cannot be split."""
        if has_control_flow(program):
            return self._register_pieces(program)
        check_definition(program, self._devices)
        number = self._number()
        self._send_program(number, program)
        self._takes(number, credits_of(program))
        return number

    def _register_pieces(self, program: Program) -> int:
        launches = split(program)
        for part in dict.fromkeys(part for piece in launches for part in parts_of(piece.programs)):
            check_definition(part, self._devices)
        numbers: list[int] = []
        known: dict[Program, int] = {}

        def registered(each: Program) -> int:
            if each not in known:
                known[each] = self._number()
                numbers.append(known[each])
                self._send_program(known[each], each)
            return known[each]

        pieces = []
        for piece in launches:
            programs = piece.programs
            number, *others = map(registered, parts_of(programs))
            if not isinstance(programs, Program):
                first, number = number, self._number()
                numbers.append(number)
                if isinstance(programs, SwitchPrograms):
                    self._send(m.RegisterSwitch(number, first, tuple(others)))
                else:
                    begins, following, last = others
                    self._send(m.RegisterLoop(number, programs.constants, first, begins, following, last))
            self._takes(number, credits_of(*parts_of(programs)))
            pieces.append((number, piece))
        whole = self._number()
        self._known[whole] = _Split(program.results, tuple(pieces), tuple(numbers))
        return whole

    def _send_program(self, number: int, program: Program) -> None:
        for message in in_parts(number, program):
            self._send(message)

    def release(self, number: int) -> None:
        split = self._known.pop(number, None)
        for each in (number,) if split is None else split.programs:
            self._send(m.ReleaseProgram(each))
            self._credits.pop(each, None)

    def credits(self, number: int) -> int:
        """Return the credits that a launch of the program takes. A split program launches several programs."""
        return self._credits.get(number, 1)

    def _takes(self, number: int, credits: int) -> None:
        if credits > 1:
            self._credits[number] = credits

    def launch(
        self, number: int, arguments: Sequence[int], results: Sequence[int], traceback_id: int, launch: SendLaunch
    ) -> None:
        """Launch all pieces of a split program, and release the arrays that pass between them."""
        whole = self._known[number]
        handles = dict(enumerate(arguments))
        handles.update(zip(whole.results, results, strict=True))
        between = []
        for each, piece in whole.pieces:
            for value in piece.results:
                if value not in handles:
                    handles[value] = self._mint()
                    between.append(handles[value])
            launch(
                each,
                [handles[value] for value in piece.arguments],
                [handles[value] for value in piece.results],
                (),
                traceback_id,
            )
        if between:
            self._send(m.Release(tuple(between)))


class SessionProgramCache:
    """Registered programs that a session may need again, by key: transfers, views, copies to the host.

    At most `limit` programs stay registered; the least recently used one is released first. Programs of executables are
    not in this cache: they live as long as their executable.
    """

    def __init__(
        self, register: Callable[[Program], int], release: Callable[[int], None], limit: int = MAX_PROGRAMS
    ) -> None:
        self._register = register
        self._release = release
        self._limit = limit
        self._numbers: OrderedDict[Hashable, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._numbers)

    def number(self, key: Hashable, build: Callable[[], Program]) -> int:
        """Return the number of the program with this key. Build and register the program if necessary."""
        number = self._numbers.get(key)
        if number is not None:
            self._numbers.move_to_end(key)
            return number
        number = self._numbers[key] = self._register(build())
        while len(self._numbers) > self._limit:
            _, oldest = self._numbers.popitem(last=False)
            self._release(oldest)
        return number
