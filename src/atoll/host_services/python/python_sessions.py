"""The Python processes of a host: one per session, and one more per session and world that the host has joined.

The processes of a world are one JAX program on the hosts of several islands. They share nothing with the processes of
these islands.

If a process ends, its calls fail with an error that contains its last output. The next call or function starts a new
process, which loads the session's functions again. The objects of the old process are lost, and calls that need them
fail.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from atoll.cluster.directories import remove_tree
from atoll.cluster.sandbox.grants import USER_RULES, PythonRules
from atoll.decodable import decodable
from atoll.errors import (
    OK,
    Code,
    Details,
    FrameError,
    Kind,
    Status,
    StatusError,
    failure,
    invalid,
    not_found,
    shortened,
    status_of,
    unimplemented,
)
from atoll.host_services.python.failed_starts import ProgramStart, ProgramStarts
from atoll.host_services.python.python_link import PythonLink, view
from atoll.host_services.python.python_options import ProcessWorld, PythonHost, program_starts, python_options
from atoll.host_services.python.python_process import PythonProcess
from atoll.host_services.python.rendezvous import Rendezvous, nowhere
from atoll.ir.plan import LocalArray
from atoll.ir.program import STORAGE_STREAM
from atoll.protocol.messages import CloseWorld, Compile
from atoll.protocol.messages import python_messages as m
from atoll.transfers.dtypes import numpy_dtype
from atoll.wire.framing import NO_MESSAGE

_log = logging.getLogger(__name__)

_CODES = frozenset(int(code) for code in Code)
# Created at import, because msgspec cannot analyze a type in two compiling threads at a time.
_read_program = msgspec.msgpack.Decoder(decodable(m.PythonProgram)).decode

# The contents of each result's local shards, or the status of a failed call.
Outcome = list[list[np.ndarray[Any, Any]]] | Status


class Input(msgspec.Struct, frozen=True):
    """The local shards of an argument.

    `read` returns them, without blocking if `at_once`. `release`, which is idempotent, is called after the last read.
    """

    position: int
    dtype: str
    shapes: tuple[tuple[int, ...], ...]
    at_once: bool
    read: Callable[[], list[np.ndarray[Any, Any]]]
    release: Callable[[], None]


class _Unasked(msgspec.Struct):
    """An argument whose shards the process requests one by one."""

    input: Input
    to_send: int  # remaining shards


class _Call(msgspec.Struct, frozen=True):
    function: str
    sequence: int  # of its unit, if it holds back other calls when it fails; otherwise 0
    results: tuple[LocalArray, ...]
    on_outcome: Callable[[Outcome], None]
    unasked: dict[int, tuple[_Unasked, int]]  # arguments and shards by the feeds that the process may still request

    @property
    def nbytes(self) -> int:
        """The bytes of all results."""
        return sum(
            numpy_dtype(array.dtype).itemsize * sum(map(math.prod, array.shard_shapes)) for array in self.results
        )


class _Program(msgspec.Struct):
    """A session's functions on this host, and the process that runs them: its part of a JAX program.

    `world` is that of the program's hosts, or None for the hosts of the island.
    """

    number: int  # of the session
    rules: PythonRules
    world: ProcessWorld | None = None
    options: m.PythonOptions | None = None  # None until the session's devices are known
    rendezvous: Rendezvous = nowhere
    starts: ProgramStarts | None = None  # of the processes on all hosts, if there are several
    start: ProgramStart | None = None  # of `process`
    process: PythonProcess | None = None
    ending: PythonProcess | None = None  # the one before `process`, which starts when this one has ended
    is_ready: bool = False
    functions: dict[str, m.Load] = msgspec.field(default_factory=dict)  # to be loaded again in the next process
    loading: dict[str, Callable[[Status], None]] = msgspec.field(default_factory=dict)
    calls: dict[int, _Call] = msgspec.field(default_factory=dict)
    held: dict[int, list[int]] = msgspec.field(default_factory=dict)  # failed calls that hold others, by sequence
    opening: list[Callable[[Status], None]] = msgspec.field(default_factory=list)
    is_open: bool = True

    def holds(self, stream: int) -> bool:
        """Return whether a call of this stream that fails holds back later ones, because it has a part elsewhere."""
        has_others = self.options is not None and len(self.options.devices) > 1
        return has_others and stream != STORAGE_STREAM

    def take_waiting(self) -> list[Callable[[Status], None]]:
        """Return what waits for the process or for functions, and forget these functions."""
        waiting = [*self.opening, *self.loading.values()]
        for function in self.loading:
            self.functions.pop(function, None)
        self.opening, self.loading = [], {}
        return waiting


class _Session(msgspec.Struct):
    """The programs of a session, by world. 0: the program of the island."""

    rules: PythonRules
    programs: dict[int, _Program] = msgspec.field(default_factory=dict)


class PythonSessions:
    """The Python processes of a host. Thread-safe; no method blocks. The processes end with the worker.

    `host` is None if devices hold no values, so that Python functions cannot run.
    """

    def __init__(self, host: PythonHost | None) -> None:
        self._host = host
        self._sessions: dict[int, _Session] = {}  # open sessions
        self._program_of: dict[str, _Program] = {}  # by function
        self._numbers = itertools.count(1)
        self._lock = threading.RLock()

    def begin(self, session: int, rules: PythonRules = USER_RULES) -> None:
        with self._lock:
            self._sessions[session] = _Session(rules)

    # ---- functions

    def load(self, message: Compile, program: bytes, then: Callable[[Status], None]) -> None:
        """Start the session's process, or load a function in it, and call `then` afterwards. Raise StatusError."""
        try:
            source = _read_program(program)
        except NO_MESSAGE as error:
            raise invalid(f"invalid Python function: {error}") from None
        if self._host is None:
            raise unimplemented("colocated Python needs devices that hold values, and null devices hold none")
        with self._lock:
            record = self._program(message, self._host)
            if not isinstance(source, m.PythonHosts):
                record.functions[message.function] = m.Load(message.function, source, message.recompile)
                record.loading[message.function] = then
                self._program_of[message.function] = record
                if record.options is not None:  # otherwise PythonHosts has not arrived yet
                    self._load(record, message.function)
                return
            self._open(record, source, message, self._host)
            self._running(record)
            if not record.is_ready:
                record.opening.append(then)
                return
        then(OK)

    def _program(self, message: Compile, host: PythonHost) -> _Program:
        """Return the program that has the function of this message. Raise StatusError if its hosts are lost."""
        session = self._sessions.get(message.session)
        if session is None:
            raise StatusError(Code.CANCELLED, f"session {message.session} has ended")
        record = session.programs.get(message.world)
        if record is None:
            world = None
            if message.world:
                assert host.worlds is not None  # because this host has joined one
                host.worlds.key_values(message.world)
                world = ProcessWorld(message.world, message.ranks[0])
            record = session.programs[message.world] = _Program(message.session, session.rules, world)
        return record

    def _open(self, record: _Program, hosts: m.PythonHosts, message: Compile, host: PythonHost) -> None:
        """Set the options of a program that has none, and load the functions that have arrived before."""
        flat = [where for partitions in message.assignment for where, _ in partitions]
        devices = list(zip(flat, hosts.devices, strict=True))
        record.starts = record.starts or program_starts(host, record.number, devices, record.world)
        try:
            options, rendezvous = python_options(
                host, record.number, hosts.settings, devices, record.rules, record.world
            )
        except StatusError as error:
            if record.starts is not None and record.options is None:
                self._in_thread("failed", record.starts.begin().failed, f"host {host.number}: {error}")
            raise
        if record.options is None:
            record.options, record.rendezvous = options, rendezvous
            for function in record.loading:
                self._load(record, function)
        elif record.options.devices != options.devices:
            raise invalid("this session's Python processes were started for other devices of these islands")

    def _load(self, record: _Program, function: str) -> None:
        process, load = self._running(record), record.functions[function]
        record.functions[function] = msgspec.structs.replace(load, recompile=True)
        process.send(load)

    def drop(self, function: str) -> None:
        """Drop a function. No more calls of it may follow."""
        with self._lock:
            record = self._program_of.pop(function, None)
            if record is not None and record.functions.pop(function, None) is not None and record.process is not None:
                record.process.send(m.Drop(function))

    def session_of(self, function: str) -> int | None:
        """Return the session of a Python function; None for other functions."""
        record = self._program_of.get(function)
        return None if record is None else record.number

    # ---- calls

    def call(
        self,
        function: str,
        stream: int,
        inputs: Sequence[Input],
        results: Sequence[tuple[int, LocalArray]],
        on_outcome: Callable[[Outcome], None],
        sequence: int = 0,
    ) -> None:
        """Call a function for the unit `sequence`. `on_outcome` is called once, on any thread.

        On several hosts, a call that fails holds back the later calls of its stream until `resume`. Otherwise these
        could compute together with the failed call of another host, where the other host has to wait for it.

        Raise NOT_FOUND if the function is not loaded.
        """
        with self._lock:
            record = self._program_of.get(function)
            if record is None or function not in record.functions:
                raise not_found(f"Python function {function} is not on this host")
            number = next(self._numbers)
            arguments = [
                m.Argument(each.position, each.dtype, each.shapes[0], tuple(next(self._numbers) for _ in each.shapes))
                for each in inputs
            ]
            asks = isinstance(record.functions[function].source, m.WriteArrays)
            positions = tuple(position for position, _ in results)
            process = self._running(record)
            holds = record.holds(stream)
            call = m.Call(number, function, stream, tuple(arguments), positions, asks, holds)
            pairs = list(zip(inputs, arguments, strict=True))
            unasked = {}
            if asks:
                for each, argument in pairs:
                    shards = _Unasked(each, len(argument.feeds))
                    unasked.update({feed: (shards, i) for i, feed in enumerate(argument.feeds)})
            arrays = tuple(array for _, array in results)
            record.calls[number] = _Call(
                function, sequence if holds else 0, arrays, partial(_end, inputs, on_outcome), unasked
            )
            now = [pair for pair in pairs if pair[0].at_once and not asks]
            later = [pair for pair in pairs if not pair[0].at_once and not asks]
            process.call(
                call,
                partial(self._send, number, now),
                partial(self._send, number, later) if later else None,
            )

    def leave_out(self, function: str, stream: int, sequence: int) -> None:
        """Hold back the later calls of a stream as `call` does, for a call of this unit that failed before `call`."""
        with self._lock:
            record = self._program_of.get(function)
            if record is not None and record.holds(stream):
                number = next(self._numbers)
                record.held.setdefault(sequence, []).append(number)
                self._running(record).send(m.Hold(number, stream))

    def resume(self, sequence: int) -> None:
        """Start the calls that wait behind those of this unit, which have failed here and ended on all hosts."""
        with self._lock:
            for session in self._sessions.values():
                for record in session.programs.values():
                    for number in record.held.pop(sequence, ()):
                        if record.process is not None:
                            record.process.send(m.Resume(number))

    def _send(self, number: int, inputs: Sequence[tuple[Input, m.Argument]], link: PythonLink) -> None:
        for each, argument in inputs:
            try:
                for feed, shard in zip(argument.feeds, each.read(), strict=True):
                    link.send_array(feed, shard)
            except OSError:
                raise
            except Exception as error:
                link.send(m.InputFailed(number, status_of(error)))
            finally:
                each.release()

    def _wanted(self, record: _Program, process: PythonProcess, wanted: m.Wanted) -> None:
        with self._lock:
            call = record.calls.get(wanted.number)
            found = None if call is None else call.unasked.pop(wanted.feed, None)
        if found is None:
            raise FrameError(f"call {wanted.number} requested feed {wanted.feed}, which it does not have")
        argument, shard = found

        def send(link: PythonLink) -> None:
            try:
                contents = argument.input.read()[shard]
            except Exception as error:
                link.send(m.InputFailed(wanted.number, status_of(error)))
                return
            link.send_array(wanted.feed, contents, in_place=True)
            with self._lock:
                argument.to_send -= 1
            if not argument.to_send:
                argument.input.release()

        process.send_array(send)

    # ---- processes

    def close(self, session: int) -> None:
        """Close a session that has ended, and kill its processes."""
        with self._lock:
            closed = self._sessions.pop(session, None)
            for record in closed.programs.values() if closed is not None else ():
                self._close(record)

    def end_process(self, function: str, reason: str) -> None:
        """End the process that runs a function, because other hosts wait for it or it waits for others.

        Its calls fail with the `reason`, and so do those of other functions. Later calls are for the next process, as
        on the other hosts: otherwise, these would wait for this host again. A process that is starting continues, since
        the one that ran the function has ended.
        """
        with self._lock:
            record = self._program_of.get(function) or self._program_that_calls(function)
            if record is None or record.process is None or not record.is_ready:
                return
            process, record.ending, record.process = record.process, record.process, None
            calls, waiting = self._take_all(record)
            self._running(record)
        process.kill_at_once()
        text = f"the Python process of {process.name} {reason}"
        _fail(calls, waiting, failure(Code.ABORTED, text, Details(Kind.PYTHON, retriable=True)))

    def _program_that_calls(self, function: str) -> _Program | None:
        """Return the program that runs a call of a function that was dropped since."""
        programs = (record for session in self._sessions.values() for record in session.programs.values())
        return next((each for each in programs if any(call.function == function for call in each.calls.values())), None)

    def close_world(self, closed: CloseWorld) -> None:
        """Kill the processes of a world that is closed, or have them belong to its successor."""
        calls: list[_Call] = []
        waiting: list[Callable[[Status], None]] = []
        with self._lock:
            for session in self._sessions.values():
                record = session.programs.pop(closed.world, None)
                if record is None or record.world is None:
                    continue
                if closed.successor:
                    record.world.number = closed.successor
                    session.programs[closed.successor] = record
                    continue
                its_calls, its_waiting = self._take_all(record)
                calls += its_calls
                waiting += its_waiting
                self._close(record)
        _fail(calls, waiting, closed.status)

    def _close(self, record: _Program) -> None:
        record.is_open = False
        for function in (*record.functions, *record.loading):
            self._program_of.pop(function, None)
        record.functions.clear()
        if record.ending is not None:  # `_gone` removes the directory when it has ended
            record.process = None
        elif record.process is not None:
            record.process.kill()  # `_gone` removes its directory later
        else:  # the last process has ended, and no other one was started; large directories take long to remove
            self._in_thread("gone", self._gone, record)

    def _running(self, record: _Program) -> PythonProcess:
        """Return the session's process. If none runs, start one and load the previous process's functions."""
        if record.process is None:
            assert record.options is not None
            assert self._host is not None
            record.is_ready = False
            process = PythonProcess(
                f"session {record.number} on host {self._host.number}",
                record.options,
                record.rendezvous,
                lambda message: self._received(record, process, message),
                lambda reason: self._ended(record, process, reason),
                lambda: self._gone(record),
                lambda: sum(call.nbytes for call in list(record.calls.values())),
            )
            record.process = process
            if record.ending is None:
                self._start(record, process)
            for function, load in record.functions.items():
                if function not in record.loading:
                    process.send(load)
        return record.process

    def _start(self, record: _Program, process: PythonProcess) -> None:
        process.start()
        if record.starts is not None:
            record.start = record.starts.begin()
            self._in_thread("starts", self._await_others, record, process, record.start)

    def _take_all(self, record: _Program) -> tuple[list[_Call], list[Callable[[Status], None]]]:
        """Return the calls of a process that ends, and what waits for it, and forget them."""
        calls = list(record.calls.values())
        record.calls, record.held = {}, {}
        for function in record.loading:
            self._program_of.pop(function, None)
        return calls, record.take_waiting()

    def _in_thread(self, name: str, call: Callable[..., None], *arguments: Any) -> None:
        """Call what blocks."""
        threading.Thread(target=call, args=arguments, name=f"atoll-python-{name}", daemon=True).start()

    def _await_others(self, record: _Program, process: PythonProcess, start: ProgramStart) -> None:
        """End a process that starts if the one on another host has not started, since it would wait for that one."""
        reason = start.wait(lambda: record.process is process and record.is_open and not record.is_ready)
        with self._lock:
            gives_up = bool(reason) and record.start is start and not record.is_ready
            if gives_up:
                record.start = None  # the other hosts know of the failure
        if gives_up:
            process.give_up(f"did not start, because another host failed: {reason}")

    def _received(self, record: _Program, process: PythonProcess, message: Any) -> None:
        if process is record.ending:  # its calls have failed
            return
        match message:
            case m.PythonReady(isolated=isolated):
                _log.info("the Python process of session %d is up; namespaces: %s", record.number, isolated)
                with self._lock:
                    record.is_ready = True
                    waiting, record.opening = record.opening, []
                for then in waiting:
                    then(OK)
            case m.Loaded(function=function, status=status):
                status = _checked(status)
                with self._lock:
                    loaded = record.loading.pop(function, None)
                    if not status.ok and loaded is not None:
                        record.functions.pop(function, None)
                        self._program_of.pop(function, None)
                if loaded is not None:
                    loaded(status)
            case m.Wanted():
                self._wanted(record, process, message)
            case m.Returned(number=number, status=status, results=results):
                call = record.calls.get(number)
                if call is None:
                    raise FrameError(f"call {number} returned, but it was not made")
                outcome = _outcome(process, call, _checked(status), results)
                with self._lock:
                    mine = record.calls.pop(number, None)
                    if not status.ok and call.sequence:
                        record.held.setdefault(call.sequence, []).append(number)
                if mine is not None:
                    call.on_outcome(outcome)

    def _ended(self, record: _Program, process: PythonProcess, reason: str) -> None:
        status = failure(Code.ABORTED, reason, Details(Kind.PYTHON, retriable=True))
        with self._lock:
            if process is record.ending:
                record.ending = None
                if record.process is not None:
                    self._start(record, record.process)
                    return
            failed = None
            if record.process is process:
                failed = record.start if record.is_open and not record.is_ready else None
                record.process = record.start = None
            # The processes on the program's other hosts also end, and wait for this one after their restart.
            restarts = (
                record.is_ready and record.options is not None and len(record.options.devices) > 1 and record.is_open
            )
            calls, waiting = self._take_all(record)
            if restarts:
                self._running(record)
        _fail(calls, waiting, status)
        if failed is not None:
            failed.failed(reason)

    def _gone(self, record: _Program) -> None:
        """Remove the directories of a closed program, whose process writes no more."""
        if record.options is not None and not record.is_open:
            remove_tree(record.options.sandbox.scratch)
            with contextlib.suppress(OSError):  # other hosts may still have directories in it
                Path(record.options.sandbox.scratch).parent.rmdir()


