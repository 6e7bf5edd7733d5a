"""A request that has not been answered yet, and the ways to answer it.

A request that makes arrays is answered at once, because the client has chosen the handles of the results, and uses of
the results report a failure. A request that needs the cluster is answered later.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

import msgspec

from atoll.errors import OK, Status, StatusError, status_of
from atoll.executables.loaded_executable import Loaded, LoadedExecutable, compile_reply
from atoll.executables.session_arrays import ArrayRecord, Memory
from atoll.ifrt.ifrt_session import FIRST_MINTED_HANDLE, IfrtSession
from atoll.protocol.ifrt import session_pb2
from atoll.protocol.translation import codec

_log = logging.getLogger(__name__)

USER_CONTEXT_PAYLOAD = "type.googleapis.com/ifrt.UserContext"


class PendingRequest(msgspec.Struct, eq=False):
    """One request, which gets one response. `context` identifies the Python stack that made it, or is 0."""

    session: IfrtSession
    op: int
    context: int

    def response(self) -> Any:
        """Return an empty response to fill. Setting one of its kinds makes it a success."""
        response = session_pb2.Response()
        response.meta.op_id = self.op
        return response

    def reply(self, response: Any) -> None:
        """Send a response, after which the client may forget the request's stack."""
        self.session.responses.send(response, self.context)

    def reply_out_of_sequence(self, response: Any) -> None:
        """Send a response that the client never finishes (see `ResponseStream`)."""
        self.session.responses.send_out_of_sequence(response, self.context)

    def reply_arrays(self, kind: str, handles: Sequence[int], *, one: bool = False) -> None:
        """Reply to a request that made arrays, which keep its stack."""
        response = self.response()
        reply = getattr(response, kind)
        reply.SetInParent()
        if one:
            reply.array = handles[0]
        else:
            reply.arrays.extend(handles)
        self.session.responses.send(response, 0 if handles else self.context)

    def fail(self, status: Status, *, with_stack: bool = True) -> None:
        """Answer with an error. The client shows it with the stack of the request if `with_stack` is set."""
        response = self.response()
        response.meta.status.CopyFrom(codec.status_to(self._with_stack(status) if with_stack else status))
        self.session.responses.send_out_of_sequence(response, self.context)

    def reply_later(self, work: Coroutine[Any, Any, Any], *, with_stack: bool = True) -> None:
        """Answer when `work` is done, with the response that it returns or the error that it raises."""
        self.session.spawn(self._answer(work, with_stack))

    def reply_loaded(self, loaded: Loaded) -> None:
        """Reply to a compile request with a handle for an executable."""
        self.reply(self._loaded(loaded))

    def reply_loaded_later(self, work: Coroutine[Any, Any, Loaded]) -> None:
        """Reply to a compile request when `work` is done. Its error has no stack, because JAX raises it at the call."""

        async def load() -> Any:
            return self._loaded(await work)

        self.reply_later(load(), with_stack=False)

    def reply_compiled_later(self, work: Coroutine[Any, Any, LoadedExecutable]) -> None:
        """Reply to a compile request when `work` is done, or with an error if the client's process is ending."""
        self.reply_loaded_later(self.session.compilation(work))

    def _loaded(self, loaded: Loaded) -> Any:
        response = self.response()
        response.compile.CopyFrom(compile_reply(loaded, self.session.load(loaded), self.session.add_future(OK)))
        return response

    def reply_outcome(self, kind: str, handle: int) -> None:
        """Answer when the future `handle` is resolved, with an empty `kind` or with its error."""
        future = self.session.take_future(handle)

        async def work() -> Any:
            (await future).raise_if_error()
            response = self.response()
            getattr(response, kind).SetInParent()
            return response

        self.reply_later(work())

    async def _answer(self, work: Coroutine[Any, Any, Any], with_stack: bool) -> None:
        try:
            self.reply(await work)
        except StatusError as error:
            self.fail(error.status, with_stack=with_stack)
        except Exception as error:
            _log.exception("a request failed")
            self.fail(status_of(error), with_stack=with_stack)

    @contextlib.contextmanager
    def making(self, given: Sequence[int]) -> Iterator[None]:
        """If the block raises StatusError, set the error on the handles that the client chose for results."""
        try:
            yield
        except StatusError as error:
            self.set_error(given, error)
            raise

    def set_error(self, given: Sequence[int], error: StatusError) -> None:
        """Define the valid handles that the client chose for results as arrays that failed with the error."""
        records = self.session.arrays.records
        free = [handle for handle in given if 0 < handle < FIRST_MINTED_HANDLE and handle not in records]
        self.define_failed(free, error.status)

    def define_failed(self, handles: Sequence[int], status: Status) -> None:
        """Define arrays that failed with `status`."""
        with_stack = self._with_stack(status)
        for handle in handles:
            self.session.arrays.records[handle] = ArrayRecord(None, Memory(), None, with_stack)

    def _with_stack(self, status: Status) -> Status:
        if not self.context or USER_CONTEXT_PAYLOAD in status.payloads:
            return status
        payloads = {**status.payloads, USER_CONTEXT_PAYLOAD: str(self.context).encode()}
        return Status(status.code, status.message, payloads)


# Handles one kind of request: answers it, or raises StatusError.
Handler = Callable[[PendingRequest, Any], None]
