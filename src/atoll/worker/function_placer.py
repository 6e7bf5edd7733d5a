"""The functions of a host in worlds: they wait until this host has joined one, and move when it is closed.

`function_worlds` decides, `host_worlds` joins worlds, and `program_compiler` compiles.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

from atoll.devices.compilers.compiler_messages import Description
from atoll.errors import OK, Status
from atoll.protocol.messages import CloseWorld, Compile, CompileStage, FunctionSource, LoadInWorld, NeedsWorld
from atoll.state.closed_worlds import ended_with_others
from atoll.worker.compile_results import CompileResult
from atoll.worker.compilers import ProgramCompilation
from atoll.worker.function_records import Function, FunctionRecord, FunctionRecords, FunctionState, Pending
from atoll.worker.function_worlds import Placement, Recipe, Waiting, placement_of
from atoll.worker.host_worlds import HostWorlds


class Compilations(Protocol):
    """The compilations of a host: `HostFunctions`."""

    def start(self, message: Compile, work: Callable[..., None], *arguments: Any) -> None:
        """Call `work(message, *arguments)` on another thread. If it raises an error, the compilation fails."""

    def start_asking(self, session: int, message: Compile, work: Callable[..., None], *arguments: Any) -> None:
        """Do the same as `start`, on one of the session's threads: the work asks the session's client, and may wait."""

    def working(self, message: Compile, in_compiler: ProgramCompilation | None = None) -> AbstractContextManager[None]:
        """Note that this thread works on a compilation, whose error ends it. `in_compiler` is a compiler process's."""
        ...

    def begin(self, message: Compile, joined: Status = OK) -> None:
        """Begin a compilation, on this thread. `joined` is the outcome of joining the function's world."""

    def compile_source(self, message: Compile, source: FunctionSource) -> None:
        """Compile a program whose source is at hand, on this thread."""

    def end(self, message: Compile, result: CompileResult) -> None:
        """End a compilation, and report its result."""

    def cancel(self, record: FunctionRecord) -> None:
        """Forget a compilation for which no session waits any longer. The caller holds the lock of the records."""

    def unload(self, record: FunctionRecord) -> None:
        """Note that a loaded function leaves its world. The caller holds the lock of the records."""


