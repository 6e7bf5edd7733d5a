"""Tests of the states of a host's functions."""

from __future__ import annotations

from typing import Any, cast

import pytest

from atoll.cluster.state_machine import IllegalTransition
from atoll.errors import StatusError
from atoll.worker.function_records import TRANSITIONS, FunctionRecord, FunctionRecords, FunctionState, Pending
from tests.state_tables import check_table

FUNCTION: Any = cast(Any, "a function")
S = FunctionState


@pytest.fixture
def records() -> FunctionRecords:
    return FunctionRecords()


def compiling(records: FunctionRecords, name: str = "f") -> FunctionRecord:
    records.compile(name, Pending())
    record = records.find(name)
    assert record is not None
    return record


def loaded(records: FunctionRecords, name: str = "f") -> FunctionRecord:
    record = compiling(records, name)
    records.load(record, FUNCTION, b"info", "title")
    return record


def record_in(state: FunctionState) -> FunctionRecord:
    record = FunctionRecord("f", Pending())
    record.state = state
    return record


def test_a_function_changes_its_state_only_as_the_table_says() -> None:
    check_table(record_in, FunctionState, TRANSITIONS)


def test_a_loaded_function_is_found(records: FunctionRecords) -> None:
    record = compiling(records)
    records.validate()
    with pytest.raises(StatusError, match="compiled function f is not on this host"):
        records.get("f")
    records.load(record, FUNCTION, b"info", "title")
    records.validate()
    assert records.get("f") is records.loaded("f") is FUNCTION
    assert records.pending("f") is None


def test_a_function_that_is_dropped_while_it_is_compiled_can_be_requested_again(records: FunctionRecords) -> None:
    record = compiling(records)
    records.drop(record)
    assert record.state is S.UNWANTED
    records.use(record)
    assert record.state is S.COMPILING
    records.validate()


def test_the_function_that_has_been_idle_for_the_longest_time_is_the_first_to_be_forgotten(
    records: FunctionRecords,
) -> None:
    first, second, third = (loaded(records, name) for name in "abc")
    for record in (second, first, third):
        records.drop(record)
    records.use(second)
    records.drop(second)
    records.validate()
    assert records.surplus(3) is None
    assert records.surplus(2) is first
    records.forget(first)
    records.validate()
    assert records.find("a") is None
    assert records.surplus(2) is None


def test_a_loaded_function_is_compiled_again_without_its_follower(records: FunctionRecords) -> None:
    record = loaded(records)
    record.follower = FUNCTION
    pending = Pending()
    records.compile("f", pending)
    records.validate()
    assert (record.state, records.pending("f"), records.loaded("f")) == (S.COMPILING, pending, None)


def test_an_idle_function_is_not_compiled_again(records: FunctionRecords) -> None:
    record = loaded(records)
    records.drop(record)
    with pytest.raises(IllegalTransition):
        records.compile("f", Pending())


def test_a_lost_compilation_begins_again_in_the_same_state(records: FunctionRecords) -> None:
    record = compiling(records)
    again = Pending(others=[])
    records.compile("f", again)
    assert (record.state, records.pending("f")) == (S.COMPILING, again)
    records.validate()


def test_validation_finds_attributes_that_do_not_fit_the_state(records: FunctionRecords) -> None:
    record = loaded(records)
    record.pending = Pending()
    with pytest.raises(AssertionError, match="f"):
        records.validate()
