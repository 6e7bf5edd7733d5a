"""Tests of the checks of single nodes in a client's program."""

from __future__ import annotations

import pytest

from atoll.errors import StatusError
from atoll.ir.program import Call, DeviceToHost
from atoll.ir.types import ArraySpec, Sharding
from atoll.ir.validation import DefinitionCheck


@pytest.mark.parametrize("stream", [None, 0, -754411527779174620, -(1 << 63), (1 << 64) - 1])
def test_a_stream_is_any_number_that_jaxlib_draws(stream):
    DefinitionCheck("f", 0, {0: 0}).node(Call(1, (), (), (0,), stream=stream))


@pytest.mark.parametrize("stream", [-(1 << 63) - 1, 1 << 64])
def test_a_stream_has_64_bits(stream):
    with pytest.raises(StatusError, match="stream"):
        DefinitionCheck("f", 0, {0: 0}).node(Call(1, (), (), (0,), stream=stream))


@pytest.mark.parametrize(
    ("node", "error"),
    [
        (DeviceToHost((0, 0), 0, None, (), (1,)), "positions has 1 entries for 2 inputs"),
        (DeviceToHost((0,), 0, (4,), (), (1,)), "strides is set for 1 arrays or shards: expected one whole array"),
        (DeviceToHost((0, 0), 0, (4,)), "strides is set for 2 arrays or shards"),
    ],
)
def test_shards_are_read_one_after_the_other(node: DeviceToHost, error: str) -> None:
    check = DefinitionCheck("f", 1, {0: 0})
    check.arguments([ArraySpec("int8", (4,), Sharding((0,)))])
    with pytest.raises(StatusError, match=error):
        check.node(node)
