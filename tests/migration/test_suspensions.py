"""Tests that sessions are suspended and resumed: events, and the messages that follow."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from atoll.cluster.locations import DeviceLocation
from atoll.cluster.slice_requests import SliceRequest
from atoll.errors import OK, Code, Status, StatusError
from atoll.ir.types import ArraySpec
from atoll.migration.array_spiller import MAX_LEFT
from atoll.migration.manifest import SuspendedSession
from atoll.migration.rules import MAX_MOVED_ARRAYS, MAX_MOVED_ON_HOST, MAX_MOVED_SHARDS, check_size
from atoll.protocol import messages as m
from atoll.telemetry.report import report
from tests.controller.play import Play, runs


class SuspendPlay(Play):
    """Session with an array (handle 5) of 8 bytes on device 0, on a cluster of two islands."""

    def __init__(self, topology: str = "2x1x2", **options: Any) -> None:
        super().__init__(topology, **options)
        self.array(5)

    def ask(self, to_disk: bool = False, session: int = 0) -> list[Any]:
        self.operator(m.SuspendRequest(session or self.session, to_disk))
        return self.outbox()

    def resume(self, *islands: int, wait: float = 0.0) -> list[Any]:
        self.operator(m.ResumeRequest(self.session, islands, wait))
        return self.outbox()

    def quiesced(self, number: int = 1) -> list[Any]:
        return self.send(m.Quiesced(number))

    def suspended(self, to_disk: bool = False) -> tuple[m.SpilledPiece, list[Any]]:
        """Suspend the session. Return the spilled piece, and the last messages."""
        self.ask(to_disk)
        (put,) = self.quiesced()
        assert isinstance(put, m.SpillRequest)
        piece = m.SpilledPiece(put.shards[0][0], 8, "/spilled/1.piece" if to_disk else "", 7)
        return piece, self.report(0, m.SpillReply(self.session, put.request, OK, (piece,)))

    @property
    def memory(self) -> int:
        return sum(self.controller.ledger.used.values())


def answer_in(messages: list[Any]) -> m.OperationReply:
    (answer,) = [each for each in messages if isinstance(each, m.OperationReply)]
    return answer


def test_a_session_is_suspended_and_resumed_step_by_step():
    play = SuspendPlay()
    assert play.ask() == [m.Quiesce(1)]
    # The session is quiet while its array is copied. Nothing has changed so far.
    (put,) = play.quiesced()
    assert put == m.SpillRequest(play.session, 1, ((1, 5, 0),))
    assert play.memory == 8
    # When the array is spilled, its memory is free, and the script waits.
    piece = m.SpilledPiece(1, 8)
    replies = play.report(0, m.SpillReply(play.session, 1, OK, (piece,)))
    assert replies == [
        m.Free(play.session, (5,)),
        m.OperationReply(OK, f"session {play.session} is suspended in memory"),
    ]
    assert play.memory == 0
    # The array is restored as a feed of an ordinary launch.
    keep, send, credit = play.resume()
    assert isinstance(keep, m.RegisterPlan)
    assert credit == m.CreditReturned(-1)
    ((back, feed, hosts),) = send.pieces
    assert (back, hosts) == (piece, (0,))
    (run,) = runs(play.report(0, m.FeedsArrived(play.session, (feed,))))
    assert (run.results, run.feeds) == ((5,), (feed,))
    assert play.memory == 8
    replies = play.done(run.sequence)
    assert m.DropSpilled(play.session, (piece,)) in replies
    assert m.Migrated(2, ()) in replies
    assert answer_in(replies) == m.OperationReply(OK, f"session {play.session} continues on island 0")
    assert play.controller.suspensions.by_session == {}


def test_it_goes_on_on_another_island_with_its_functions_compiled_there():
    play = SuspendPlay()
    play.with_call()
    piece, _ = play.suspended()
    assert play.resume(1)[0] == m.SendSources(((1, (1,)),))
    play.send(m.Recompile(1, 77))
    (compile_,) = play.report(1, m.FeedsArrived(play.session, (77,)))
    replies = play.report(1, m.Compiled(compile_.function, OK, b"", 0.1, False))
    (send,) = [each for each in replies if isinstance(each, m.SendSpilled)]
    ((_, feed, hosts),) = send.pieces
    assert hosts == (1,), "the host with the piece sends it to the other host"
    (run,) = runs(play.report(1, m.FeedsArrived(play.session, (feed,))))
    replies = play.report(1, m.Done(((run.sequence, 0, 1),)))
    assert m.Migrated(2, ((0, 1),)) in replies
    assert play.controller.sessions[play.session].devices.locations[0] == DeviceLocation(1, 1, 0)
    assert m.DropSpilled(play.session, (piece,)) in replies


def test_a_disk_gets_a_manifest_with_all_that_another_cluster_needs():
    play = SuspendPlay()
    play.with_call()
    play.ask(to_disk=True)
    (put,) = play.quiesced()
    assert put.to_files
    assert put.directory.startswith(f"session-{play.session}-")
    manifest = msgspec.json.decode(put.manifest, type=SuspendedSession)
    (array,) = manifest.arrays
    assert isinstance(array.spec, ArraySpec)
    assert (array.handle, array.spec.shape, array.parts[0].positions) == (5, (2,), (0,))
    assert [each.content for each in manifest.functions] == ["content 1"]
    assert manifest.programs[1].name == "f"


def test_others_have_the_memory_and_the_exclusive_devices_meanwhile():
    play = SuspendPlay(device_memory=10)
    play.send(m.AddSlice(1, SliceRequest(2, exclusive=True)))
    other = play.open(43, "other.py").number
    play.flush()
    assert len(play.controller.sessions[other].devices.virtual) == 2
    play.suspended()
    third = play.open(44, "third.py").number
    play.flush()
    assert len(play.controller.sessions[third].devices.virtual) == 4
    # As long as other sessions use the devices, the resumption waits and names these sessions.
    play.controller.sessions[third].devices.used.add(0)
    replies = answer_in(play.resume()).status
    assert replies.code == Code.RESOURCE_EXHAUSTED
    assert "waits for device 0, which other sessions use" in replies.message
    assert play.resume(wait=100.0) == []
    play.tick(1.0)
    assert "waits for device 0" in report(play.controller).sessions[0].state
    play.close(third)
    play.tick(2.0)
    assert any(isinstance(each, m.SendSpilled) for each in play.outbox())


def test_without_room_it_waits_and_names_who_has_it():
    play = SuspendPlay("1x1x1", device_memory=10)
    play.suspended()
    other = play.open(43, "other.py").number
    first, play.session = play.session, other
    play.array(6)
    play.session = first
    replies = answer_in(play.resume()).status
    assert replies.message == (
        "session 1 stays suspended: session 1 waits for 8 B on device 0, where only 2 B are free; "
        "the rest is held by session 2"
    )
    assert play.resume(wait=5.0) == []
    for now in range(1, 8):
        play.tick(float(now))
    assert answer_in(play.outbox()).status.code == Code.RESOURCE_EXHAUSTED
    assert play.controller.suspensions.by_session, "it stays suspended"


def test_bad_requests_say_what_is_wrong():
    play = SuspendPlay()
    assert answer_in(play.ask(session=99)).status.code == Code.NOT_FOUND
    assert "session 1 is not suspended" in answer_in(play.resume()).status.message
    play.ask()
    assert "session 1 is being suspended already" in answer_in(play.ask()).status.message
    (put,) = play.quiesced()
    play.report(0, m.SpillReply(play.session, put.request, OK, (m.SpilledPiece(1, 8),)))
    assert "session 1 is suspended in memory already" in answer_in(play.ask()).status.message
    assert "island 7 does not exist" in answer_in(play.resume(7)).status.message
    assert "name as many islands" in answer_in(play.resume(0, 1)).status.message
    play.operator(m.RemapRequest(play.session, 1, 1))
    assert not answer_in(play.outbox()).status.ok


def test_a_host_that_cannot_spill_leaves_the_session_where_it_was():
    play = SuspendPlay()
    play.ask(to_disk=True)
    (put,) = play.quiesced()
    full = Status(Code.INTERNAL, "cannot write 8 B to /spilled/1.piece: No space left on device")
    replies = play.report(0, m.SpillReply(play.session, put.request, full))
    assert m.Migrated(1, ()) in replies
    assert "continues: cannot write 8 B to /spilled/1.piece: No space left" in answer_in(replies).status.message
    assert play.memory == 8
    assert not [each for each in replies if isinstance(each, m.Free)]


def test_what_cannot_be_read_leaves_it_suspended_and_can_be_tried_again():
    play = SuspendPlay()
    piece, _ = play.suspended(to_disk=True)
    (send,) = [each for each in play.resume() if isinstance(each, m.SendSpilled)]
    feed = send.pieces[0][1]
    broken = Status(Code.DATA_LOSS, "/spilled/1.piece is not what was spilled there: its checksum differs")
    replies = play.report(0, m.SendSpilledFailed(play.session, feed, broken))
    assert "stays suspended" in answer_in(replies).status.message
    assert "its checksum differs" in answer_in(replies).status.message
    entry = play.controller.sessions[play.session].directory.entries[5]
    assert (entry.error, entry.ready) == (None, True)
    assert entry.spilled is not None
    assert play.memory == 0
    (send,) = [each for each in play.resume() if isinstance(each, m.SendSpilled)]
    assert send.pieces[0][0] == piece


def test_the_loss_of_an_island_takes_what_is_in_its_memory_and_not_what_is_on_disk():
    for to_disk in (False, True):
        play = SuspendPlay()
        play.suspended(to_disk)
        play.lose(0, "killed")
        play.outbox()
        entry = play.controller.sessions[play.session].directory.entries[5]
        assert (entry.error is None) == to_disk
        assert (entry.spilled is not None) == to_disk


def test_an_island_can_be_drained_of_sessions_that_are_on_disk():
    for to_disk in (False, True):
        play = SuspendPlay()
        play.suspended(to_disk)
        play.operator(m.DrainRequest(0))
        replies = play.outbox()
        assert any(isinstance(each, m.EndIsland) for each in replies) == to_disk
        if not to_disk:
            assert "session 1 is suspended in memory" in answer_in(replies).status.message
            continue
        play.engine(m.IslandEnded(0))
        play.flush()
        assert "waits for island 0, which is drained" in answer_in(play.resume()).status.message
        # A host of another island may have access to the same files.
        (send,) = [each for each in play.resume(1) if isinstance(each, m.SendSpilled)]
        assert send.pieces[0][2] == (1,)


@pytest.mark.parametrize("to_disk", [False, True])
def test_a_suspended_session_that_ends_leaves_nothing(to_disk: bool):
    play = SuspendPlay()
    piece, _ = play.suspended(to_disk)
    play.close(play.session)
    replies = play.outbox()
    assert (m.DropSpilled(play.session, (piece,)) in replies) == to_disk
    assert m.CloseStore(play.session) in replies
    assert play.controller.suspensions.by_session == {}
    assert play.memory == 0


FILE = "/spilled/1.piece"


def suspended_in_one_file() -> SuspendPlay:
    """Suspend a session whose two arrays (handles 5 and 6) are in one file."""
    play = SuspendPlay()
    play.array(6)
    play.ask(to_disk=True)
    (put,) = play.quiesced()
    assert put.are_dropped_together
    pieces = tuple(m.SpilledPiece(number, 8, FILE, 7, 8 * i) for i, (number, _, _) in enumerate(put.shards))
    play.report(0, m.SpillReply(play.session, put.request, OK, pieces))
    return play


def dropped(messages: list[Any]) -> list[str]:
    """Return the files that hosts must remove."""
    return [piece.path for each in messages if isinstance(each, m.DropSpilled) for piece in each.pieces]


def test_a_file_of_several_arrays_is_removed_once_when_all_of_them_are_back():
    play = suspended_in_one_file()
    (send,) = [each for each in play.resume() if isinstance(each, m.SendSpilled)]
    assert [piece.offset for piece, _, _ in send.pieces] == [0, 8]
    (run,) = runs(play.report(0, m.FeedsArrived(play.session, tuple(feed for _, feed, _ in send.pieces))))
    assert dropped(play.done(run.sequence)) == [FILE]


def test_a_file_of_several_arrays_stays_while_one_of_them_is_needed():
    play = suspended_in_one_file()
    assert dropped(play.send(m.Release((5,)))) == []
    assert dropped(play.send(m.Release((6,)))) == [FILE]


@pytest.mark.parametrize("is_resuming", [False, True])
def test_the_file_of_a_session_that_ends_is_removed_once(is_resuming: bool):
    play = suspended_in_one_file()
    if is_resuming:
        play.resume()
    play.close(play.session)
    assert dropped(play.outbox()) == [FILE]


def test_a_host_that_is_lost_when_a_session_ends_removes_its_file_when_it_has_joined_again():
    play = suspended_in_one_file()
    play.lose(0, "its connection broke")
    play.close(play.session)
    assert dropped(play.outbox()) == []
    play.join_again(1)
    assert dropped(play.outbox()) == []
    assert dropped(play.join_again(0)) == [FILE]
    play.lose(0, "its connection broke")
    assert dropped(play.join_again(0)) == []


def test_the_files_that_a_host_has_to_remove_later_are_bounded():
    spiller = suspended_in_one_file().controller._spiller
    for number in range(MAX_LEFT + 10):
        spiller._drop(1, 99, (m.SpilledPiece(number, 8, f"/{number}"), m.SpilledPiece(number, 8)))
    assert list(spiller._left[99]) == [f"/{number}" for number in range(10, MAX_LEFT + 10)]


def test_a_session_that_does_not_come_to_rest_goes_on():
    play = SuspendPlay()
    play.with_call(arguments=0)
    play.send(m.Launch(1, (), (7,), ()))
    play.ask()
    play.quiesced()
    play.tick(1.0)
    play.tick(70.0)
    replies = play.outbox()
    assert "1 of its launches have not ended after 69 s" in answer_in(replies).status.message
    assert m.Migrated(1, ()) in replies


def test_a_session_with_too_many_arrays_is_not_suspended_and_continues():
    play = SuspendPlay()
    entries = play.controller.sessions[play.session].directory.entries
    some = entries[5]
    play.ask()
    entries.update({handle: some for handle in range(6, 5 + MAX_MOVED_ARRAYS)})
    handles = len(entries)
    assert handles == MAX_MOVED_ARRAYS
    entries[handles + 5] = some  # it arrived before the proxy was quiesced
    replies = play.quiesced()
    text = f"cannot be moved or suspended while it has more than {MAX_MOVED_ARRAYS:,} arrays"
    assert text in answer_in(replies).status.message
    assert m.Migrated(1, ()) in replies
    assert answer_in(play.ask()).status.code == Code.RESOURCE_EXHAUSTED
    del entries[handles + 5]
    assert play.ask() == [m.Quiesce(2)]


@pytest.mark.parametrize(
    ("topology", "shards", "text"),
    [
        ("1x1x1", MAX_MOVED_ON_HOST, f"{MAX_MOVED_ON_HOST:,} shards of arrays on one host"),
        ("1x8x1", MAX_MOVED_SHARDS, f"{MAX_MOVED_SHARDS:,} shards of arrays"),
    ],
)
def test_the_shards_of_a_session_that_is_suspended_are_bounded(topology: str, shards: int, text: str):
    play = SuspendPlay(topology)
    session = play.controller.sessions[play.session]
    entry, devices = session.directory.entries[5], tuple(session.devices.locations)
    assert entry.spec is not None
    repeated = devices * (1024 // len(devices))  # as an array with many shards would have them
    entry.spec = msgspec.structs.replace(
        entry.spec, sharding=msgspec.structs.replace(entry.spec.sharding, devices=repeated)
    )
    entries = session.directory.entries
    entries.update({handle: entry for handle in range(6, 5 + shards // 1024)})
    check_size(session)
    entries[5 + shards // 1024] = entry
    with pytest.raises(StatusError, match=f"more than {text}$"):
        check_size(session)
