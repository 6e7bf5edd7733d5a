"""Tests of encoding and decoding events."""

from __future__ import annotations

import pytest

from atoll.errors import JournalError
from atoll.journal.records import decode_events, encode_event, encode_turn, join_records, read_turns
from atoll.protocol import events as e
from atoll.protocol import messages as m

EVENTS = (
    e.Started(0.5),
    e.ConnectionOpened(1.0, 7, "secret", "host"),
    e.Received(1.5, 7, m.Release((1, 2, 3))),
    e.Tick(2.0, e.Load(0.1, 2.0)),
    e.TimerEnded(2.5, 3),
    e.ConnectionLost(3.0, 7, "it was closed"),
    e.Restarted(3.5, 2),
    e.StopAsked(4.0),
    e.Flush(4.5),
)


def records_of(*events):
    """Return the records of events as part of a turn."""
    return join_records(map(encode_event, events))


def test_events_are_read_back_as_they_were():
    assert list(decode_events(records_of(*EVENTS))) == list(EVENTS)


@pytest.mark.parametrize("size", range(1, 40))
def test_a_record_that_is_cut_off_is_none(size):
    record = records_of(EVENTS[2])
    with pytest.raises(JournalError, match="cut off"):
        list(decode_events(record[: min(size, len(record) - 1)]))


def test_bytes_that_are_no_event_are_refused():
    record = bytearray(records_of(EVENTS[2]))
    record[-4:] = b"\xc1\xc1\xc1\xc1"
    with pytest.raises(JournalError, match="invalid record"):
        list(decode_events(bytes(record)))


def test_turns_are_read_up_to_the_first_that_is_not_whole():
    turns = [encode_turn(join_records([encode_event(each), encode_event(e.Flush(9.0))])) for each in EVENTS]
    content = b"".join(turns)
    assert [bytes(turn) for _, turn in read_turns(content)] == [turn[8:] for turn in turns]
    for cut in range(len(content)):
        ends = [end for end, _ in read_turns(content[:cut])]
        assert ends == [end for end, _ in read_turns(content) if end <= cut]
