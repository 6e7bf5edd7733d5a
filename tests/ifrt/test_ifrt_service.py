"""Tests of the session stream: how it opens, ends, and is rejected, with a fake call."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from atoll.errors import AccessError, Code, ConnectError, Status, StatusError
from atoll.ifrt.ifrt_service import MAX_PROTOCOL, MIN_PROTOCOL, SERVICE, SESSION_HEADER, Service
from atoll.ifrt.ifrt_session import FIRST_MINTED_HANDLE
from atoll.protocol import messages as m
from atoll.protocol.ifrt import session_pb2, transport_pb2
from atoll.session.cluster_session import ClusterSession
from tests.session.fake_cluster import FakeCluster

LOST = Status(int(Code.DATA_LOSS), "it burnt")


class FakeCall:
    """The part of `grpc.Call` that a session's stream uses."""

    def __init__(self, protocol: int = MAX_PROTOCOL, token: str = "") -> None:
        metadata = transport_pb2.SessionMetadata()
        metadata.version.protocol_version = protocol
        if token:
            metadata.initialization_data.attributes["token"].string_value = token.encode()
        self.metadata = {SESSION_HEADER: metadata.SerializeToString()}
        self.on_message: Callable[[bytes], None] = lambda data: None
        self.on_half_close: Callable[[], None] = lambda: None
        self.on_closed: Callable[[], None] = lambda: None
        self.sent: list[Any] = []
        self.finished: list[tuple[int, str]] = []
        self.paused = False
        self.peer = "10.0.0.1"
        self.is_admitted = False

    def set_handlers(
        self,
        on_message: Callable[[bytes], None] = lambda data: None,
        on_half_close: Callable[[], None] = lambda: None,
        on_closed: Callable[[], None] = lambda: None,
    ) -> None:
        self.on_message, self.on_half_close, self.on_closed = on_message, on_half_close, on_closed

    def admit(self) -> None:
        self.is_admitted = True

    @property
    def ended(self) -> bool:
        return bool(self.finished)

    def send(self, data: bytes) -> None:
        self.sent.append(session_pb2.Response.FromString(data))

    def finish(self, code: int = 0, message: str = "") -> None:
        self.finished.append((int(code), message))

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False

    def ask(self, kind: str = "init") -> None:
        request = session_pb2.Request()
        request.meta.op_id = 4
        getattr(request, kind).SetInParent()
        self.on_message(request.SerializeToString())


def play(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 10))


def service(opened: ClusterSession | Exception, ends: list[str] | None = None, token: str = "") -> Service:
    async def open_session() -> ClusterSession:
        await asyncio.sleep(0)
        if isinstance(opened, Exception):
            raise opened
        return opened

    return Service(open_session, token=token, on_session_end=lambda: (ends if ends is not None else []).append("end"))


async def stream(service: Service, call: FakeCall) -> None:
    service.methods()[SERVICE + "IfrtSession"](call)  # type: ignore[arg-type]
    for _ in range(5):
        await asyncio.sleep(0)


def test_requests_are_held_back_until_the_session_is_open():
    async def work() -> None:
        cluster, call = FakeCluster(first_handle=FIRST_MINTED_HANDLE), FakeCall()
        opening = asyncio.ensure_future(stream(service(cluster.session), call))
        await asyncio.sleep(0)
        assert call.paused
        await opening
        assert not call.paused
        call.ask()
        assert call.sent[0].WhichOneof("kind") == "init"

    play(work())


@pytest.mark.parametrize(
    ("end", "finished"),
    [
        (lambda call, cluster: call.on_half_close(), [(0, "")]),
        (lambda call, cluster: call.on_closed(), []),
        (lambda call, cluster: call.on_message(b"\xff"), [(3, "INVALID")]),
    ],
    ids=["half close", "closed", "no request"],
)
def test_a_session_ends_once_with_its_stream(end, finished):
    async def work() -> None:
        cluster, call, ends = FakeCluster(), FakeCall(), list[str]()
        await stream(service(cluster.session, ends), call)
        end(call, cluster)
        call.on_closed()
        assert [code for code, _ in call.finished] == [code for code, _ in finished]
        assert (cluster.closed, ends) == (True, ["end"])

    play(work())


