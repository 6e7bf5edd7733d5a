"""Tests that clients' replies are checked, and that their errors are passed on."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

from atoll.errors import Code, Status, StatusError
from atoll.host_services.calls.call_messages import ArrayType, Call, Returned, decode, encode
from atoll.host_services.calls.client_calls import ClientError, Reply, status_of_device_error, wrapped
from atoll.host_services.calls.function_callbacks import Callbacks


class FakeCalls:
    """Answers each call with `answer`: a message and the bytes of its arrays."""

    def __init__(self, message: Any = None, arrays: Any = ()) -> None:
        self.content = b"".join(bytes(part) for part in encode(message, arrays)) if message is not None else b""
        self.called: list[Any] = []
        self.given_back = 0
        self.retained: list[tuple[int, tuple[int, ...]]] = []

    def retain(self, session: int, numbers: tuple[int, ...]) -> None:
        self.retained.append((session, numbers))

    def release(self, session: int, numbers: tuple[int, ...]) -> None:
        self.retained.remove((session, numbers))

    def call(self, session: int, callback: int, types: Any, arrays: Any, limit: int = 0) -> Reply:
        self.called.append((session, Call(callback, types), [bytes(each) for each in arrays]))
        message, offsets = decode(self.content)

        def done() -> None:
            self.given_back += 1

        return Reply(message.arrays, offsets, self.content, done)


def callbacks(calls: FakeCalls) -> Callbacks:
    return Callbacks(calls, 7, (40, 41))  # type: ignore[arg-type]


def test_arrays_and_tokens_go_and_come():
    ints = ArrayType("int32", (2,), 8)
    calls = FakeCalls(Returned((ArrayType("", (), 0), ints)), [b"", np.array([5, 6], np.int32).tobytes()])
    results = callbacks(calls).call(
        1, (("token", ()), ("int32", (2,))), (None, np.array([[1, 2], [3, 4]], np.int16)[:, 1])
    )
    assert results[0] is None
    assert results[1] is not None
    assert results[1].tolist() == [5, 6]
    types = (ArrayType("", (), 0), ArrayType("int16", (2,), 4))
    assert calls.called == [(7, Call(41, types), [np.array([2, 4], np.int16).tobytes()])]
    assert calls.given_back == 0, "the results are views of the channel's memory"
    del results
    gc.collect()
    assert calls.given_back == 1


@pytest.mark.parametrize(
    "given",
    [(), (("int32", (3,), 12),), (("float32", (2,), 8),), (("int32", (2,), 4),), (("int32", (2,), 8),) * 2],
)
def test_an_answer_of_another_type_is_refused_and_its_memory_given_back(given: Any):
    types = tuple(ArrayType(*each) for each in given)
    calls = FakeCalls(Returned(types), [bytes(each.nbytes) for each in types])
    with pytest.raises(StatusError, match="a callback") as caught:
        callbacks(calls).call(0, (("int32", (2,)),), ())
    assert caught.value.status.code == Code.INVALID_ARGUMENT
    assert calls.given_back == 1


def test_what_is_asked_while_a_function_is_compiled_goes_to_the_callable_of_its_key():
    calls = FakeCalls(Returned((ArrayType("uint8", (3,), 3),)), [b"yes"])
    asking = Callbacks(calls, 7, (40, 41, 42), keys=(b"a", b"b"))  # type: ignore[arg-type]
    assert asking.ask(b"b", b"what") == b"yes"
    assert calls.called == [(7, Call(42, (ArrayType("uint8", (4,), 4),)), [b"what"])]
    assert calls.given_back == 1
    assert len(asking) == 1, "one that the function calls when it runs"


@pytest.mark.parametrize("count", [0, 2])
def test_an_answer_that_is_not_one_array_is_refused_and_its_memory_given_back(count: int):
    calls = FakeCalls(Returned((ArrayType("uint8", (1,), 1),) * count), [b"x"] * count)
    with pytest.raises(StatusError, match="must return one array"):
        Callbacks(calls, 7, (40,), keys=(b"a",)).ask(b"a", b"what")  # type: ignore[arg-type]
    assert calls.given_back == 1


XLA = (
    "INTERNAL: CpuCallback error calling callback: "
    'Traceback (most recent call last):\n  File "stub.py", line 1, in stub\n'
)


def test_a_clients_traceback_is_shown_without_that_of_the_worker():
    text = f'Traceback (most recent call last):\n  File "mine.py", line 2, in mine\n{XLA}ValueError: mine'
    error = RuntimeError(f"{XLA}ClientError: {wrapped(ClientError(text))}")
    message = f"CpuCallback error calling callback: {text}"
    assert status_of_device_error(error) == Status(int(Code.INTERNAL), message)


def test_a_status_of_a_stub_is_the_status_of_its_run():
    error = RuntimeError(f"{XLA}ClientError: {wrapped(StatusError(Code.CANCELLED, 'nobody is there'))}")
    assert status_of_device_error(error) == Status(int(Code.CANCELLED), "nobody is there")


def test_other_errors_are_what_they_are():
    assert status_of_device_error(ValueError("no")) == Status(int(Code.INVALID_ARGUMENT), "no")


def test_the_client_keeps_the_callables_while_the_function_or_a_stub_exists():
    from atoll.devices.xla.client_callbacks import Signature, stubs

    calls = FakeCalls(Returned(()))
    mine = callbacks(calls)
    assert calls.retained == [(7, (40, 41))]
    given_to_xla = stubs(mine, [Signature(), Signature()], None)
    del mine
    gc.collect()
    assert calls.retained == [(7, (40, 41))]
    del given_to_xla[0]
    gc.collect()
    assert calls.retained == [(7, (40, 41))]
    given_to_xla.clear()
    gc.collect()
    assert not calls.retained


@pytest.mark.parametrize("spans_devices", [False, True])
def test_what_a_callable_raises_stops_its_device_unless_others_may_wait_for_it(spans_devices: bool):
    from atoll.devices.xla.client_callbacks import Signature, stubs

    mine = Callbacks(FakeCalls(Returned(())), 7, (40,), spans_devices)  # type: ignore[arg-type]
    (stub,) = stubs(mine, [Signature((("int32", (2,)), ("token", ())))], None)
    if not spans_devices:
        with pytest.raises(ClientError):
            stub()
        assert mine.take_failure() is None
        return
    zeros, token = stub()
    assert (zeros.tolist(), zeros.dtype, token) == ([0, 0], np.int32, None)
    failure = mine.take_failure()
    assert failure is not None
    assert "a callback returned 0 results, expected 2" in failure.message
    assert mine.take_failure() is None
