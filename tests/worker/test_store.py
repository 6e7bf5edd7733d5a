"""The object store, and types by number."""

from __future__ import annotations

import pytest

from atoll.errors import Code, Status, StatusError
from atoll.ir.plan import LocalArray
from atoll.worker.store import Buffer, MemoryHolds, Store, TypeKeys, share

SPEC = LocalArray("float32", (2,), ((2,),), (0,), (0,))
LOST = Status(Code.DATA_LOSS, "gone", {"why": b"x"})


class FakeArray:
    def __init__(self) -> None:
        self.deleted = False

    def delete(self) -> None:
        self.deleted = True

    def is_deleted(self) -> bool:
        return self.deleted


def stored() -> tuple[Store, FakeArray, Buffer]:
    store, array = Store(), FakeArray()
    buffer = Buffer(array, 0, SPEC)
    store.set(7, buffer)
    return store, array, buffer


# ---- memory that several buffers have


def read(buffer: Buffer, change: int = 1, count: int = 1) -> None:
    for shard in buffer.shard_memory(count):
        shard.readers += change


def part_of(whole: Buffer, position: int, count: int = 2) -> Buffer:
    part = Buffer(FakeArray(), 0, SPEC)
    share(part, [(whole, position, count)])
    return part


def test_a_buffer_that_is_neither_read_nor_shared_is_exclusive():
    alone = Buffer(FakeArray(), 0, SPEC)
    assert alone.is_exclusive
    alone.shard_memory(2)
    assert alone.is_exclusive


def test_buffers_that_share_memory_are_read_together():
    whole, other = Buffer(FakeArray(), 0, SPEC), Buffer(FakeArray(), 0, SPEC)
    first, second = part_of(whole, 0), part_of(whole, 1)
    read(whole, count=2)
    assert [any(shard.readers for shard in b.shard_memory(1)) for b in (whole, first, second, other)] == [
        True,
        True,
        True,
        False,
    ]
    read(second)
    read(whole, -1, 2)
    assert [any(shard.readers for shard in b.shard_memory(1)) for b in (whole, first, second)] == [True, False, True]
    read(second, -1)
    assert not any(shard.readers for b in (whole, first, second) for shard in b.shard_memory(1))


def test_readers_from_before_the_memory_was_shared_are_counted():
    whole = Buffer(FakeArray(), 0, SPEC)
    read(whole, 2, 2)
    part = part_of(whole, 0)
    assert [shard.readers for shard in part.shard_memory(1)] == [2]
    read(whole, -2, 2)
    assert [shard.readers for shard in part.shard_memory(1)] == [0]


def test_a_buffer_is_exclusive_again_once_the_others_that_have_its_memory_are_freed():
    whole = Buffer(FakeArray(), 0, SPEC)
    first, second = part_of(whole, 0), part_of(whole, 1)
    assert not any(buffer.is_exclusive for buffer in (whole, first, second))
    del first
    assert not whole.is_exclusive
    del whole
    assert second.is_exclusive, "the two parts have no memory in common"


def test_an_array_and_the_parts_that_it_was_assembled_from_share_memory():
    parts = [Buffer(FakeArray(), 0, SPEC) for _ in range(2)]
    whole = Buffer(FakeArray(), 0, SPEC)
    share(whole, [(part, 0, 1) for part in parts])
    assert not any(buffer.is_exclusive for buffer in (whole, *parts))
    part = parts.pop()
    parts.clear()
    assert not whole.is_exclusive
    del part
    assert whole.is_exclusive


def test_deleting_one_of_two_that_share_memory_leaves_it_to_the_other():
    whole = Buffer(FakeArray(), 0, SPEC)
    part = part_of(whole, 0)
    array = whole.array
    whole.delete()
    assert whole.array.is_deleted()
    assert not array.deleted
    assert part.is_exclusive
    part.delete()
    assert part.array.deleted


# ---- buffers


def test_a_handle_that_was_never_set_is_not_found():
    with pytest.raises(StatusError, match="array 5 is not on this host") as caught:
        Store().get(5)
    assert caught.value.status.code == Code.NOT_FOUND


def test_an_error_in_a_buffers_place_is_raised_as_it_is():
    store = Store()
    store.set(5, LOST)
    with pytest.raises(StatusError) as caught:
        store.get(5)
    assert caught.value.status == LOST


def test_freeing_a_handle_deletes_no_memory():
    store, array, buffer = stored()
    assert store.get(7) is buffer
    store.forget([7])
    assert len(store) == 0
    assert not array.deleted, "others may refer to it still: it goes with the last of them"
    store.forget([7])


def test_deleted_memory_is_freed_at_once():
    store, array, _ = stored()
    store.delete(7)
    assert array.deleted
    assert len(store) == 1, "the handle goes when it is freed"
    store.forget([7])
    assert len(store) == 0


def test_memory_under_a_reader_is_given_up_instead_of_deleted():
    store, array, buffer = stored()
    read(buffer)
    store.delete(7)
    assert not array.deleted
    assert store.get(7).array.is_deleted()
    store.forget([7])
    assert len(store) == 0


def test_errors_and_unknown_handles_are_freed_quietly():
    store = Store()
    store.set(5, LOST)
    store.delete(5)
    store.forget([5])
    store.delete(6)
    assert len(store) == 0


def test_a_calls_completion_has_no_memory_to_delete():
    store, array = Store(), FakeArray()
    store.set(7, Buffer(array, -1, None))
    store.delete(7)
    assert not array.deleted


# ---- types by number


def test_equal_types_have_equal_keys_and_others_have_others():
    keys = TypeKeys()
    types = [
        ("float32", ((2,), (2,)), (0, 1)),
        ("int32", ((2,), (2,)), (0, 1)),
        ("float32", ((2,), (3,)), (0, 1)),
        ("float32", ((2,), (2,)), (1, 0)),  # executables care for the order of devices
        ("float32", ((2,),), (0,)),
        ("float32", ((),), (0,)),
        ("float32", ((2, 3),), (0,), None),
        ("float32", ((2, 3),), (0,), (1, 0)),
    ]
    numbers = [keys.of(*each) for each in types]
    assert len(set(numbers)) == len(types)
    assert [keys.of(*each) for each in types] == numbers


def test_a_type_is_described_in_a_users_words():
    keys = TypeKeys()
    even = keys.of("float32", ((2, 3), (2, 3)), (0, 1))
    uneven = keys.of("int8", ((2,), (3,)), (0, 1))
    assert keys.describe(even) == "float32[2, 3] on local devices [0, 1]"
    assert "(2,), (3,)" in keys.describe(uneven)
    turned = keys.of("int8", ((2, 3),), (0,), (1, 0))
    assert keys.describe(turned) == "int8[2, 3] with dimensions in the order [1, 0] on local devices [0]"
    assert keys.layout(turned) == (1, 0)


def test_several_buffers_are_protected_until_they_are_released_together() -> None:
    holds = MemoryHolds()
    first, second = Buffer(object(), 0, None), Buffer(object(), 0, None)
    release = holds.hold_all([(first, 1), (second, 2), (first, 1)])
    assert [shard.readers for buffer, count in ((first, 1), (second, 2)) for shard in buffer.shard_memory(count)] == [
        2,
        1,
        1,
    ]
    release()
    assert not any(shard.readers for shard in (*first.shard_memory(1), *second.shard_memory(2)))
