"""The states of a buffer: the table of transitions, and the transitions that methods of an entry make."""

from __future__ import annotations

from atoll.errors import Code, Status
from atoll.state.buffer_directory import BufferDirectory, Entry, SpilledArray
from atoll.state.buffer_states import TRANSITIONS, BufferState, HandleState
from tests.state_tables import check_table

LOST = Status(Code.DATA_LOSS, "lost")
FAILED = Status(Code.INTERNAL, "failed")


def test_a_buffer_enters_the_states_of_the_table_and_no_other():
    check_table(lambda state: Entry((0,), 8, state), BufferState, TRANSITIONS)


def test_the_results_of_a_failed_launch_are_errors_when_its_gangs_have_ended():
    directory = BufferDirectory()
    directory.add(1, Entry((0,), 8))
    directory.fail((1,), FAILED)
    entry = directory.entries[1]
    assert (entry.state, entry.ready, directory.problem(1)) == (BufferState.DOOMED, False, FAILED)
    directory.settle(1, LOST)
    assert (entry.state, entry.ready, entry.error) == (BufferState.FAILED, True, FAILED)


def test_a_spilled_buffer_is_restored_by_a_launch_or_lost():
    entry = Entry((0,), 8, BufferState.READY)
    entry.spill(SpilledArray(()))
    assert (entry.state, entry.hosts, entry.ready) == (BufferState.SPILLED, (), True)
    entry.restore()
    assert (entry.state, entry.spilled, entry.ready) == (BufferState.PENDING, None, False)
    entry.settle(None)
    entry.spill(SpilledArray(()))
    entry.lose(LOST)
    assert (entry.state, entry.spilled, entry.error) == (BufferState.FAILED, None, LOST)


def test_the_first_error_of_a_buffer_stays():
    entry = Entry((0,), 8, BufferState.FAILED, FAILED)
    entry.lose(LOST)
    assert entry.error == FAILED


def test_a_deleted_buffer_stays_deleted_if_a_launch_consumes_it():
    entry = Entry((0,), 8, BufferState.READY)
    entry.delete()
    entry.consume()
    assert entry.handle is HandleState.DELETED
