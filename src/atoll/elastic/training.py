"""What a training is to `elastic.run`: how it goes on, over whatever islands there are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from jax.sharding import Mesh


class Training(Protocol):
    """A training over certain islands. Made anew whenever these change; it keeps no arrays of its own.

    Called on the thread of `run`. What a failed island makes of its arrays is raised where they are read, by `run`: a
    method need not look.
    """

    def place(self, kept: Any) -> Any:
        """The state, on this training's devices, of what was kept of another. Must copy: `kept` is used again."""

    def step(self, state: Any, batch: Any) -> tuple[Any, Any]:
        """One step: the next state, and what the user is to see of it. Consumes the state, and waits for nothing."""

    def keep(self, state: Any) -> Any:
        """A tree with one of each array that must outlive a loss, each on one island."""


# Of one mesh for each island that works, in the order of their numbers: a training over them.
Make = Callable[[Sequence[Mesh]], Training]
