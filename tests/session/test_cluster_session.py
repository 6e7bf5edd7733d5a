"""Tests of the session: the messages that it sends on request, and its reactions to those of the controller."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from atoll.cluster.slice_requests import SliceRequest
from atoll.errors import OK, Code, ConnectError, Status, StatusError
from atoll.ir.program import NODES_PER_CREDIT, Call, HostBuffer, HostToDevice, Program, Report, Switch
from atoll.ir.types import ArraySpec, Sharding
from atoll.protocol import messages as m
from atoll.session.cluster_session import DIAL_SECONDS
from atoll.session.downloads import DirectDownload, Download, DownloadState
from atoll.session.registered_programs import in_parts
from tests.session.fake_cluster import WINDOW, FakeCluster

ARRAY = ArraySpec("float32", (4,), Sharding((0,)))
PROGRAM = Program("nothing", (), (), ())
FAILURE = Status(int(Code.DATA_LOSS), "it burnt")


def play(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 10))


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


# ---- launches


def test_a_launch_takes_credits_for_its_nodes_until_the_controller_returns_them():
    cluster = FakeCluster()
    session = cluster.session
    large = Program("large", (ARRAY,), (Report((0,)),) * ((WINDOW - 1) * NODES_PER_CREDIT), ())
    program = session.register_program(large)
    results = [session.mint(), session.mint()]
    session.launch(program, (7,), results, (8,), traceback_id=9)
    assert cluster.take() == [
        *in_parts(program, large),
        m.Launch(program, (7,), tuple(results), (8,), 9, WINDOW),
    ]
    assert session.window.is_full
    session.handle(m.CreditReturned(WINDOW))
    assert session.window.in_flight == 0


TRANSFER = Program("put", (), (HostToDevice((HostBuffer(0, (4,), (4, 4), None),), (ARRAY,)),), (0,), feeds=1)
NUMBER = ArraySpec("int32", (), Sharding((0,)))
BRANCHES = (Program("good", (ARRAY,), (), (0,)), Program("bad", (ARRAY,), (Call(-1, (0,), (ARRAY,), (0,)),), (1,)))
SWITCH = Program("switch", (NUMBER, ARRAY), (Switch((0, 1), (ARRAY,), BRANCHES),), (2,))


@pytest.mark.parametrize(("program", "text"), [(TRANSFER, "strides"), (SWITCH, "function is -1")])
def test_a_program_that_is_not_valid_is_refused_and_nothing_of_it_is_sent(program, text):
    cluster = FakeCluster()
    for _ in range(2):
        with pytest.raises(StatusError, match=text) as error:
            cluster.session.programs.number("key", lambda: program)
        assert error.value.status.code == Code.INVALID_ARGUMENT
    assert cluster.take() == []


def test_handles_count_up_from_the_first_and_numbers_of_other_things_do_not_repeat():
    session = FakeCluster(first_handle=100).session
    assert [session.mint() for _ in range(3)] == [100, 101, 102]
    assert len({session.number() for _ in range(100)}) == 100


@pytest.mark.parametrize("delete", [False, True])
def test_handles_are_released(delete):
    cluster = FakeCluster()
    cluster.session.release([1, 2], delete=delete)
    assert cluster.take() == [m.Release((1, 2), delete)]


@pytest.mark.parametrize("status", [OK, FAILURE])
def test_a_wait_is_answered_once(status):
    cluster, answers = FakeCluster(), list[Status]()
    cluster.session.wait((3, 4), answers.append)
    (asked,) = cluster.take()
    assert asked.handles == (3, 4)
    cluster.session.handle(m.Awaited(asked.wait, status))
    cluster.session.handle(m.Awaited(asked.wait, status))
    assert answers == [status]


# ---- functions


@pytest.mark.parametrize("failing", [None, 0, 1])
def test_a_wait_for_more_handles_than_a_message_has_ends_with_the_last_or_the_first_error(failing):
    cluster = FakeCluster()
    session = cluster.session
    handles, answers = tuple(range(2 * m.MAX_HANDLES)), []
    session.wait(handles, answers.append)
    named: tuple[int, ...] = ()
    for number in range(2 if failing is None else failing + 1):
        (message,) = cluster.take()
        named += message.handles
        assert answers == []
        session.handle(m.Awaited(message.wait, FAILURE if number == failing else OK))
    assert answers == [OK if failing is None else FAILURE]
    assert named == handles[: len(named)]
    assert cluster.take() == []


def test_a_functions_source_goes_to_each_host_of_its_devices():
    async def work() -> None:
        cluster = FakeCluster(hosts=3)
        task = asyncio.ensure_future(cluster.session.register_function(b"source", "hash", ((1,), (4,))))
        await settle()
        ((hosts, feed, contents),) = cluster.uploads
        (asked,) = cluster.take()
        assert (hosts, contents) == ((0, 2), b"source")
        assert asked == m.RegisterFunction(asked.function, "hash", feed, ((1,), (4,)))
        cluster.session.handle(m.FunctionReady(asked.function, OK, b"info"))
        assert await task == (asked.function, b"info")

    play(work())


def test_a_function_that_does_not_compile_is_not_compiled_again():
    async def work() -> None:
        cluster = FakeCluster()
        task = asyncio.ensure_future(cluster.session.register_function(b"source", "hash", ((0,),)))
        await settle()
        (asked,) = cluster.take()
        cluster.session.handle(m.FunctionReady(asked.function, FAILURE, b""))
        with pytest.raises(StatusError, match="it burnt"):
            await task
        cluster.uploads.clear()
        cluster.session.handle(m.SendSources(((asked.function, (1,)),)))
        assert (cluster.take(), cluster.uploads) == ([], [])

    play(work())


def test_a_function_on_a_device_that_does_not_exist_is_refused_and_nothing_sent():
    async def work() -> None:
        cluster = FakeCluster()
        with pytest.raises(StatusError, match="device 99 does not exist"):
            await cluster.session.register_function(b"source", "hash", ((99,),))
        assert (cluster.take(), cluster.uploads) == ([], [])

    play(work())


async def compiled(cluster: FakeCluster, *devices: int) -> int:
    task = asyncio.ensure_future(cluster.session.register_function(b"source", "hash", (devices,)))
    await settle()
    (asked,) = cluster.take()
    cluster.session.handle(m.FunctionReady(asked.function, OK, b""))
    function, _ = await task
    cluster.uploads.clear()
    return function


def test_a_function_is_released_with_the_last_executable_that_uses_it():
    async def work() -> None:
        cluster = FakeCluster()
        function = await compiled(cluster, 0)
        cluster.session.retain_functions((function,))
        cluster.session.retain_functions((function,))
        cluster.session.drop_functions((function,))
        assert cluster.take() == []
        cluster.session.drop_functions((function,))
        assert cluster.take() == [m.ReleaseFunction(function)]

    play(work())


# ---- hosts


def test_a_loss_is_acknowledged_and_reported_to_the_front_end():
    cluster = FakeCluster()
    cluster.session.handle(m.HostsFailed((1,)))
    assert (cluster.disconnected, cluster.take(), cluster.losses) == ([1], [m.FailureAcknowledged((1,))], 1)


def test_an_acknowledgement_names_the_feeds_that_will_come():
    cluster = FakeCluster()
    session = cluster.session
    sent, unsent = session.feed(), session.feed()
    session.upload((1,), sent, [b"x"], launch=sent)
    session.launch(1, (), (10,), (sent,))
    session.launch(1, (), (11,), (unsent,))
    cluster.kept = [(0, 90), (1, sent)]
    cluster.take()
    session.handle(m.HostsFailed((1,)))
    assert cluster.take() == [m.FailureAcknowledged((1,), ((1, sent),), (unsent,))]
    session.handle(m.CreditReturned(1))
    assert cluster.kept
    session.handle(m.CreditReturned(1))
    assert not cluster.kept, "nothing is in flight"


@pytest.mark.parametrize(
    ("lost_again", "again"),
    [((), ["on both", "on 1"]), ((0,), ["on 1"]), ((1,), [])],
)
def test_functions_of_hosts_that_are_back_are_compiled_again_where_none_of_them_was_lost_again(lost_again, again):
    async def work() -> None:
        cluster = FakeCluster(hosts=3)
        functions = {
            await compiled(cluster, 2): "on 1",
            await compiled(cluster, 1, 2): "on both",
            await compiled(cluster, 4): "on 2",
        }
        back = ((0, "unix:/new-0"), (1, "unix:/new-1"))
        cluster.session.handle(m.HostsRestarted(back))
        ((hosts, then),) = cluster.dials
        assert hosts == back
        if lost_again:
            cluster.session.handle(m.HostsFailed(lost_again))
        cluster.take()
        then({})
        sent = cluster.take()
        assert [functions[message.function] for message in sent] == again
        assert [message.feed for message in sent] == [feed for _, feed, _ in cluster.uploads]

    play(work())


def test_a_session_whose_host_is_back_and_not_reached_in_time_is_lost_with_the_hosts_name():
    async def work() -> None:
        cluster, lost, waited = FakeCluster(), list[Status](), list[Status]()
        cluster.session.set_handlers(lost.append)
        await compiled(cluster, 2)
        cluster.session.wait((1,), waited.append)
        cluster.take()
        cluster.session.handle(m.HostsRestarted(((1, "unix:/new-1"),)))
        assert cluster.patience == [DIAL_SECONDS]
        ((_, then),) = cluster.dials
        then({1: ConnectError("nobody there")})
        (status,) = lost
        assert status.message == "host 1 has restarted, but its data port was unreachable for 30 s: nobody there"
        assert (status.code, waited, cluster.closed, cluster.take()) == (Code.UNAVAILABLE, [status], True, [])

    play(work())


def test_all_hosts_are_dialled_when_a_session_opens():
    cluster, outcomes = FakeCluster(), list[Any]()
    cluster.session.connect(outcomes.append)
    ((hosts, then),) = cluster.dials
    assert hosts == ((0, "unix:/0"), (1, "unix:/1"))
    then({})
    assert outcomes == [{}]


# ---- questions


def test_a_question_is_answered_by_the_worker_that_has_the_device():
    async def work() -> None:
        cluster = FakeCluster()
        task = asyncio.ensure_future(cluster.session.inquire(m.QueryKind.COST, 3, 17, b"how much"))
        await settle()
        (asked,) = cluster.take()
        assert asked == m.Query(asked.query, m.QueryKind.COST, 3, 17, b"how much")
        cluster.session.handle(m.QueryReply(asked.query, OK, b"much"))
        assert await task == b"much"

    play(work())


# ---- quiescing


def test_a_session_that_is_quiesced_says_so_and_compiles_nothing_until_it_resumes():
    async def work() -> None:
        cluster, changes = FakeCluster(), list[bool]()
        session = cluster.session
        session.set_handlers(lambda status: None, lambda: changes.append(session.is_quiesced))
        session.handle(m.Quiesce(6))
        assert (cluster.take(), session.is_quiesced) == ([m.Quiesced(6)], True)
        task = asyncio.ensure_future(session.register_function(b"source", "hash", ((0,),)))
        await settle()
        assert cluster.take() == []
        session.handle(m.Migrated(6, ((0, 1),)))
        await settle()
        (asked,) = cluster.take()
        assert isinstance(asked, m.RegisterFunction)
        assert [hosts for hosts, _, _ in cluster.uploads] == [(1,)]  # where the device is now
        assert changes == [True, False]
        task.cancel()

    play(work())


def test_sources_of_functions_that_move_are_sent_while_the_session_is_quiesced():
    async def work() -> None:
        cluster = FakeCluster()
        function = await compiled(cluster, 0)
        cluster.session.handle(m.Quiesce(1))
        cluster.take()
        cluster.session.handle(m.SendSources(((function, (1,)), (999, (1,)))))
        ((hosts, feed, contents),) = cluster.uploads
        assert (hosts, contents, cluster.take()) == ((1,), b"source", [m.Recompile(function, feed)])

    play(work())


@pytest.mark.parametrize("status", [OK, FAILURE])
def test_a_request_for_a_slice_quiesces_the_session_at_once_and_until_the_reply(status):
    async def work() -> None:
        cluster, request = FakeCluster(), SliceRequest(2)
        reply = asyncio.ensure_future(cluster.session.add_slice(request))
        (asked,) = cluster.take()  # before the coroutine has run
        assert asked == m.AddSlice(asked.request, request)
        assert cluster.session.is_quiesced
        cluster.session.handle(m.SliceAdded(asked.request, status, 1, (0, 1), (2,), ((0, 1), (1, 1))))
        if status.ok:
            assert (await reply).devices == (0, 1)
            assert cluster.session.hosts_of([0, 1]) == [1]
        else:
            with pytest.raises(StatusError, match="it burnt"):
                await reply
        assert not cluster.session.is_quiesced

    play(work())


def test_a_slice_request_and_a_migration_may_overlap():
    async def work() -> None:
        cluster, changes = FakeCluster(), list[bool]()
        cluster.session.set_handlers(lambda status: None, lambda: changes.append(cluster.session.is_quiesced))
        reply = asyncio.ensure_future(cluster.session.add_slice(SliceRequest(1)))
        (asked,) = cluster.take()
        cluster.session.handle(m.Quiesce(1))
        cluster.session.handle(m.SliceAdded(asked.request, OK, 1, (0,)))
        await reply
        assert (cluster.session.is_quiesced, changes) == (True, [True])
        cluster.session.handle(m.Migrated(1, ()))
        assert (cluster.session.is_quiesced, changes) == (False, [True, False])

    play(work())


# ---- feeds


def download_of(cluster: FakeCluster) -> Download:
    """Return a download of an array on device 0, which hosts send as feed 4."""
    download = Download(4, (0,), 1, cluster.session.make_future)
    cluster.session.downloads.expect(download)
    return download


def test_contents_of_hosts_come_to_whom_expects_them():
    cluster = FakeCluster()
    download = download_of(cluster)
    assert cluster.awaits()
    cluster.on_feed(4, b"a", False, lambda: None)
    assert (download.contents, download.state) == ([b"a"], DownloadState.STORED)
    assert not cluster.awaits()


def test_what_a_lost_host_had_sent_and_is_not_here_does_not_come():
    cluster = FakeCluster()
    download = download_of(cluster)
    cluster.session.downloads.sent(download, [1])
    cluster.session.handle(m.HostsFailed((0, 1)))
    assert download.status.code == Code.DATA_LOSS


def test_a_lost_session_fails_what_has_been_sent_and_is_not_here():
    cluster = FakeCluster()
    download = download_of(cluster)
    cluster.session.downloads.sent(download, [1])
    cluster.session.handle(m.Closing(FAILURE))
    assert download.status.message == FAILURE.message


class DirectRead:
    """A read of an array on device 0 by the client's process, as feed 4, whose host has sent all."""

    def __init__(self, *, local: bool) -> None:
        self.cluster = FakeCluster()
        self.cluster.local = {0} if local else set()
        self.failures: list[str] = []
        download = DirectDownload(4, (0, 2), lambda status: self.failures.append(status.message), may_bypass=True)
        wait = self.cluster.session.expect(download)
        assert self.cluster.awaits(), "hosts are watched for silence"
        self.cluster.session.handle(m.Awaited(wait, OK))


