"""One session's migration, and the seam for how its arrays get to their new places."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from atoll.errors import Status
from atoll.migration.rules import Changes
from atoll.scheduling.session import Session


class Stage(Enum):
    """How far a migration has come."""

    QUIESCING = "quiescing"
    DRAINING = "draining"
    COMPILING = "compiling"
    COPYING = "copying"


@dataclass(eq=False)
class Migration:
    """A session's migration. `plan()` says where devices go, and is asked again when the session is still: it raises
    StatusError where they cannot go there. `then(status)` is called once, at the end.
    """

    number: int
    session: Session
    plan: Callable[[], Changes]
    then: Callable[[Status], None]
    changes: Changes
    islands: set[int]  # that it is about
    mover: Mover
    stage: Stage = Stage.QUIESCING
    functions: dict[int, str] = field(default_factory=dict)  # their new names


class Mover(Protocol):
    """How the arrays of one migration get to where its `changes` put their devices. Called in this order."""

    def begin(self, migration: Migration) -> None:
        """Begins to make the arrays there. Raises StatusError where they cannot be; `give_up` follows."""

    def are_there(self, migration: Migration) -> bool:
        """Whether all of them are. Raises StatusError where one will not be."""

    def leave(self, migration: Migration) -> None:
        """The devices are about to change places: what is at the old ones goes. Cannot fail, as what follows."""

    def arrive(self, migration: Migration) -> None:
        """They have changed places: the arrays that are there take the handles of the client."""

    def give_up(self, migration: Migration, status: Status) -> None:
        """Instead of `leave` and `arrive`: all is to be as it was before `begin`."""
