"""The ledger of device memory: blocks that are taken and freed together."""

from __future__ import annotations

import pytest

from atoll.state.memory_ledger import BlockSpan, MemoryLedger, divide, undivided
from atoll.state.usage import Account, Meter

PIECES = tuple((((host, 0), 8), ((host, 1), 8)) for host in range(3))
WHOLE = tuple(each for piece in PIECES for each in piece)
SPAN = BlockSpan((0, 1, 2), PIECES)


@pytest.mark.parametrize("parts", [(3,), (1, 2), (2, 1), (1, 1, 1)])
def test_pieces_are_freed_one_by_one_or_together(parts):
    ledger, owner, account = MemoryLedger(), MemoryLedger(), Account()
    whole = ledger.take_joint(WHOLE, SPAN, owner, account, users=2)
    blocks = divide(whole)
    assert undivided([whole]) == list(blocks) == list(divide(whole)), "it is divided once"
    assert [block.requirement for block in blocks] == list(PIECES)
    assert ledger.release(blocks) == [], "they have another user"
    assert ledger.total == owner.total == 48
    left = list(blocks)
    for count in parts:
        some, left = left[:count], left[count:]
        assert ledger.release(some) == some
        used = {device: 8 for block in left for device, _ in block.requirement}
        for each in (ledger, owner):
            assert each.total == 16 * len(left)
            assert {device: nbytes for device, nbytes in each.used.items() if nbytes} == used


def test_memory_of_a_joint_gang_that_is_not_divided_is_freed_as_one_block():
    ledger, owner, account = MemoryLedger(), MemoryLedger(), Account()
    block = ledger.take_joint(WHOLE, SPAN, owner, account)
    assert undivided([block]) == [block]
    assert block.first_hosts == [0, 1, 2]
    assert ledger.total == owner.total == account.nbytes == 48
    assert ledger.release([block]) == [block]
    assert ledger.total == owner.total == account.nbytes == 0


def test_a_piece_that_another_tenant_was_charged_for_is_freed_there():
    ledger, owner, other = MemoryLedger(), MemoryLedger(), MemoryLedger()
    blocks = divide(ledger.take_joint(WHOLE, SPAN, owner))
    ledger.hand_over(blocks[1], other)
    assert (owner.total, other.total) == (32, 16)
    ledger.release(blocks)
    assert (ledger.total, owner.total, other.total) == (0, 0, 0)


def test_memory_that_is_taken_at_once_is_counted_as_if_it_was_taken_one_by_one():
    requirements = [*[(((0, 0), 8), ((0, 1), 24))] * 3, (((0, 0), 8),), *[(((0, 0), 8), ((0, 1), 24))] * 2]
    states = []
    for at_once in (False, True):
        ledger, owner, meter = MemoryLedger(), MemoryLedger(), Meter()
        account, meter.now = Account(meter), 0.1
        ledger.declare((0, 1), 130)
        if at_once:
            blocks = ledger.take_all(requirements, owner, account, users=2)
        else:
            blocks = [ledger.take(each, owner, account, users=2) for each in requirements]
        meter.now = 0.7
        usage = account.take(meter.now)
        assert all(block.owner is owner and block.account is account for block in blocks)
        found = [(block.requirement, block.users) for block in blocks]
        counts = [(each.total, each.used, each.peak, each.is_tight, each.free((0, 1))) for each in (ledger, owner)]
        states.append((found, counts, account.nbytes, usage))
    assert states[0] == states[1]
    assert states[0][1][0][1] == {(0, 0): 48, (0, 1): 120}


def test_memory_that_is_released_at_once_is_counted_as_if_it_was_released_one_by_one() -> None:
    requirements = [*[(((0, 0), 8), ((0, 1), 24))] * 3, (((0, 0), 8),), *[(((0, 0), 8), ((0, 1), 24))] * 2]
    states = []
    for at_once in (False, True):
        ledger, owners, meter = MemoryLedger(), (MemoryLedger(), MemoryLedger()), Meter()
        accounts = Account(meter), Account(meter)
        ledger.declare((0, 1), 130)
        blocks = [
            ledger.take(each, owners[i % 2], accounts[i // 2 % 2], users=1 + i % 2)
            for i, each in enumerate(2 * requirements)
        ]
        meter.now = 0.1
        for some in (blocks, blocks[1::2]):  # others use every second block
            if at_once:
                ledger.release_each(some)
            else:
                for block in some:
                    ledger.release([block])
            used = [(each.total, each.used, each.peak) for each in (ledger, *owners)]
            states.append((at_once, used, [each.take(0.3) for each in accounts]))
        ledger.take(requirements[0])
        states.append((at_once, ledger.is_tight))
    half = len(states) // 2
    assert [each[1:] for each in states[:half]] == [each[1:] for each in states[half:]]
    assert not states[1][1][0][0], "all memory is free"
