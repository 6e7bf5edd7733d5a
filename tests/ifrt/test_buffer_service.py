"""Tests of how a connection proves that it belongs to the client of a session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atoll.errors import Code, not_found
from atoll.ifrt.buffer_service import BufferService
from atoll.ifrt.host_buffer_store import HostBuffers, StoredUpload
from atoll.protocol.ifrt import transport_pb2
from tests.file_limits import no_more_files

SESSION = 5


class Call:
    """Unary call that records what happens to it."""

    def __init__(self) -> None:
        self.is_admitted = False
        self.code: int | None = None
        self.on_message: Callable[[bytes], None] = lambda data: None

    def set_handlers(self, on_message: Callable[[bytes], None], *_: Any) -> None:
        self.on_message = on_message

    def admit(self) -> None:
        self.is_admitted = True

    def send(self, data: bytes) -> None:
        pass

    def finish(self, code: int = 0, message: str = "") -> None:
        self.code = code


@pytest.fixture
def service(tmp_path: Path) -> BufferService:
    buffers = HostBuffers()
    buffers.put(7, StoredUpload([b"ab"], 2))
    (tmp_path / "lt_8").write_bytes(b"abc")

    def buffers_of(session: int) -> HostBuffers:
        if session != SESSION:
            raise not_found("unknown session")
        return buffers

    return BufferService(buffers_of, str(tmp_path))


def requests(session: int) -> dict[str, Any]:
    metadata = transport_pb2.HostBufferStoreMetadata(session_id=session, handle=8, buffer_size=3)
    return {
        "HostBufferDelete": transport_pb2.HostBufferDelete(session_id=session, handle=7),
        "HostBufferReadFromDisk": transport_pb2.HostBufferReadFromDisk(metadata=metadata),
    }


@pytest.mark.parametrize("method", sorted(requests(0)))
@pytest.mark.parametrize("session", [SESSION, SESSION + 1])
def test_only_the_client_of_a_session_is_admitted(service: BufferService, method: str, session: int) -> None:
    call = Call()
    service.methods()[method](call)  # type: ignore[arg-type]
    call.on_message(requests(session)[method].SerializeToString())
    is_own = session == SESSION
    assert (call.is_admitted, call.code) == (is_own, 0 if is_own else Code.NOT_FOUND)


def test_a_file_that_cannot_be_opened_now_is_not_reported_as_missing(service: BufferService, tmp_path: Path) -> None:
    def read() -> int | None:
        call = Call()
        service.methods()["HostBufferReadFromDisk"](call)  # type: ignore[arg-type]
        call.on_message(requests(SESSION)["HostBufferReadFromDisk"].SerializeToString())
        return call.code

    with no_more_files():
        assert read() == Code.UNAVAILABLE
    assert read() == 0
    assert read() == Code.NOT_FOUND  # it was read, and is removed
