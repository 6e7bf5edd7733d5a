"""Deleting and destructing arrays: what the controller gets, and what the client."""

from __future__ import annotations

import pytest

from atoll.errors import Code
from atoll.ifrt.responses import OUT_OF_SEQUENCE
from atoll.protocol import messages as m
from tests.ifrt.rig import STACK, Rig, check_refused, on


@pytest.mark.parametrize(
    ("kind", "released"),
    [("delete_array", m.Release((1, 2), delete=True)), ("destruct_array", m.Release((1, 2)))],
)
def test_arrays_are_released_together(rig: Rig, kind, released):
    rig.make(1, on(0))
    rig.make(2, on(0, 1))
    response = rig.ask(kind, arrays=[1, 2])
    assert response.WhichOneof("kind") == kind
    assert response.meta.seq_num == OUT_OF_SEQUENCE
    assert rig.take() == [released]


def test_a_deleted_array_says_so_until_it_is_destructed(rig: Rig):
    rig.make(1, on(0))
    assert not rig.ask("is_array_deleted", array=1).is_array_deleted.deleted
    rig.ask("delete_array", arrays=[1])
    assert rig.ask("is_array_deleted", array=1).is_array_deleted.deleted
    rig.ask("destruct_array", arrays=[1])
    check_refused(rig.ask("is_array_deleted", array=1), Code.NOT_FOUND, "unknown array handle 1")


@pytest.mark.parametrize(("arrays", "code"), [([1], 0), ([1, 2], Code.NOT_FOUND), ([2], Code.NOT_FOUND)])
def test_the_future_of_a_deletion_has_its_status(rig: Rig, arrays, code):
    rig.make(1, on(0))
    future = rig.ask("delete_array", arrays=arrays).delete_array.deletion_future_handle
    assert [message.handles for message in rig.take()] == ([(1,)] if 1 in arrays else [])
    response = rig.ask("check_future", future=future)
    assert (response.meta.status.code, response.meta.seq_num) == (code, OUT_OF_SEQUENCE)
    check_refused(rig.ask("check_future", future=future), Code.NOT_FOUND, "unknown future")


def test_arrays_that_are_not_there_are_named_and_the_others_destructed(rig: Rig):
    rig.make(1, on(0))
    check_refused(rig.ask("destruct_array", arrays=[1, 8, 9]), Code.NOT_FOUND, "unknown array handles [8, 9]")
    assert rig.take() == [m.Release((1,))]


def test_an_array_that_was_never_made_is_destructed_without_the_controller(rig: Rig):
    check_refused(rig.ask("copy_arrays", arrays=[7], results=[1]), Code.NOT_FOUND, "unknown array handle 7")
    assert rig.ask("destruct_array", arrays=[1]).meta.status.code == 0
    assert rig.take() == []


def test_the_stack_of_an_array_is_named_with_the_first_response_after_its_end(rig: Rig):
    rig.make(1, on(0), stack=5)
    destructed = rig.ask("destruct_array", arrays=[1], stack=0)
    assert list(destructed.meta.destroyed_user_context_ids) == []
    rig.make(2, on(0))
    response = rig.ask("is_array_deleted", array=2, stack=STACK)
    assert sorted(response.meta.destroyed_user_context_ids) == [5, STACK]
