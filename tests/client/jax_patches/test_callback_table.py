"""The user's callables: each call runs, whatever others wait for, and whatever it returns or raises is an answer."""

from __future__ import annotations

import gc
import os
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

import atoll
from atoll.client.jax_patches.callback_table import CallbackTable
from atoll.errors import ConnectError
from atoll.host_services.calls.call_messages import (
    GREETING,
    ArrayType,
    Call,
    Raised,
    Returned,
    decode,
    encode,
    first_call,
)
from atoll.peers.listener import Listener
from atoll.protocol.callbacks import CallbackAddress
from atoll.transfers.channel import DataChannel, Open
from atoll.wire.address import Address

SECONDS = 10.0
FEED = 77


class Channel:
    """Keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, Any, list[bytes]]] = []

    def send(self, session: int, feed: int, contents: list[Any]) -> None:
        content = b"".join(bytes(part) for part in contents)
        message, offsets = decode(content)
        arrays = zip(message.arrays, offsets, strict=True)
        self.sent.append((feed, message, [content[offset : offset + each.nbytes] for each, offset in arrays]))


def answer(callback: Any, *arguments: Any, given_back: list[int] | None = None) -> tuple[Any, list[bytes]]:
    """What a table answers to a call of `callback` with these arrays, None standing for a token."""
    table, channel = CallbackTable(lambda client, payload: None), Channel()
    if callback is not None:
        table._callbacks[5] = callback
    types = tuple(
        ArrayType("", (), 0) if each is None else ArrayType(each.dtype.name, each.shape, each.nbytes)
        for each in arguments
    )
    parts = encode(Call(5, types), [b"" if each is None else each.reshape(-1).view(np.uint8) for each in arguments])
    content = b"".join(bytes(part) for part in parts)
    call, offsets = decode(content)
    table._call(channel, FEED, call, content, offsets, lambda: given_back is not None and given_back.append(1))  # type: ignore[arg-type]
    ((feed, message, results),) = channel.sent
    assert feed == FEED
    return message, results


def test_a_callable_gets_arrays_that_it_cannot_write_to_and_its_results_are_sent():
    given: list[Any] = []

    def callback(token: Any, x: Any) -> Any:
        given.append((token, x.tolist(), x.flags.writeable))
        return token, np.asarray(x[::-1])

    message, results = answer(callback, None, np.arange(3, dtype=np.int16))
    assert given == [(None, [0, 1, 2], False)]
    assert message == Returned((ArrayType("", (), 0), ArrayType("int16", (3,), 6)))
    assert results[1] == np.array([2, 1, 0], np.int16).tobytes()


def test_memory_of_the_channel_is_given_back_when_the_last_array_is_gone():
    given_back: list[int] = []
    kept: list[Any] = []
    answer(lambda x: kept.append(x) or (), np.zeros(1 << 20, np.uint8), given_back=given_back)
    assert not given_back
    kept.clear()
    gc.collect()
    assert given_back == [1]


@pytest.mark.parametrize("result", [7, (object(),)])
def test_a_result_that_is_no_array_is_an_error_of_the_callable(result: Any):
    message, _ = answer(lambda: result)
    assert isinstance(message, Raised)


def test_what_a_callable_raises_is_sent_with_the_users_frames_alone():
    def stumbles() -> None:
        raise SystemExit("mine")

    message, _ = answer(stumbles)
    assert message.text.startswith("Traceback (most recent call last):\n")
    assert "in stumbles" in message.text
    assert message.text.endswith("SystemExit: mine")
    assert "atoll/client/jax_patches/callback_table.py" not in message.text


def test_frames_of_a_directory_whose_name_begins_with_that_of_the_package_are_the_users():
    namespace: dict[str, Any] = {}
    exec(
        compile("def stumbles(): raise ValueError('mine')", f"{os.path.dirname(atoll.__file__)}_addons/a.py", "exec"),
        namespace,
    )

    message, _ = answer(namespace["stumbles"])
    assert "atoll_addons/a.py" in message.text


def test_a_number_that_nobody_has_is_answered():
    message, _ = answer(None)
    assert message.cancelled


def test_a_proxy_on_all_addresses_is_called_back_from_where_it_was_dialled() -> None:
    opened: list[Open] = []

    def serve(channel: DataChannel) -> None:
        opened.append(channel.receive_open())
        channel.send(0, first_call(0), encode(GREETING))
        channel.receive(lambda piece, content, done: done())

    listener = Listener(Address(host="127.0.0.2"), serve, lambda: None)
    where = CallbackAddress(f"0.0.0.0:{listener.address.port}", 11, "secret")
    loaded = SimpleNamespace(fingerprint=msgspec.json.encode(where))
    table = CallbackTable(lambda client, payload: loaded)
    table.proxy = Address(host="127.0.0.2", port=1)
    try:
        table.add(None, [lambda: ()])
        assert [(each.session, each.secret) for each in opened] == [(11, "secret")]
    finally:
        table.clear_cache()
        listener.close()


def test_a_proxy_that_does_not_greet_takes_no_callables() -> None:
    listener = Listener(Address(host="127.0.0.1"), lambda channel: None, lambda: None)
    where = CallbackAddress(str(listener.address), 11, "secret")
    loaded = SimpleNamespace(fingerprint=msgspec.json.encode(where))
    table = CallbackTable(lambda client, payload: loaded)
    try:
        with pytest.raises(ConnectError, match="did not answer on a connection for callbacks"):
            table.add(None, [lambda: ()])
        assert not len(table)
    finally:
        listener.close()
