"""The interfaces through which migrations use the outbox, compilation, programs and queries.

The classes are in `launch` and in `controller`, which is a package of a higher layer. No method blocks, and methods
raise only documented errors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from atoll.cluster.locations import Placement
from atoll.ir.program import Program
from atoll.state.compiled_functions import FunctionRegistry
from atoll.state.programs import RegisteredProgram
from atoll.state.session import Session


class Out(Protocol):
    """Sends messages at the next flush, in order."""

    def to_session(self, session: int, message: Any) -> None: ...

    def to_host(self, host: int, message: Any) -> None: ...

    def free(self, hosts: tuple[int, ...], session: int, handles: Iterable[int]) -> None:
        """Let the hosts drop these buffers."""

    def flush_frees(self) -> None:
        """Send the pending frees, before messages that need the memory."""

    def set_patience(self, session: int, seconds: float) -> None:
        """Let the session's proxy wait for `seconds` if the controller is away; 0: as long as usual."""

    def return_credits(self, session: int, count: int = 1) -> None:
        """Return credits to the session's window. -1 takes a credit for a launch that its proxy did not make."""


class Compiler(Protocol):
    """Compiles functions of sessions."""

    functions: FunctionRegistry

    def is_waiting(self, session: int) -> bool:
        """Whether a function is being compiled for the session."""

    def forget(self, session: Session, name: str) -> None:
        """Stop waiting for the function on behalf of the session."""

    def drop_reference(self, name: str) -> None:
        """Drop a reference to the function, and the function with the last reference."""

    def replaced(self, session: Session, name: str) -> None:
        """Drop a reference of the session to the function, in whose place the session has another one."""


class Programs(Protocol):
    """Lowers programs and sends them to their hosts."""

    def lower(
        self, session: Session, definition: Program, locations: Placement, functions: Mapping[int, str]
    ) -> RegisteredProgram:
        """Lower a program. Raises StatusError if it cannot run at these locations."""

    def lower_again(self, session: Session, number: int) -> None:
        """Lower a program of the session for the current locations of its devices, and replace the old one."""

    def drop(self, program: RegisteredProgram) -> None:
        """Drop a program that will not be launched again."""


class PendingQueries(Protocol):
    """The queries that sessions have sent to workers."""

    def is_waiting(self, session: int) -> bool:
        """Whether the session waits for a reply."""
