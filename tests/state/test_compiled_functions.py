from __future__ import annotations

from atoll.cluster.locations import DeviceLocation
from atoll.errors import OK, Code, Status
from atoll.state.compiled_functions import FunctionRegistry, Registration, function_name

BROKEN = Status(Code.INVALID_ARGUMENT, "no such custom call")
LOCATIONS = {10: DeviceLocation(0, 0, 0), 11: DeviceLocation(0, 0, 1), 12: DeviceLocation(1, 1, 0)}


def name_of(assignment: tuple[tuple[int, ...], ...], content: str = "hash") -> str:
    return function_name(content, tuple(tuple(LOCATIONS[device] for device in row) for row in assignment))


def test_a_name_depends_on_the_source_and_the_devices():
    names = [name_of(((10, 11),)), name_of(((11, 10),)), name_of(((10,), (11,))), name_of(((12, 11),))]
    assert len({*names, name_of(((10, 11),), content="other")}) == 5
    assert name_of(((10, 11),)) == names[0]


def test_release_returns_true_for_the_last_user():
    registry = FunctionRegistry()
    registry.acquire("f")
    registry.acquire("f")
    assert [registry.release("f"), registry.release("f")] == [False, True]
    assert registry.users == {}


def test_a_registration_is_answered_when_all_its_hosts_have_compiled():
    registry = FunctionRegistry()
    registration = Registration(1, 7, "f", {0, 1})
    registry.expect(registration)
    assert registry.settle("f", 0, OK, b"info") == []
    assert registry.settle("f", 1, OK, b"other") == [registration]
    assert (registration.failure, registration.info) == (None, b"info")
    assert registry.waiting == {}


def test_a_failure_on_one_host_is_reported_after_the_others_have_answered():
    registry = FunctionRegistry()
    registration = Registration(1, 7, "f", {0, 1})
    registry.expect(registration)
    assert registry.settle("f", 1, BROKEN, b"") == []
    assert registry.settle("f", 0, OK, b"info") == [registration]
    assert registration.failure == BROKEN


def test_one_compilation_answers_all_requests_for_a_function():
    registry = FunctionRegistry()
    registrations = [Registration(session, 7, "f", {0}) for session in (1, 2)]
    for registration in registrations:
        registry.expect(registration)
    assert registry.settle("f", 0, OK, b"info") == registrations
    # No request waits for the host's second answer.
    assert registry.settle("f", 0, OK, b"info") == []


def test_answers_of_other_functions_and_hosts_change_nothing():
    registry = FunctionRegistry()
    registry.expect(Registration(1, 7, "f", {0}))
    assert registry.settle("g", 0, OK, b"") == []
    assert registry.settle("f", 1, OK, b"") == []


def test_answers_to_requests_that_do_not_wait_any_longer_have_no_effect():
    registry = FunctionRegistry()
    ended, other = (Registration(session, 7, "f", {0, 1}) for session in (1, 2))
    for each in (ended, other):
        registry.expect(each)
    registry.stop_waiting([ended])
    assert registry.settle("f", 0, BROKEN, b"") == []
    assert registry.settle("f", 1, OK, b"info") == [other]
    assert ended.failure is None
    assert registry.waiting == {}
