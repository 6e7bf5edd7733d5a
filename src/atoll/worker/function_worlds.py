"""The worlds of a host's functions: which functions wait for a world, are in one, or move to another one.

This module only decides. `host_functions` joins worlds, compiles and reports.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec

from atoll.devices.compilers.compiler_messages import CompiledProgram, Description
from atoll.protocol.messages import CloseWorld, Compile, FunctionSource


@dataclass(frozen=True)
class Placement:
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


@dataclass(frozen=True)
class Recipe:
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


@dataclass(frozen=True)
class Waiting:
    """A function that waits until the controller names its world. `load` loads it there, with the changed message."""

    message: Compile
    source: FunctionSource
    load: Callable[[Compile], None]

    def in_world(self, world: int) -> Waiting:
        """Return the same function with the world that the controller has named."""
        return Waiting(msgspec.structs.replace(self.message, world=world), self.source, self.load)


class FunctionWorlds:
    """The functions of a host that wait for a world, are in one, or move to another one.

    `Functions` holds its lock while it calls the methods. They do not block.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, Waiting] = {}
        self._recipes: dict[str, Recipe] = {}  # of functions that are, will be, or may be in a world
        self._followed: dict[str, int] = {}  # worlds of arguments
        self._moving: dict[str, list[Callable[[], None]]] = {}  # with the runs that wait for them

    def await_world(self, waiting: Waiting) -> None:
        """Note that a compiled function waits for a world."""
        self._waiting[waiting.message.function] = waiting

    def awaits_world(self, name: str) -> bool:
        """Return whether the function waits until the controller names its world."""
        return name in self._waiting

    def named(self, name: str, world: int) -> Waiting | None:
        """Note that the controller has named the world of a function. Return the function; None if it does not wait."""
        waiting = self._waiting.pop(name, None)
        if waiting is None:
            return None
        waiting = waiting.in_world(world)
        if not waiting.source.is_python:  # Python functions are in the process of their session
            self.enter(Recipe(waiting.message, waiting.source))
        return waiting

    def enter(self, recipe: Recipe) -> None:
        """Note that a function is compiled for, or loaded in, the world that its message names.

        Without a world, it is apart, and may `follow` its arguments if the recipe has the compiled program.
        """
        self._recipes[recipe.message.function] = recipe

    def follow(self, name: str, world: int) -> Recipe | None:
        """Return how to load a function that is apart in the world of its arguments. Return None after the first call.

        The recipe of a function that runs in the client of the host's island is not changed.
        """
        recipe = self._recipes.get(name)
        if not world or recipe is None or recipe.program is None or self._followed.get(name) == world:
            return None
        self._followed[name] = world
        return recipe.in_world(world)

    def leave(self, name: str, successor: int = 0) -> Recipe | None:
        """Forget the world of a loaded function, since the world is closed.

        With a `successor`, return the recipe for that world. Runs of the function wait until `arrived`.
        """
        recipe = self._recipes.pop(name)
        if not successor:
            return None
        self._moving[name] = []
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
        recipe = self._recipes.get(message.function)
        if recipe is None or not (closing.successor or is_apart):
            return None
        return recipe.in_world(closing.successor)

    def awaits_move(self, name: str, wake: Callable[[], None]) -> bool:
        """Return whether a function moves to another world. If so, `arrived` or `forget` will return `wake`."""
        waiting = self._moving.get(name)
        if waiting is None:
            return False
        waiting.append(wake)
        return True

    def arrived(self, name: str) -> Iterable[Callable[[], None]]:
        """Note that a function is compiled. Return the callbacks of the runs that wait for it."""
        self._waiting.pop(name, None)
        return self._moving.pop(name, ())

    def forget(self, name: str) -> Iterable[Callable[[], None]]:
        """Forget a function, which may not exist. Return the callbacks of the runs that wait for it."""
        self._recipes.pop(name, None)
        self._followed.pop(name, None)
        return self.arrived(name)
