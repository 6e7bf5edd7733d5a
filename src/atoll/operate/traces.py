"""Traces as Chrome trace events (JSON), which Perfetto and chrome://tracing open.

Times are the controller's, in microseconds from the first. `otherData` has the clock error of each host.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from atoll.decodable import decodable
from atoll.protocol.spans import ClientCall, ClockError, SessionCalls, SessionName, Span, TraceRecord
from atoll.state.gang_states import Reason

_MAX_DEVICES = 1 << 12  # per host
_SESSIONS = 1 << 20  # "process" numbers of the trace: islands by number, then sessions
_PROXY, _HELD = 1, 2  # rows of a session
_HELD_KINDS = {"window": "the launch window is full", "quiesced": "devices are migrating"}

_Event = dict[str, Any]


def chrome_trace(record: TraceRecord) -> bytes:
    """Return the trace: rows per host and device, grouped by island; then per session its waits and its recorded calls.

    A gang on several devices is in the row of its first device, where it overlaps with no other: gangs in one row share
    that device, and ran one after another.
    """
    spans = record.spans
    calls = {each.session: read_calls(each) for each in record.calls}
    starts = [span.started for span in spans]
    starts += [span.dispatched - _of_others(span) for span in spans if span.launched]
    starts += [call.received for some in calls.values() for call in some]
    writer = _Writer(min(starts, default=0), record.sessions)
    events = [
        *writer.device_rows(spans, record.clocks),
        *writer.session_rows({span.session for span in spans if span.launched} | set(calls)),
        *(event for span in spans for event in writer.span(span)),
        *writer.arrows(spans),
        *writer.waits(spans),
        *(event for session, some in calls.items() for call in some for event in writer.call(session, call)),
    ]
    other = {
        "clock": "the controller's monotonic clock, and the time for which it did not run",
        "origin_ns": writer.origin,
        "hosts": [_clock(each) for each in record.clocks],
        "sessions": [_clock(each) for each in record.calls],
        "missing": list(record.missing),
    }
    return msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms", "otherData": other})


def read_calls(recorded: SessionCalls) -> list[ClientCall]:
    """Return the calls with times of the controller's clock. Invalid data from a proxy counts as no calls."""
    try:
        calls = msgspec.msgpack.decode(recorded.calls, type=decodable(list[ClientCall]))
    except msgspec.MsgspecError:
        return []
    times = [at for at, _ in recorded.offsets]

    def aligned(at: int) -> int:
        after = min(bisect_right(times, at), len(times) - 1)
        if after < 1:
            return at + (recorded.offsets[0][1] if times else 0)
        (begin, offset), (end, later) = recorded.offsets[after - 1 : after + 1]
        return at + offset + (later - offset) * (at - begin) // (end - begin)

    return [
        ClientCall(
            each.kind,
            each.name,
            aligned(each.received),
            aligned(each.handled),
            aligned(each.answered) if each.answered else 0,
            each.nbytes,
        )
        for each in calls
    ]


