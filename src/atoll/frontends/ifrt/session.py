"""A session: one client's stream of requests, each answered once.

Requests are taken in order. One that makes arrays is answered at once: the client has numbered the results
itself, and a failure is told by whatever uses them. What waits for the cluster answers later, by itself. What
each request does is in `atoll.frontends.ifrt.requests`; here is what they have in common.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any

from google.protobuf.unknown_fields import UnknownFieldSet

from atoll.errors import Code, Status, StatusError, invalid, not_found, status_of
from atoll.frontends.ifrt import codec
from atoll.frontends.ifrt.arrays import ArrayRecord, Arrays, Memory, Origin
from atoll.frontends.ifrt.executables import Loaded
from atoll.frontends.ifrt.host_buffers import HostBuffers
from atoll.frontends.session.link import Link
from atoll.ir.program import Program
from atoll.ir.types import ArraySpec
from atoll.protocol import messages as m
from atoll.protocol.ifrt import session_pb2

_log = logging.getLogger(__name__)

# Handles that the server mints start far above the client's.
SERVER_HANDLES = 1 << 62
# Programs of transfers and the like that stay registered; jitted functions keep theirs for as long as they live.
MAX_PROGRAMS = 4096
USER_CONTEXT_PAYLOAD = "type.googleapis.com/ifrt.UserContext"


class Exchange:
    """One request and its one answer. `context` names the Python stack that made it, or is 0."""

    __slots__ = ("context", "op", "session")

    def __init__(self, session: Session, op: int, context: int) -> None:
        self.session = session
        self.op = op
        self.context = context

    def response(self) -> Any:
        """An empty answer to fill; setting one of its kinds makes it a success."""
        response = session_pb2.Response()
        response.meta.op_id = self.op
        return response

    def reply(self, response: Any) -> None:
        """Answers. The client may forget the request's stack now, unless arrays keep it."""
        self.session.send(response, self.context)

    def made(self, kind: str, handles: Sequence[int], *, one: bool = False) -> None:
        """Answers a request that made arrays."""
        response = self.response()
        reply = getattr(response, kind)
        reply.SetInParent()
        if one:
            reply.array = handles[0]
        else:
            reply.arrays.extend(handles)
        self.session.send(response, 0 if handles else self.context)

    def fail(self, status: Status, *, placed: bool = True) -> None:
        """Answers with an error; where it is `placed`, the client shows it beside the stack of the request."""
        response = self.response()
        response.meta.status.CopyFrom(codec.status_to(self._placed(status) if placed else status))
        self.session.send_failure(response, self.context)

    def later(self, work: Coroutine[Any, Any, Any], *, placed: bool = True) -> None:
        """Answers when `work` is done, with the response that it returns or the error that it raises."""
        self.session.spawn(self._answer(work, placed))

    def outcome(self, kind: str, handle: int) -> None:
        """Answers when the future `handle` is resolved: with an empty `kind`, or with its error."""
        future = self.session.take_future(handle)

        async def work() -> Any:
            (await future).raise_if_error()
            response = self.response()
            getattr(response, kind).SetInParent()
            return response

        self.later(work())

    async def _answer(self, work: Coroutine[Any, Any, Any], placed: bool) -> None:
        try:
            self.reply(await work)
        except StatusError as error:
            self.fail(error.status, placed=placed)
        except Exception as error:
            _log.exception("a request failed")
            self.fail(status_of(error), placed=placed)

    @contextlib.contextmanager
    def defining(self, given: Sequence[int]) -> Iterator[None]:
        """Where the block fails, the handles that the client chose for results stand for its error from now on."""
        try:
            yield
        except StatusError as error:
            self.undefined(given, error)
            raise

    def undefined(self, given: Sequence[int], error: StatusError) -> None:
        status = self._placed(error.status)
        for handle in given:
            if 0 < handle < SERVER_HANDLES and handle not in self.session.arrays.records:
                self.session.arrays.records[handle] = ArrayRecord(None, Memory(), None, status)

    def _placed(self, status: Status) -> Status:
        if not self.context or USER_CONTEXT_PAYLOAD in status.payloads:
            return status
        payloads = {**status.payloads, USER_CONTEXT_PAYLOAD: str(self.context).encode()}
        return Status(status.code, status.message, payloads)


