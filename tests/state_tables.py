"""Checks of state machines against their tables of transitions."""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

import pytest

from atoll.cluster.state_machine import IllegalTransition, StateMachine

S = TypeVar("S", bound=enum.Enum)


def check_table(make: Callable[[S], StateMachine[Any]], states: type[S], table: Mapping[S, Collection[S]]) -> None:
    """Check that the machines that `make` makes enter the states of the table from each state, and no others."""
    for before in states:
        for after in states:
            machine = make(before)
            if after in table[before]:
                machine.enter(after)
                assert machine.state is after
            else:
                with pytest.raises(IllegalTransition, match=f"cannot go from {before.name} to {after.name}"):
                    machine.enter(after)
