"""The handlers of all kinds of requests, and the dispatch to them.

`jax.jit(f)(x)` sends `compile` for the first call, and `execute` for each: both are in `executable_requests`.
"""

from __future__ import annotations

import logging
from typing import Any

from google.protobuf.unknown_fields import UnknownFieldSet

from atoll.errors import Code, Status, StatusError, status_of
from atoll.ifrt.ifrt_session import IfrtSession
from atoll.ifrt.pending_request import Handler, PendingRequest
from atoll.ifrt.requests import array_requests, executable_requests, host_array_requests, value_requests
from atoll.protocol.ifrt import session_pb2
from atoll.protocol.translation import codec

_log = logging.getLogger(__name__)

HANDLERS: dict[str, Handler] = {
    **value_requests.HANDLERS,
    **host_array_requests.HANDLERS,
    **array_requests.HANDLERS,
    **executable_requests.HANDLERS,
}


_DESTRUCTIONS = ("destruct_array", "executable_destruct")


def handle_request(session: IfrtSession, data: bytes | memoryview) -> Any:
    """Handle one request of the client, and return it.

    Raise INVALID_ARGUMENT if the bytes are not a request, which ends the stream.
    """
    request, pending = _pending(session, data)
    kind = request.WhichOneof("kind")
    try:
        handler = HANDLERS.get(kind)
        if handler is None:
            fields = [field.field_number for field in UnknownFieldSet(request)]
            raise StatusError(Code.UNIMPLEMENTED, f"requests with the fields {fields} are not supported")
        handler(pending, getattr(request, kind))
    except StatusError as error:
        pending.fail(error.status)
    except Exception as error:
        _log.exception("handling %s failed", kind)
        pending.fail(status_of(error))
    return request


def refuse_request(session: IfrtSession, data: bytes | memoryview, status: Status) -> None:
    """Answer a request of any kind with an error, but a destruction with success. Raise as `handle_request` does.

    The objects have ended with the session, and jaxlib's client logs each destruction that fails.
    """
    request, pending = _pending(session, data)
    kind = request.WhichOneof("kind")
    if kind not in _DESTRUCTIONS:
        pending.fail(status)
        return
    response = pending.response()
    getattr(response, kind).SetInParent()
    pending.reply_out_of_sequence(response)


def _pending(session: IfrtSession, data: bytes | memoryview) -> tuple[Any, PendingRequest]:
    request = codec.parse(session_pb2.Request, data if isinstance(data, bytes) else bytes(data))
    return request, PendingRequest(session, request.meta.op_id, request.meta.user_context_id)
