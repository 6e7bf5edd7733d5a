"""Accounts: charges of device time, memory and bytes, and the usage that is taken once a second."""

from __future__ import annotations

import gc

from hypothesis import given
from hypothesis import strategies as st

from atoll.cluster.usage.usage_records import Usage
from atoll.ir import plan as p
from atoll.ir.exchange import Exchange, spread
from atoll.ir.program import Program
from atoll.ir.types import ArraySpec, Replicated, Sharding, Tiled
from atoll.state.memory_ledger import MemoryLedger
from atoll.state.program_registration import bytes_moved
from atoll.state.usage import Account, Meter


def account(meter: Meter, session: int = 1, program: str = "step") -> Account:
    return meter.account("ana", session, "train.py", program)


def test_usage_is_taken_once():
    meter = Meter()
    meter.now = 10.0
    assert meter.take(4) == (0, ()), "usage counts from the first call on"
    mine = account(meter)
    mine.device_ns += 5
    mine.bytes_moved += 7
    mine.compile_seconds += 0.5
    mine.wake()
    meter.now = 11.0
    assert meter.take(4) == (4_000_000_000, (Usage("ana", 1, "train.py", "step", 5, 0.0, 7, 0.5),))
    meter.now = 11.5
    assert meter.take(4) == (2_000_000_000, ())
    assert mine.is_idle


def test_memory_is_charged_by_the_time_for_which_it_is_held():
    meter, ledger = Meter(), MemoryLedger()
    mine = account(meter)
    meter.now = 10.25
    block = ledger.take((((0, 0), 1000), ((0, 1), 1000)), None, mine)
    meter.now = 11.0
    ((usage,), _) = meter.take(2)[1], None
    assert usage.byte_seconds == 0.75 * 2000
    meter.now = 12.0
    ((usage,), _) = meter.take(2)[1], None
    assert usage.byte_seconds == 2000
    block.users += 1
    meter.now = 12.25
    ledger.release([block])
    meter.now = 12.5
    ledger.release([block])
    meter.now = 13.0
    ((usage,), _) = meter.take(2)[1], None
    assert usage.byte_seconds == 0.5 * 2000, "memory counts until its last user has released it"
    meter.now = 14.0
    assert meter.take(2)[1] == ()


@given(st.lists(st.tuples(st.integers(1, 1 << 40), st.floats(0, 100), st.floats(0, 100)), max_size=20))
def test_byte_seconds_add_up_however_often_they_are_taken(blocks: list[tuple[int, float, float]]):
    meter, ledger = Meter(), MemoryLedger()
    mine = account(meter)
    moments = []
    for number, (_, start, length) in enumerate(blocks):
        moments += [(start, 0, number), (start + length, 1, number)]
    moments += [(float(second), 2, 0) for second in range(201)]
    held, found = {}, 0.0
    for when, what, number in sorted(moments):
        meter.now = when
        if what == 0:
            held[number] = ledger.take((((0, 0), blocks[number][0]),), None, mine)
        elif what == 1:
            ledger.release([held.pop(number)])
        else:
            found += sum(usage.byte_seconds for usage in meter.take(1)[1])
    wanted = sum(nbytes * length for nbytes, _, length in blocks)
    assert abs(found - wanted) <= 1e-6 * wanted + len(blocks) + 201


def test_programs_of_one_name_share_an_account_and_sessions_do_not():
    meter = Meter()
    mine = account(meter)
    assert account(meter) is mine
    assert account(meter, session=2) is not mine
    assert account(meter, program="other") is not mine


def test_an_account_without_references_is_charged_and_forgotten():
    meter = Meter()
    mine = account(meter)
    mine.device_ns += 5
    mine.wake()
    meter.session_closed(1)
    del mine
    gc.collect()
    meter.now = 1.0
    assert [usage.device_ns for usage in meter.take(1)[1]] == [5]
    meter.now = 2.0
    assert meter.take(1)[1] == ()
    assert not meter._active


SPEC = ArraySpec("float32", (8,), Sharding((0, 1), Tiled((2,), (0, 1))))
LOCAL = p.LocalArray("float32", (8,), ((4,), (4,)), (0, 1), (0, 1))
PROGRAM = Program("f", (SPEC,), (), ())


EXCHANGE = Exchange(spread((8,), Replicated(), (1,)), spread((8,), Tiled((2,), (0, 1)), (0, 0)), True, 0)


def test_moved_bytes_are_those_that_a_step_writes():
    half = ((0, 4),)
    steps = {
        p.Put(1, LOCAL, ()): 32,
        p.PutAll((1, 2), (LOCAL, LOCAL), 0): 64,
        p.Move((0,), (1,), (LOCAL, LOCAL), False): 64,
        p.Send(0, (0, 1), EXCHANGE): 0,
        p.Receive(1, LOCAL, EXCHANGE): 32,
        p.Get(0, 1, 5, (8,), None, (0,), (half,)): 16,
        p.GetAll((0, 0), 1, 5, (0, 1)): 32,
        p.Select((0,), 1, LOCAL, (p.Take(0, 0),), False): 0,
        p.Execute("f", (0,), 1, (), (), False): 0,
    }
    for step, nbytes in steps.items():
        assert bytes_moved(step, PROGRAM.arguments) == nbytes, step