Handler = Callable[[Exchange, Any], None]


class Session:
    """What a client owns, and the ways to the cluster. `number` names it to the client's side channels.

    `write(bytes)` carries responses; `pause` and `resume` hold back the client's requests while too many of its
    launches are in the system.
    """

    def __init__(
        self,
        link: Link,
        handlers: Mapping[str, Handler],
        number: int,
        write: Callable[[bytes], None],
        pause: Callable[[], None],
        resume: Callable[[], None],
    ) -> None:
        self.link = link
        self.number = number
        self.arrays = Arrays()
        self.buffers = HostBuffers()
        self.executables: dict[int, Loaded] = {}
        self._function_users: Counter[int] = Counter()
        self.staged: list[int] = []  # arguments of the program that runs next, by handle
        self.layouts: dict[Any, bytes] = {}
        self._handlers = handlers
        self._write = write
        self._pause = pause
        self._resume = resume
        self._paused = False
        self._holds = 0
        self._in_flight = 0
        self._window = link.welcome.launch_window
        self._next_handle = SERVER_HANDLES
        self._futures: dict[int, asyncio.Future[Status]] = {}
        self._programs: OrderedDict[Any, int] = OrderedDict()
        self._sequence = 0
        self._tasks: set[asyncio.Task[None]] = set()
        link.on_credit_returned = self._retired
        link.on_hold = self.hold
        link.on_moved = self.go_on
        if link.is_held:
            self.hold()

    # ---- requests and responses

    def on_request(self, data: bytes | memoryview) -> None:
        """Handles one request. Raises INVALID_ARGUMENT for bytes that are none: the stream then ends."""
        request = codec.parse(session_pb2.Request, data if isinstance(data, bytes) else bytes(data))
        kind = request.WhichOneof("kind")
        exchange = Exchange(self, request.meta.op_id, request.meta.user_context_id)
        try:
            handler = self._handlers.get(kind)
            if handler is None:
                fields = [field.field_number for field in UnknownFieldSet(request)]
                raise StatusError(Code.UNIMPLEMENTED, f"a request of a kind that Atoll does not know: {fields}")
            handler(exchange, getattr(request, kind))
        except StatusError as error:
            exchange.fail(error.status)
        except Exception as error:
            _log.exception("handling %s failed", kind)
            exchange.fail(status_of(error))

    def send(self, response: Any, ended_context: int) -> None:
        """Sends a success. The client counts these, and reads in them alone which stacks it may forget."""
        meta = response.meta
        meta.seq_num = self._sequence
        self._sequence += 1
        if ended_context:
            meta.destroyed_user_context_ids.append(ended_context)
        if self.arrays.ended_origins:
            meta.destroyed_user_context_ids.extend(self.arrays.ended_origins)
            self.arrays.ended_origins.clear()
        self._write(response.SerializeToString())

    def send_failure(self, response: Any, ended_context: int) -> None:
        if ended_context:
            self.arrays.ended_origins.append(ended_context)
        self._write(response.SerializeToString())

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self.link.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        """The client is gone."""
        for task in self._tasks:
            task.cancel()
        self.buffers.close()
        self.link.close()

    # ---- handles

    def mint(self) -> int:
        """A handle of the server's own."""
        self._next_handle += 1
        return self._next_handle - 1

    def handles(self, given: Sequence[int], count: int) -> list[int]:
        """The client's handles for results, or fresh ones."""
        if not given:
            return [self.mint() for _ in range(count)]
        if len(given) != count or len(set(given)) != count:
            raise invalid(f"{len(given)} handles for {count} results")
        for handle in given:
            if handle == 0 or handle >= SERVER_HANDLES or handle in self.arrays.records:
                raise invalid(f"{handle} is no handle for a new array")
        return list(given)

    def define(
        self,
        handles: Sequence[int],
        specs: Sequence[ArraySpec],
        context: int,
        memories: Sequence[Memory] | None = None,
    ) -> None:
        """The handles stand for arrays from now on; the stack that made them lives as long as they do."""
        origin = Origin(context, len(handles)) if context and handles else None
        for i, handle in enumerate(handles):
            memory = memories[i] if memories is not None else Memory()
            self.arrays.records[handle] = ArrayRecord(specs[i], memory, origin)

    def load(self, loaded: Loaded) -> int:
        """A handle for something that can be run; the functions that it needs are the session's from now on."""
        handle = self.mint()
        self.executables[handle] = loaded
        self._function_users.update(loaded.functions)
        return handle

    def unload(self, handle: int) -> None:
        """Releases it, and those of its functions that nothing else needs."""
        loaded = self.executables.pop(handle)
        loaded.unloaded(self.link)
        for program, _ in loaded.programs.values():
            self.link.send(m.ReleaseProgram(program))
        self._function_users.subtract(loaded.functions)
        for function in loaded.functions:
            if not self._function_users[function]:
                del self._function_users[function]
                self.link.release_function(function)

    def executable(self, handle: int) -> Loaded:
        executable = self.executables.get(handle)
        if executable is None:
            raise not_found(f"unknown executable handle {handle}")
        return executable

    # ---- futures

    def add_future(self, status: Status | None = None, handle: int = 0) -> int:
        """A future that the client asks about once; resolved with `status`, or later by `resolve`."""
        handle = handle or self.mint()
        future = self._futures[handle] = self.link.loop.create_future()
        if status is not None:
            future.set_result(status)
        return handle

    def resolver(self, handle: int) -> Callable[[Status], None]:
        return self._futures[handle].set_result

    def take_future(self, handle: int) -> asyncio.Future[Status]:
        future = self._futures.pop(handle, None)
        if future is None:
            raise not_found(f"unknown future handle {handle}")
        return future

    # ---- programs and launches

    def program(self, key: Any, build: Callable[[], Program]) -> int:
        """The number of a registered program; `build` is asked only for one that is not."""
        number = self._programs.get(key)
        if number is not None:
            self._programs.move_to_end(key)
            return number
        body = build()
        number = self._programs[key] = self.link.number()
        self.link.send(m.RegisterProgram(number, body))
        while len(self._programs) > MAX_PROGRAMS:
            _, oldest = self._programs.popitem(last=False)
            self.link.send(m.ReleaseProgram(oldest))
        return number

    def launch(
        self,
        program: int,
        arguments: Sequence[int],
        results: Sequence[int],
        feeds: Sequence[int] = (),
        context: int = 0,
        room: int = 1,
    ) -> None:
        """Sends a launch off; holds the client back where it has too many in the system.

        `context` is the client's number for the stack of the request that makes the results; `room` is what the launch
        takes of the session's window.
        """
        self._in_flight += room
        self.link.send(m.Launch(program, tuple(arguments), tuple(results), tuple(feeds), context, room))
        if self._in_flight >= self._window and not self._paused:
            self._paused = True
            self._pause()

    def _retired(self, count: int) -> None:
        self._in_flight -= count
        if self._paused and self._in_flight <= self._window // 2:
            self._paused = False
            if not self._holds:
                self._resume()

    # ---- virtual devices that change places

    def hold(self) -> None:
        """Takes no more requests until as many `go_on` as `hold`: where they would send data may change."""
        self._holds += 1
        self._pause()
        self.link.hold()

    @property
    def is_held(self) -> bool:
        return self._holds > 0

    def go_on(self) -> None:
        self._holds -= 1
        if not self._holds:
            self.link.go_on()
            if not self._paused:
                self._resume()
