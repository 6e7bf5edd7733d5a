from __future__ import annotations

import pytest

from atoll.errors import Code, Status, StatusError
from atoll.ir.plan import LocalArray
from atoll.worker.store import Buffer, Readers, Store, TypeKeys

SPEC = LocalArray("float32", (2,), ((2,),), (0,), (0,))
LOST = Status(Code.DATA_LOSS, "gone", {"why": b"x"})


class FakeArray:
    def __init__(self) -> None:
        self.deleted = False

    def delete(self) -> None:
        self.deleted = True


def stored() -> tuple[Store, FakeArray, Buffer]:
    store, array = Store(), FakeArray()
    buffer = Buffer(array, 0, SPEC)
    store.set(7, buffer)
    return store, array, buffer


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


# ---- readers


def test_buffers_that_share_memory_are_read_together():
    whole, first, second, other = (Buffer(None, 0, SPEC) for _ in range(4))
    first.readers.join(whole.readers)
    whole.readers.add(1)
    second.readers.join(whole.readers)
    assert [b.is_read for b in (whole, first, second, other)] == [True, True, True, False]
    second.readers.add(1)
    whole.readers.add(-1)
    assert first.is_read
    first.readers.add(-1)
    assert not any(b.is_read for b in (whole, first, second))


def test_readers_that_joined_while_they_read_are_all_counted():
    a, b = Readers(), Readers()
    a.add(1)
    b.add(2)
    a.join(b)
    b.join(a)
    a.add(-2)
    assert (a.count, b.count) == (1, 1)


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


def test_freed_memory_is_let_go_and_not_deleted():
    store, array, buffer = stored()
    assert store.get(7) is buffer
    store.free(7, delete=False)
    assert len(store) == 0
    assert not array.deleted, "others may refer to it still: it goes with the last of them"
    store.free(7, delete=False)


def test_deleted_memory_goes_at_once():
    store, array, _ = stored()
    store.free(7, delete=True)
    assert array.deleted
    assert len(store) == 1, "the handle goes when it is freed"
    store.free(7, delete=False)
    assert len(store) == 0


def test_memory_under_a_reader_is_let_go_instead_of_deleted():
    store, array, buffer = stored()
    buffer.readers.add(1)
    store.free(7, delete=True)
    assert not array.deleted
    assert len(store) == 0
    store.free(7, delete=False)


def test_errors_and_unknown_handles_are_freed_without_ado():
    store = Store()
    store.set(5, LOST)
    store.free(5, delete=True)
    store.free(5, delete=False)
    store.free(6, delete=True)
    assert len(store) == 0


def test_a_calls_completion_has_no_memory_to_delete():
    store, array = Store(), FakeArray()
    store.set(7, Buffer(array, -1, None))
    store.free(7, delete=True)
    assert not array.deleted
