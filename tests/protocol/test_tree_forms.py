"""Tests of descriptions of packs, which a publisher of another tenant may send."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from atoll.protocol.tree_forms import MAX_PACKED, Pack, TreeForm

PACK = Pack(paths=("a", "b"), count=3, shape=(4, 6), cuts=(0, 2), mesh=(5, 2, 3), axes=(1, 2))


def test_a_pack_has_the_shards_of_all_its_arrays() -> None:
    assert PACK.parts == (2, 3)
    assert PACK.shard_shape == (4, 1)
    PACK.check((3 * 4 * 6,))


@pytest.mark.parametrize(
    "change",
    [
        {"axes": (1, 3)},
        {"axes": (1, 1)},
        {"axes": (1,)},
        {"cuts": (1, 2)},
        {"cuts": (2,)},
        {"cuts": (1, 1), "shape": (4, 7)},
        {"shape": (4, 6, 1)},
        {"shape": (4, 12)},
        {"shape": ()},
        {"count": 4},
        {"count": 1},
        {"mesh": (5, 2, 1 << 31)},
    ],
)
def test_a_pack_that_an_array_cannot_be_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"pack|arrays"):
        replace(PACK, **change).check((72,))


@pytest.mark.parametrize(
    "change",
    [
        {"paths": ()},
        {"paths": ("a",) * (MAX_PACKED + 1)},
        {"paths": (1,)},
        {"count": 0},
        {"count": 1 << 40},
        {"shape": (-1, 6)},
        {"shape": (1 << 40,)},
        {"shape": (1,) * 65},
        {"cuts": (-1, 3)},
        {"mesh": (0, 2, 3)},
        {"axes": (-1, 2)},
    ],
)
def test_a_malformed_pack_is_not_decoded(change: dict[str, Any]) -> None:
    content = msgspec.msgpack.encode(TreeForm(None, {0: replace(PACK, **change)}))
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(content, type=TreeForm)
