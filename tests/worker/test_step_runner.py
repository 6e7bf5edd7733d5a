"""Tests of steps on real devices: an invalid one is an error of its run, and never ends the process."""

from __future__ import annotations

import math
import threading
import weakref
from functools import partial
from typing import Any, get_args

import numpy as np
import pytest

from atoll.errors import Code, Status
from atoll.host_services.calls.client_calls import Calls
from atoll.host_services.host_data import encode_strings
from atoll.ir import plan as p
from atoll.ir.exchange import Exchange, spread
from atoll.ir.types import Replicated, Tiled
from atoll.protocol import messages as m
from atoll.protocol.number_ranges import SCRIPT_FEEDS
from atoll.transfers.host_memory import aligned
from atoll.worker.host_network import LENT_BYTES
from atoll.worker.step_runner import STEP_METHODS
from tests.worker.worker_rig import SECONDS, Behaviours, Rig, add, copying, local, says, spec

BEHAVIOURS = Behaviours("tests.worker.test_step_runner")


def test_a_method_runs_each_type_of_step() -> None:
    assert set(STEP_METHODS) == set(get_args(p.Step)) == set(p.STEP_KINDS)


@BEHAVIOURS.add
def it_runs_a_function_over_four_devices(rig: Rig) -> None:
    name = rig.function(add, spec(), spec(), devices=(0, 1, 2, 3))
    a = rig.put(local(0, 1, 2, 3), *[np.full((4,), i, np.float32) for i in range(4)])
    report, (result,) = rig.call(name, a, rig.ones(0, 1, 2, 3))
    assert isinstance(report, m.Done)
    assert [rig.shard(result, i)[0] for i in range(4)] == [1, 2, 3, 4]


@BEHAVIOURS.add
def it_enqueues_while_a_client_does_not_read_what_is_sent_to_it(rig: Rig) -> None:
    array, client, send_lock = rig.ones(), rig.proxy(), rig.port.to_proxy(rig.session)._socket._send_lock
    rig.port.answers = Calls(rig.port.to_proxy, 0, lambda *_: False, rig.port.receive)
    is_held, reads = threading.Event(), threading.Event()
    released: list[bool] = []

    def send() -> None:
        """Wait like a thread inside `send`."""
        with send_lock:
            is_held.set()
            released.append(reads.wait(SECONDS / 6))

    sending = threading.Thread(target=send)
    sending.start()
    try:
        assert is_held.wait(SECONDS)
        get = p.Get(0, 1, 0, (4,), None, (0,), (((0, 4),),))
        rig.start([get], [array], 1, [SCRIPT_FEEDS.start])
        rig.ones()
        reads.set()
        sending.join()
        assert released == [True], "the executor waited for the client"
        assert rig.next_piece(client).tolist() == [1] * 4
        assert isinstance(rig.reports.get(timeout=SECONDS), m.Done)
    finally:
        reads.set()
        rig.port.answers = None
        client.close()


@BEHAVIOURS.add
def it_reads_much_only_where_it_may_wait(rig: Rig) -> None:
    client, steps = rig.proxy(), rig.executor.plan_executor.reporter._steps
    rig.port.to_proxy(rig.session)
    texts = np.array(["a" * 1_000_000] * 2, np.dtypes.StringDType())
    put = p.Put(0, local(0, shape=(2,), dtype="string"), (p.HostPiece(0, 0, (2,), None, None),))
    _, (strings,) = rig.run([put], feeds=[rig.feed(bytes(encode_strings(texts)))])
    numbers = rig.ones(shape=(2,))

    def is_read(handle: int, strides: tuple[int, ...] | None) -> bool:
        buffer = rig.executor.plan_executor.buffer(rig.session, handle)
        run = m.Run(rig.fresh(), rig.session, 0, (), (), (rig.fresh(),))
        read = steps.client_reads.read(p.Get(0, 1, 0, (2,), strides, (0,), (((0, 2),),)), run, {0: buffer})
        return read.read_nowait()

    assert not is_read(strings, None)
    assert not is_read(numbers, (1_000_000,)), "the contents have gaps"
    assert is_read(numbers, None)
    assert is_read(numbers, (4,))
    client.close()


