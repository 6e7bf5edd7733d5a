"""Tests of files of published arrays: writing them, losing islands, and restoring arrays, also in the next cluster."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from atoll.controller.controller_dumps import load_controller
from atoll.controller.named_arrays.array_files import file_bytes
from atoll.errors import OK, Code, Details, IncompatibleJournalError, Kind, Status, failure
from atoll.ir.program import HostBuffer, HostToDevice, single
from atoll.ir.types import ArraySpec, Sharding
from atoll.named_arrays.named_arrays import MAX_WAIT_SECONDS, RETRY_SECONDS
from atoll.named_arrays.version_files import FileState, VersionFiles
from atoll.named_arrays.version_records import Version
from atoll.named_arrays.version_states import VersionState
from atoll.protocol import actions as a
from atoll.protocol import events as e
from atoll.protocol import messages as m
from tests.controller.dumps import dumped
from tests.controller.play import Cluster, on, runs
from tests.controller.publishing_play import EVE, READER, TRAINER, Trainer

FULL = Status(Code.INTERNAL, "cannot write /spilled/1.piece: No space left on device")
CHANGED = failure(Code.DATA_LOSS, "/spilled/1.piece is not what was spilled there", Details(Kind.CONTENTS))


class Spilling(Trainer):
    """Trainer that publishes array 10 with files. It also replies on behalf of the hosts."""

    @property
    def version(self) -> Version:
        (version,) = self.controller.published.names.versions()
        return version

    @property
    def files(self) -> VersionFiles:
        assert self.version.files is not None
        return self.version.files

    def of_type(self, kind: type[Any]) -> list[Any]:
        """Return the messages of this type since the last call."""
        return [each for _, each in self.sent() if isinstance(each, kind)]

    def publish_on_disk(self, keep: int = 2) -> m.SpillRequest:
        """Publish array 10 and complete it. Return the request to write it."""
        view, sequence = self.view()
        (reply,) = self.send(m.Publish(self.request(), "policy", keep, (view,), ("w",), on_disk=True))
        assert reply.status.ok, reply.status
        self.worker(0, m.Done(((sequence, 0, 1),)))
        (request,) = self.of_type(m.SpillRequest)
        assert isinstance(request, m.SpillRequest)
        return request

    def wrote(self, request: m.SpillRequest, status: Status = OK, nbytes: int = 8) -> None:
        """Report that the host has written the requested arrays, or that it failed to."""
        numbers = [number for number, _, _ in request.shards] if status.ok else []
        pieces = tuple(m.SpilledPiece(number, nbytes, f"/spilled/{number}.piece", 7) for number in numbers)
        self.worker(0, m.SpillReply(request.session, request.request, status, pieces))

    def on_disk(self) -> None:
        self.wrote(self.publish_on_disk())

    def reader(self) -> int:
        return self.open(token="reader").number

    def request_version(self, reader: int, number: int = -1, seconds: float = 30.0) -> list[Any]:
        """Request a version for a session. Return the messages that the controller sends."""
        self.sent()
        self.proxy(reader, m.OpenVersion(self.request(), "trainer/policy", number, seconds=seconds))
        return [each for _, each in self.sent()]


def _only(kind: type[Any], messages: list[Any]) -> Any:
    (found,) = [each for each in messages if isinstance(each, kind)]
    return found


def _restored(cluster: Cluster, host: int, vault: int, feed: int) -> list[Any]:
    """Report that a host has received the bytes of an array and has made the array. Return the messages that follow."""
    cluster.worker(host, m.FeedsArrived(vault, (feed,)))
    run = _only(m.Run, [each for _, each in cluster.sent()])
    cluster.worker(host, m.Done(((run.sequence, 0, 1),)))
    return [each for _, each in cluster.sent()]


def test_a_complete_version_is_written_to_a_directory_of_its_own() -> None:
    play = Spilling()
    request = play.publish_on_disk()
    assert request.to_files
    assert request.directory.startswith("published-")
    assert [(handle, shard) for _, handle, shard in request.shards] == [(1, 0)]
    assert play.files.state is FileState.WRITING
    play.wrote(request)
    assert play.files.state is FileState.WRITTEN


def test_a_session_is_told_when_a_version_is_in_files() -> None:
    play = Spilling()
    request = play.publish_on_disk()
    asked = m.OpenVersion(play.request(), "policy", 1, seconds=30.0, in_files=True)
    assert play.answers(play.session, asked) == []
    play.wrote(request)
    assert play.of_type(m.VersionOpened) == [m.VersionOpened(asked.request, OK, -1, 1)]
    assert play.version.readers == set()


def test_a_version_can_be_read_before_it_is_written() -> None:
    play = Spilling()
    play.publish_on_disk()
    assert play.opened(play.reader()).status.ok


def test_a_version_that_could_not_be_written_is_written_later() -> None:
    play = Spilling()
    play.wrote(play.publish_on_disk(), FULL)
    assert play.files.problem == FULL.message
    play.tick(play.now + RETRY_SECONDS + 1)
    (request,) = play.of_type(m.SpillRequest)
    play.wrote(request)
    assert (play.files.state, play.files.problem) == (FileState.WRITTEN, "")


def test_a_lost_version_is_restored_before_a_request_for_it_is_answered() -> None:
    play = Spilling()
    play.on_disk()
    reader = play.reader()
    play.lose(0, "it burnt")
    assert (play.version.state, play.files.state) == (VersionState.COMPLETE, FileState.STORED)
    sent = play.request_version(reader)
    assert not [each for each in sent if isinstance(each, m.VersionOpened)]
    send = _only(m.SendSpilled, sent)
    ((piece, feed, hosts),) = send.pieces
    assert (piece.path, hosts) == ("/spilled/1.piece", (1,)), "the other island is ready"
    assert _only(m.VersionOpened, _restored(play, 1, send.session, feed)).status.ok
    assert play.files.state is FileState.WRITTEN
    assert play.version.device_numbers == (2,)


def test_small_arrays_share_a_launch_when_they_are_restored() -> None:
    play = Spilling()
    shapes = [(2,), (3,), (2,)]
    for handle, shape in enumerate(shapes, 20):
        spec = ArraySpec("float32", shape, Sharding((0,)))
        put = HostToDevice((HostBuffer(0, shape, None, None),), (spec,))
        play.send(m.RegisterProgram(handle, single("put", (), put, feeds=1)))
        play.worker(0, m.FeedsArrived(play.session, (handle,)))
        (run,) = runs(play.send(m.Launch(handle, (), (handle,), (handle,))))
        play.done(run.sequence)
    sent = play.send(m.Publish(play.request(), "policy", 2, (20, 21, 22), ("a", "b", "c"), on_disk=True))
    play.wrote(_only(m.SpillRequest, sent))
    reader = play.reader()
    play.lose(0, "it burnt")
    sent = play.request_version(reader)
    send = _only(m.SendSpilled, sent)
    assert len(send.pieces) == 3
    play.worker(1, m.FeedsArrived(send.session, tuple(feed for _, feed, _ in send.pieces)))
    play.worker(1, m.Done(((_only(m.Run, play.of_type(m.Run)).sequence, 0, 1),)))
    assert play.files.state is FileState.WRITTEN
    entries = play.vault.directory.entries
    assert [entries[handle].spec.shape for handle in play.version.held] == shapes


def test_a_read_of_an_open_version_waits_until_it_is_restored() -> None:
    play = Spilling()
    play.on_disk()
    reader = play.reader()
    opened = play.opened(reader)
    play.sent()
    play.lose(0, "it burnt")
    play.proxy(reader, m.ReadVersion(opened.reader, 0, (on(3),), (7,)))
    sent = [each for _, each in play.sent()]
    send = _only(m.SendSpilled, sent)
    ((_, feed, _),) = send.pieces
    assert not [each for each in sent if isinstance(each, m.Run)]
    play.worker(1, m.FeedsArrived(send.session, (feed,)))
    (run,) = play.of_type(m.Run)
    play.worker(1, m.Done(((run.sequence, 0, 1),)))
    (run,) = play.of_type(m.Run)
    assert run.session == reader


def test_a_read_whose_reader_is_closed_has_a_lost_version_restored() -> None:
    play = Spilling("3x1x2")
    play.on_disk()
    reader = play.reader()
    opened = play.opened(reader)
    play.proxy(reader, m.ReadVersion(opened.reader, 0, (on(3),), (7,)))
    play.proxy(reader, m.CloseVersion(opened.reader))
    play.sent()
    gangs = [each for each in play.controller.launches.in_flight.values() if each.island == 1]
    play.lose(0, "it burnt")
    for gang in gangs:
        play.worker(1, m.Failed(gang.sequence, Status(Code.DATA_LOSS, "the sender is gone")))
    assert len(play.of_type(m.SendSpilled)) == 1


def test_a_read_does_not_wait_for_an_island_for_ever() -> None:
    play = Spilling("1x1x2")
    play.on_disk()
    reader = play.reader()
    opened = play.opened(reader)
    play.lose(0, "it burnt")
    play.proxy(reader, m.ReadVersion(opened.reader, 0, (on(1),), (7,)))
    play.proxy(reader, m.ReadVersion(opened.reader, 0, (on(1),), (8,)))
    play.tick(play.now + MAX_WAIT_SECONDS / 2)
    play.flush()
    entries = play.controller.sessions[reader].directory.entries
    assert [entries[handle].error for handle in (7, 8)] == [None, None]
    play.tick(play.now + MAX_WAIT_SECONDS + 10)
    play.flush()
    errors = [entries[handle].error for handle in (7, 8)]
    assert all(error is not None and error.code == Code.UNAVAILABLE for error in errors), errors
    assert "is in files, and waits to be restored: no island with 1 cpu device is ready" in str(errors[0])
    assert play.controller.sessions[reader].reading == 0


def test_a_read_waits_for_an_island_that_has_been_missing_for_long() -> None:
    play = Spilling("1x1x2")
    play.on_disk()
    play.now += 2 * MAX_WAIT_SECONDS
    reader = play.reader()
    opened = play.opened(reader)
    play.lose(0, "it burnt")
    play.tick(play.now + 1)
    play.flush()
    assert play.files.problem
    play.proxy(reader, m.ReadVersion(opened.reader, 0, (on(1),), (7,)))
    play.flush()
    assert play.controller.sessions[reader].directory.entries[7].error is None


def test_a_version_waits_for_an_island() -> None:
    play = Spilling("1x1x2")
    play.on_disk()
    reader = play.reader()
    play.lose(0, "it burnt")
    assert not [each for each in play.request_version(reader, seconds=5.0) if isinstance(each, m.VersionOpened)]
    assert play.files.problem == "no island with 1 cpu device is ready"
    play.tick(play.now + 6)
    reply = _only(m.VersionOpened, [each for _, each in play.sent()])
    assert reply.status.code == Code.DEADLINE_EXCEEDED
    assert "version 1 is in files, and waits to be restored: no island" in reply.status.message


def test_a_version_is_lost_with_its_island_if_it_is_not_written() -> None:
    play = Spilling()
    play.publish_on_disk()
    play.lose(0, "it burnt")
    assert play.version.state is VersionState.LOST


def test_wrong_files_refuse_requests_and_the_version_stays() -> None:
    play = Spilling()
    play.on_disk()
    reader = play.reader()
    play.lose(0, "it burnt")
    send = _only(m.SendSpilled, play.request_version(reader))
    ((_, feed, _),) = send.pieces
    play.worker(1, m.SendSpilledFailed(send.session, feed, CHANGED))
    reply = _only(m.VersionOpened, [each for _, each in play.sent()])
    assert reply.status.code == Code.DATA_LOSS
    assert "/spilled/1.piece is not what was spilled there" in reply.status.message
    assert play.files.state is FileState.STORED
    assert _only(m.VersionOpened, play.request_version(reader)).status.code == Code.DATA_LOSS, (
        "it is not retried at once"
    )
    play.now += RETRY_SECONDS + 1
    assert [each for each in play.request_version(reader) if isinstance(each, m.SendSpilled)]


def test_files_are_removed_when_the_version_ends() -> None:
    play = Spilling()
    play.on_disk()
    play.sent()
    play.controller.published.remove("trainer", "policy")
    (dropped,) = play.of_type(m.DropSpilled)
    assert [each.path for each in dropped.pieces] == ["/spilled/1.piece"]


def test_files_that_are_written_after_the_end_of_the_version_are_removed() -> None:
    play = Spilling()
    request = play.publish_on_disk()
    play.controller.published.remove("trainer", "policy")
    play.wrote(request)
    (dropped,) = play.of_type(m.DropSpilled)
    assert [each.path for each in dropped.pieces] == ["/spilled/1.piece"]


@pytest.mark.parametrize("tag", ["files of a version", "restoration of arrays"])
def test_a_journal_with_files_is_not_read_if_an_older_version_of_atoll_has_written_it(tag: str) -> None:
    play = Spilling()
    play.on_disk()
    reader = play.reader()
    play.lose(0, "it burnt")
    play.request_version(reader)
    content = msgspec.msgpack.decode(dumped(play.controller))
    content["objects"]["versions"][tag] = [1, 1]
    with pytest.raises(IncompatibleJournalError, match=f"version 1 of '{tag}'"):
        load_controller(msgspec.msgpack.encode(content))


def test_the_next_cluster_restores_a_version() -> None:
    play = Spilling()
    play.on_disk()
    play.event(e.StopAsked(play.now, True))
    actions = play.flush()
    (persisted,) = [each for each in actions if isinstance(each, a.PersistSessions)]
    assert persisted.versions == (("trainer", "policy", 1),)
    assert not [each for each in actions if isinstance(each, a.Send) and isinstance(each.message, m.DropSpilled)]
    following = Cluster("1x1x2", token="cluster", tenants=(TRAINER, READER, EVE))
    following.event(e.SessionsPersisted(0.0, persisted.content, {}))
    following.join(0)
    following.outbox()
    reader = following.open(token="reader").number
    following.outbox()
    following.proxy(reader, m.OpenVersion(1, "trainer/policy", seconds=30.0))
    send = _only(m.SendSpilled, following.outbox())
    ((_, feed, _),) = send.pieces
    opened = _only(m.VersionOpened, _restored(following, 0, send.session, feed))
    assert (opened.status, opened.version) == (OK, 1)
    (version,) = following.controller.published.names.versions()
    assert following.controller.published.names.names["trainer", "policy"].next_number == 2
    assert version.files is not None
    assert version.files.state is FileState.WRITTEN


def test_nothing_is_persisted_if_the_operator_ends_all() -> None:
    play = Spilling()
    play.on_disk()
    play.event(e.StopAsked(play.now, False))
    actions = play.flush()
    assert not [each for each in actions if isinstance(each, a.PersistSessions)]
    assert [each for each in actions if isinstance(each, a.Send) and isinstance(each.message, m.DropSpilled)]


def test_hosts_that_join_remove_what_no_version_has() -> None:
    play = Spilling()
    request = play.publish_on_disk()
    prefix = request.directory.removesuffix("1")
    play.wrote(request)
    play.publish_on_disk()
    play.lose(0, "it burnt")
    play.sent()
    play.join_again(0)
    kept = [each for each in play.actions if isinstance(each, a.Send) and isinstance(each.message, m.KeepFiles)]
    assert kept[-1].message == m.KeepFiles(prefix, 3, (1,)), "the second version was not written and is lost"


def test_a_version_that_exceeds_the_quota_is_refused() -> None:
    play = Spilling()
    play.operator(m.SetTenant("trainer", limits={"disk": 7}))
    view, _ = play.view()
    play.sent()
    reply = _only(m.Published, play.send(m.Publish(play.request(), "policy", 2, (view,), ("w",), on_disk=True)))
    assert reply.status.code == Code.RESOURCE_EXHAUSTED
    assert "quota `disk` of 7" in reply.status.message


def test_a_version_is_written_when_others_have_made_room() -> None:
    play = Spilling()
    play.operator(m.SetTenant("trainer", limits={"disk": 15}))
    play.on_disk()
    view, sequence = play.view()
    play.send(m.Publish(play.request(), "policy", 2, (view,), ("w",), on_disk=True))
    play.worker(0, m.Done(((sequence, 0, 1),)))
    assert play.of_type(m.SpillRequest) == []
    play.controller.published.remove("trainer", "policy", 1)
    play.tick(play.now + 1)
    assert len(play.of_type(m.SpillRequest)) == 1
    assert play.files.problem == ""


def test_files_that_are_larger_than_their_arrays_count_with_their_size() -> None:
    play = Spilling()
    play.operator(m.SetTenant("trainer", limits={"disk": 100}))
    play.wrote(play.publish_on_disk(), nbytes=60)
    assert (play.files.state, play.files.nbytes) == (FileState.WRITTEN, 60)


def test_files_that_exceed_the_quota_are_removed() -> None:
    play = Spilling()
    play.operator(m.SetTenant("trainer", limits={"disk": 100}))
    play.wrote(play.publish_on_disk(), nbytes=101)
    (dropped,) = play.of_type(m.DropSpilled)
    assert [each.path for each in dropped.pieces] == ["/spilled/1.piece"]
    assert play.files.state is FileState.WRITING
    assert "and version 1 of trainer/policy needs 93 B" in play.files.problem


def test_files_that_exceed_the_quota_are_not_written_again_before_it_has_space() -> None:
    play = Spilling()
    play.operator(m.SetTenant("trainer", limits={"disk": 100}))
    play.wrote(play.publish_on_disk(), nbytes=101)
    for _ in range(3):
        play.tick(play.now + RETRY_SECONDS + 1)
    assert play.of_type(m.SpillRequest) == []
    assert "and version 1 of trainer/policy needs 93 B" in play.files.problem
    play.operator(m.SetTenant("trainer", limits={"disk": 101}))
    play.tick(play.now + RETRY_SECONDS + 1)
    (request,) = play.of_type(m.SpillRequest)
    play.wrote(request, nbytes=101)
    assert (play.files.state, play.files.nbytes, play.files.excess) == (FileState.WRITTEN, 101, 0)


def test_files_that_are_larger_than_their_arrays_replace_those_of_an_older_version() -> None:
    play = Spilling()
    play.operator(m.SetTenant("trainer", limits={"disk": 100}))
    play.wrote(play.publish_on_disk(keep=1), nbytes=60)
    play.wrote(play.publish_on_disk(keep=1), nbytes=60)
    assert (play.version.number, play.files.state, play.files.nbytes) == (2, FileState.WRITTEN, 60)


def test_the_estimated_size_of_files() -> None:
    sharding = Sharding((1,))
    sizes = {dtype: file_bytes(ArraySpec(dtype, (2, 3), sharding)) for dtype in ("float32", "int4", "bool", "string")}
    assert sizes == {"float32": 24, "int4": 6, "bool": 6, "string": 12}


def _complete(play: Spilling, tenant: str, count: int) -> list[Version]:
    """Return complete versions of a tenant that wait to be written. They have no arrays."""
    published = play.controller.published
    versions = []
    for _ in range(count):
        version = published.names.publish(
            play.now, tenant, "many", play.session, keep=64, handles=(), paths=(), on_disk=True
        )
        published.names.complete(play.now, version)
        published.files.write(version)
        versions.append(version)
    return versions


def test_one_version_of_each_tenant_is_written_at_a_time() -> None:
    play = Spilling(dumps=False)
    files = play.controller.published.files
    first, second, _ = _complete(play, "trainer", 3)
    (other,) = _complete(play, "eve", 1)
    assert list(files.due) == [first.key, other.key]
    files.forget(first)
    assert list(files.due) == [other.key, second.key]


def test_a_version_stays_until_its_successor_is_in_files() -> None:
    play = Spilling()
    play.wrote(play.publish_on_disk(keep=1))
    second = play.publish_on_disk(keep=1)
    numbers = [version.number for version in play.controller.published.names.versions()]
    assert numbers == [1, 2]
    play.wrote(second)
    assert (play.version.number, play.files.state) == (2, FileState.WRITTEN)
    assert [each.path for sent in play.of_type(m.DropSpilled) for each in sent.pieces] == ["/spilled/1.piece"]


def test_a_version_that_is_complete_after_newer_ones_does_not_keep_later_ones_from_files() -> None:
    play = Spilling()
    view, late = play.view()
    play.send(m.Publish(play.request(), "policy", 1, (view,), ("w",), on_disk=True))
    play.wrote(play.publish_on_disk(keep=1))
    third = play.publish_on_disk(keep=1)
    play.done(late)
    assert [version.number for version in play.controller.published.names.versions()] == [2, 3]
    play.wrote(third)
    play.wrote(play.publish_on_disk(keep=1))
    assert (play.version.number, play.files.state) == (4, FileState.WRITTEN)


def test_a_version_ends_before_its_successor_is_in_files_if_the_quota_has_no_space_for_both() -> None:
    play = Spilling()
    play.operator(m.SetTenant("trainer", limits={"disk": 15}))
    play.wrote(play.publish_on_disk(keep=1))
    play.wrote(play.publish_on_disk(keep=1))
    assert (play.version.number, play.files.state) == (2, FileState.WRITTEN)


def test_the_only_version_in_files_stays_if_its_end_would_free_no_space() -> None:
    play = Spilling()
    play.operator(m.SetTenant("trainer", limits={"disk": 15}))
    play.wrote(play.publish_on_disk(keep=1))
    reader = play.reader()
    play.opened(reader)
    view, sequence = play.view()
    play.send(m.Publish(play.request(), "policy", 1, (view,), ("w",), on_disk=True))
    play.worker(0, m.Done(((sequence, 0, 1),)))
    assert play.of_type(m.SpillRequest) == []
    first, second = play.controller.published.names.versions()
    assert (first.state, second.state) == (VersionState.COMPLETE, VersionState.COMPLETE)
    assert second.files is not None
    assert "has reached its quota `disk`" in second.files.problem
    play.lose(0, "it burnt")
    assert (first.state, second.state) == (VersionState.COMPLETE, VersionState.LOST)
    (send,) = play.of_type(m.SendSpilled)
    ((piece, feed, _),) = send.pieces
    assert piece.path == "/spilled/1.piece"
    assert play.request_version(reader) == []
    assert _only(m.VersionOpened, _restored(play, 1, send.session, feed)).version == first.number


def test_a_version_ends_for_its_successor_when_its_reader_has_left() -> None:
    play = Spilling()
    play.operator(m.SetTenant("trainer", limits={"disk": 15}))
    play.wrote(play.publish_on_disk(keep=1))
    reader = play.reader()
    opened = play.opened(reader)
    view, sequence = play.view()
    play.send(m.Publish(play.request(), "policy", 1, (view,), ("w",), on_disk=True))
    play.worker(0, m.Done(((sequence, 0, 1),)))
    play.proxy(reader, m.CloseVersion(opened.reader))
    play.tick(play.now + RETRY_SECONDS + 1)
    (request,) = play.of_type(m.SpillRequest)
    play.wrote(request)
    assert (play.version.number, play.files.state) == (2, FileState.WRITTEN)


def _make(play: Spilling, session: int, handle: int) -> list[Any]:
    """Make an array of 8 bytes on device 0. Return the messages that the controller sends."""
    play.session = session
    if 2 not in play.controller.sessions[session].programs:
        play.with_put()
    play.worker(0, m.FeedsArrived(session, (handle,)))
    play.sent()
    return play.send(m.Launch(2, (), (handle,), (handle,)))


def test_a_version_that_nobody_reads_gives_up_its_memory() -> None:
    play = Spilling("1x1x1", device_memory=20)
    play.on_disk()
    reader, eve = play.reader(), play.open(token="eve").number
    play.close(play.session)
    opened = play.opened(reader)
    assert runs(_make(play, eve, 1)) != []
    assert runs(_make(play, eve, 2)) == []
    play.tick(play.now + 1)
    assert play.of_type(m.Run) == [], "the version has a reader"
    play.proxy(reader, m.CloseVersion(opened.reader))
    play.tick(play.now + 1)
    (run,) = play.of_type(m.Run)
    assert (run.session, run.results) == (eve, (2,))
    assert play.files.state is FileState.STORED
    assert play.version.state is VersionState.COMPLETE


def test_a_replaced_version_that_is_being_written_gives_up_its_memory_while_a_session_does_not_answer() -> None:
    play = Spilling("1x1x1", device_memory=20)
    trainer = play.session
    play.publish_on_disk(keep=1)
    play.send(m.Release((10,)))
    play.array(11)
    (run,) = runs(play.send(m.Launch(5, (11,), (12,), ())))
    play.send(m.Publish(play.request(), "policy", 1, (12,), ("w",), on_disk=True))
    play.done(run.sequence)
    eve = play.open(token="eve").number
    assert runs(_make(play, eve, 1)) == [], "the versions have 16 of 20 bytes"
    started = []
    for _ in range(3):
        play.tick(play.now + 1, silent_sessions=(trainer,))
        started += play.of_type(m.Run)
    assert [each.results for each in started] == [(1,)]
    assert (play.version.number, play.files.state) == (2, FileState.WRITING)


@pytest.mark.parametrize("quota", ["memory", "total_memory"])
def test_a_version_gives_up_its_memory_for_its_tenants_quota(quota: str) -> None:
    play = Spilling("1x1x1")
    play.on_disk()
    play.proxy(play.session, m.Release((10,)))
    play.operator(m.SetTenant("trainer", limits={quota: 20}))
    trainer = play.session
    assert runs(_make(play, trainer, 1)) != []
    assert runs(_make(play, trainer, 2)) == []
    play.tick(play.now + 1)
    (run,) = play.of_type(m.Run)
    assert (run.session, run.results) == (trainer, (2,))
    assert play.files.state is FileState.STORED


def test_a_version_stays_if_a_launch_needs_more_than_its_tenants_quota() -> None:
    play = Spilling("1x1x1")
    play.on_disk()
    play.operator(m.SetTenant("trainer", limits={"memory": 7}))
    assert runs(_make(play, play.session, 1)) == []
    for _ in range(3):
        play.tick(play.now + 1)
        play.flush()
    assert play.files.state is FileState.WRITTEN
    error = play.controller.sessions[play.session].directory.entries[1].error
    assert error is not None
    assert error.code == Code.RESOURCE_EXHAUSTED


def test_a_restored_version_waits_for_memory() -> None:
    play = Spilling("1x1x1", device_memory=20)
    play.on_disk()
    reader, eve = play.reader(), play.open(token="eve").number
    play.close(play.session)
    (run,) = runs(_make(play, eve, 1))
    play.worker(0, m.Done(((run.sequence, 0, 1),)))
    assert runs(_make(play, eve, 2)) == []
    play.tick(play.now + 1)
    (run,) = play.of_type(m.Run)
    play.worker(0, m.Done(((run.sequence, 0, 1),)))
    send = _only(m.SendSpilled, play.request_version(reader))
    ((_, feed, _),) = send.pieces
    play.worker(0, m.FeedsArrived(send.session, (feed,)))
    assert play.of_type(m.Run) == []
    play.proxy(eve, m.Release((1,)))
    (run,) = play.of_type(m.Run)
    play.worker(0, m.Done(((run.sequence, 0, 1),)))
    assert _only(m.VersionOpened, [each for _, each in play.sent()]).status.ok


def test_a_version_is_not_restored_to_an_island_that_is_being_drained() -> None:
    play = Spilling()
    play.on_disk()
    reader = play.reader()
    play.lose(0, "it burnt")
    play.controller.published.copies.leave(1)
    assert not [each for each in play.request_version(reader) if isinstance(each, m.SendSpilled)]
    play.controller.published.copies.stay(1)
    play.tick(play.now + 1)
    assert len(play.of_type(m.SendSpilled)) == 1
