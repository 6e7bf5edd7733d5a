"""Tests of copies of arrays that a script may change after `jax.device_put`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from atoll.client.jax_internals import CopySemantics
from atoll.client.jax_patches import large_writes, tree_writes
from atoll.client.jax_patches.large_writes import MIN_BYTES

ON_ATOLL: Any = SimpleNamespace(_device_assignment=(SimpleNamespace(client="atoll"),))
ELSEWHERE: Any = SimpleNamespace(_device_assignment=(SimpleNamespace(client="stock"),))
LARGE = np.zeros(MIN_BYTES, np.uint8)
SMALL = np.zeros(8, np.uint8)


@pytest.fixture(params=[True, False], ids=["direct", "by JAX"])
def put(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the array whose memory is the source of the transfer, by a direct write or by JAX itself."""
    monkeypatch.setattr(large_writes, "is_atoll", lambda client: client == "atoll")
    monkeypatch.setattr(tree_writes, "is_atoll", lambda client: client == "atoll")
    monkeypatch.setattr(tree_writes, "made_of", lambda x, sharding: x if request.param else None)
    put = tree_writes._together(lambda xs, *others: xs)
    return lambda x, sharding, copies: put([x], [sharding], [None], [copies])[0]


@pytest.mark.parametrize(
    "x", [LARGE, SMALL, np.zeros((2, MIN_BYTES), np.uint8)[:, ::2]], ids=["contiguous", "small", "strided"]
)
def test_contents_that_must_not_alias_are_sent_from_a_copy(put: Any, x: Any) -> None:
    sent = put(x, ON_ATOLL, CopySemantics.ALWAYS_COPY)
    assert not np.shares_memory(sent, x)
    np.testing.assert_array_equal(sent, x)


@pytest.mark.parametrize(
    ("x", "sharding", "copies"),
    [
        (LARGE, ON_ATOLL, CopySemantics.REUSE_INPUT),
        (LARGE, ELSEWHERE, CopySemantics.ALWAYS_COPY),
    ],
    ids=["reused", "another client"],
)
def test_other_contents_are_not_copied(put: Any, x: Any, sharding: Any, copies: Any) -> None:
    assert put(x, sharding, copies) is x