@BEHAVIOURS.add
def it_runs_on_devices_in_another_order(rig: Rig) -> None:
    name = rig.function(add, spec(), spec(), devices=(2, 0))
    _, (result,) = rig.call(name, rig.ones(2, 0), rig.ones(2, 0))
    assert rig.shard(result, 1).tolist() == [2, 2, 2, 2]


@BEHAVIOURS.add
def it_moves_shards_to_other_devices(rig: Rig) -> None:
    a = rig.put(local(0, 1), np.full((4,), 5, np.float32), np.full((4,), 6, np.float32))
    move = p.Move((0,), (1,), (local(3, 2),), False)
    _, (moved,) = rig.run([move], [a])
    assert [rig.shard(moved, i)[0] for i in range(2)] == [5, 6]
    assert rig.shard(a)[0] == 5


@BEHAVIOURS.add
def it_keeps_shards_of_different_shapes(rig: Rig) -> None:
    uneven = p.LocalArray("float32", (3,), ((1,), (2,)), (0, 1), (0, 1))
    a = rig.put(uneven, np.ones((1,), np.float32), np.full((2,), 2, np.float32))
    target = p.LocalArray("float32", (3,), ((1,), (2,)), (2, 3), (0, 1))
    _, (moved,) = rig.run([p.Move((0,), (1,), (target,), False)], [a])
    assert [rig.shard(moved, i).tolist() for i in range(2)] == [[1], [2, 2]]
    name = rig.function(add, spec(), spec(), devices=(0, 1))
    says(rig.failure(rig.call(name, a, a)), Code.INVALID_ARGUMENT, "argument 0")


@BEHAVIOURS.add
def it_hands_an_array_to_itself_through_the_inbox(rig: Rig) -> None:
    a = rig.put(local(0, 1, shape=(2,)), *np.arange(4, dtype=np.float32).reshape(2, 2))
    feeds = rig.fresh()
    halves, whole = spread((4,), Tiled((2,), (0, 1)), (0, 0)), spread((4,), Replicated(), (0,))
    exchange = Exchange(halves, whole, True, 0)
    rig.run([p.Send(0, (0, 1), exchange)], [a], 0, host_feeds=feeds)
    report, (b,) = rig.run([p.Receive(0, local(2), exchange)], host_feeds=feeds)
    assert isinstance(report, m.Done), report
    assert rig.shard(b).tolist() == [0, 1, 2, 3]
    assert rig.inbox.nbytes == 0


@BEHAVIOURS.add
def it_copies_pieces_whose_memory_their_sender_reuses(rig: Rig) -> None:
    """The memory is aligned, so that a CPU device could use it without a copy."""
    large = LENT_BYTES // 4
    for shape, layout in (((2, 2), None), ((2, 2), (1, 0)), ((), None), ((large,), None)):
        contents = [aligned(4 * math.prod(shape)).view(np.float32).reshape(shape) for _ in range(2)]
        feeds = rig.fresh(), rig.fresh()
        for i, (feed, content) in enumerate(zip(feeds, contents, strict=True)):
            content[...] = np.arange(content.size).reshape(shape) + i
            rig.inbox.put(rig.session, feed, memoryview(content).cast("B"), partial(content.fill, -1))
        expected = [content.tolist() for content in contents]
        exchange = Exchange(*[spread(shape, Replicated(), (0, 0))] * 2, False, 0)
        spec = local(0, 1, shape=shape, layout=layout)
        report, (handle,) = rig.run([p.Receive(0, spec, exchange)], host_feeds=feeds[0])
        assert isinstance(report, m.Done), report
        assert all((content == -1).all() for content in contents)
        found = [rig.shard(handle, i).tolist() for i in range(2)]
        assert found == expected, f"{shape} {layout} {found} {expected}"[:300]