class _Writer:
    """Creates events. `origin` is the first time, in nanoseconds."""

    def __init__(self, origin: int, sessions: Iterable[SessionName]) -> None:
        self.origin = origin
        self._names = {each.number: each for each in sessions}

    def _time(self, nanoseconds: int) -> float:
        return (nanoseconds - self.origin) / 1e3

    def _bar(self, name: str, kind: str, pid: int, tid: int, start: int, end: int, args: _Event) -> _Event:
        """Return a bar. Bars of one row are disjoint or nested."""
        return {
            "name": name,
            "cat": kind,
            "ph": "X",
            "pid": pid,
            "tid": tid,
            "ts": self._time(start),
            "dur": max(0, end - start) / 1e3,
            "args": args,
        }

    def _stretch(self, name: str, kind: str, pid: int, number: str, start: int, end: int, args: _Event) -> list[_Event]:
        """Return the events of an interval that may overlap with others of the same name."""
        common = {"name": name, "cat": kind, "pid": pid, "tid": 0, "id": number}
        return [
            {**common, "ph": "b", "ts": self._time(start), "args": args},
            {**common, "ph": "e", "ts": self._time(max(start, end))},
        ]

    # ---- Rows

    def device_rows(self, spans: list[Span], clocks: Iterable[ClockError]) -> Iterator[_Event]:
        errors = {each.host: each.error for each in clocks}
        for island in sorted({span.island for span in spans}):
            yield _named("process_name", island, 0, f"island {island}")
        rows = sorted({(span.island, span.host, _device(span)) for span in spans})
        rows_of = Counter((island, host) for island, host, _ in rows)
        for island, host, device in rows:
            name = f"host {host}" if rows_of[island, host] == 1 else f"host {host}, device {device}"
            if errors.get(host, 0) > 0:
                name += f" (±{errors[host] / 1e6:.2g} ms)"
            yield _named("thread_name", island, _row(host, device), name)

    def session_rows(self, sessions: Iterable[int]) -> Iterator[_Event]:
        for number in sorted(sessions):
            known = self._names.get(number)
            label = "" if known is None else f" ({known.label}, tenant {known.tenant})"
            yield _named("process_name", _SESSIONS + number, 0, f"session {number}{label}")
            yield _named("thread_name", _SESSIONS + number, _PROXY, "proxy")
            yield _named("thread_name", _SESSIONS + number, _HELD, "held back")

    # ---- Spans

    def span(self, span: Span) -> Iterator[_Event]:
        args: _Event = {
            "session": span.session,
            "sequence": span.sequence,
            "nodes": span.nodes,
            "devices": span.devices,
        }
        known = self._names.get(span.session)
        if known is not None:
            args |= {"client": known.label, "tenant": known.tenant}
        if span.nbytes:
            args["bytes"] = span.nbytes
        if span.launched:
            waits: Counter[str] = Counter()
            for reason, nanoseconds in span.waits:
                waits[reason] += nanoseconds
            args["waited_ms"] = {reason: nanoseconds / 1e6 for reason, nanoseconds in waits.items()}
            args["device_queue_ms"] = (span.started - span.enqueued) / 1e6
        name = span.function or span.program
        if span.kind != "call":
            name = f"{span.program} ({span.kind})"
        elif span.function:
            args["program"] = span.program
        yield self._bar(name, span.kind, span.island, _row(span.host, _device(span)), span.started, span.ended, args)

    def arrows(self, spans: list[Span]) -> Iterator[_Event]:
        """Yield arrows from sends to receives."""
        sends = {span.node: span for span in reversed(spans) if span.kind == "send"}
        for span in spans:
            source = sends.get(span.node) if span.kind == "receive" and span.node else None
            if source is None:
                continue
            common = {"name": "transfer", "cat": "transfer", "id": f"{span.node}.{span.host}"}
            for ph, at, when in (("s", source, source.started), ("f", span, span.ended)):
                row = _row(at.host, _device(at))
                yield {**common, "ph": ph, "bp": "e", "pid": at.island, "tid": row, "ts": self._time(when)}

    def waits(self, spans: list[Span]) -> Iterator[_Event]:
        """Yield the waits of gangs in the controller, except for earlier work of their own sessions."""
        for span in {span.sequence: span for span in spans if span.launched}.values():
            start = span.launched
            for reason, nanoseconds in span.waits:
                if reason != Reason.OWN:
                    args = {"program": span.program, "island": span.island, "sequence": span.sequence}
                    number = f"{span.sequence}.{start}"
                    pid = _SESSIONS + span.session
                    yield from self._stretch(f"waits: {reason}", "wait", pid, number, start, start + nanoseconds, args)
                start += nanoseconds

    # ---- Clients

    def call(self, session: int, call: ClientCall) -> Iterator[_Event]:
        """Yield the proxy's work for a call, and the time until its client got the answer."""
        pid = _SESSIONS + session
        if call.kind in _HELD_KINDS:
            yield self._bar(_HELD_KINDS[call.kind], "held", pid, _HELD, call.received, call.handled, {})
            return
        name = f"{call.kind} {call.name}" if call.name else call.kind
        args: _Event = {"bytes": call.nbytes} if call.nbytes else {}
        yield self._bar(name, "request", pid, _PROXY, call.received, call.handled, args)
        if call.answered > call.handled:
            number = f"{call.received}"
            yield from self._stretch(f"client: {call.kind}", "client", pid, number, call.received, call.answered, args)


def _of_others(span: Span) -> int:
    """Return for how long the span waited for anything but its own session, in nanoseconds."""
    return sum(nanoseconds for reason, nanoseconds in span.waits if reason != Reason.OWN)


def _clock(each: ClockError | SessionCalls) -> _Event:
    error = each.error if each.error >= 0 else None
    if isinstance(each, ClockError):
        return {"host": each.host, "offset_ns": each.offset, "error_ns": error, "round_trips": each.samples}
    return {"session": each.session, "offset_ns": each.offsets[-1][1] if each.offsets else 0, "error_ns": error}


def _device(span: Span) -> int:
    return min(span.devices, default=0)


def _row(host: int, device: int) -> int:
    """Return the number of a row; the rows of a host are adjacent."""
    return host * _MAX_DEVICES + device


def _named(what: str, pid: int, tid: int, name: str) -> _Event:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
