"""Tests that encoded fields are those of protobuf's own encoder."""

from __future__ import annotations

import pytest
from google.protobuf.wrappers_pb2 import BytesValue, UInt64Value

from atoll.protocol.protobuf_fields import field, header


@pytest.mark.parametrize("value", [1, 127, 128, 300, (1 << 64) - 1])
def test_a_field_with_a_number(value: int) -> None:
    assert field(1, value) == UInt64Value(value=value).SerializeToString()


@pytest.mark.parametrize("nbytes", [1, 127, 128, 20_000])
def test_a_field_with_bytes(nbytes: int) -> None:
    content = b"x" * nbytes
    expected = BytesValue(value=content).SerializeToString()
    assert field(1, content) == header(1, nbytes) + content == expected
