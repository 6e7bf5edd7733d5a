"""The states of a gang: the table of transitions, and the story of one gang."""

from __future__ import annotations

from atoll.state.gang_states import TRANSITIONS, GangState, Reason
from atoll.state.queued_nodes import Gang, Step, story
from tests.launch.pausable_scheduler import Scheduler
from tests.launch.test_scheduler import launch
from tests.state_tables import check_table
from tests.test_layers import SOURCE


def gang_in(state: GangState) -> Gang[str]:
    (gang,) = launch(1).gangs
    gang.state = state
    return gang


def test_a_gang_enters_the_states_of_the_table_and_no_other():
    check_table(gang_in, GangState, TRANSITIONS)


def test_every_state_is_reached_and_the_last_three_are_final():
    reached = {GangState.NEW}
    while (more := reached.union(*(TRANSITIONS[state] for state in reached))) != reached:
        reached = more
    assert reached == set(GangState)
    assert [state for state in GangState if not TRANSITIONS[state]] == [
        GangState.DONE,
        GangState.FAILED,
        GangState.DROPPED,
    ]


def test_only_gangs_that_were_not_sent_can_be_dropped():
    droppable = {state for state in GangState if GangState.DROPPED in TRANSITIONS[state]}
    assert droppable == {state for state in GangState if gang_in(state).is_unsent}


def test_the_story_of_a_gang_names_each_state_with_its_time_and_reason():
    scheduler = Scheduler[str](1, 1)
    first, second = launch(1), launch(2, missing=1)
    scheduler.enqueue(first)
    assert scheduler.start_next(0) is first.gangs[0]
    scheduler.now = 1.0
    scheduler.enqueue(second)
    scheduler.now = 3.0
    scheduler.arrived(second, Reason.BYTES)
    (gang,) = second.gangs
    assert [step.state for step in story(gang)][-1] is GangState.READY
    scheduler.now = 4.0
    scheduler.finished(first.gangs[0])
    assert scheduler.start_next(0) is gang
    assert story(gang) == [
        Step(0.0, GangState.READY, Reason.ORDER),
        Step(1.0, GangState.WAITING, Reason.BYTES),
        Step(3.0, GangState.READY, Reason.ORDER),
        Step(4.0, GangState.COMMITTED, Reason.ORDER),
    ]


def test_the_story_of_a_gang_that_was_dropped_before_its_commitment_has_no_commitment():
    scheduler = Scheduler[str](1, 1)
    node = launch(1, missing=1)
    scheduler.now = 1.0
    scheduler.enqueue(node)
    scheduler.drop(node)
    assert [step.state for step in story(node.gangs[0])][-1] is GangState.WAITING
    assert all(step.seconds >= 0 for step in story(node.gangs[0]))


def test_a_gang_of_a_dropped_node_is_dropped_unless_it_was_sent():
    scheduler = Scheduler[str](2, 1)
    node = launch(1, islands=(0, 1))
    scheduler.enqueue(node)
    sent = scheduler.start_next(0)
    assert sent is not None
    sent.enter(GangState.RUNNING)
    dropped = scheduler.drop(node)
    assert (dropped.gangs, dropped.were_committed) == ([node.gangs[1]], True)
    assert [gang.state for gang in node.gangs] == [GangState.RUNNING, GangState.DROPPED]
    assert scheduler.start_next(1) is None


def test_a_node_that_is_not_in_line_yet_can_be_dropped():
    scheduler = Scheduler[str](1, 1)
    scheduler.enqueue(launch(1))
    new = launch(2)
    assert scheduler.drop(new).gangs == list(new.gangs)
    scheduler.validate()


def test_the_documentation_names_all_states():
    text = (SOURCE.parent.parent / "docs" / "design" / "life-of-a-launch.md").read_text(encoding="utf-8")
    assert [state.name for state in GangState if f"`{state.name}`" not in text] == []
