"""The state of one client of the IFRT proxy: arrays, host buffers, executables, futures, and its cluster session.

`atoll.ifrt.requests` handles the client's requests, in order. The client is held back while its launch window is full,
and while its virtual devices may be moving.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import msgspec

from atoll.errors import Code, Status, StatusError, invalid, not_found, unimplemented
from atoll.executables.loaded_executable import ImmediateReply, Loaded, LoadedExecutable
from atoll.executables.program_executables import DeferringExecutable
from atoll.executables.python_functions import PythonFunctions
from atoll.executables.session_arrays import ArrayRecord, Arrays, Memory, Origin
from atoll.executables.session_libraries import SessionLibraries
from atoll.ifrt.deferred_runs import DeferredRuns
from atoll.ifrt.early_reads import EarlyReads
from atoll.ifrt.host_buffer_store import HostBuffers
from atoll.ir.types import ArraySpec
from atoll.protocol.callbacks import CALLBACK_ADVICE
from atoll.protocol.messages import FunctionInfo
from atoll.protocol.number_ranges import PROXY_HANDLES
from atoll.quantities import counted
from atoll.session.client_relay import ClientRelay
from atoll.session.cluster_session import ClusterSession
from atoll.session.outgoing_messages import Later

# Handles that the session mints.
FIRST_MINTED_HANDLE = PROXY_HANDLES.start
OUT_OF_SEQUENCE = 1 << 62
# How long, and how many, responses can wait for which nothing in the client waits.
RESPONSE_SECONDS = 1e-3
MAX_WAITING = 64
_MAX_REMEMBERED = 512  # of `IfrtSession.compiled`
_MAX_PUBLISHED = 64  # names, and arrays of each, of `IfrtSession.published`


class ResponseStream:
    """Numbers a session's responses so that jaxlib's client can forget Python stacks, and passes them to `write`.

    The client keeps the stack of each request until a response names it as ended, and until it has finished all
    responses with lower numbers. It never finishes some responses: that of Init, and those to the requests of its
    batcher (arrays that are destructed or deleted, and the futures of deletions). If one of them were numbered in the
    sequence, the client would forget nothing after it.

    Invariant: the numbers of the sequence have no gap. All other responses have a number that is never reached, and
    name no stacks.

    During a recording, `on_response` receives the number of each answered request.

    Each write wakes up threads of the client. A response for which nothing in the client waits is therefore written
    together with the next one. `later` calls a function after a number of seconds; without it, no response waits.

    `ended_contexts` are stacks to which no error can refer any more. The next response of the sequence names them.
    """

    def __init__(
        self, write: Callable[[bytes], None], on_response: Callable[[int], None], later: Later | None = None
    ) -> None:
        self._write = write
        self._on_response = on_response
        self._later = later
        self._waiting: list[bytes] = []
        self._is_timed = False  # whether the timer is running
        self._is_recording = False
        self._next = 0
        self.ended_contexts: list[int] = []

    def send(self, response: Any, ended_context: int, may_wait: bool = False) -> None:
        """Send the next response of the sequence. The client may forget `ended_context`, unless it is 0.

        If it `may_wait`, it is written with the next response, after `RESPONSE_SECONDS` at the latest.
        """
        meta = response.meta
        meta.seq_num = self._next
        self._next += 1
        if ended_context:
            meta.destroyed_user_context_ids.append(ended_context)
        if self.ended_contexts:
            meta.destroyed_user_context_ids.extend(self.ended_contexts)
            self.ended_contexts.clear()
        content = response.SerializeToString()
        if may_wait or self._waiting:
            self._put(content, may_wait)
        else:
            self._write(content)
        if self._is_recording:
            self._on_response(meta.op_id)

    def record(self, is_recording: bool) -> None:
        """Begin or end a recording."""
        self._is_recording = is_recording

    def send_out_of_sequence(self, response: Any, ended_context: int) -> None:
        """Send a failure, or a response that the client never finishes. The next in sequence names the context."""
        response.meta.seq_num = OUT_OF_SEQUENCE
        if ended_context:
            self.ended_contexts.append(ended_context)
        content = response.SerializeToString()
        if self._waiting:
            self._put(content)
        else:
            self._write(content)
        if self._is_recording:
            self._on_response(response.meta.op_id)

    def _put(self, content: bytes, may_wait: bool = False) -> None:
        self._waiting.append(content)
        if not may_wait or self._later is None or len(self._waiting) >= MAX_WAITING:
            self._flush()
        elif not self._is_timed:
            self._is_timed = True
            self._later(RESPONSE_SECONDS, self._time_is_over)

    def _time_is_over(self) -> None:
        self._is_timed = False
        self._flush()

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        for content in waiting:
            self._write(content)


class IfrtSession:
    """One client's session. `number` identifies it on the client's other connections.

    `write(bytes)` sends responses. `pause` and `resume` control the client's requests, which are held back until
    `start`. `cluster` is a session whose minted handles start at `FIRST_MINTED_HANDLE`. `on_lost` and `on_recording`
    are as in `ClusterSession.set_handlers`. `open_relay` opens the relay to the client's process. `later` is as in
    `ResponseStream`.
    """

    def __init__(
        self,
        cluster: ClusterSession,
        number: int,
        write: Callable[[bytes], None],
        pause: Callable[[], None],
        resume: Callable[[], None],
        on_lost: Callable[[Status], None] = lambda status: None,
        on_recording: Callable[[bool], None] = lambda is_recording: None,
        open_relay: Callable[[], ClientRelay] | None = None,
        later: Later | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.cluster = cluster
        self.number = number
        self.responses = ResponseStream(write, cluster.recorder.answered, later)
        self.arrays = Arrays(self.responses.ended_contexts)
        self.deferred = DeferredRuns(cluster, self.arrays, self.launch, self._hold_if_full)
        self.buffers = HostBuffers()
        self.executables: dict[int, LoadedExecutable] = {}
        self._replies: dict[int, ImmediateReply] = {}  # their handles are handles of executables, too
        self.compiled: dict[str, FunctionInfo] = {}  # the last compiled functions, by their content
        self.python = PythonFunctions(cluster)
        self.libraries = SessionLibraries(cluster)
        self.staged: list[int] = []  # handles of the next program's arguments
        self.layouts: dict[Any, bytes] = {}
        self.early_reads = EarlyReads(self._loop.time)
        self._published: dict[str, list[Memory]] = {}  # by name: memory of the arrays that were published last
        self._open_relay = open_relay
        self._relay: ClientRelay | None = None
        self.deletions: dict[int, Status] = {}  # by future, about which the client asks once
        self._futures: dict[int, asyncio.Future[Status]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._compilations: set[asyncio.Task[LoadedExecutable]] = set()
        self._pause = pause
        self._resume = resume
        self._is_paused = True
        self._is_window_full = False
        cluster.set_handlers(on_lost, self._pause_or_resume, self.deferred.held, on_recording)

    def start(self) -> None:
        """Start to handle requests."""
        self._pause_or_resume()

    def close(self) -> None:
        """End the session, because its client has disconnected."""
        for task in self._tasks:
            task.cancel()
        self.python.close()
        self.buffers.close()
        self.cluster.close()

    @property
    def is_working(self) -> bool:
        """Whether a task that was started with `spawn` runs."""
        return bool(self._tasks)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` as a task that ends with the session."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def compilation(self, work: Coroutine[Any, Any, LoadedExecutable]) -> LoadedExecutable:
        """Return the result of `work`, or raise CANCELLED if `end_compilations` is called before it is done."""
        task = self._loop.create_task(work)
        self._compilations.add(task)
        try:
            await asyncio.wait((task,))
        finally:
            task.cancel()
            self._compilations.discard(task)
        if task.cancelled():
            raise StatusError(Code.CANCELLED, "the script's process ended during the compilation")
        return task.result()

    def end_compilations(self) -> None:
        """Let `compilation` raise CANCELLED for all work under way."""
        for task in self._compilations:
            task.cancel()

    # ---- holding the client back

    def launch(
        self,
        program: int,
        arguments: Sequence[int],
        results: Sequence[int],
        feeds: Sequence[int] = (),
        traceback_id: int = 0,
        contents: bytes | None = None,
        wait: int = 0,
    ) -> None:
        """Launch a program with `ClusterSession.launch`. A full window holds the client back until it is half empty."""
        self.cluster.launch(program, arguments, results, feeds, traceback_id, contents, wait)
        if self.cluster.window.is_full:
            self._hold_if_full()

    def _hold_if_full(self) -> None:
        """Hold the client back if the window is full, until it is half empty."""
        window = self.cluster.window
        if window.is_full and not self._is_window_full:
            self._is_window_full = True
            window.when_at_most(window.size // 2, self._window_drained)
            self._pause_or_resume()

    def launch_with_contents(self, program: int, results: Sequence[int], contents: bytes, traceback_id: int) -> None:
        """Launch a program that makes arrays of contents, which the launch carries: see `Welcome.most_carried`."""
        self.launch(program, (), results, (self.cluster.number(),), traceback_id, contents)

    def _window_drained(self) -> None:
        self._is_window_full = False
        self._pause_or_resume()

    @property
    def is_held_back(self) -> bool:
        """Whether the client is held back, so that nothing may be launched."""
        return self._is_window_full or self.cluster.is_quiesced

    def _pause_or_resume(self) -> None:
        paused = self.is_held_back
        if paused == self._is_paused:
            return
        self._is_paused = paused
        if paused:
            self._pause()
            self.cluster.recorder.held("window" if self._is_window_full else "quiesced")
        else:
            self._resume()
            self.cluster.recorder.resumed()

    # ---- arrays

    def handles(self, given: Sequence[int], count: int) -> list[int]:
        """Return the client's handles for results, or new handles. Raise INVALID_ARGUMENT if they are not valid."""
        if not given:
            return [self.cluster.mint() for _ in range(count)]
        if len(given) != count or len(set(given)) != count:
            raise invalid(
                f"the request has {counted(len(given), 'handle')} for {counted(count, 'result')}, or repeats a handle"
            )
        for handle in given:
            if handle == 0 or handle >= FIRST_MINTED_HANDLE or handle in self.arrays.records:
                raise invalid(f"{handle} is not a valid handle for a new array")
        return list(given)

    def define(
        self, handles: Sequence[int], specs: Sequence[ArraySpec], context: int, memories: Sequence[Memory] | None = None
    ) -> None:
        """Define arrays for the handles. The stack that made them lives as long as they do."""
        origin, now = Origin(context, len(handles)) if context and handles else None, self._loop.time()
        self.early_reads.launched(now)
        for i, handle in enumerate(handles):
            memory = memories[i] if memories else Memory()
            self.arrays.records[handle] = ArrayRecord(specs[i], memory, origin, made_at=now)

    def note_published(self, name: str, handles: Sequence[int]) -> bool:
        """Note that these arrays are published. Return whether the former ones of the name were donated or deleted."""
        former = self._published.pop(name, ())
        self._published[name] = [self.arrays.get(handle).memory for handle in handles[:_MAX_PUBLISHED]]
        if len(self._published) > _MAX_PUBLISHED:
            del self._published[next(iter(self._published))]
        return any(memory.is_deleted for memory in former)

    # ---- executables

    def remember_compiled(self, content: str, info: FunctionInfo) -> None:
        """Remember the workers' description of a compiled function, which is valid on other devices as well."""
        self.compiled[content] = info
        if len(self.compiled) > _MAX_REMEMBERED:
            del self.compiled[next(iter(self.compiled))]

    def load(self, loaded: Loaded) -> int:
        """Return a handle for an executable, whose functions the session retains, or for a reply."""
        handle = self.cluster.mint()
        if isinstance(loaded, ImmediateReply):
            self._replies[handle] = loaded
            return handle
        self.executables[handle] = loaded
        self.cluster.retain_functions(loaded.functions)
        if self._relay is not None and loaded.callbacks and loaded.functions:
            self._relay.compiled(loaded.callbacks, self.cluster.hosts_of(loaded.devices))
        return handle

    def unload(self, handle: int) -> None:
        """Release a reply, or an executable and its functions that nothing else needs. Raise NOT_FOUND."""
        loaded = self.loaded(handle)
        loaded.unloaded(self.cluster)
        if isinstance(loaded, ImmediateReply):
            del self._replies[handle]
            return
        del self.executables[handle]
        if isinstance(loaded, DeferringExecutable):
            self.deferred.unload(loaded)
        if self._relay is not None and loaded.callbacks:
            self._relay.unloaded(loaded.callbacks)
        for program, _ in loaded.programs.values():
            self.cluster.release_program(program)
        self.cluster.drop_functions(loaded.functions)

    def executable(self, handle: int) -> LoadedExecutable:
        """Return a loaded executable. Raise NOT_FOUND, or INVALID_ARGUMENT for a reply."""
        executable = self.executables.get(handle)
        if executable is None:
            raise invalid(f"{self.loaded(handle).name} is not a program and cannot be run")
        return executable

    def loaded(self, handle: int) -> Loaded:
        """Return what has the handle of an executable. Raise NOT_FOUND."""
        loaded = self.executables.get(handle) or self._replies.get(handle)
        if loaded is None:
            raise not_found(f"unknown executable handle {handle}")
        return loaded

    def open_client_relay(self) -> ImmediateReply:
        """Return a reply whose fingerprint tells the client where to open its channel for calls and contents.

        Raise UNIMPLEMENTED if this proxy relays none.
        """
        if self._open_relay is None:
            raise unimplemented(CALLBACK_ADVICE)
        self._relay = self._open_relay()
        return ImmediateReply("the place of callbacks", (0,), msgspec.json.encode(self._relay.where))

    def client_relay(self) -> ClientRelay:
        """Return the relay to the client's process. Raise INVALID_ARGUMENT if the client has not asked for it."""
        if self._relay is None:
            raise invalid("the client has not asked where it receives contents")
        return self._relay

    # ---- futures

    def add_future(self, status: Status | None = None, handle: int = 0) -> int:
        """Return the handle of a future, about which the client asks once. `status` or its `resolver` resolves it."""
        handle = handle or self.cluster.mint()
        future = self._futures[handle] = self._loop.create_future()
        if status is not None:
            future.set_result(status)
        return handle

    def resolver(self, handle: int) -> Callable[[Status], None]:
        return self._futures[handle].set_result

    def take_future(self, handle: int) -> asyncio.Future[Status]:
        """Remove and return a future. Raise NOT_FOUND."""
        future = self._futures.pop(handle, None)
        if future is None:
            raise not_found(f"unknown future handle {handle}")
        return future
