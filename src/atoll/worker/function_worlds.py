"""The world of a host's function: it waits for one, is in one, or moves to another one.

This module only decides. `function_placer` acts on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from atoll.devices.compilers.compiler_messages import CompiledProgram, Description
from atoll.protocol.messages import CloseWorld, Compile, FunctionSource


class Placement(msgspec.Struct, frozen=True):
    """The client that runs a function on several islands.

    Attributes:
        is_apart: The devices of different islands do not communicate.
        world: The world in which the function is loaded; 0 for the client of the host's island.
        must_wait: The function needs a world, which this host has not joined.
    """

    is_apart: bool
    world: int = 0
    must_wait: bool = False


def placement_of(message: Compile, description: Description, calls_client: bool, has_joined: bool) -> Placement:
    """Return where a compiled function on several islands runs.

    If its islands communicate, it needs a world. If only hosts of this island communicate, they do so with the
    island's own client, on all of these hosts. Otherwise, the function has the world that the controller names, where
    most of its arguments probably are, if this host has joined it.

    Args:
        calls_client: The function calls its client. Such calls are in one order on all islands, so the islands of such
            functions run together.
        has_joined: This host has joined the world that `message` names.
    """
    islands, hosts = _islands_and_hosts(message)
    is_apart = not calls_client and not description.crosses(islands)
    if is_apart and description.crosses(hosts):
        return Placement(is_apart)
    world = message.world if has_joined else 0
    return Placement(is_apart, world, must_wait=not is_apart and not has_joined)


def _islands_and_hosts(message: Compile) -> tuple[list[int], list[int]]:
    """Return the island and the host of each device of a function, in the order of the assignment."""
    hosts = [rank for row in message.assignment for rank, _ in row]
    island_of = [island for island, count in enumerate(message.islands) for _ in range(count)]
    return [island_of[rank] for rank in hosts], hosts


class Recipe(msgspec.Struct, frozen=True):
    """A request for a function, with what it is compiled from.

    Attributes:
        source: None if the session of the request sends it.
        program: The compiled program, with which the function can `follow` its arguments.
    """

    message: Compile
    source: FunctionSource | None
    program: CompiledProgram | None = None

    def in_world(self, world: int) -> Recipe:
        """Return the recipe of the same function in another world."""
        return Recipe(msgspec.structs.replace(self.message, world=world), self.source, self.program)


class Waiting(msgspec.Struct, frozen=True):
    """A function that waits until the controller names its world. `load` loads it there, with the changed message."""

    message: Compile
    source: FunctionSource
    load: Callable[[Compile], None]

    def in_world(self, world: int) -> Waiting:
        """Return the same function with the world that the controller has named."""
        return Waiting(msgspec.structs.replace(self.message, world=world), self.source, self.load)


class FunctionWorld:
    """The world of a function, which waits for one, is in one, or moves to another one.

    It is part of the function's `FunctionRecord`, whose lock the caller of each method holds. The methods do not block.
    """

    def __init__(self) -> None:
        self._waiting: Waiting | None = None
        self._recipe: Recipe | None = None  # of a function that is, will be, or may be in a world
        self._followed = 0  # the world of its arguments
        self._runs: list[Callable[[], None]] | None = None  # that wait while it moves

    def await_world(self, waiting: Waiting) -> None:
        """Note that the compiled function waits for a world."""
        self._waiting = waiting

    @property
    def is_awaited(self) -> bool:
        """Return whether the function waits until the controller names its world."""
        return self._waiting is not None

    def named(self, world: int) -> Waiting | None:
        """Note that the controller has named the world. Return the function; None if it does not wait."""
        if self._waiting is None:
            return None
        waiting, self._waiting = self._waiting.in_world(world), None
        if not waiting.source.is_python:  # Python functions are in the process of their session
            self.enter(Recipe(waiting.message, waiting.source))
        return waiting

    def enter(self, recipe: Recipe) -> None:
        """Note that the function is compiled for, or loaded in, the world that its message names.

        Without a world, it is apart, and may `follow` its arguments if the recipe has the compiled program.
        """
        self._recipe = recipe

    def follow(self, world: int) -> Recipe | None:
        """Return how to load a function that is apart in the world of its arguments. Return None after the first call.

        The recipe of a function that runs in the client of the host's island is not changed.
        """
        recipe = self._recipe
        if not world or recipe is None or recipe.program is None or self._followed == world:
            return None
        self._followed = world
        return recipe.in_world(world)

    def leave(self, successor: int = 0) -> Recipe | None:
        """Note that the world of the loaded function is closed.

        With a `successor`, return the recipe for that world. Runs of the function wait until `take_runs`.
        """
        recipe, self._recipe = self._recipe, None
        assert recipe is not None
        if not successor:
            return None
        self._runs = []
        return recipe.in_world(successor)

    def after_closing(
        self, message: Compile, closing: CloseWorld, is_apart: bool, others: list[Compile]
    ) -> Recipe | None:
        """Return how to compile a function whose world was closed meanwhile, or None if that fails.

        A function that is apart needs no world.

        Args:
            others: Further requests for the function. One for another world is preferred, and removed from the list.
        """
        later = next((each for each in others if each.world != message.world), None)
        if later is not None:
            others.remove(later)
            return Recipe(later, None)
        recipe = self._recipe
        if recipe is None or not (closing.successor or is_apart):
            return None
        return recipe.in_world(closing.successor)

    @property
    def is_moving(self) -> bool:
        """Whether the function moves to another world. Safe without the lock."""
        return self._runs is not None

    def awaits_move(self, wake: Callable[[], None]) -> bool:
        """Return whether the function moves to another world. If so, `take_runs` will return `wake`."""
        if self._runs is None:
            return False
        self._runs.append(wake)
        return True

    def take_runs(self) -> Iterable[Callable[[], None]]:
        """Note that the function is compiled or forgotten. Return the callbacks of the runs that wait for it."""
        runs, self._runs, self._waiting = self._runs, None, None
        return runs or ()
