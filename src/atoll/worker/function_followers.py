"""Functions on several islands that follow their arguments into a world, so that they need not wait for them there.

Only functions that are apart do so: their devices do not communicate, so they also run without a world.
"""

from __future__ import annotations

from concurrent.futures import Executor as Pool

from atoll.cluster.processes.bugs import start_in
from atoll.devices.device import ProgramLoader
from atoll.errors import StatusError
from atoll.worker.function_records import Function, FunctionRecords
from atoll.worker.function_worlds import Recipe, placement_of
from atoll.worker.host_worlds import HostWorlds
from atoll.worker.store import TypeKeys


class Followers:
    """Loads functions in the worlds of their arguments, and returns them home when these are closed.

    Only the executor's thread may call `follow` and `in_open_world`, since its runs use the functions.

    Args:
        pool: The threads that load functions.
    """

    def __init__(
        self,
        records: FunctionRecords,
        worlds: HostWorlds | None,
        loader: ProgramLoader | None,
        keys: TypeKeys,
        pool: Pool,
    ) -> None:
        self._records = records
        self._worlds = worlds
        self._loader = loader
        self._keys = keys
        self._pool = pool

    def follow(self, name: str, world: int) -> bool:
        """Have a function that is apart run in the world of its arguments, and return whether it does now.

        Its runs then need not wait until the arguments are computed. The first call begins to load the function there,
        and a later call uses it.
        """
        with self._records.lock:
            record = self._records.find(name)
            if record is None:
                return False
            if record.follower is not None:
                follower, record.follower = record.follower, None
                if follower.loaded.world == world and follower.home is record.function:
                    record.function = follower
                    return True
            recipe = record.world.follow(world)
        if recipe is not None:
            start_in(self._pool, self._load, recipe)
        return False

    def _load(self, recipe: Recipe) -> None:
        """Load a function in the world of its arguments, unless that is not possible."""
        message, program = recipe.message, recipe.program
        home = self._records.loaded(message.function)
        if home is None or program is None or program.description is None:
            return
        if self._loader is None or self._worlds is None:
            return
        placement = placement_of(message, program.description, False, self._worlds.has_joined(message.world))
        if placement.world != message.world:  # hosts of an island communicate, or the world was closed
            return
        try:
            loaded = self._loader.load(program, message.assignment, None, message.world, message.ranks)
            follower = Function(loaded, self._keys, is_apart=True, home=home)
        except StatusError:  # the world was closed meanwhile
            return
        with self._records.lock:
            record = self._records.find(message.function)
            if record is not None and record.function is home:
                record.follower = follower

    def in_open_world(self, name: str) -> Function:
        """Return a function, which returns home if the world into which it has followed its arguments is closed.

        Raise NOT_FOUND.
        """
        function = self._records.get(name)
        if function.home is None or (self._worlds is not None and self._worlds.has_joined(function.loaded.world)):
            return function
        with self._records.lock:
            record = self._records.find(name)
            if record is not None and record.function is function:
                record.function = function.home
        return function.home
