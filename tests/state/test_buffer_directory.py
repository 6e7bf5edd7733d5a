from __future__ import annotations

from atoll.errors import OK, Code, Status
from atoll.state.buffer_directory import BufferDirectory, Entry
from atoll.state.buffer_states import BufferState, HandleState
from tests.work_counts import instructions_of

LOST = Status(Code.DATA_LOSS, "host 3 is gone")
BROKEN = Status(Code.INTERNAL, "division by zero")


def directory(**entries: Entry) -> BufferDirectory:
    """Return a directory of the handles named h1, h2, ..."""
    result = BufferDirectory()
    for name, entry in entries.items():
        result.add(int(name[1:]), entry)
    return result


def pending(hosts: tuple[int, ...] = (0,), uses: int = 0) -> Entry:
    return Entry(hosts, 8, uses=uses)


# ---- waiting


def test_a_wait_for_ready_buffers_ends_at_once():
    assert directory(h1=Entry((0,), 8, BufferState.READY)).wait(1, (1,)) == OK
    assert directory().wait(1, ()) == OK


def test_a_wait_ends_with_the_last_of_its_handles():
    d = directory(h1=pending(), h2=pending())
    assert d.wait(7, (1, 2)) is None
    assert d.settle(1, None) == []
    assert d.settle(2, None) == [(7, OK)]
    assert d.settle(2, None) == []


def test_a_handle_that_is_named_twice_is_waited_for_once():
    d = directory(h1=pending())
    assert d.wait(7, (1, 1)) is None
    assert d.settle(1, None) == [(7, OK)]


def test_all_waits_of_a_handle_end_together_in_order():
    d = directory(h1=pending())
    assert [d.wait(number, (1,)) for number in (5, 6)] == [None, None]
    assert d.settle(1, BROKEN) == [(5, BROKEN), (6, BROKEN)]


def test_a_wait_reports_the_first_error_once_all_have_settled():
    d = directory(h1=pending(), h2=Entry((0,), 8, BufferState.FAILED, LOST), h3=pending())
    assert d.wait(7, (1, 2, 3)) is None
    assert d.settle(1, BROKEN) == []
    assert d.settle(3, None) == [(7, LOST)]


def test_a_wait_for_an_unknown_handle_is_not_found():
    status = directory().wait(7, (99,))
    assert status is not None
    assert status.code == Code.NOT_FOUND
    assert "99" in status.message


# ---- use


def test_an_argument_cannot_be_missing_failed_or_consumed():
    d = directory(
        h1=pending(),
        h2=Entry((0,), 8, error=BROKEN),
        h3=Entry((0,), 8, handle=HandleState.CONSUMED),
        h4=Entry((0,), 8, released=True, uses=1),
    )
    assert d.problem(1) is None
    assert d.problem(2) == BROKEN
    problems = {handle: d.problem(handle) for handle in (3, 4, 5)}
    assert {handle: status and status.code for handle, status in problems.items()} == {
        3: Code.INVALID_ARGUMENT,
        4: Code.NOT_FOUND,
        5: Code.NOT_FOUND,
    }
    assert all(str(handle) in status.message for handle, status in problems.items() if status)


def test_results_of_a_failed_launch_cannot_be_used_before_they_have_settled():
    d = directory(h1=pending())
    d.fail((1, 2), BROKEN)
    assert d.problem(1) == BROKEN
    assert d.wait(7, (1,)) == BROKEN
    d.fail((1,), LOST)
    assert d.settle(1, LOST) == []
    assert d.problem(1) == BROKEN, "the first cause stays"


# ---- memory


def test_memory_is_freed_at_the_release_if_no_gang_needs_it():
    d = directory(h1=pending())
    assert d.nbytes == 8
    assert d.release_all([1])
    assert (d.entries, d.nbytes) == ({}, 0)
    assert not d.release_all([1])


def test_memory_is_freed_when_the_last_gang_that_needs_it_has_started():
    d = directory(h1=pending(uses=2))
    assert not d.release_all([1])
    assert not any(d.unneeded([1]))
    (((handle, _),), deleted) = d.unneeded([1])
    assert (handle, *deleted) == (1,)
    assert (d.entries, d.nbytes) == ({}, 0)


