"""A program reads the details of a failure, not its text."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll import errors
from atoll.errors import (
    DETAILS,
    Code,
    Details,
    Kind,
    Status,
    StatusError,
    UnreachableError,
    details_in,
    details_of,
    failed,
    failure,
    reported_name,
)
from atoll.protocol.translation.codec import status_from, status_to
from tests.test_layers import SOURCE

numbers = st.lists(st.integers(0, 1 << 30), max_size=3).map(tuple)
details = st.builds(
    Details, st.sampled_from(Kind), numbers, numbers, st.text(max_size=9), st.booleans(), st.text(max_size=9)
)
LOST = Details(Kind.ISLAND, (0, 2), (5,), retriable=True)


@given(details.filter(lambda each: each.kind is not Kind.OTHER), st.text(max_size=9))
def test_details_survive_jaxlibs_client(given: Details, message: str) -> None:
    proto = status_to(failure(Code.DATA_LOSS, message, given))
    assert not proto.payload
    error = RuntimeError(f"DATA_LOSS: {proto.message}\n\t\nscript.py:4 (<module>)")
    assert details_of(error) == given
    assert status_from(proto) == failure(Code.DATA_LOSS, message, given)


def test_the_text_is_readable() -> None:
    text = status_to(failure(Code.DATA_LOSS, "island 0 is gone", LOST).within("jit_step")).message
    assert text == "island 0 is gone (in jit_step) [atoll: island 0 2, host 5, retriable, in jit_step]"


def test_names_with_spaces_are_readable() -> None:
    given = Details(Kind.LIMIT, hosts=(0,), limit="device memory", retriable=True, program="jit_<lambda> (2)")
    text = given.in_text("out of memory")
    assert text == "out of memory [atoll: limit, host 0, of device memory, retriable, in jit_<lambda> (2)]"
    assert details_in(text) == ("out of memory", given)


def test_a_text_that_quotes_another_failure_is_not_that_failure() -> None:
    quoted = LOST.in_text("island 0 is gone")
    text = status_to(Status(Code.INTERNAL, f"a callback raised: {quoted}")).message
    assert quoted in text
    assert details_in(text)[1] == Details()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[atoll: ",
        "[atoll: new, island  ]",
        "[atoll: link, host ]",
        f"[atoll: x, host {'9' * 999}]",
    ],
)
def test_a_text_without_valid_details_has_none(text: str) -> None:
    assert details_in(text)[1].kind is Kind.OTHER


def test_invalid_details_of_a_client_are_none() -> None:
    assert Status(Code.INTERNAL, "x", {DETAILS: b"\xc1"}).details == Details()
    assert Status(Code.INTERNAL, "x", {DETAILS: b"\x81\xa4kind\xa3new"}).details == Details()


def test_an_error_names_its_program_once_whatever_its_text_is() -> None:
    error = Status(Code.INTERNAL, "the worker has no memory left (in GiB)").within("jit_f")
    assert error.message == "the worker has no memory left (in GiB) (in jit_f)"
    assert error.within("jit_g") == error
    assert error.details.program == "jit_f"


def test_a_reworded_error_keeps_its_details() -> None:
    assert failure(Code.DATA_LOSS, "x", LOST).reworded("y").details == LOST


def test_an_exception_has_the_details_of_its_status() -> None:
    error = failed(Code.UNAVAILABLE, "x", LOST)
    assert isinstance(error, StatusError)
    assert details_of(error) == LOST
    assert LOST.is_loss
    assert not Details(Kind.LIMIT).is_loss


def test_a_status_becomes_an_exception_only_by_its_method_which_keeps_the_details() -> None:
    status = failure(Code.DATA_LOSS, "island 0 is gone", LOST)
    assert status.exception().status == status
    copied = re.compile(r"StatusError\(Code\((?P<status>[\w.]+)\.code\), (?P=status)\.message\b")
    sources = (path for path in SOURCE.rglob("*.py") if path.name != "errors.py")
    assert [path.name for path in sources if copied.search(path.read_text())] == []


def test_a_subclass_is_reported_as_its_nearest_public_class() -> None:
    class Private(UnreachableError):
        pass

    assert reported_name(Private()) == "UnreachableError"
    assert reported_name(OSError()) == "OSError"
    assert reported_name(failed(Code.INTERNAL, "x", LOST)) == "AtollError"
    assert errors.error_kind("AtollError") is errors.AtollError
    assert errors.error_kind("OSError") is None


def test_the_status_of_an_exception_has_the_code_with_which_xla_begins_its_text() -> None:
    expected = Status(Code.RESOURCE_EXHAUSTED, "no memory")
    for text in ("RESOURCE_EXHAUSTED: no memory", "Bad StatusOr access: RESOURCE_EXHAUSTED: no memory"):
        assert errors.status_of(RuntimeError(text)) == expected
    assert errors.status_of(RuntimeError("no: memory")) == Status(Code.INTERNAL, "RuntimeError: no: memory")
    assert errors.status_of(RuntimeError("OK: fine")) == Status(Code.INTERNAL, "RuntimeError: OK: fine")
