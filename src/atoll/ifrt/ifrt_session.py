"""What one client of the IFRT proxy owns: arrays, host buffers, executables, futures, and its session with the cluster.

Requests are taken in order; what each does is in `atoll.ifrt.requests`. The client is held back while its
launch window is full, and while its virtual devices may be moving.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import msgspec

from atoll.errors import Status, invalid, not_found, unimplemented
from atoll.executables.loaded_executable import ImmediateExecutable, LoadedExecutable
from atoll.executables.python_functions import PythonFunctions
from atoll.executables.session_arrays import ArrayRecord, Arrays, Memory, Origin
from atoll.ifrt.host_buffer_store import HostBuffers
from atoll.ifrt.responses import ResponseStream
from atoll.ir.types import ArraySpec
from atoll.protocol.advice import CALLBACK_ADVICE
from atoll.protocol.messages import FunctionInfo
from atoll.session.callback_relay import CallbackRelay
from atoll.session.cluster_session import ClusterSession

# Handles that the session mints start far above those that the client chooses.
FIRST_MINTED_HANDLE = 1 << 62
_MOST_REMEMBERED = 512  # of `IfrtSession.compiled`


class IfrtSession:
    """One client's session. `number` names it to the client's side channels.

    `write(bytes)` carries responses; `pause` and `resume` hold back the client's requests. They are held back until
    `start` is called. `cluster` is a session whose minted handles start at `FIRST_MINTED_HANDLE`.
    """

    def __init__(
        self,
        cluster: ClusterSession,
        number: int,
        write: Callable[[bytes], None],
        pause: Callable[[], None],
        resume: Callable[[], None],
    ) -> None:
        self.cluster = cluster
        self.number = number
        self.responses = ResponseStream(write)
        self.arrays = Arrays(self.responses.ended_contexts)
        self.buffers = HostBuffers()
        self.executables: dict[int, LoadedExecutable] = {}
        self.compiled: dict[str, FunctionInfo] = {}  # by the content of what was compiled last
        self.python = PythonFunctions(cluster)
        self.staged: list[int] = []  # arguments of the program that runs next, by handle
        self.layouts: dict[Any, bytes] = {}
        self.open_relay: Callable[[], CallbackRelay] | None = None  # has calls into the client's Python go to it
        self._relay: CallbackRelay | None = None
        self.deletions: dict[int, Status] = {}  # by the future that the client asks about once
        self._futures: dict[int, asyncio.Future[Status]] = {}
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._pause = pause
        self._resume = resume
        self._is_paused = True
        self._is_window_full = False
        cluster.held = lambda: {handle: each.error is not None for handle, each in self.arrays.records.items()}
        cluster.on_quiesce = cluster.on_resume = self._pause_or_resume

    def start(self) -> None:
        """Requests are taken from now on."""
        self._pause_or_resume()

    def close(self) -> None:
        """The client is gone."""
        for task in self._tasks:
            task.cancel()
        self.python.close()
        self.buffers.close()
        self.cluster.close()

    @property
    def is_working(self) -> bool:
        """Whether something beside the requests is not done."""
        return bool(self._tasks)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs `work` beside the requests; it ends with the session."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ---- holding the client back

    def launch(
        self,
        program: int,
        arguments: Sequence[int],
        results: Sequence[int],
        feeds: Sequence[int] = (),
        traceback_id: int = 0,
    ) -> None:
        """As `ClusterSession.launch`. A window that is full holds the client back until it is half empty."""
        self.cluster.launch(program, arguments, results, feeds, traceback_id)
        window = self.cluster.window
        if window.is_full and not self._is_window_full:
            self._is_window_full = True
            window.when_at_most(window.size // 2, self._window_has_room)
            self._pause_or_resume()

    def _window_has_room(self) -> None:
        self._is_window_full = False
        self._pause_or_resume()

    def _pause_or_resume(self) -> None:
        paused = self._is_window_full or self.cluster.is_quiesced
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
        """The client's handles for results, or fresh ones."""
        if not given:
            return [self.cluster.mint() for _ in range(count)]
        if len(given) != count or len(set(given)) != count:
            raise invalid(f"{len(given)} handles for {count} results")
        for handle in given:
            if handle == 0 or handle >= FIRST_MINTED_HANDLE or handle in self.arrays.records:
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
            self.arrays.records[handle] = ArrayRecord(specs[i], memories[i] if memories else Memory(), origin)

    # ---- executables

    def remember_compiled(self, content: str, info: FunctionInfo) -> None:
        """What the workers said of a function: it holds on other devices, too."""
        self.compiled[content] = info
        if len(self.compiled) > _MOST_REMEMBERED:
            del self.compiled[next(iter(self.compiled))]

    def load(self, loaded: LoadedExecutable) -> int:
        """A handle for something that can be run; the functions that it needs are the session's from now on."""
        handle = self.cluster.mint()
        self.executables[handle] = loaded
        self.cluster.retain_functions(loaded.functions)
        if self._relay is not None and loaded.callbacks and loaded.functions:
            self._relay.compiled(loaded.callbacks, self.cluster.hosts_of(loaded.devices))
        return handle

    def unload(self, handle: int) -> None:
        """Releases it, and those of its functions that nothing else needs. Raises NOT_FOUND."""
        loaded = self.executable(handle)
        del self.executables[handle]
        loaded.unloaded(self.cluster)
        if self._relay is not None and loaded.callbacks:
            self._relay.unloaded(loaded.callbacks)
        for program, _ in loaded.programs.values():
            self.cluster.release_program(program)
        self.cluster.drop_functions(loaded.functions)

    def executable(self, handle: int) -> LoadedExecutable:
        """Raises NOT_FOUND."""
        executable = self.executables.get(handle)
        if executable is None:
            raise not_found(f"unknown executable handle {handle}")
        return executable

    def callback_loader(self) -> LoadedExecutable:
        """The client wants to be called back: the reply says where. Raises UNIMPLEMENTED where that cannot be."""
        if self.open_relay is None:
            raise unimplemented(CALLBACK_ADVICE)
        self._relay = self.open_relay()
        return ImmediateExecutable("the place of callbacks", (0,), msgspec.json.encode(self._relay.where))

    # ---- futures

    def add_future(self, status: Status | None = None, handle: int = 0) -> int:
        """A future that the client asks about once; resolved with `status`, or later by its `resolver`."""
        handle = handle or self.cluster.mint()
        future = self._futures[handle] = self._loop.create_future()
        if status is not None:
            future.set_result(status)
        return handle

    def resolver(self, handle: int) -> Callable[[Status], None]:
        return self._futures[handle].set_result

    def take_future(self, handle: int) -> asyncio.Future[Status]:
        """Raises NOT_FOUND."""
        future = self._futures.pop(handle, None)
        if future is None:
            raise not_found(f"unknown future handle {handle}")
        return future
