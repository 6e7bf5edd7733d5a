"""Objects whose state changes only by the transitions of a table."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any, ClassVar, Generic, TypeVar

State = TypeVar("State", bound=enum.Enum)


class IllegalTransition(RuntimeError):
    """A transition that the table of an object does not have, which is a bug."""


class StateMachine(Generic[State]):
    """An object that is in one state at a time. Subclasses set `transitions`, and declare `state` with its first value.

    `transitions` maps each state to the states that may follow it.
    """

    __slots__ = ()
    transitions: ClassVar[Mapping[Any, frozenset[Any]]]
    state: State

    def enter(self, state: State) -> None:
        """Change the state. Raise IllegalTransition if the table does not have the transition."""
        if state not in self.transitions[self.state]:
            raise IllegalTransition(f"{self._described()} cannot go from {self.state.name} to {state.name}")
        self.state = state  # type: ignore[misc]  # subclasses have the slot

    def _described(self) -> str:
        """Return text that names the object in an error, such as "island 3"."""
        return type(self).__name__
