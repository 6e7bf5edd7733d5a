"""Tests of measuring the load of the controller's process."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.protocol.events import Load
from atoll.telemetry.load import LoadMeter, LoadRecord


@dataclass
class _Connection:
    messages_in: int
    messages_out: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    unsent_bytes: int = 0

    def statistics(self) -> _Connection:
        return self


def test_connections_that_are_closed_still_count():
    connections = {1: _Connection(5, 1, 50, 10), 2: _Connection(7, unsent_bytes=3)}
    meter = LoadMeter(connections, lambda: 0.0)
    meter.closed(connections.pop(1))
    load = meter.measure(1.0)
    assert (load.connections, load.messages_in, load.messages_out, load.bytes_in, load.bytes_out) == (1, 12, 1, 50, 10)
    assert load.unsent_bytes == 3


def test_the_lag_is_that_of_the_tick_or_of_the_longest_turn():
    now = [10.0]
    meter = LoadMeter({}, lambda: now[0])
    assert meter.measure(1.0).lag == 0.0, "nothing was due before the first"
    now[0] = 11.5
    assert meter.measure(1.0).lag == 0.5
    now[0] = 12.5
    meter.longest = 0.25
    assert meter.measure(1.0).lag == 0.25
    now[0] = 13.5
    assert meter.measure(1.0).lag == 0.0


def test_a_record_keeps_the_last_and_counts_all():
    record = LoadRecord()
    record.record(Load(lag=0.5))
    record.record(Load(lag=0.001))
    record.record(None)
    assert (record.last.lag, sum(record.lag.counts)) == (0.001, 2)