@BEHAVIOURS.add
def it_puts_and_reads_every_stride_the_client_likes(rig: Rig) -> None:
    content = np.arange(6, dtype=np.float32).reshape(2, 3)
    piece = p.HostPiece(0, 0, (3, 2), (-4, 12), ((1, 3), (0, 2)))
    feed = rig.feed(content.tobytes())
    report, (a,) = rig.run([p.Put(0, local(1, shape=(2, 2)), (piece,))], feeds=[feed])
    assert isinstance(report, m.Done), report
    assert rig.shard(a).tolist() == content.T[::-1][1:].tolist()


@BEHAVIOURS.add
def it_names_a_wrong_number_of_arguments(rig: Rig) -> None:
    name = rig.function(add, spec(), spec(), devices=(0, 1))
    a = rig.ones(0, 1)
    for arguments in ((), (a,), (a, a, a)):
        status = rig.failure(rig.call(name, *arguments))
        says(status, Code.INVALID_ARGUMENT, "expected 2 arguments", f"got {len(arguments)}", "train_step")


@BEHAVIOURS.add
def it_names_an_argument_of_another_type(rig: Rig) -> None:
    name = rig.function(add, spec(), spec(), devices=(0, 1))
    right = rig.ones(0, 1)
    wrong = {
        "int32[4]": rig.ones(0, 1, dtype="int32"),
        "float32[5]": rig.ones(0, 1, shape=(5,)),
        "float32[4, 1]": rig.ones(0, 1, shape=(4, 1)),
        "[1, 0]": rig.ones(1, 0),
        "[0, 1, 2]": rig.ones(0, 1, 2),
        "[0]": rig.ones(0),
        "[2, 3]": rig.ones(2, 3),
    }
    for text, handle in wrong.items():
        status = rig.failure(rig.call(name, right, handle))
        says(status, Code.INVALID_ARGUMENT, "argument 1: expected float32[4] on local devices [0, 1]", text)


@BEHAVIOURS.add
def it_names_a_function_that_is_not_there(rig: Rig) -> None:
    says(rig.failure(rig.call("no such", rig.ones())), Code.NOT_FOUND, "no such", "train_step")


@BEHAVIOURS.add
def it_names_an_array_that_is_not_there(rig: Rig) -> None:
    name = rig.function(add, spec(), spec())
    says(rig.failure(rig.call(name, rig.ones(), 999_999)), Code.NOT_FOUND, "array 999999 is not on this host")


@BEHAVIOURS.add
def it_refuses_a_calls_completion_as_an_array(rig: Rig) -> None:
    name = rig.function(add, spec(), spec())
    step = p.Execute(name, (0, 1), 2, (), (), True)
    report, (_, completion) = rig.run([step], [rig.ones(), rig.ones()], results=2)
    assert isinstance(report, m.Done), report
    says(rig.failure(rig.call(name, completion, rig.ones())), Code.INVALID_ARGUMENT, "no array")
    says(rig.failure(rig.run([p.Move((0,), (1,), (local(1),), False)], [completion])), Code.INVALID_ARGUMENT)


@BEHAVIOURS.add
def it_refuses_to_move_an_array_as_one_of_another_type(rig: Rig) -> None:
    large = rig.put(local(0, shape=(1000,)), np.ones((1000,), np.float32))
    for other in (local(1), local(1, shape=(1000,), dtype="int32"), local(0, 1, shape=(1000,))):
        outcome = rig.run([p.Move((0,), (1,), (other,), False)], [large])
        says(rig.failure(outcome), Code.INVALID_ARGUMENT, "float32[1000] on local devices [0] cannot be moved to")


@BEHAVIOURS.add
def it_refuses_a_shard_as_one_of_another_type_or_device(rig: Rig) -> None:
    pair = rig.ones(0, 1)
    for other in (local(0, shape=(2,)), local(0, dtype="int32"), local(1)):
        take = p.Select((0,), 1, other, (p.Take(0, 0),), False)
        outcome = rig.run([take], [pair])
        says(
            rig.failure(outcome), Code.INVALID_ARGUMENT, "a shard of float32[4] on local device 0 cannot be a shard of"
        )