def test_a_direct_read_whose_contents_were_on_the_way_fails_with_the_name_of_its_host():
    read = DirectRead(local=False)
    assert read.cluster.awaits()
    read.cluster.session.handle(m.HostsFailed((0,)))
    assert read.failures == ["host 0 is gone, and data that it had sent to the client was still on the way"]
    assert not read.cluster.awaits()


def test_a_direct_read_ends_when_its_contents_were_forwarded():
    read = DirectRead(local=False)
    read.cluster.on_feed(4, b"", False, lambda: None)
    assert not read.cluster.awaits()
    read.cluster.session.handle(m.HostsFailed((0,)))
    assert not read.failures


def test_a_direct_read_on_one_machine_ends_when_its_host_has_sent_it():
    read = DirectRead(local=True)
    assert not read.cluster.awaits()
    read.cluster.session.handle(m.HostsFailed((0,)))
    assert not read.failures


# ---- the end


@pytest.mark.parametrize(
    ("end", "text"),
    [
        (lambda cluster: cluster.session.handle(m.Closing(FAILURE)), "it burnt"),
        (lambda cluster: cluster.session.connection_lost("reset"), "the Atoll controller is gone: reset"),
        (lambda cluster: cluster.on_broken(FAILURE), "it burnt"),
    ],
)
def test_all_that_waits_is_answered_when_the_session_is_lost(end, text):
    async def work() -> None:
        cluster = FakeCluster()
        session = cluster.session
        lost, waited = list[Status](), list[Status]()
        session.set_handlers(lost.append)
        session.wait((1,), waited.append)
        tasks = [
            asyncio.ensure_future(each)
            for each in (
                session.register_function(b"source", "hash", ((0,),)),
                session.inquire(m.QueryKind.COST, 0),
                session.add_slice(SliceRequest(1)),
            )
        ]
        # The function waits for the slice; the others for the controller.
        await settle()
        end(cluster)
        for task in tasks[1:]:
            with pytest.raises(StatusError, match=text):
                await task
        with pytest.raises(StatusError, match=text):
            await tasks[0]
        with pytest.raises(StatusError, match=text):
            await session.inquire(m.QueryKind.COST, 0)  # from now on, too
        session.wait((1,), waited.append)
        assert [text in status.message for status in (*lost, *waited)] == [True] * 3
        assert cluster.closed
        end(cluster)
        assert len(lost) == 1

    play(work())


def test_a_session_that_is_closed_is_not_lost():
    cluster, lost = FakeCluster(), list[Status]()
    cluster.session.set_handlers(lost.append)
    cluster.session.close()
    cluster.session.connection_lost("closed")
    assert (lost, cluster.closed) == ([], True)


def test_a_compilation_that_waits_for_the_end_of_a_migration_ends_with_the_session() -> None:
    async def main() -> None:
        session = FakeCluster().session
        session.handle(m.Quiesce(1))
        compiling = asyncio.ensure_future(session.register_function(b"source", "content", ((0,),)))
        await asyncio.sleep(0)
        session.connection_lost("it ended")
        with pytest.raises(StatusError, match="controller is gone"):
            await asyncio.wait_for(compiling, 10)

    asyncio.run(main())
