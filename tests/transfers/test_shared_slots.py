"""Slots: contents that are put under a number are taken once, and nobody can take the memory away."""

from __future__ import annotations

import os

import pytest

from atoll.errors import FrameError
from atoll.transfers.shared_slots import SLOT_BYTES, SLOTS, SharedSlots, SlotWriter

FIRST = 1 << 46


def test_contents_are_taken_once() -> None:
    slots = SharedSlots()
    writer = SlotWriter(slots.descriptor)
    writer[FIRST] = b"one"
    writer[FIRST + 1] = bytes(SLOT_BYTES)
    assert slots.take(FIRST + 1, SLOT_BYTES) == bytes(SLOT_BYTES)
    assert slots.take(FIRST, 3) == b"one"
    assert slots.take(FIRST, 3) is None


def test_contents_that_were_not_put_are_not_taken() -> None:
    slots = SharedSlots()
    SlotWriter(slots.descriptor)[FIRST] = b"one"
    assert [slots.take(number, nbytes) for number, nbytes in ((0, 3), (FIRST + 1, 3), (FIRST, SLOT_BYTES + 1))] == [
        None,
        None,
        None,
    ]


def test_slots_are_used_again() -> None:
    slots = SharedSlots()
    writer = SlotWriter(slots.descriptor)
    for number in range(FIRST, FIRST + 3 * SLOTS):
        writer[number] = number.to_bytes(8)
        assert slots.take(number, 8) == number.to_bytes(8)


def test_without_a_free_slot_nothing_is_put_until_one_is_taken() -> None:
    slots = SharedSlots()
    writer = SlotWriter(slots.descriptor)
    for number in range(FIRST, FIRST + SLOTS):
        assert writer.has_space()
        writer[number] = b"x"
    assert not writer.has_space()
    with pytest.raises(ValueError, match="no slot"):
        writer[FIRST + SLOTS] = b"y"
    assert slots.take(FIRST + 7, 1) == b"x"
    writer[FIRST + SLOTS] = b"y"
    assert slots.take(FIRST + SLOTS, 1) == b"y"


def test_contents_are_removed() -> None:
    slots = SharedSlots()
    writer = SlotWriter(slots.descriptor)
    writer[FIRST] = b"one"
    writer.pop(FIRST, None)
    writer.pop(FIRST + 1, None)
    assert slots.take(FIRST, 3) is None


def test_the_writer_cannot_shorten_the_memory() -> None:
    slots = SharedSlots()
    with pytest.raises(PermissionError):
        os.ftruncate(slots.descriptor, 0)


def test_the_reader_closes_its_memory() -> None:
    slots = SharedSlots()
    descriptor = os.dup(slots.descriptor)
    writer, number = SlotWriter(descriptor), slots.descriptor
    del slots
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)
    writer[FIRST] = b"one"  # to its own mapping, which stays
    os.close(descriptor)


def test_other_memory_is_refused() -> None:
    other = os.memfd_create("other")
    try:
        with pytest.raises(FrameError, match="they have 0 bytes"):
            SlotWriter(other)
    finally:
        os.close(other)
