"""Tests of published arrays: owners, permissions, reads, losses, and invalid messages of proxies."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from atoll.errors import Code, Status
from atoll.ir.program import Mapping, Rearrange, single
from atoll.ir.types import ArraySpec, Sharding, Tiled
from atoll.named_arrays.named_arrays import GUEST_SECONDS
from atoll.named_arrays.version_states import VersionState
from atoll.protocol import actions as a
from atoll.protocol import events as e
from atoll.protocol import messages as m
from tests.controller.play import BROKEN, on
from tests.controller.publishing_play import Trainer
from tests.telemetry.reports import snapshot_of


def test_a_version_moves_to_the_vault_when_it_is_complete() -> None:
    play = Trainer()
    view, sequence = play.view()
    (reply,) = play.send(m.Publish(1, "policy", 2, (view,), ("w",)))
    assert reply == m.Published(1, Status(), 1)
    messages = play.done(sequence)
    vault = play.vault
    assert m.ShareBuffers(play.session, vault.number, ((view, 1),)) in messages
    assert m.Free(play.session, (view,)) in messages
    assert list(vault.directory.entries) == [1]
    assert view not in play.controller.sessions[play.session].directory.entries


def test_a_version_outlives_its_session_and_is_freed_when_newer_ones_replace_it() -> None:
    play = Trainer()
    play.complete(keep=1)
    play.close(play.session)
    play.flush()
    vault = play.vault
    assert list(vault.directory.entries) == [1]
    play.session = play.open(token="trainer").number
    play.array(10)
    view = Rearrange((0,), (on(0),), (Mapping(0, 0, (0, 1, 1), (0, 1, 1)),))
    play.send(m.RegisterProgram(5, single("publish", (on(0),), view)))
    assert play.complete(keep=1) == 2
    assert list(vault.directory.entries) == [2]


@pytest.mark.parametrize("to_disk", [False, True])
def test_a_version_is_read_while_its_session_is_suspended(to_disk: bool) -> None:
    play = Trainer()
    play.complete()
    play.operator(m.SuspendRequest(play.session, to_disk))
    (quiesce,) = [each for each in play.outbox() if isinstance(each, m.Quiesce)]
    (put,) = play.send(m.Quiesced(quiesce.migration))
    assert [handle for _, handle, _ in put.shards] == [10], "only the arrays of the session leave the devices"
    piece = m.SpilledPiece(put.shards[0][0], 8, "/spilled/1.piece" if to_disk else "", 7)
    play.report(0, m.SpillReply(play.session, put.request, Status(), (piece,)))
    assert play.controller.sessions[play.session].suspension_text
    reader = play.open(token="reader").number
    assert _read(play, reader) == [0, 1]
    play.close(play.session)
    play.flush()
    other = play.open(token="trainer").number
    assert _read(play, other) == [0, 1], "readers of other tenants are not used as sources"


def _read(play: Trainer, reader: int) -> list[int]:
    """Read version 1 to the other island. Return the hosts that run the transfer."""
    opened = play.opened(reader, number=1)
    assert opened.status.ok, opened.status
    play.proxy(reader, m.ReadVersion(opened.reader, 0, (on(2),), (play.request() + 700,)))
    runs = {to[1]: each for to, each in play.sent() if isinstance(each, m.Run)}
    for host, run in runs.items():
        play.worker(host, m.Done(((run.sequence, 0, 1),)))
    play.flush()
    return sorted(runs)


def test_a_session_that_ends_inside_a_publication_leaves_nothing_of_it() -> None:
    play = Trainer()
    play.publish()
    play.close(play.session)
    play.flush()
    reader = play.open(token="reader").number
    text = play.opened(reader, number=1).status.message
    assert "version 1 of trainer/policy failed: session 2 ended before all arrays" in text
    assert not any(play.controller.ledger.used.values())


def test_a_version_fails_with_the_error_of_its_array() -> None:
    play = Trainer()
    _, sequence = play.publish()
    play.report(0, m.Failed(sequence, BROKEN))
    reader = play.open(token="reader").number
    assert "array w of version 1 of trainer/policy failed: division by zero" in (
        play.opened(reader, number=1).status.message
    )
    assert play.controller.sessions[play.session].publishing == 0


@pytest.mark.parametrize(
    ("token", "name", "text"),
    [
        ("eve", "trainer/policy", "tenant eve may not read trainer/policy"),
        ("eve", "nobody/policy", "tenant eve may not read nobody/policy"),
        ("reader", "trainer/secret", "tenant reader may not read trainer/secret"),
        ("reader", "trainer/../policy", "invalid name"),
        ("reader", "trainer/policy*", "invalid name"),
        ("reader", "/policy", "invalid name"),
        ("reader", "trainer/", "invalid name"),
        ("reader", "", "invalid name"),
        ("reader", "policy\n", "invalid name"),
    ],
)
def test_a_name_that_a_tenant_may_not_read_is_refused(token: str, name: str, text: str) -> None:
    play = Trainer()
    play.complete()
    session = play.open(token=token).number
    opened = play.opened(session, name)
    assert text in opened.status.message
    assert opened.arrays == ()


def test_a_name_belongs_to_the_tenant_of_the_session() -> None:
    play = Trainer()
    play.complete()
    reader = play.open(token="reader").number
    assert play.opened(reader, "trainer/policy").version == 1
    assert "reader/policy does not have a version yet" in play.opened(reader, "policy").status.message


@pytest.mark.parametrize(
    ("name", "keep", "code"),
    [
        ("secret", 2, Code.PERMISSION_DENIED),
        ("trainer/policy", 2, Code.INVALID_ARGUMENT),
        ("policy\0", 2, Code.INVALID_ARGUMENT),
        ("policy", 0, Code.INVALID_ARGUMENT),
        ("policy", 65, Code.INVALID_ARGUMENT),
        ("policy", -1, Code.INVALID_ARGUMENT),
    ],
)
def test_a_refused_publication_releases_its_arrays_and_is_counted(name: str, keep: int, code: Code) -> None:
    play = Trainer()
    view, sequence = play.view()
    (reply,) = [each for each in play.send(m.Publish(1, name, keep, (view,), ("w",))) if isinstance(each, m.Published)]
    assert reply.status.code == code
    play.done(sequence)
    assert view not in play.controller.sessions[play.session].directory.entries
    counts = {each.name: each.rejected_publications for each in snapshot_of(play).tenants}
    assert counts == {"default": 0, "trainer": 1, "reader": 0, "eve": 0}


def test_a_read_is_a_transfer_from_the_publishers_devices_in_the_readers_session() -> None:
    play = Trainer()
    play.complete()
    reader = play.open(token="reader").number
    opened = play.opened(reader)
    assert [(each.path, each.dtype, each.shape) for each in opened.arrays] == [("w", "float32", (2,))]
    play.proxy(reader, m.ReadVersion(opened.reader, 0, (on(2),), (7,)))
    sent = play.sent()
    (shared,) = [each for to, each in sent if isinstance(each, m.ShareBuffers) and to == ("host", 0)]
    assert (shared.source, shared.target) == (play.vault.number, reader)
    hosts = {to[1]: each for to, each in sent if isinstance(each, m.Run)}
    assert {run.session for run in hosts.values()} == {reader}
    assert hosts.keys() == {0, 1}
    assert hosts[0].arguments == (shared.handles[0][1],)
    (made,) = hosts[1].results
    for host, run in hosts.items():
        play.worker(host, m.Done(((run.sequence, 0, 1),)))
    sent = [each for to, each in play.sent() if to == ("host", 1)]
    assert sent == [m.ShareBuffers(reader, reader, ((made, 7),)), m.Free(reader, (made,))]
    entries = play.controller.sessions[reader].directory.entries
    assert {handle: entry.ready for handle, entry in entries.items()} == {7: True}


def test_a_read_has_the_sharding_of_the_reader() -> None:
    play = Trainer("2x1x2")
    play.complete()
    reader = play.open(token="reader").number
    halves = ArraySpec("float32", (2,), Sharding((2, 3), Tiled((2,), (0, 1))))
    play.proxy(reader, m.ReadVersion(play.opened(reader).reader, 0, (halves,), (7,)))
    assert play.controller.sessions[reader].directory.entries[7].spec == halves


def test_further_versions_of_the_same_types_are_read_by_the_same_program() -> None:
    play = Trainer()
    reader = play.open(token="reader").number
    programs = []
    for handle, device in ((7, 2), (8, 2), (9, 3)):
        play.complete()
        opened = play.opened(reader)
        play.proxy(reader, m.ReadVersion(opened.reader, 0, (on(device),), (handle,)))
        programs.append({each.plan for to, each in play.sent() if isinstance(each, m.Run) and to == ("host", 1)})
    assert programs[0] == programs[1] != programs[2]
    play.close(reader)
    play.flush()
    assert play.controller.published.reads.programs == {}


def test_a_version_that_is_read_is_freed_when_its_reader_leaves() -> None:
    play = Trainer()
    play.complete(keep=1)
    reader = play.open(token="reader").number
    opened = play.opened(reader)
    play.complete(keep=1)
    assert list(play.vault.directory.entries) == [1, 2]
    play.proxy(reader, m.CloseVersion(opened.reader))
    play.flush()
    assert list(play.vault.directory.entries) == [2]


def test_the_end_of_a_reader_frees_what_it_has_opened() -> None:
    play = Trainer()
    play.complete(keep=1)
    reader = play.open(token="reader").number
    play.opened(reader)
    play.complete(keep=1)
    play.close(reader)
    play.flush()
    assert list(play.vault.directory.entries) == [2]


@pytest.mark.parametrize(
    ("first", "target", "text"),
    [
        (0, msgspec.structs.replace(on(2), shape=(3,)), "cannot be read as float32[3]"),
        (0, msgspec.structs.replace(on(2), dtype="int32"), "cannot be read as int32[2]"),
        (1, on(2), "has 1 array, not 2"),
        (1 << 60, on(2), "has 1 array"),
        (0, on(99), "99"),
        (0, on(1 << 41), "does not exist"),
        (0, on(), "devices"),
    ],
)
def test_a_wrong_read_makes_errors_and_shares_nothing(first: int, target: Any, text: str) -> None:
    play = Trainer()
    play.complete()
    reader = play.open(token="reader").number
    opened = play.opened(reader)
    play.proxy(reader, m.ReadVersion(opened.reader, first, (target,), (7,)))
    assert not any(isinstance(each, m.ShareBuffers | m.Run) for each in play.outbox())
    (awaited,) = play.answers(reader, m.Await(1, (7,)))
    assert text in awaited.status.message


def test_a_reader_of_another_session_reads_nothing() -> None:
    play = Trainer()
    play.complete()
    one, other = play.open(token="reader").number, play.open(token="reader").number
    opened = play.opened(one)
    play.proxy(other, m.ReadVersion(opened.reader, 0, (on(2),), (7,)))
    (awaited,) = play.answers(other, m.Await(1, (7,)))
    assert "does not exist in this session" in awaited.status.message


def test_the_loss_of_an_island_is_named_and_a_newer_version_replaces_the_lost_one() -> None:
    play = Trainer()
    play.complete()
    reader = play.open(token="reader").number
    opened = play.opened(reader)
    play.lose(0, "it burnt")
    play.flush()
    assert play.vault.directory.entries == {}
    text = play.opened(reader, number=1).status.message
    assert "a part of version 1 of trainer/policy was on island 0, which failed" in text
    play.proxy(reader, m.ReadVersion(opened.reader, 0, (on(2),), (7,)))
    (awaited,) = play.answers(reader, m.Await(1, (7,)))
    assert "was on island 0" in awaited.status.message
    (version,) = play.controller.published.names.versions()
    assert version.state is VersionState.LOST


@pytest.mark.parametrize("ask", [m.SuspendRequest, m.EndSessionRequest, lambda number: m.RemapRequest(number, 1, 1)])
def test_a_vault_is_no_session_for_operators(ask: Any) -> None:
    play = Trainer()
    play.complete()
    (reply,) = play.ask(play.connect("operator", token="cluster"), ask(play.vault.number))
    assert reply.status.code == Code.NOT_FOUND


def test_an_island_without_a_part_of_a_version_does_not_concern_it() -> None:
    play = Trainer()
    play.complete()
    play.lose(1, "it burnt")
    play.flush()
    (version,) = play.controller.published.names.versions()
    assert version.state is VersionState.COMPLETE


def test_a_request_waits_for_a_version_and_ends_at_its_deadline() -> None:
    play = Trainer()
    reader = play.open(token="reader").number
    play.flush()
    play.proxy(reader, m.OpenVersion(1, "trainer/policy", seconds=5.0))
    play.proxy(reader, m.OpenVersion(2, "trainer/policy", newer_than=1, seconds=5.0))
    assert play.outbox() == []
    view, sequence = play.view()
    play.send(m.Publish(1, "policy", 2, (view,), ("w",)))
    (first,) = [each for each in play.done(sequence) if isinstance(each, m.VersionOpened)]
    assert (first.request, first.version) == (1, 1)
    play.tick(6.0)
    (second,) = [each for each in play.outbox() if isinstance(each, m.VersionOpened)]
    assert (second.request, second.status.code) == (2, Code.DEADLINE_EXCEEDED)


def test_many_requests_for_versions_are_answered_in_several_flushes() -> None:
    play = Trainer()
    play.complete()
    reader = play.open(token="reader").number
    play.flush()
    for request in range(100):
        play.proxy(reader, m.OpenVersion(request, "trainer/policy"))
    first = [each for each in play.event(e.Flush(play.now)) if isinstance(each, a.Send)]
    assert 0 < len(first) < 100
    assert play.controller.has_work
    rest = [each for _, each in play.sent() if isinstance(each, m.VersionOpened)]
    assert len(first) + len(rest) == 100
    assert len({each.reader for each in rest}) == len(rest)


def test_a_request_whose_version_is_removed_before_its_answer_gets_an_error() -> None:
    play = Trainer()
    play.complete()
    reader = play.open(token="reader").number
    play.flush()
    play.proxy(reader, m.OpenVersion(1, "trainer/policy"))
    play.operator(m.RemoveTenant("trainer"))
    (reply,) = [each for each in play.outbox() if isinstance(each, m.VersionOpened)]
    assert reply.status.code == Code.NOT_FOUND


def test_published_memory_counts_against_the_quota_of_its_tenant() -> None:
    play = Trainer()
    play.complete()
    play.close(play.session)
    play.flush()
    memory = play.controller.tenants.by_name["trainer"].memory
    assert memory is not None
    assert memory.total == on(0).shape[0] * 4


def test_a_tenant_whose_launch_has_yet_to_read_a_freed_version_is_charged_for_its_memory() -> None:
    play = Trainer()
    play.complete(keep=1)
    play.close(play.session)
    reader = play.open(token="reader").number
    opened = play.opened(reader)
    busy = play.keep_busy(0, 1)
    play.proxy(reader, m.ReadVersion(opened.reader, 0, (on(2),), (7,)))
    started = [(to[1], each.sequence) for to, each in play.sent() if isinstance(each, m.Run)]
    assert {host for host, _ in started} <= {1}, "island 0 is full"
    nbytes = on(0).shape[0] * 4
    trainer, guest = (play.controller.tenants.by_name[name].memory for name in ("trainer", "reader"))
    assert trainer is not None
    assert guest is not None
    assert (trainer.total, guest.total) == (nbytes, nbytes), "the memory of the result is reserved"
    play.proxy(reader, m.CloseVersion(opened.reader))
    (reply,) = play.ask(play.connect("operator", token="trainer"), m.RemoveArraysRequest("policy", 1))
    assert reply.status.ok
    assert (trainer.total, guest.total) == (0, 2 * nbytes)
    play.worker(0, m.Done(tuple((sequence, 0, 1) for sequence in busy)))
    while started := started + [(to[1], each.sequence) for to, each in play.sent() if isinstance(each, m.Run)]:
        for host, sequence in started:
            play.worker(host, m.Done(((sequence, 0, 1),)))
        started = []
    assert (trainer.total, guest.total) == (0, nbytes), "only the result is left"
    entries = play.controller.sessions[reader].directory.entries
    assert {handle: entry.ready for handle, entry in entries.items()} == {7: True}


def test_a_tenant_stays_charged_for_a_freed_version_whose_memory_its_own_arrays_share() -> None:
    play = Trainer()
    play.complete(keep=1)
    reader = play.open(token="reader").number
    opened = play.opened(reader)
    memory = [play.controller.tenants.by_name[name].memory for name in ("trainer", "reader")]
    play.keep_busy(0, 1)
    play.proxy(reader, m.ReadVersion(opened.reader, 0, (on(2),), (7,)))
    play.flush()  # the read has not started
    before = [each.total for each in memory if each is not None]
    play.proxy(reader, m.CloseVersion(opened.reader))
    play.ask(play.connect("operator", token="trainer"), m.RemoveArraysRequest("policy", 1))
    assert [each.total for each in memory if each is not None] == before


def test_a_session_of_another_tenant_cannot_keep_a_removed_version_open() -> None:
    play = Trainer()
    play.complete()
    reader = play.open(token="reader").number
    opened = play.opened(reader)
    play.ask(play.connect("operator", token="trainer"), m.RemoveArraysRequest("policy", 1))
    play.tick(play.now + GUEST_SECONDS + 1)
    assert play.vault.directory.entries == {}
    play.proxy(reader, m.ReadVersion(opened.reader, 0, (on(2),), (7,)))
    (awaited,) = play.answers(reader, m.Await(1, (7,)))
    assert "was closed 300 s after another tenant had replaced its version" in awaited.status.message


def test_the_removal_of_a_tenant_frees_its_versions() -> None:
    play = Trainer()
    play.complete()
    reader = play.open(token="reader").number
    play.opened(reader)
    play.operator(m.RemoveTenant("trainer"))
    play.flush()
    assert play.controller.vaults.by_tenant == {}
    assert not any(play.controller.ledger.used.values())
    assert "may not read" not in play.opened(reader).status.message


def test_a_handle_that_the_session_uses_cannot_be_published_twice() -> None:
    play = Trainer()
    view, _ = play.view()
    (first,) = play.send(m.Publish(1, "policy", 2, (view,), ("w",)))
    (second,) = play.send(m.Publish(2, "policy", 2, (view,), ("w",)))
    assert (first.status.ok, second.status.code) == (True, Code.INVALID_ARGUMENT)


@pytest.mark.parametrize(
    "message",
    [
        m.Publish(1, "policy", 2, (), ()),
        m.Publish(1, "policy", 2, (10, 10), ("a", "b")),
        m.Publish(1, "policy", 2, (10,), ("a", "b")),
        m.Publish(1, "policy", 2, (10,), ("a" * 2000,)),
        m.Publish(1, "p" * 1000, 2, (10,), ("a",)),
        m.Publish(-1, "policy", 2, (10,), ("a",)),
        m.OpenVersion(1, "policy", seconds=float("nan")),
        m.OpenVersion(1, "policy", seconds=-1.0),
        m.OpenVersion(1, "policy", 1 << 63),
        m.OpenVersion(1, "policy", -2),
        m.ReadVersion(1, 0, (on(0),) * 200, tuple(range(200, 400))),
        m.ReadVersion(1, 0, (on(0),), (10,)),
        m.ReadVersion(1, 0, (on(0),), (1 << 61,)),
        m.ReadVersion(1, 0, (on(0),), (50, 51)),
        m.CloseVersion(-1),
    ],
)
def test_a_message_that_no_correct_proxy_sends_ends_the_session(message: Any) -> None:
    play = Trainer()
    play.complete()
    play.proxy(play.session, message)
    assert any(isinstance(each, m.Closing) for each in play.outbox())
    assert list(play.vault.directory.entries) == [1]


def reported(play: Trainer, token: str) -> list[tuple[str, str, int, str]]:
    (reply,) = play.ask(play.connect("operator", token=token), m.StatusRequest())
    found = msgspec.json.decode(reply.content)["versions"]
    return sorted((each["tenant"], each["name"], each["version"], each["state"]) for each in found)


def test_a_report_has_the_versions_that_its_reader_may_read() -> None:
    play = Trainer()
    play.complete()
    play.publish("policy-b")
    both = [("trainer", "policy", 1, "complete"), ("trainer", "policy-b", 1, "pending")]
    assert {token: reported(play, token) for token in ("trainer", "reader", "eve", "cluster")} == {
        "trainer": both,
        "reader": both,
        "eve": [],
        "cluster": both,
    }


@pytest.mark.parametrize(
    ("token", "name", "code"),
    [
        ("eve", "trainer/policy", Code.NOT_FOUND),
        ("reader", "trainer/policy", Code.NOT_FOUND),  # it may only read
        ("reader", "policy", Code.NOT_FOUND),  # of the tenant that ran the command
        ("trainer", "policy", Code.OK),
        ("trainer", "trainer/policy", Code.OK),
        ("trainer", "pol*", Code.INVALID_ARGUMENT),
        ("cluster", "trainer/policy", Code.OK),
    ],
)
def test_arrays_are_removed_by_their_tenant_and_by_operators(token: str, name: str, code: Code) -> None:
    play = Trainer()
    play.complete()
    (reply,) = play.ask(play.connect("operator", token=token), m.RemoveArraysRequest(name, 1))
    assert isinstance(reply, m.OperationReply)
    assert reply.status.code == code
    assert (play.vault.directory.entries == {}) == (code == Code.OK)