class FunctionPlacer:
    """Places the functions of a host in worlds, if its devices join any.

    Attributes:
        may_wait: Whether some functions run in worlds, or together with other hosts, so that their runs may wait.

    Args:
        worlds: None if the devices join no worlds.
        report: Sends messages to the controller, on any thread.
    """

    def __init__(
        self,
        records: FunctionRecords,
        worlds: HostWorlds | None,
        compilations: Compilations,
        report: Callable[[NeedsWorld], None],
    ) -> None:
        self.may_wait = False
        self._records = records
        self._worlds = worlds
        self._compilations = compilations
        self._report = report

    # ---- compiled for a world

    def begin(self, message: Compile) -> None:
        """Begin a compilation on another thread, when this host has joined the function's world, if it needs one.

        A function on several islands is compiled first if the controller wants that, and then `place` decides.
        """
        if message.world and not message.islands and self._worlds is not None:
            self.may_wait = True
            self._records.note_waiting(message.function)
            self._worlds.when_joined(message.world, partial(self._begin_joined, message))
        else:
            self._compilations.start(message, self._compilations.begin)

    def _begin_joined(self, message: Compile, joined: Status) -> None:
        self._compilations.start(message, self._compilations.begin, joined)

    def enter(self, recipe: Recipe) -> None:
        """Note that a function is compiled for, or loaded in, the world of the recipe."""
        if recipe.message.world and self._worlds is not None:
            self.may_wait = True
        with self._records.lock:
            record = self._records.find(recipe.message.function)
            if record is not None:
                record.world.enter(recipe)

    def note_loaded(self, function: Function) -> None:
        """Note that a function is loaded, which may run together with other hosts."""
        self.may_wait = self.may_wait or function.loaded.is_joint

    # ---- compiled, and then loaded in a world

    def placement_of(self, message: Compile, description: Description, calls_client: bool) -> Placement:
        """Return where a compiled function on several islands runs. `calls_client` is as in `function_worlds`."""
        has_joined = self._worlds is not None and self._worlds.has_joined(message.world)
        return placement_of(message, description, calls_client, has_joined)

    def await_world(self, waiting: Waiting) -> None:
        """Load a function when this host has joined its world. If it has none, ask the controller for it."""
        message = waiting.message
        with self._records.lock:
            record = self._records.find(message.function)
            if record is None or record.pending is None:  # the compilation was canceled
                return
            record.world.await_world(waiting)
            record.pending.wait()
            if record.state is FunctionState.UNWANTED:
                self._compilations.cancel(record)
                return
        if message.world:
            self.load_in_world(LoadInWorld(message.function, message.world))
        else:
            self._report(NeedsWorld(message.function))

    def load_in_world(self, message: LoadInWorld) -> None:
        """Load a function in the world that the controller has chosen, when this host has joined it."""
        if self._worlds is None:
            return
        with self._records.lock:
            record = self._records.find(message.function)
            waiting = None if record is None else record.world.named(message.world)
            if waiting is None:
                return
            self.may_wait = True
        self._worlds.when_joined(message.world, partial(self._load_joined, waiting))

    def _load_joined(self, waiting: Waiting, joined: Status) -> None:
        self._compilations.start(waiting.message, self._load, waiting, joined)

    def _load(self, message: Compile, waiting: Waiting, joined: Status) -> None:
        joined.raise_if_error()
        waiting.load(message)

    # ---- closed worlds

    def close_world(self, message: CloseWorld) -> list[Recipe]:
        """Leave a world, and drop its functions. Return how to compile again those that move to its successor."""
        worlds, moving = self._worlds, list[Recipe]()
        if worlds is None:
            return moving
        worlds.note_closing(message)
        with self._records.lock:
            for record, function in self._records.of_world(message.world):
                if function.home is not None:  # its next run returns there
                    continue
                successor = 0 if record.state is FunctionState.IDLE else message.successor
                recipe = record.world.leave(successor)
                self._compilations.unload(record)
                if recipe is None:
                    self._records.forget(record)
                else:
                    self._records.compile(record.name, Pending(CompileStage.WAITING))
                    moving.append(recipe)
        worlds.close(message)
        return moving

    def closing_of(self, world: int) -> CloseWorld | None:
        """Return the message that closed the world, or None if it is not closed."""
        return None if self._worlds is None else self._worlds.closing_of(world)

    def closing_status(self, world: int, run: int) -> Status:
        """Return why a run of a world ended with it; OK if the world is open. `run` is its sequence number.

        The controller did not end it if the message does not name it: then this host had begun it, and others may not.
        """
        closing = self.closing_of(world)
        if closing is None:
            return OK
        return ended_with_others(closing.status) if closing.ended and run not in closing.ended else closing.status

    def after_closing(
        self, message: Compile, closing: CloseWorld, record: FunctionRecord, result: CompileResult
    ) -> Recipe | None:
        """Return how to compile a function again whose world was closed meanwhile, or None if that fails.

        The caller holds the lock of the records.
        """
        assert record.pending is not None
        record.pending.wait()
        is_apart = result.function is not None and result.function.is_apart
        return record.world.after_closing(message, closing, is_apart, record.pending.others)

    def compile_again(self, recipe: Recipe) -> None:
        """Compile a function again, in the world of the recipe if it has one."""
        message, source = recipe.message, recipe.source
        if source is None:
            self.begin(message)
        elif message.world and self._worlds is not None:
            self._worlds.when_joined(message.world, partial(self._compile_joined, message, source))
        else:
            self._compilations.start(message, self._compilations.compile_source, source)

    def _compile_joined(self, message: Compile, source: FunctionSource, joined: Status) -> None:
        """Compile a function in the world that this host has joined, or fail. With `islands`, it may need no world."""
        if joined.ok or message.islands:
            self.enter(Recipe(message, source))
            self._compilations.start(message, self._compilations.compile_source, source)
        else:
            self._compilations.end(message, CompileResult(joined))

    def awaits(self, name: str, wake: Callable[[], None]) -> bool:
        """Return whether the function moves to another world. If so, call `wake` on any thread afterwards."""
        record = self._records.find(name)
        if record is None or not record.world.is_moving:  # without the lock, since this is on the path of every call
            return False
        with self._records.lock:
            return record.world.awaits_move(wake)
