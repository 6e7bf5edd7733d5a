"""Tests of many sessions that read one version: trees of transfers, and interruptions of them."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import pytest

from atoll.cluster.slice_requests import SliceRequest
from atoll.controller.controller_dumps import load_controller
from atoll.controller.named_arrays.version_reads import MAX_OTHER_PARTS, MAX_READS
from atoll.errors import Code, Status
from atoll.ir.program import Call, single
from atoll.named_arrays.version_states import VersionState
from atoll.protocol import events as e
from atoll.protocol import messages as m
from atoll.state.queued_nodes import Gang
from atoll.state.session import GangRun
from tests.controller.dumps import dumped
from tests.controller.play import on, runs
from tests.controller.publishing_play import Trainer


class Reader(NamedTuple):
    """Session that reads the version to array 7, on the island (and only host) with this number."""

    session: int
    reader: int
    island: int


class Reading(Trainer):
    """Trainer with a version on island 0, and sessions on other islands that read it."""

    def __init__(self, topology: str = "6x1x2") -> None:
        super().__init__(topology)
        self.complete()
        self.running: dict[int, list[Gang[GangRun]]] = {}  # gangs of reads, by receiving island

    def read(self, *islands: int, token: str = "reader") -> list[Reader]:
        """Let one session on each of these islands read the version."""
        sessions = [self.open(token=token).number for _ in islands]
        readers = [
            Reader(each, self.opened(each).reader, island) for each, island in zip(sessions, islands, strict=True)
        ]
        for session, reader, island in readers:
            self.proxy(session, m.ReadVersion(reader, 0, (on(2 * island),), (7,)))
        return readers

    def sources(self) -> dict[int, int]:
        """Return the reads that have started since the last call: the sending island, by receiving island."""
        sent = [(to[1], each) for to, each in self.sent() if isinstance(each, m.Run) and each.results]
        found = {}
        for island, run in sent:
            gangs = self.running[island] = list(self.controller.launches.in_flight[run.sequence].node.gangs)
            (found[island],) = [gang.island for gang in gangs if gang.island != island]
        return found

    def end(self, *islands: int) -> dict[int, int]:
        """End the reads of these islands on all hosts. Return `sources` of the next reads."""
        for island in islands:
            for gang in self.running.pop(island):
                self.worker(gang.island, m.Done(((gang.sequence, 0, 1),)))
        return self.sources()

    def interrupt(self, *islands: int) -> dict[int, int]:
        """Report from the hosts of these islands that the bytes of their reads do not arrive.

        Return `sources` of the next reads.
        """
        for island in islands:
            (sequence,) = [gang.sequence for gang in self.running.pop(island) if gang.island == island]
            self.worker(island, m.Failed(sequence, Status(Code.DATA_LOSS, "the sender is gone")))
        return self.sources()

    def error(self, reader: Reader) -> str | None:
        """Return the error of the array that a session reads, None if it has none, or "waits" if it is pending."""
        entry = self.controller.sessions[reader.session].directory.entries[7]
        return "waits" if not entry.ready else None if entry.error is None else entry.error.message


def test_later_readers_get_the_copies_of_earlier_ones() -> None:
    play = Reading()
    readers = play.read(1, 2, 3, 4, 5)
    assert play.sources() == {1: 0, 2: 0}
    assert play.end(2) == {3: 2, 4: 2}
    assert [play.error(each) for each in readers] == ["waits", None, "waits", "waits", "waits"]
    assert play.end(1) == {5: 1}
    play.end(3, 4, 5)
    assert [play.error(each) for each in readers] == [None] * 5


def test_bytes_that_a_version_has_sent_and_that_readers_have_passed_on_are_counted() -> None:
    play = Reading()
    (version,) = play.controller.published.names.versions()
    play.read(1, 2, 3, 4, 5)
    begun = play.sources()
    while begun:
        begun = play.end(*begun)
    assert (version.sent, version.passed_on) == (2 * version.nbytes, 3 * version.nbytes)


def test_a_read_on_the_island_of_its_source_sends_nothing() -> None:
    play = Reading()
    (version,) = play.controller.published.names.versions()
    session = play.session = play.open(token="reader").number
    reader = play.opened(session).reader
    (run,) = [each for each in play.send(m.ReadVersion(reader, 0, (on(1),), (7,))) if isinstance(each, m.Run)]
    play.done(run.sequence)
    assert play.controller.sessions[session].directory.entries[7].ready
    assert (version.sent, version.passed_on) == (0, 0)


def test_what_uses_an_array_that_waits_runs_after_it_and_holds_up_nothing_else() -> None:
    play = Reading()
    *_, last = play.read(1, 2, 3)
    play.sources()
    play.session = last.session
    play.with_function(1, (6,))
    play.send(m.RegisterProgram(1, single("use", (on(6),), Call(1, (0,), (on(6),), (6,)))))
    assert play.send(m.Launch(1, (7,), (8,), ())) == []
    play.with_put(2, 6)
    play.report(3, m.FeedsArrived(last.session, (20,)))
    (put,) = [each for each in play.send(m.Launch(2, (), (9,), (20,))) if isinstance(each, m.Run)]
    play.worker(3, m.Done(((put.sequence, 0, 1),)))
    assert play.end(1) == {3: 1}
    for gang in play.running.pop(3):
        play.worker(gang.island, m.Done(((gang.sequence, 0, 1),)))
    (used,) = [each for _, each in play.sent() if isinstance(each, m.Run)]
    assert (used.arguments, used.results) == ((7,), (8,))


def test_readers_of_a_copy_whose_island_fails_get_another_copy() -> None:
    play = Reading()
    readers = play.read(1, 2, 3, 4)
    play.sources()
    assert play.end(1) == {3: 1, 4: 1}
    play.lose(1, "it burnt")
    play.flush()
    assert [play.error(each) for each in readers[1:]] == ["waits"] * 3
    assert play.interrupt(3, 4) == {}
    assert play.end(2) == {3: 2, 4: 2}
    play.end(3, 4)
    assert [play.error(each) for each in readers[1:]] == [None] * 3


def test_copies_of_readers_feed_others_when_the_version_is_lost() -> None:
    play = Reading()
    _, second, third, fourth = play.read(1, 2, 3, 4)
    play.sources()
    assert play.end(1) == {3: 1, 4: 1}
    play.lose(0, "it burnt")
    (version,) = play.controller.published.names.versions()
    assert version.state is VersionState.LOST
    assert play.interrupt(2) == {}, "the first copy has served two readers"
    assert play.end(3) == {2: 3}
    play.end(2, 4)
    assert [play.error(each) for each in (second, third, fourth)] == [None] * 3


def test_a_reader_that_waits_gets_the_error_of_a_lost_version_that_no_one_has() -> None:
    play = Reading()
    readers = play.read(1, 2, 3)
    play.sources()
    play.lose(0, "it burnt")
    assert play.interrupt(1, 2) == {}
    for each in readers:
        assert "a part of version 1 of trainer/policy was on island 0" in (play.error(each) or "")


def test_a_reader_whose_own_island_fails_gets_that_error_and_others_go_on() -> None:
    play = Reading()
    first, second, third = play.read(1, 2, 3)
    play.sources()
    (sender, _) = play.running.pop(1)
    play.lose(1, "it burnt")
    play.worker(0, m.Done(((sender.sequence, 0, 1),)))
    assert play.end(2) == {3: 2}
    assert "it burnt" in (play.error(first) or "")
    play.end(3)
    assert [play.error(second), play.error(third)] == [None, None]


def test_a_copy_that_was_released_is_no_source() -> None:
    play = Reading()
    first, _ = play.read(1, 2)
    play.sources()
    play.proxy(first.session, m.Release((7,)))
    play.end(1)
    assert 7 not in play.controller.sessions[first.session].directory.entries
    play.read(3)
    assert play.sources() == {}, "the publisher has served two readers, one of which will have a copy soon"
    assert play.end(2) == {3: 2}


def test_another_array_with_the_handle_of_a_copy_is_no_source() -> None:
    play = Reading()
    first, *_ = play.read(1)
    play.sources()
    play.end(1)
    play.proxy(first.session, m.Release((7,)))
    play.session = first.session
    play.with_put(2, 2)
    play.report(1, m.FeedsArrived(first.session, (20,)))
    (run,) = [each for each in play.send(m.Launch(2, (), (7,), (20,))) if isinstance(each, m.Run)]
    play.worker(1, m.Done(((run.sequence, 0, 1),)))
    play.read(3)
    assert play.sources() == {3: 0}


def test_copies_of_readers_feed_no_other_tenant() -> None:
    play = Reading()
    play.read(1, 2)
    play.sources()
    play.end(1)
    play.read(3, token="trainer")
    assert play.sources() == {3: 0}


def test_a_copy_in_an_exclusive_slice_feeds_only_its_session() -> None:
    play = Reading()
    session = play.session = play.open(token="reader").number
    reader = play.opened(session).reader
    replies = play.send(m.AddSlice(1, SliceRequest(2, exclusive=True)))
    (device, _) = next(each.devices for each in replies if isinstance(each, m.SliceAdded))
    play.proxy(session, m.ReadVersion(reader, 0, (on(device),), (7,)))
    assert play.sources() == {1: 0}
    play.end(1)
    play.read(3)
    assert play.sources() == {3: 0}


def test_a_reader_with_one_of_its_arrays_on_the_publishers_island_counts_as_one_of_two() -> None:
    play = Reading()
    play.session = play.open(token="trainer").number
    play.array(10)
    play.send(m.RegisterProgram(5, play.view_program))
    views = []
    for _ in range(2):
        view, sequence = play.view()
        views.append(view)
        play.done(sequence)
    play.send(m.Publish(play.request(), "policy", 2, tuple(views), ("w", "checksums")))
    play.flush()
    sessions = [play.open(token="reader").number for _ in range(3)]
    readers = [play.opened(each).reader for each in sessions]
    for island, (session, reader) in enumerate(zip(sessions, readers, strict=True), start=1):
        play.proxy(session, m.ReadVersion(reader, 0, (on(2 * island), on(0)), (7, 8)))
    runs = [to[1] for to, each in play.sent() if isinstance(each, m.Run) and to[1]]
    assert runs == [1, 2]


def test_a_reader_does_not_wait_for_a_copy_that_does_not_come() -> None:
    play = Reading()
    play.read(1, 2, 3, 4)
    play.sources()
    play.tick(play.now + 1.0)
    assert play.sources() == {}
    play.tick(play.now + 2.0)
    assert play.sources() == {3: 0}
    play.tick(play.now + 3.0)
    assert play.sources() == {4: 0}


def test_readers_that_stall_delay_others_by_the_logarithm_of_their_number() -> None:
    play = Reading("9x1x2")
    *_, (last, _, _) = play.read(1, 2, 3, 4, 5, 6, 7, 8)
    begun = [sorted(play.sources())]
    for _ in range(3):
        play.tick(play.now + 3.0)
        begun.append(sorted(play.sources()))
    assert begun == [[1, 2], [3], [4, 5], [6, 7, 8]]
    play.end(8)
    assert play.controller.sessions[last].directory.entries[7].error is None


def test_a_session_with_many_reads_that_stall_does_not_delay_another_one() -> None:
    play = Reading()
    (hostile,) = play.read(1)
    for handle in range(100, 120):
        play.proxy(hostile.session, m.ReadVersion(hostile.reader, 0, (on(2),), (handle,)))
    play.flush()
    play.read(2)
    play.tick(play.now + 3.0)
    assert 2 in play.sources()


def test_a_flush_drops_only_some_copies_that_do_not_exist_any_more() -> None:
    play = Reading("31x1x2")
    readers = play.read(*range(1, 31))
    begun = play.sources()
    while begun:
        begun = play.end(*begun)
    for session, *_ in readers:
        play.proxy(session, m.Release((7,)))
    play.flush()
    play.read(1)
    flushes = 1
    while play.controller.has_work:
        play.event(e.Flush(play.now))
        flushes += 1
    assert flushes > len(readers) // 8
    assert play.controller.launches.in_flight, "the read has begun"


def test_a_version_that_is_closed_and_replaced_exists_until_its_reads_begin() -> None:
    play = Reading()
    readers = play.read(1, 2, 3)
    play.sources()
    for each in readers:
        play.proxy(each.session, m.CloseVersion(each.reader))
    play.session = play.open(token="trainer").number
    play.array(10)
    play.send(m.RegisterProgram(5, play.view_program))
    play.complete(keep=1)
    assert len(list(play.controller.published.names.versions())) == 2
    assert play.end(1) == {3: 1}
    assert len(list(play.controller.published.names.versions())) == 1
    play.end(2, 3)
    assert [play.error(each) for each in readers] == [None] * 3
    assert play.controller.published.reads.is_idle


def test_the_end_of_a_session_ends_its_reads_and_lets_others_start() -> None:
    play = Reading()
    first, second, third, _ = play.read(1, 2, 3, 4)
    play.sources()
    play.close(third.session)
    play.close(first.session)
    play.flush()
    play.controller.published.reads.validate()
    assert play.end(2) == {4: 2}
    play.end(4)
    play.close(second.session)
    play.flush()
    play.controller.published.reads.validate()


def test_the_many_reads_of_a_session_that_ends_are_forgotten_in_steps() -> None:
    play = Reading()
    (many,) = play.read(1)
    for handle in range(100, 500):
        play.proxy(many.session, m.ReadVersion(many.reader, 0, (on(2),), (handle,)))
    (other,) = play.read(3)
    play.sources()
    reads = play.controller.published.reads
    play.close(many.session)
    left = [len(reads.leaving)]
    while play.controller.has_work:
        play._kept += play.event(e.Flush(play.now))
        left.append(len(reads.leaving))
        reads.validate()
    assert left[0] == 401, "the other reads of the session wait"
    assert max(before - after for before, after in pairwise(left)) <= 128
    assert not left[-1]
    assert play.sources() == {3: 0}
    play.end(3)
    assert play.error(other) is None


def test_a_dump_has_the_reads_that_are_to_be_forgotten() -> None:
    play = Reading()
    (many,) = play.read(1)
    for handle in range(100, 300):
        play.proxy(many.session, m.ReadVersion(many.reader, 0, (on(2),), (handle,)))
    play.sources()
    play.close(many.session)
    reads = load_controller(dumped(play.controller)).published.reads
    reads.validate()
    assert len(reads.leaving) == 201
    play.flush()
    play.controller.published.reads.validate()
    assert not play.controller.published.reads.leaving


class ReadingParts(Reading):
    """Trainer with a version of several arrays on island 0, of which sessions read some."""

    def __init__(self, arrays: int = 3) -> None:
        super().__init__()
        views = []
        for _ in range(arrays):
            view, sequence = self.view()
            views.append(view)
            self.done(sequence)
        self.send(m.Publish(self.request(), "policy", 2, tuple(views), tuple(map(str, views))))
        self.flush()

    def read_part(self, island: int, first: int, count: int, is_original: bool = False) -> dict[int, int]:
        """Let a session read these arrays, and end all reads. Return `sources`."""
        session = self.open(token="reader").number
        reader = self.opened(session).reader
        handles = tuple(range(7, 7 + count))
        self.proxy(session, m.ReadVersion(reader, first, (on(2 * island),) * count, handles, is_original))
        begun = self.sources()
        self.end(*begun)
        return begun


def test_readers_without_the_checksums_and_readers_of_the_checksums_alone_feed_each_other() -> None:
    play = ReadingParts()
    assert play.read_part(1, 0, 2) == {1: 0}
    assert play.read_part(2, 0, 2) == {2: 1}
    assert play.read_part(3, 2, 1) == {3: 0}
    assert play.read_part(4, 2, 1) == {4: 3}
    assert play.read_part(5, 0, 3) == {5: 0}, "no session has all arrays"


def test_a_reader_that_asks_for_the_original_gets_no_copy_of_another_reader() -> None:
    play = ReadingParts()
    assert play.read_part(1, 0, 3) == {1: 0}
    assert play.read_part(2, 0, 3) == {2: 1}
    assert play.read_part(3, 0, 3, is_original=True) == {3: 0}
    play.controller.published.reads.validate()


def test_the_unusual_parts_with_trees_are_bounded() -> None:
    play = ReadingParts(arrays=6)
    parts = [(first, count) for first in range(6) for count in range(1, 7 - first)]
    unusual = [part for part in parts if part != (0, 6)]
    assert len(unusual) > MAX_OTHER_PARTS
    assert all(play.read_part(1, *part) == {1: 0} for part in unusual)
    assert play.read_part(2, *unusual[MAX_OTHER_PARTS - 1]) == {2: 1}
    assert play.read_part(2, *unusual[MAX_OTHER_PARTS]) == {2: 0}


def test_nothing_is_kept_of_the_copies_of_a_session_that_has_ended() -> None:
    play = Reading()
    first, _ = play.read(1, 2)
    play.sources()
    play.end(1)
    play.close(first.session)
    play.flush()
    play.controller.published.reads.validate()
    play.read(3)
    assert play.sources() == {}, "the publisher has served two readers, one of which will have a copy soon"
    assert play.end(2) == {3: 2}


def test_the_reads_of_a_session_are_bounded() -> None:
    play = Reading("3x1x2")
    session = play.open(token="reader").number
    opened = play.opened(session)
    for handle in range(1, MAX_READS + 2):
        play.proxy(session, m.ReadVersion(opened.reader, 0, (on(2),), (handle,)))
    play.flush()
    entries = play.controller.sessions[session].directory.entries
    assert not entries[MAX_READS].ready
    error = entries[MAX_READS + 1].error
    assert error is not None
    assert error.code == Code.RESOURCE_EXHAUSTED


def _donate(play: Reading, reader: Reader, result: int) -> int:
    """Replace a session's array 7 with the result of a function that donates it.

    Return the bytes used on its device.
    """
    play.session = reader.session
    device = 2 * reader.island
    play.with_function(90, (device,))
    call = Call(90, (0,), (on(device),), (device,), donated=(0,))
    play.send(m.RegisterProgram(90, single("step", (on(device),), call)))
    play.send(m.Launch(90, (7,), (result,), ()))
    return play.controller.ledger.used[reader.island, 0]


def test_a_copy_that_is_to_feed_others_is_counted_beside_the_output_that_replaces_it() -> None:
    play = Reading()
    first, *_ = play.read(1, 2, 3)
    play.sources()
    play.controller.ledger.declare((3, 0), 7)
    assert play.end(1) == {}, "the third reader waits for memory"
    assert _donate(play, first, 8) == 16, "the host copies the array, which must still be sent"


def test_a_copy_that_has_fed_others_gives_its_memory_to_the_output_that_replaces_it() -> None:
    play = Reading()
    first, *_ = play.read(1, 2, 3, 4, 5)
    begun = play.sources()
    while begun:
        begun = play.end(*begun)
    assert _donate(play, first, 8) == 8


@pytest.mark.parametrize("limits", [{}, {"memory": 12}, {"total_memory": 20}])
def test_a_launch_that_donates_a_copy_continues_when_the_copy_does_not_feed_others_any_more(
    limits: dict[str, int],
) -> None:
    play = Reading()
    first, _, third = play.read(1, 2, 3)
    play.sources()
    play.controller.ledger.declare((3, 0), 7)
    play.end(1)  # the third reader waits for memory, and will receive the first reader's copy
    play.operator(m.SetTenant("reader", limits=limits))
    if not limits:
        play.controller.ledger.declare((1, 0), 12)
    _donate(play, first, 8)
    assert play.controller.launches.reservations.waits.is_waiting(first.session)
    play.close(third.session)
    assert [each.results for each in runs(play.outbox())] == [(8,)]