def _fail(calls: Sequence[_Call], waiting: Sequence[Callable[[Status], None]], status: Status) -> None:
    for call in calls:
        call.on_outcome(status)
    for then in waiting:
        then(status)


def _end(inputs: Sequence[Input], on_outcome: Callable[[Outcome], None], outcome: Outcome) -> None:
    for each in inputs:
        each.release()
    on_outcome(outcome)


def _outcome(process: PythonProcess, call: _Call, status: Status, results: Sequence[Sequence[int]]) -> Outcome:
    if not status.ok:
        return status
    if [len(feeds) for feeds in results] != [len(array.devices) for array in call.results]:
        raise FrameError("a call returned a different number of arrays than declared")
    try:
        return [
            [
                view(process.take(feed), array.dtype, shape)
                for feed, shape in zip(feeds, array.shard_shapes, strict=True)
            ]
            for feeds, array in zip(results, call.results, strict=True)
        ]
    except StatusError as error:
        return Status(Code.INTERNAL, f"a result does not have its declared type: {error.status.message}")


def _checked(status: Status) -> Status:
    """Return a status from a user's process with a valid code and a shortened message.

    Of its details, only those of a lost object are kept.
    """
    code = status.code if status.code in _CODES else Code.INTERNAL.value
    checked = Status(code, shortened(status.message))
    return checked.with_details(Details(Kind.PYTHON)) if status.details.kind is Kind.PYTHON else checked
