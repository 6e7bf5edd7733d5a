"""Traces of what a figure measures: files as `atoll trace` writes them, and what is read off them.

`python -m benchmarks.paper.traces MODULE:FUNCTION POINT FILE` takes one in a separate process. The function starts
clients on a cluster according to the point, and calls its argument with the cluster's address while they work.
"""

from __future__ import annotations

import gzip
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name

import msgspec

from atoll.cluster.tenant_settings import DEFAULT_TENANT
from atoll.operate.operator_requests import request_recording, request_trace
from atoll.operate.traces import chrome_trace
from atoll.protocol.spans import Span, TraceRecord
from atoll.wire.address import parse_address

Point = Mapping[str, int | float | str]
# Takes a trace of the cluster at an address. Blocks for `SECONDS` and what the reply takes.
Take = Callable[[str], None]

SECONDS = 0.3
_DEADLINE = 300.0


@dataclass(frozen=True)
class TracePoint:
    """A panel of a picture. `function` is "module:function", given the point and what takes a trace."""

    title: str
    function: str
    point: Point
    milliseconds: float  # of the trace, that are kept and drawn


@dataclass(frozen=True)
class Bar:
    """A device was busy for a session, from `start` to `end`, in milliseconds of the trace."""

    row: str
    session: int
    client: str
    start: float
    end: float


def take_trace(trace: TracePoint, path: Path) -> None:
    """Writes a trace file. Raises RuntimeError where that does not work."""
    path.parent.mkdir(parents=True, exist_ok=True)
    point = json.dumps({**trace.point, "milliseconds_kept": trace.milliseconds})
    command = [sys.executable, "-m", "benchmarks.paper.traces", trace.function, point, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_DEADLINE, check=False)
    if done.returncode:
        raise RuntimeError(f"{trace.title}: no trace was taken:\n{done.stderr[-2000:]}")


def spans_of(address: str) -> TraceRecord:
    """Return the spans of the cluster in the next `SECONDS`."""
    where = parse_address(address)
    recording = request_recording(where, "")
    time.sleep(SECONDS)
    return request_trace(where, "", recording=recording)


def beside(work: Callable[[], object], take: Callable[[], None], after: float) -> None:
    """Does the work, and takes a trace while it is under way, `after` so many seconds. Raises what either raises."""
    failures: list[BaseException] = []

    def taken() -> None:
        try:
            time.sleep(after)
            take()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=taken)
    thread.start()
    work()
    thread.join()
    if failures:
        raise failures[0]


def middle_of(record: TraceRecord, milliseconds: float) -> TraceRecord:
    """Of a trace, what overlaps with a little more than so much in its middle; of what clients did, nothing."""
    begin, end = min(each.started for each in record.spans), max(each.ended for each in record.spans)
    half = int(milliseconds * 1.2e6) // 2
    middle = (begin + end) // 2
    first, last = middle - half, middle + half
    spans = [each for each in record.spans if each.ended > first and each.started < last]
    return msgspec.structs.replace(record, spans=spans, calls=())


def bars_of(path: Path) -> list[Bar]:
    """Of each device, from a trace file: a gang is in the row of its first device, and says which others it had."""
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    events = json.loads(content)["traceEvents"]
    hosts = {(each["pid"], each["tid"]): each["args"]["name"] for each in events if each["name"] == "thread_name"}
    return [
        Bar(
            f"{hosts[each['pid'], each['tid']].split(',')[0].split(' (')[0]}, device {device}",
            each["args"]["session"],
            _client(each["args"]),
            each["ts"] / 1e3,
            (each["ts"] + each["dur"]) / 1e3,
        )
        for each in events
        if each["ph"] == "X" and "devices" in each["args"]
        for device in each["args"]["devices"] or [0]
    ]


def _client(args: Mapping[str, str]) -> str:
    """Its tenant, where there are several."""
    tenant = args.get("tenant", DEFAULT_TENANT.name)
    return args.get("client", "") if tenant == DEFAULT_TENANT.name else tenant


def busy(spans: Sequence[Span]) -> float:
    """Return the percentage of time in which the first device of the first host was busy."""
    here = _first_device(spans)
    whole = here[-1].ended - here[0].started
    return 100 * sum(each.ended - each.started for each in here) / whole


def turn(spans: Sequence[Span]) -> float:
    """Return the median time for which one client has the first device until another one has it, in milliseconds."""
    turns: list[int] = []
    began, session = 0, -1
    for span in _first_device(spans):
        if span.session != session:
            if session >= 0:
                turns.append(span.started - began)
            began, session = span.started, span.session
    return statistics.median(turns) / 1e6 if turns else 0.0


def _first_device(spans: Sequence[Span]) -> list[Span]:
    host = min(span.host for span in spans)
    here = [span for span in spans if span.host == host and 0 in (span.devices or (0,))]
    return sorted(here, key=lambda each: each.started)


def main() -> None:
    function, point, path = sys.argv[1:]
    settings = json.loads(point)

    def take(address: str) -> None:
        content = chrome_trace(middle_of(spans_of(address), settings["milliseconds_kept"]))
        Path(path).write_bytes(gzip.compress(content, mtime=0))

    resolve_name(function)(settings, take)


if __name__ == "__main__":
    main()