@BEHAVIOURS.add
def it_assembles_tokens_as_an_empty_array(rig: Rig) -> None:
    tokens = []
    for device in (0, 1):
        name, status = rig.compile(token_module(), devices=(device,))
        assert status.ok, status
        tokens.append(rig.call(name)[1][0])
    assembled = p.Select((0, 1), 2, local(0, 1, shape=(0,), dtype="token"), (p.Take(0, 0), p.Take(1, 0)), False)
    report, _ = rig.run([assembled], tokens)
    assert isinstance(report, m.Done)
    large = p.Select((0,), 1, local(0, shape=(4,), dtype="token"), (p.Take(0, 0),), False)
    says(rig.failure(rig.run([large], tokens[:1])), Code.INVALID_ARGUMENT, "a shard of token[]")


def token_module() -> Any:
    """A module whose function main takes nothing and returns a token."""
    from jax._src.interpreters import mlir
    from jax._src.lib.mlir import ir

    with mlir.make_ir_context():
        return ir.Module.parse("""module @effect {
          func.func public @main() -> !stablehlo.token {
            %t = stablehlo.create_token : !stablehlo.token
            return %t : !stablehlo.token
          }
        }""")


@BEHAVIOURS.add
def it_refuses_contents_of_the_wrong_size(rig: Rig) -> None:
    piece = p.HostPiece(0, 0, (4,), None, None)
    for size in (0, 15, 17):
        outcome = rig.run([p.Put(0, local(0), (piece,))], feeds=[rig.feed(bytes(size))])
        says(rig.failure(outcome), Code.INVALID_ARGUMENT, f"for float32[4] must have 16 bytes, got {size}")
    small = p.HostPiece(0, 0, (2,), None, None)
    outcome = rig.run([p.Put(0, local(0), (small,))], feeds=[rig.feed(bytes(8))])
    says(rig.failure(outcome), Code.INVALID_ARGUMENT, "[2]", "[4]")


@BEHAVIOURS.add
def it_makes_arrays_of_contents_that_the_run_carries(rig: Rig) -> None:
    content = np.arange(4, dtype=np.float32)
    pieces = p.HostPiece(0, 0, (4,), None, ((0, 2),)), p.HostPiece(1, 0, (4,), None, ((2, 4),))
    feeds = [rig.fresh()]
    report, (a,) = rig.run([p.Put(0, local(0, 1, shape=(2,)), pieces)], feeds=feeds, contents=content.tobytes())
    assert isinstance(report, m.Done), report
    assert (rig.shard(a).tolist(), rig.shard(a, 1).tolist()) == ([0, 1], [2, 3])
    put_all = p.PutAll((0, 1), (local(0, shape=(3,)), local(0, shape=())), 0)
    report, (b, c) = rig.run([put_all], results=2, feeds=feeds, contents=content.tobytes())
    assert isinstance(report, m.Done), report
    assert (rig.shard(b).tolist(), rig.shard(c).tolist()) == ([0, 1, 2], 3)
    outcome = rig.run([p.Put(0, local(0), (p.HostPiece(0, 0, (4,), None, None),))], feeds=feeds, contents=b"")
    says(rig.failure(outcome), Code.INVALID_ARGUMENT, "must have 16 bytes, got 0")


@BEHAVIOURS.add
def it_gives_shared_memory_back_also_where_its_contents_are_wrong(rig: Rig) -> None:
    given_back = threading.Event()
    feed = rig.fresh()
    rig.inbox.put(rig.session, feed, memoryview(bytes(7)), given_back.set)
    rig.failure(rig.run([p.Put(0, local(0), (p.HostPiece(0, 0, (4,), None, None),))], feeds=[feed]))
    assert given_back.is_set()
    given_back.clear()
    rig.inbox.put(rig.session, feed, memoryview(bytes(7)), given_back.set)
    rig.failure(rig.run([p.Receive(0, local(0), copying(1))], host_feeds=feed))
    assert given_back.is_set()


