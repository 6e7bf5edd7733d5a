"""What a migration needs of the controller that it is part of: to say something, to launch, to compile, to lower.

The controller's own classes are these (`outbox`, `programs/launcher`, `programs/compilation`, `programs/registry`).
Nothing here blocks, and nothing raises but where it says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from atoll.cluster.locations import Placement
from atoll.errors import Status
from atoll.ir.program import Program
from atoll.protocol import messages as m
from atoll.scheduling.compiled_functions import FunctionRegistry
from atoll.scheduling.programs import RegisteredProgram
from atoll.scheduling.reservations import Reservations
from atoll.scheduling.session import Launch, Session


class Out(Protocol):
    """What leaves at the next flush, in order."""

    def to_session(self, session: int, message: Any) -> None: ...

    def to_host(self, host: int, message: Any) -> None: ...

    def free(self, hosts: tuple[int, ...], session: int, handles: Iterable[int]) -> None:
        """The hosts may forget these buffers."""

    def flush_frees(self) -> None:
        """Names the memory that goes now: what is sent next needs it."""

    def return_credits(self, session: int, count: int = 1) -> None:
        """So much of the session's window is free again; -1 for a launch that its proxy did not make."""


class Launches(Protocol):
    """Launches programs, as those of clients."""

    memory: Reservations

    def launch(self, session: Session, message: m.Launch) -> None: ...

    def launch_again(self, session: Session, message: m.Launch, then: Callable[[Launch], None]) -> Launch:
        """Launch a program that makes buffers that the session has, and that are spilled; call `then` at its end."""

    def fail(self, launch: Launch, status: Status) -> None: ...

    def release(self, session: Session, handles: tuple[int, ...], delete: bool) -> None: ...


class Compiler(Protocol):
    """Compiles functions of sessions."""

    functions: FunctionRegistry

    def is_waiting(self, session: int) -> bool:
        """Whether something is being compiled for the session."""

    def forget(self, session: Session, name: str) -> None:
        """The session does not wait for it any more."""

    def drop_reference(self, name: str) -> None:
        """One that needs the function less; with the last one it goes."""


class Programs(Protocol):
    """Lowers programs, which their hosts have from then on."""

    def lower(
        self, session: Session, definition: Program, locations: Placement, functions: Mapping[int, str]
    ) -> RegisteredProgram:
        """Raises StatusError where it cannot be lowered for these places."""

    def lower_again(self, session: Session, number: int) -> None:
        """Lower a program of the session for the places that its devices have now, in place of what it has."""

    def drop(self, program: RegisteredProgram) -> None:
        """Nobody launches it any more."""


class Questions(Protocol):
    """What sessions have asked workers."""

    def is_waiting(self, session: int) -> bool:
        """Whether the session waits for an answer."""