def test_a_client_whose_session_is_lost_reads_why_whatever_it_asks_until_it_leaves():
    async def work() -> None:
        cluster, call, ends = FakeCluster(), FakeCall(), list[str]()
        await stream(service(cluster.session, ends), call)
        before = len(call.sent)
        cluster.session.handle(m.Closing(LOST))
        for _ in range(2):
            call.ask()
        assert [each.meta.status.message for each in call.sent[before:]] == ["it burnt [atoll: session]"] * 2
        assert (call.finished, ends) == ([], [])
        call.on_half_close()
        assert (cluster.closed, ends) == (True, ["end"])

    play(work())


@pytest.mark.parametrize("kind", ["destruct_array", "executable_destruct"])
def test_a_client_whose_session_is_lost_destructs_without_an_error(kind):
    async def work() -> None:
        cluster, call = FakeCluster(), FakeCall()
        await stream(service(cluster.session), call)
        cluster.session.handle(m.Closing(LOST))
        call.ask(kind)
        assert (call.sent[-1].meta.status.code, call.sent[-1].WhichOneof("kind")) == (0, kind)

    play(work())


def test_a_client_that_leaves_while_its_session_opens_leaves_none():
    async def work() -> None:
        cluster, call = FakeCluster(), FakeCall()
        opening = asyncio.ensure_future(stream(service(cluster.session), call))
        await asyncio.sleep(0)
        call.on_half_close()
        await opening
        assert cluster.closed

    play(work())


@pytest.mark.parametrize(
    ("opened", "code", "text"),
    [
        (AccessError("the token is wrong"), Code.UNAUTHENTICATED, "the token is wrong"),
        (ConnectError("nobody there"), Code.UNAVAILABLE, "nobody there"),
    ],
)
def test_a_session_that_does_not_open_is_the_answer_to_the_first_request(opened, code, text):
    async def work() -> None:
        call = FakeCall()
        await stream(service(opened), call)
        assert (call.paused, call.finished) == (False, [])
        call.ask()
        assert (call.sent[0].meta.op_id, call.sent[0].meta.status.code) == (4, code)
        assert call.finished == [(code, text)]

    play(work())


def test_a_session_that_was_lost_before_its_client_came_is_refused():
    async def work() -> None:
        cluster, call = FakeCluster(), FakeCall()
        cluster.session.handle(m.Closing(LOST))
        await stream(service(cluster.session), call)
        call.ask()
        assert call.finished == [(LOST.code, LOST.message)]

    play(work())


@pytest.mark.parametrize(
    ("call", "code"),
    [
        (FakeCall(protocol=MIN_PROTOCOL - 1), Code.FAILED_PRECONDITION),
        (FakeCall(protocol=MAX_PROTOCOL + 1), Code.FAILED_PRECONDITION),
        (FakeCall(), Code.UNAUTHENTICATED),
        (FakeCall(token="wrong"), Code.UNAUTHENTICATED),
        (FakeCall(token="right"), None),
    ],
)
def test_versions_and_tokens_are_checked_before_a_session_opens(call, code):
    async def work() -> None:
        cluster = FakeCluster()
        await stream(service(cluster.session, token="right"), call)
        call.ask()
        assert [status for status, _ in call.finished] == ([] if code is None else [code])
        assert call.is_admitted == (code is None)

    play(work())


@pytest.mark.parametrize(
    ("low", "high", "serdes", "protocol"),
    [(1, 16, 6, 16), (16, 99, 99, MAX_PROTOCOL), (20, 22, 3, 22), (1, 15, 6, None), (26, 30, 6, None)],
)
def test_the_highest_version_that_both_speak_is_chosen(low, high, serdes, protocol):
    request = transport_pb2.GetVersion()
    request.min_version.protocol_version, request.max_version.protocol_version = low, high
    request.max_version.ifrt_serdes_version_number = serdes
    get_version = service(ConnectError("not asked"))._get_version
    if protocol is None:
        with pytest.raises(StatusError, match="install a"):
            get_version(request)
    else:
        assert get_version(request).version.protocol_version == protocol