@BEHAVIOURS.add
def it_leaves_no_feed_behind_where_another_one_of_the_same_step_has_failed(rig: Rig) -> None:
    put = p.Put(0, local(0, 1), tuple(p.HostPiece(i, i, (4,), None, None) for i in range(2)))
    receive = p.Receive(0, local(0, 1), copying(2))
    for step in (put, receive):
        failed, arrived = rig.fresh(), rig.feed(bytes(16))
        assert arrived == failed + 1
        rig.inbox.put_failed(rig.session, failed, Status(Code.DATA_LOSS, "it was cut off"))
        says(rig.failure(rig.run([step], feeds=[failed, arrived], host_feeds=failed)), Code.DATA_LOSS, "it was cut off")
        assert rig.inbox.nbytes == 0


@BEHAVIOURS.add
def it_names_a_feed_that_is_not_there(rig: Rig) -> None:
    outcome = rig.run([p.Put(0, local(0), (p.HostPiece(0, 0, (4,), None, None),))], feeds=[999_999])
    says(rig.failure(outcome), Code.INTERNAL, "feed 999999", "train_step")


@BEHAVIOURS.add
def it_refuses_a_layout_that_the_function_does_not_expect(rig: Rig) -> None:
    name = rig.function(lambda x: x * 2, spec((2, 3)))
    content = np.arange(6, dtype=np.float32).reshape(2, 3)
    a = rig.put(local(0, shape=(2, 3), layout=(1, 0)), content)
    assert rig.shard(a).tolist() == content.tolist()
    says(rig.failure(rig.call(name, a)), Code.INVALID_ARGUMENT, "argument 0", "order [1, 0]")
    _, (moved,) = rig.run([p.Move((0,), (1,), (local(1, shape=(2, 3)),), False)], [a])
    _, (again,) = rig.run([p.Select((0,), 1, local(1, shape=(2, 3)), (p.Take(0, 0),), False)], [moved])
    there = rig.function(lambda x: x * 2, spec((2, 3)), devices=(1,))
    for handle in (moved, again):
        assert rig.shard(handle).tolist() == content.tolist()
        says(rig.failure(rig.call(there, handle)), Code.INVALID_ARGUMENT, "order [1, 0]")


@BEHAVIOURS.add
def it_survives_a_memory_that_the_function_does_not_expect(rig: Rig) -> None:
    for devices in ((0,), (0, 1)):
        name = rig.function(add, spec(), spec(), devices=devices)
        a = rig.put(local(*devices, memory_kind="pinned_host"), *[np.ones((4,), np.float32)] * len(devices))
        report, handles = rig.call(name, a, rig.ones(*devices))
        if isinstance(report, m.Done):
            assert rig.shard(handles[0]).tolist() == [2, 2, 2, 2]


@BEHAVIOURS.add
def it_goes_on_after_a_program_of_garbage(rig: Rig) -> None:
    feed = rig.feed(b"\x00 no program")
    rig.functions.compile(m.Compile("garbage", rig.session, feed, (((0, 0),),)))
    compiled = rig.reports.get(timeout=SECONDS)
    assert not compiled.status.ok
    assert rig.inbox.nbytes == 0


@BEHAVIOURS.add
def it_frees_the_memory_of_a_session_that_has_ended(rig: Rig) -> None:
    content = aligned(1 << 20)
    content[:] = 0
    is_freed = threading.Event()
    weakref.finalize(content.base, is_freed.set)
    feed = rig.fresh()
    rig.inbox.put(rig.session, feed, content)
    del content
    shape = (1 << 18,)
    report, _ = rig.run([p.Put(0, local(0, shape=shape), (p.HostPiece(0, 0, shape, None, None),))], feeds=[feed])
    assert isinstance(report, m.Done), report
    assert not is_freed.is_set(), "the array has this very memory"
    rig.executor.submit(m.CloseStore(rig.session))
    assert is_freed.wait(SECONDS), "nothing else came, and the memory is still there"


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    return BEHAVIOURS.outcomes()


@pytest.mark.parametrize("name", BEHAVIOURS.names)
def test_the_step_runner(name: str, outcomes: dict[str, str]) -> None:
    assert outcomes.get(name, outcomes[""]) == "ok"


if __name__ == "__main__":
    BEHAVIOURS.play()
