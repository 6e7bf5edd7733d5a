"""The states of sessions and launches: their tables, and what a session says of its suspension."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from atoll.state import launch_states, session_states
from atoll.state.launch_states import LaunchState
from atoll.state.programs import RegisteredProgram
from atoll.state.session import Launch, Session
from atoll.state.session_states import SessionState
from tests.state_tables import check_table
from tests.test_layers import SOURCE


def session_in(state: SessionState) -> Session:
    return Session(1, 42, "script.py", "", cast(Any, None), state=state)


def launch_in(state: LaunchState) -> Launch:
    program = cast(RegisteredProgram, SimpleNamespace(name="step"))
    return Launch(1, program, (), (), (), 0, [], state=state)


def test_the_tables_have_all_transitions():
    check_table(session_in, SessionState, session_states.TRANSITIONS)
    check_table(launch_in, LaunchState, launch_states.TRANSITIONS)


def test_a_session_says_how_far_its_suspension_is():
    session = session_in(SessionState.RUNNING)
    assert (session.is_suspended, session.suspension_text) == (False, "")
    session.enter(SessionState.QUIESCING)
    assert session.suspension_text == "being suspended"
    for state in (SessionState.DRAINING, SessionState.SPILLING, SessionState.SUSPENDED):
        session.enter(state)
    assert session.suspension_text == "suspended in memory"
    session.is_on_disk, session.waits_for = True, "island 1"
    session.enter(SessionState.WAITING)
    assert session.suspension_text == "suspended on disk, and waits for island 1"
    session.enter(SessionState.RESUMING)
    assert session.suspension_text == "being resumed"


def test_the_documentation_names_all_states_of_launches_and_sessions():
    pages = SOURCE.parent.parent / "docs" / "design"
    for page, states in (("life-of-a-launch.md", LaunchState), ("suspending.md", SessionState)):
        text = (pages / page).read_text(encoding="utf-8")
        assert [state.name for state in states if f"`{state.name}`" not in text] == []
