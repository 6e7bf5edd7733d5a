from __future__ import annotations

from atoll.cluster.locations import DeviceLocation
from atoll.controller.programs.functions import FunctionRegistry, Registration, function_name
from atoll.errors import OK, Code, Status

BROKEN = Status(Code.INVALID_ARGUMENT, "no such custom call")
SEATS = {10: DeviceLocation(0, 0, 0), 11: DeviceLocation(0, 0, 1), 12: DeviceLocation(1, 1, 0)}


def name_of(assignment: tuple[tuple[int, ...], ...], content: str = "hash") -> str:
    return function_name(content, tuple(tuple(SEATS[device] for device in row) for row in assignment))


def test_a_name_is_the_program_and_where_it_runs():
    names = [name_of(((10, 11),)), name_of(((11, 10),)), name_of(((10,), (11,))), name_of(((12, 11),))]
    assert len({*names, name_of(((10, 11),), content="other")}) == 5
    assert name_of(((10, 11),)) == names[0]


def test_the_last_user_to_let_go_is_told():
    registry = FunctionRegistry()
    registry.acquire("f")
    registry.acquire("f")
    assert [registry.release("f"), registry.release("f")] == [False, True]
    assert registry.users == {}


def test_a_registration_is_answered_when_all_its_hosts_have_compiled():
    registry = FunctionRegistry()
    slice_request = Registration(1, 7, "f", {0, 1})
    registry.expect(slice_request)
    assert registry.settle("f", 0, OK, b"info") == []
    assert registry.settle("f", 1, OK, b"other") == [slice_request]
    assert (slice_request.failure, slice_request.info) == (None, b"info")
    assert registry.waiting == {}


def test_a_failure_on_one_host_waits_for_the_others_and_wins():
    registry = FunctionRegistry()
    slice_request = Registration(1, 7, "f", {0, 1})
    registry.expect(slice_request)
    assert registry.settle("f", 1, BROKEN, b"") == []
    assert registry.settle("f", 0, OK, b"info") == [slice_request]
    assert slice_request.failure == BROKEN


def test_all_who_wish_for_a_function_are_answered_by_one_compilation():
    registry = FunctionRegistry()
    function_requests = [Registration(session, 7, "f", {0}) for session in (1, 2)]
    for slice_request in function_requests:
        registry.expect(slice_request)
    assert registry.settle("f", 0, OK, b"info") == function_requests
    # The second answer of the host concerns nobody any more.
    assert registry.settle("f", 0, OK, b"info") == []


def test_answers_of_other_functions_and_hosts_change_nothing():
    registry = FunctionRegistry()
    registry.expect(Registration(1, 7, "f", {0}))
    assert registry.settle("g", 0, OK, b"") == []
    assert registry.settle("f", 1, OK, b"") == []
