"""Tests of requests for slices, including those of hostile clients."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from atoll.cluster.slice_requests import SliceRequest, read_request
from atoll.errors import StatusError


def test_a_slice_request_is_read_as_it_was_written():
    slice_request = SliceRequest(4, (2, 2), "cpu", (1,), (2, 3), 1 << 30)
    assert read_request(msgspec.msgpack.encode(slice_request)) == slice_request


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "missing required field `count`"),
        ({"count": 0}, "`int` >= 1"),
        ({"count": -3}, "`int` >= 1"),
        ({"count": 1 << 40}, "`int` <= 65536"),
        ({"count": 2.0}, "Expected `int`"),
        ({"count": 4, "shape": [2, -2]}, "`int` >= 1"),
        ({"count": 4, "shape": [1 << 60]}, "`int` <= 65536"),
        ({"count": 4, "shape": [1, 1, 2, 2]}, "length <= 3"),
        ({"count": 4, "shape": [3]}, "cannot have the shape"),
        ({"count": 65536, "shape": [65536, 65536, 65536]}, "cannot have the shape"),
        ({"count": 1, "colour": "red"}, "unknown field `colour`"),
        ({"count": 1, "kind": "x" * 101}, "length <= 100"),
        ({"count": 1, "same_island_as": [-1]}, "`int` >= 1"),
        ({"count": 1, "other_island_than": [1] * 257}, "length <= 256"),
        ({"count": 1, "memory_per_device": -1}, "`int` >= 0"),
        ({"count": 1, "memory_per_device": 1 << 63}, "<= 1152921504606846976"),
        ([4], "Expected `object`"),
        (None, "Expected `object`"),
    ],
)
def test_what_is_no_slice_request_is_refused_with_the_reason(fields: Any, text: str):
    with pytest.raises(StatusError, match=text):
        read_request(msgspec.msgpack.encode(fields))


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x81", b"\x91" * 5000, b'{"count": 1}', b"\x81\xa5count\x01\x00"])
def test_bytes_that_are_no_message_are_refused(payload: bytes):
    with pytest.raises(StatusError, match="invalid slice request"):
        read_request(payload)