def test_memory_is_kept_until_the_client_releases_the_handle():
    d = directory(h1=pending(uses=1))
    assert not any(d.unneeded([1]))
    assert d.nbytes == 8
    assert d.release_all([1])


def test_a_deleted_buffer_is_kept_for_the_client_when_no_gang_needs_it():
    d = directory(h1=pending(uses=1))
    d.entries[1].delete()
    freed, deleted = d.unneeded([1])
    assert (list(freed), [handle for handle, _ in deleted]) == ([], [1])
    assert d.collect(*deleted[0]) is None  # the client has not released it
    assert 1 in d.entries


def test_waits_for_a_released_buffer_are_answered():
    d = directory(h1=pending())
    assert d.wait(7, (1,)) is None
    # Its memory is freed at once, but the entry keeps its waits until it has settled.
    assert d.release_all([1])
    assert 1 in d.entries
    assert d.settle(1, None) == [(7, OK)]
    assert (d.entries, d.nbytes) == ({}, 0)


def test_unknown_handles_are_ignored():
    d = directory()
    assert not any(d.unneeded([5]))
    assert not d.release_all([5])
    assert d.settle(5, None) == []


def test_buffers_that_stand_for_errors_count_no_bytes():
    d = directory(h1=pending(), h2=pending(), h3=pending())
    d.settle(1, BROKEN)
    d.settle(2, None)
    d.lose(d.entries[2], LOST)
    d.lose(d.entries[2], LOST)
    assert d.nbytes == 8
    d.release_all([1])
    d.release_all([2])
    assert d.nbytes == 8


# ---- many buffers at once


def many(count: int, uses: int = 0) -> BufferDirectory:
    return directory(**{f"h{handle}": pending(uses=uses) for handle in range(count)})


def test_the_first_problem_of_several_handles_is_that_of_one_of_them():
    d = many(6)
    assert d.first_problem(range(6)) is None
    d.entries[5].error = BROKEN
    d.entries[4].consume()
    d.release_all([3])
    for handle in (3, 4, 5, 99):
        assert d.first_problem([0, handle, 5]) == d.problem(handle) != None  # noqa: E711


def test_buffers_that_were_made_are_ready_and_the_others_are_left_to_settle():
    d = many(7)
    d.entries[1].error = BROKEN
    d.wait(7, (2,))
    d.fail((3,), LOST)
    d.settle(4, None)
    d.release_all([5])
    assert d.make_ready([0, 1, 2, 3, 4, 5, 6]) == [1, 2, 3]
    states = {handle: entry.state for handle, entry in d.entries.items()}
    assert {handle for handle, state in states.items() if state is BufferState.READY} == {0, 4, 6}
    assert d.settle(2, None) == [(7, OK)]
    assert d.settle(1, None) == []
    assert d.entries[1].state is BufferState.FAILED


def test_a_buffer_that_is_used_twice_by_a_gang_is_unneeded_once():
    d = many(2, uses=2)
    d.release_all([0, 1])
    assert [handle for handle, _ in d.unneeded([0, 1, 0, 99])[0]] == [0]
    assert [handle for handle, _ in d.unneeded([1])[0]] == [1]


def test_work_per_buffer_does_not_contain_a_call():
    """A script drops, and a launch uses and returns, tens of thousands of buffers."""
    most = 45  # instructions per buffer; a call of a method takes about ten by itself
    counts = {}
    for count in (100, 300):
        d = many(count, uses=1)
        handles = range(count)
        work = {
            "check": lambda d=d, handles=handles: d.first_problem(handles),
            "made": lambda d=d, handles=handles: d.make_ready(handles),
            "use": lambda d=d, handles=handles: d.unneeded(handles),
            "release": lambda d=d, handles=handles: d.release_all(handles),
        }
        counts[count] = {name: instructions_of(call) for name, call in work.items()}
        assert not d.entries
    for name in counts[100]:
        assert counts[300][name] - counts[100][name] < 200 * most, name
