"""Tests of the checks of single nodes in a client's program."""

from __future__ import annotations

import pytest

from atoll.errors import StatusError
from atoll.ir.program import Call
from atoll.ir.validation import DefinitionCheck


@pytest.mark.parametrize("stream", [None, 0, -754411527779174620, -(1 << 63), (1 << 64) - 1])
def test_a_stream_is_any_number_that_jaxlib_draws(stream):
    DefinitionCheck("f", 0, {0: 0}).node(Call(1, (), (), (0,), stream=stream))


@pytest.mark.parametrize("stream", [-(1 << 63) - 1, 1 << 64])
def test_a_stream_has_64_bits(stream):
    with pytest.raises(StatusError, match="stream"):
        DefinitionCheck("f", 0, {0: 0}).node(Call(1, (), (), (0,), stream=stream))
