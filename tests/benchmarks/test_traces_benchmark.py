"""Tests of the evaluation of traces, and of the pictures made from trace files."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from atoll.operate.traces import chrome_trace
from atoll.protocol.spans import SessionName, Span, TraceRecord
from benchmarks.paper.figure import Options
from benchmarks.paper.figures import FIGURES
from benchmarks.paper.trace_plot import draw_traces
from benchmarks.paper.traces import Bar, bars_of, busy, middle_of, turn

MS = 1_000_000


def span(sequence: int, session: int, started: float, ended: float, host: int = 0) -> Span:
    return Span(0, host, session, "step", "call", sequence, int(started * MS), int(ended * MS), 1, (0, 1))


NAMES = (SessionName(1, "client 0", "tenant-0"), SessionName(2, "client 1", "default"))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    record = TraceRecord([span(1, 1, 5, 6), span(1, 1, 5, 6, host=1), span(2, 2, 6, 8)], sessions=NAMES)
    path = tmp_path / "a.trace.json.gz"
    path.write_bytes(gzip.compress(chrome_trace(record)))
    return path


def test_a_gang_is_a_bar_in_the_row_of_each_of_its_devices(file: Path):
    assert sorted(bars_of(file), key=lambda bar: (bar.start, bar.row)) == [
        Bar("host 0, device 0", 1, "tenant-0", 0.0, 1.0),
        Bar("host 0, device 1", 1, "tenant-0", 0.0, 1.0),
        Bar("host 1, device 0", 1, "tenant-0", 0.0, 1.0),
        Bar("host 1, device 1", 1, "tenant-0", 0.0, 1.0),
        Bar("host 0, device 0", 2, "client 1", 1.0, 3.0),
        Bar("host 0, device 1", 2, "client 1", 1.0, 3.0),
    ]


def test_a_picture_is_drawn_of_trace_files(file: Path, tmp_path: Path):
    pytest.importorskip("matplotlib")
    draw_traces([("one", file, 2.0), ("the same", file, 3.0)], "a figure", tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_of_a_trace_the_middle_is_kept():
    record = TraceRecord([span(number, 1, number, number + 1) for number in range(20)])
    assert [each.sequence for each in middle_of(record, 4.0).spans] == [7, 8, 9, 10, 11, 12]


def test_how_long_a_client_has_a_device_is_counted_over_its_gangs_in_a_row():
    spans = [span(1, 1, 0, 1), span(2, 1, 1, 2), span(3, 2, 2, 3), span(4, 1, 3, 4), span(5, 1, 4, 5), span(6, 2, 6, 7)]
    assert turn(spans) == 2.0
    assert turn(spans[:2]) == 0.0, "nobody else had it"
    assert busy(spans) == pytest.approx(100 * 6 / 7)


@pytest.mark.parametrize("figure", [each for each in FIGURES if each.traces(Options())], ids=lambda each: each.key)
@pytest.mark.parametrize("null", [False, True])
def test_the_traces_of_a_figure_are_taken_by_functions_that_there_are(figure, null):
    from pkgutil import resolve_name

    for trace in figure.traces(Options(null=null)):
        assert callable(resolve_name(trace.function))
        assert trace.milliseconds > 0
