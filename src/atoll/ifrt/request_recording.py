"""What a client asks, noted while somebody takes a trace. At other times its requests do not come by here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from atoll.grpc import Call
from atoll.ifrt.ifrt_session import IfrtSession
from atoll.ir.types import nbytes

OnMessage = Callable[[bytes | memoryview], Any]


def record_requests(session: IfrtSession, call: Call, on_message: OnMessage) -> None:
    """Has `on_message` take what comes, and while the session's recorder records, have it noted. It returns the
    request, or None where it was none.
    """
    recorder = session.cluster.recorder

    def recorded(data: bytes | memoryview) -> None:
        if recorder.is_over():
            on_message(data)
            return
        received = recorder.taken()
        request = on_message(data)
        if request is not None:
            kind = request.WhichOneof("kind") or "unknown"
            name, moved = _about(session, kind, getattr(request, kind, None))
            recorder.handled(request.meta.op_id, kind, name, received, moved)

    def change(is_recording: bool) -> None:
        call.on_message = recorded if is_recording else on_message
        session.responses.on_response = recorder.answered if is_recording else None

    recorder.on_change = change
    change(False)


def _about(session: IfrtSession, kind: str, request: Any) -> tuple[str, int]:
    """The program that a request runs, and the bytes that it moves."""
    if kind == "execute":
        executable = session.executables.get(request.executable)
        return ("" if executable is None else executable.name), 0
    if kind in ("make_array_from_host_buffer", "copy_to_host_buffer"):
        return "", _nbytes(session, [request.array])
    if kind == "make_arrays_from_host_buffer_shards":
        return "", _nbytes(session, request.arrays)
    return "", 0


def _nbytes(session: IfrtSession, handles: Any) -> int:
    records = (session.arrays.records.get(handle) for handle in handles)
    return sum(nbytes(record.spec) for record in records if record is not None)
