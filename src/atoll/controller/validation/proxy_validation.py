"""Validation of messages from a session's proxy.

`launch` is on the path of every call, so it checks the usual case first, as cheaply as possible.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from atoll.cluster.topology import Topology
from atoll.controller.validation.fields import (
    MAX_NUMBER,
    check_clock,
    check_count,
    check_handles,
    check_new,
    check_new_handles,
    check_number,
    check_numbers,
    check_seconds,
    check_status,
    check_text,
    violation,
)
from atoll.errors import Code, StatusError, invalid
from atoll.ir.validation import MAX_RESULTS, DefinitionCheck
from atoll.protocol import messages as m
from atoll.protocol.number_ranges import CLIENT_FEEDS, CLIENT_HANDLES, SCRIPT_FEEDS
from atoll.state.session import Session

# Per session.
MAX_FUNCTIONS = 1 << 16
MAX_PROGRAMS = 1 << 16
MAX_PARTS = 64  # incomplete programs
MAX_WAITS = 1 << 16
MAX_ARRAYS = 1 << 20

MAX_BRANCHES = 1 << 12
MAX_CREDITS = 1 << 20
MAX_ARRAYS_NAME = 300  # characters of the name of published arrays, with its tenant
_MAX_CONTENT = 128  # characters of a hash
_MAX_QUERY_BYTES = 1 << 20
_QUERIES = frozenset(m.QueryKind)


def launch(session: Session, message: m.Launch, topology: Topology) -> None:
    if not 0 <= message.program < MAX_NUMBER:
        check_number(message, "program")
    if len(message.arguments) > m.MAX_HANDLES:
        check_handles(message, "arguments")
    first_own, entries, results = CLIENT_HANDLES.stop, session.directory.entries, message.results
    for handle in message.arguments:
        if not 0 <= handle < first_own:
            check_handles(message, "arguments")
            break
    for handle in results:
        if handle in entries or not 0 <= handle < first_own:
            check_new_handles(message, "results", entries)
            break
    if len(results) > 1:
        check_count(message, "results", MAX_RESULTS)
        check_new_handles(message, "results", entries)
    if len(entries) + len(results) > MAX_ARRAYS:
        _check_space(session, results)
    if message.feeds:
        check_numbers(message, "feeds", SCRIPT_FEEDS.stop)
    if message.contents is not None:
        if len(message.feeds) != 1:
            raise violation(message, "feeds", message.feeds, "one feed if the launch carries contents")
        if len(message.contents) > m.MAX_CARRIED_BYTES:
            raise violation(message, "contents", f"{len(message.contents)} bytes", f"at most {m.MAX_CARRIED_BYTES}")
    released = message.released
    if len(released) > m.MAX_RELEASED:
        check_count(message, "released", m.MAX_RELEASED)
    for handle in released:
        if not 0 <= handle < first_own:
            check_handles(message, "released")
            break
    if message.wait:
        _check_wait(session, message)
    if message.credits > MAX_CREDITS:  # `check_window` checks the lower bound, which depends on the program
        raise violation(message, "credits", message.credits, f"at most {MAX_CREDITS}")


def _check_space(session: Session, handles: tuple[int, ...]) -> None:
    if len(session.directory.entries) + len(handles) > MAX_ARRAYS:
        raise StatusError(Code.RESOURCE_EXHAUSTED, f"this session has {MAX_ARRAYS} arrays: delete some")


def register_function(session: Session, message: m.RegisterFunction, topology: Topology) -> None:
    check_new(message, "function", session.functions)
    if len(session.functions) >= MAX_FUNCTIONS:
        raise violation(message, "function", message.function, f"at most {MAX_FUNCTIONS} functions in a session")
    check_text(message, "content", _MAX_CONTENT)
    check_number(message, "feed", CLIENT_FEEDS.stop)
    rows = message.assignment
    if not rows or not rows[0] or len({len(row) for row in rows}) != 1:
        raise violation(message, "assignment", rows, "rows of devices of equal length")
    devices = [device for row in rows for device in row]
    for device in devices:
        if device not in session.devices.locations:
            raise violation(message, "assignment", device, "devices of this session")
    if len(set(devices)) != len(devices):
        raise violation(message, "assignment", rows, "each device once")


def register_program(session: Session, message: m.RegisterProgram, topology: Topology) -> None:
    check = _checked_part(session, message)
    try:
        check.results(message.definition.results)
    except StatusError as error:
        raise violation_in(message, "definition", error) from None


def program_part(session: Session, message: m.ProgramPart, topology: Topology) -> None:
    if message.program not in session.parts and len(session.parts) >= MAX_PARTS:
        raise violation(message, "program", message.program, f"at most {MAX_PARTS} incomplete programs in a session")
    if message.definition.results:
        raise violation(message, "definition.results", message.definition.results, "no results before the last part")
    _checked_part(session, message)


def _checked_part(session: Session, message: m.RegisterProgram | m.ProgramPart) -> DefinitionCheck:
    definition, before = message.definition, session.parts.get(message.program)
    if len(definition.nodes) > m.MAX_PART_NODES:
        found = f"{len(definition.nodes)} entries"
        raise violation(message, "definition.nodes", found, f"at most {m.MAX_PART_NODES} in one message")
    check_number(message, "program")
    if before is None:
        check_new_program(session, message)
    try:
        if before is not None:
            return before.checked(definition)
        check = DefinitionCheck(definition.name, definition.feeds, session.devices.locations)
        check.arguments(definition.arguments)
        for node in definition.nodes:
            check.node(node)
    except StatusError as error:
        raise violation_in(message, "definition", error) from None
    return check


def check_new_program(session: Session, message: Any) -> None:
    check_new(message, "program", session.programs, session.control_flow, session.parts)
    if len(session.programs) + len(session.control_flow) >= MAX_PROGRAMS:
        raise violation(message, "program", message.program, f"at most {MAX_PROGRAMS} programs in a session")


def violation_in(message: Any, field: str, error: StatusError) -> StatusError:
    """Return the violation for an error that begins with a path in this field."""
    return invalid(f"{type(message).__name__}.{field}.{error.status.message}")


def register_switch(session: Session, message: m.RegisterSwitch, topology: Topology) -> None:
    check_new_program(session, message)
    check_number(message, "index")
    if not message.branches:
        raise violation(message, "branches", message.branches, "at least one program")
    check_numbers(message, "branches", max_length=MAX_BRANCHES)


def register_loop(session: Session, message: m.RegisterLoop, topology: Topology) -> None:
    check_new_program(session, message)
    for field in ("constants", "first", "begins", "following", "last"):
        check_number(message, field)


def await_(session: Session, message: m.Await, topology: Topology) -> None:
    _check_wait(session, message)
    check_handles(message, "handles")


def _check_wait(session: Session, message: m.Await | m.Launch) -> None:
    waits = session.directory.waits
    check_new(message, "wait", waits)
    if len(waits) >= MAX_WAITS:
        raise violation(message, "wait", message.wait, f"at most {MAX_WAITS} waits in a session")


def make_error(session: Session, message: m.MakeError, topology: Topology) -> None:
    check_new_handles(message, "handles", session.directory.entries)
    check_status(message, "status", is_error=True)
    _check_space(session, message.handles)


def query(session: Session, message: m.Query, topology: Topology) -> None:
    check_number(message, "query")
    if message.what not in _QUERIES:
        raise violation(message, "what", message.what, f"one of {', '.join(sorted(_QUERIES))}")
    if message.device not in session.devices.locations:
        raise violation(message, "device", message.device, "a device of this session")
    if message.function != -1:
        check_number(message, "function")
    check_count(message, "payload", _MAX_QUERY_BYTES)


def recompile(session: Session, message: m.Recompile, topology: Topology) -> None:
    check_number(message, "function")
    check_number(message, "feed", CLIENT_FEEDS.stop)


def failure_acknowledged(session: Session, message: m.FailureAcknowledged, topology: Topology) -> None:
    check_numbers(message, "hosts", max_length=topology.host_count)
    check_numbers(message, "unsent", CLIENT_FEEDS.stop, m.MAX_FEEDS_NAMED)
    check_count(message, "resent", m.MAX_FEEDS_NAMED)
    for host, feed in message.resent:
        if not (0 <= host < topology.host_count and feed in CLIENT_FEEDS):
            raise violation(message, "resent", (host, feed), "hosts of the cluster and feeds")


def release(session: Session, message: m.Release, topology: Topology) -> None:
    check_handles(message, "handles")


def calls_recorded(session: Session, message: m.CallsRecorded, topology: Topology) -> None:
    check_number(message, "request")
    check_seconds(message, "seconds")
    check_clock(message)


def pong(session: Session, message: m.Pong, topology: Topology) -> None:
    check_seconds(message, "seconds")
    check_clock(message)
    check_count(message, "running", 0)
    check_count(message, "compiles", 0)


def handles_reported(session: Session, message: m.HandlesReported, topology: Topology) -> None:
    check_number(message, "check")
    if message.handles is not None:
        check_count(message, "handles", m.MAX_HANDLES_REPORTED)


def publish(session: Session, message: m.Publish, topology: Topology) -> None:
    check_number(message, "request")
    check_text(message, "name", MAX_ARRAYS_NAME)
    check_count(message, "handles", m.MAX_PUBLISHED)
    check_handles(message, "handles")
    if not message.handles or len(set(message.handles)) != len(message.handles):
        raise violation(message, "handles", message.handles, "one or more handles, each once")
    if len(message.paths) != len(message.handles):
        raise violation(message, "paths", f"{len(message.paths)} entries", f"{len(message.handles)}")
    if max(map(len, message.paths)) > m.MAX_PATH:
        raise violation(message, "paths", max(message.paths, key=len), f"at most {m.MAX_PATH} characters")
    if len(set(message.paths)) != len(message.paths):
        raise violation(message, "paths", message.paths, "each path once")
    check_count(message, "structure", m.MAX_STRUCTURE)
    check_number(message, "replicas")


def open_version(session: Session, message: m.OpenVersion, topology: Topology) -> None:
    check_number(message, "request")
    check_text(message, "name", MAX_ARRAYS_NAME)
    check_seconds(message, "seconds")
    for field in ("number", "newer_than"):
        if not -1 <= getattr(message, field) < MAX_NUMBER:
            raise violation(message, field, getattr(message, field), f"-1 to {MAX_NUMBER - 1}")
    if message.in_files and message.number < 0:
        raise violation(message, "number", message.number, "the number of a version")


def read_version(session: Session, message: m.ReadVersion, topology: Topology) -> None:
    check_number(message, "reader")
    check_number(message, "first")
    check_count(message, "targets", m.MAX_READ)
    check_new_handles(message, "results", session.directory.entries)
    if not message.results or len(message.results) != len(message.targets):
        raise violation(message, "results", f"{len(message.results)} entries", "one per target, and at least one")
    _check_space(session, message.results)


def _number(field: str) -> Callable[[Session, Any, Topology], None]:
    def check(session: Session, message: Any, topology: Topology) -> None:
        check_number(message, field)

    return check


PROXIES: Mapping[type[Any], Callable[[Session, Any, Topology], None]] = {
    m.Launch: launch,
    m.RegisterFunction: register_function,
    m.ReleaseFunction: _number("function"),
    m.RegisterProgram: register_program,
    m.ProgramPart: program_part,
    m.ReleaseProgram: _number("program"),
    m.RegisterSwitch: register_switch,
    m.RegisterLoop: register_loop,
    m.Release: release,
    m.Await: await_,
    m.MakeError: make_error,
    m.Recompile: recompile,
    m.FailureAcknowledged: failure_acknowledged,
    m.AddSlice: _number("request"),
    m.ReleaseSlice: _number("slice"),
    m.Quiesced: _number("migration"),
    m.Query: query,
    m.Pong: pong,
    m.CallsRecorded: calls_recorded,
    m.HandlesReported: handles_reported,
    m.Publish: publish,
    m.OpenVersion: open_version,
    m.ReadVersion: read_version,
    m.CloseVersion: _number("reader"),
}
NOTHING_FROM_PROXIES = frozenset({m.LeavesIslands, m.FailOnLoss})
