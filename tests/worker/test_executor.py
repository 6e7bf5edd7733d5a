"""The executor with real devices: what is wrong with a run is its error, and never the end of the process.

XLA ends a process over a bad argument, and an executor's threads last as long as theirs; so all this runs in one child,
which plays each behaviour below (a function `it_...`) in turn and says how that went.
"""

from __future__ import annotations

import json
import os
import queue
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from atoll.errors import Code, Status
from atoll.ir import plan as p
from atoll.protocol import messages as m
from atoll.transfers.channel import DataChannel
from atoll.transfers.engine import Piece
from atoll.wire.address import Address

SECONDS = 10.0
BEHAVIOURS: dict[str, Callable[[Rig], None]] = {}
LARGE = 100_000  # elements: too many to be read at once on the executor's own thread


def behaviour(play: Callable[[Rig], None]) -> Callable[[Rig], None]:
    BEHAVIOURS[play.__name__] = play
    return play


def local(*devices: int, shape: tuple[int, ...] = (4,), dtype: str = "float32", **options: Any) -> p.LocalArray:
    """One shard of `shape` on each device."""
    return p.LocalArray(dtype, shape, (shape,) * len(devices), devices, tuple(range(len(devices))), **options)


class Rig:
    """An executor of its own session, and what it reports."""

    def __init__(self, directory: Path) -> None:
        from atoll.transfers.data_port import DataPort
        from atoll.transfers.inbox import Inbox
        from atoll.worker.executor import Executor
        from atoll.worker.functions import Functions
        from atoll.worker.steps import Steps
        from atoll.worker.store import TypeKeys
        from atoll.worker.xla.backend import Backend

        self.reports: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.backend = Backend()
        keys = TypeKeys()
        self.inbox = Inbox(lambda session, feed: None)
        self.port = DataPort(Address(path=str(directory / "data.sock")), self.inbox)
        self.functions = Functions(self.backend, self.inbox, keys, self.report)
        steps = Steps(self.backend, self.functions, self.port, keys, 0)
        self.executor = Executor(steps, self.inbox, self.report)
        self.session = 0
        self._next = 0

    def report(self, *messages: Any) -> None:
        for message in messages:
            self.reports.put(message)

    def fresh(self) -> int:
        self._next += 1
        return self._next

    def open_session(self) -> None:
        """All that follows happens in a session of its own."""
        if self.session:
            self.executor.submit(m.CloseStore(self.session))
            self.port.close_session(self.session)
        self.session = self.fresh()
        self.executor.submit(m.OpenStore(self.session, "secret"))
        self.port.open_session(self.session, "secret")

    # ---- functions

    def function(self, call: Any, *arguments: Any, devices: tuple[int, ...] = (0,), donate: Any = ()) -> str:
        """Compiles `call` for shards like `arguments` on these devices; its name."""
        import jax
        from jax._src.lib import _jax
        from jax._src.lib import xla_client as xc
        from jax.sharding import Mesh, NamedSharding, PartitionSpec
        from jaxlib.mlir.dialects import stablehlo

        mesh = Mesh(np.array([self.backend.devices[i] for i in devices]), ("x",))
        sharding = NamedSharding(mesh, PartitionSpec("x"))
        shapes = [
            jax.ShapeDtypeStruct((len(devices) * a.shape[0], *a.shape[1:]), a.dtype, sharding=sharding)
            for a in arguments
        ]
        lowered = jax.jit(call, donate_argnums=donate, out_shardings=sharding).lower(*shapes)
        program = _jax.mlir.serialize_portable_artifact(lowered.compiler_ir(), stablehlo.get_current_version())
        options = xc.CompileOptions()
        options.num_partitions = len(devices)
        options.executable_build_options.num_partitions = len(devices)
        options.executable_build_options.use_spmd_partitioning = True
        options.executable_build_options.use_shardy_partitioner = True
        source = m.FunctionSource(program, options.SerializeAsString())
        feed = self.feed(msgspec.msgpack.encode(source))
        name = f"function {feed}"
        assignment = (tuple((0, ordinal) for ordinal in devices),)
        self.functions.compile(m.Compile(name, self.session, feed, assignment))
        compiled = self.reports.get(timeout=SECONDS)
        assert compiled.status.ok, compiled.status
        return name

    # ---- runs

    def feed(self, content: Any) -> int:
        number = self.fresh()
        self.inbox.put(self.session, number, np.frombuffer(content, np.uint8).copy() if len(content) else b"")
        return number

    def run(self, steps: Any, arguments: Any = (), results: int = 1, feeds: Any = (), **options: Any) -> Any:
        """Runs a plan of values: arguments first, then results. Its report, and the results' handles."""
        outcome = self.start(steps, arguments, results, feeds, **options)
        return self.reports.get(timeout=SECONDS), outcome

    def start(
        self, steps: Any, arguments: Any = (), results: int = 1, feeds: Any = (), name: str = "train_step"
    ) -> tuple[int, ...]:
        plan, sequence = self.fresh(), self.fresh()
        count = len(arguments)
        values = tuple(range(count, count + results))
        segment = p.Segment(0, tuple(steps), values, awaited=tuple(range(len(feeds))))
        body = p.Plan(name, tuple(range(count)), (segment,), values)
        handles = tuple(self.fresh() for _ in range(results))
        self.executor.submit(m.RegisterPlan(plan, body))
        self.executor.submit(m.Run(sequence, self.session, plan, tuple(arguments), handles, tuple(feeds)))
        self.executor.submit(m.DropPlan(plan))
        return handles

    def put(self, spec: p.LocalArray, *shards: np.ndarray) -> int:
        feeds = [self.feed(shard.tobytes()) for shard in shards]
        pieces = tuple(p.HostPiece(i, i, s.shape, None, None) for i, s in enumerate(shards))
        report, (handle,) = self.run([p.Put(0, spec, pieces)], feeds=feeds)
        assert isinstance(report, m.Done), report
        return handle

    def ones(self, *devices: int, shape: tuple[int, ...] = (4,), dtype: str = "float32") -> int:
        spec = local(*(devices or (0,)), shape=shape, dtype=dtype)
        return self.put(spec, *[np.ones(shape, dtype)] * len(spec.devices))

    def call(self, function: str, *arguments: int, donated: Any = (), preserved: Any = (), **options: Any) -> Any:
        inputs = tuple(range(len(arguments)))
        step = p.Execute(function, inputs, len(arguments), tuple(donated), tuple(preserved), False)
        return self.run([step], arguments, **options)

    def failure(self, outcome: tuple[Any, tuple[int, ...]]) -> Status:
        """The error of a run, which its results must hold too."""
        report, handles = outcome
        assert isinstance(report, m.Failed), report
        for handle in handles:
            again, _ = self.read(handle)
            assert isinstance(again, m.Failed)
            assert again.status.message.startswith(report.status.message)
        return report.status

    def read(self, handle: int, shape: tuple[int, ...] = (4,)) -> Any:
        """A report of a plan that gets an array's first shard."""
        box = tuple((0, size) for size in shape)
        return self.run([p.Get(0, 1, 0, shape, None, (0,), (box,))], [handle], 1, [self.fresh()], name="get")

    def shard(self, handle: int, position: int = 0) -> np.ndarray:
        """The contents of a shard, past the data port."""
        from atoll.worker.xla.arrays import shards_of

        buffer = self.executor.walks._stores[self.session].get(handle)
        return np.array(shards_of(buffer.array)[position])

    def proxy(self) -> DataChannel:
        channel = DataChannel.dial(self.port.address)
        channel.open(self.session, "secret")
        return channel

    def next_piece(self, channel: DataChannel) -> np.ndarray:
        got: list[bytes] = []
        arrived = threading.Event()

        def take(piece: Piece, content: Any, done: Callable[[], None]) -> None:
            got.append(bytes(content))
            done()
            if not piece.more:
                arrived.set()

        threading.Thread(target=channel.receive, args=(take,), daemon=True).start()
        assert arrived.wait(SECONDS)
        return np.frombuffer(b"".join(got), np.float32)


def says(status: Status, code: Code, *words: str) -> None:
    assert status.code == code, status
    for word in words:
        assert word in status.message, status


def spec(shape: tuple[int, ...] = (4,), dtype: Any = np.float32) -> np.ndarray:
    return np.zeros(shape, dtype)


def add(x: Any, y: Any) -> Any:
    return x + y


# ---- what is right


@behaviour
def it_runs_a_function_over_four_devices(rig: Rig) -> None:
    name = rig.function(add, spec(), spec(), devices=(0, 1, 2, 3))
    a = rig.put(local(0, 1, 2, 3), *[np.full((4,), i, np.float32) for i in range(4)])
    report, (result,) = rig.call(name, a, rig.ones(0, 1, 2, 3))
    assert isinstance(report, m.Done)
    assert [rig.shard(result, i)[0] for i in range(4)] == [1, 2, 3, 4]


@behaviour
def it_runs_on_devices_in_another_order(rig: Rig) -> None:
    name = rig.function(add, spec(), spec(), devices=(2, 0))
    _, (result,) = rig.call(name, rig.ones(2, 0), rig.ones(2, 0))
    assert rig.shard(result, 1).tolist() == [2, 2, 2, 2]


def start_legs(
    rig: Rig, segments: tuple[p.Segment, ...], argument: int, results: int = 1
) -> tuple[int, tuple[int, ...]]:
    """The first leg's turn; its sequence number, and the results' handles."""
    plan, sequence = rig.fresh(), rig.fresh()
    body = p.Plan("train_step", (0,), segments, tuple(value for segment in segments for value in segment.results))
    handles = tuple(rig.fresh() for _ in range(results))
    rig.executor.submit(m.RegisterPlan(plan, body))
    rig.executor.submit(m.Run(sequence, rig.session, plan, (argument,), handles, ()))
    return sequence, handles


def doubling_legs(name: str) -> tuple[p.Segment, ...]:
    """Value 1 is twice value 0, value 2 is twice that, and so on; the last one is the result."""
    calls = [p.Execute(name, (i, i), i + 1, (), (), False) for i in range(3)]
    return tuple(p.Segment(i, (call,), (3,) if i == 2 else (), drops=(i,)) for i, call in enumerate(calls))


@behaviour
def it_walks_a_plan_leg_by_leg_as_their_turns_come(rig: Rig) -> None:
    name = rig.function(add, spec(), spec())
    first, (result,) = start_legs(rig, doubling_legs(name), rig.ones())
    assert rig.reports.get(timeout=SECONDS).runs[0][0] == first
    # Others get in between.
    _, (other,) = rig.call(name, rig.ones(), rig.ones())
    assert rig.shard(other)[0] == 2
    rig.executor.submit(m.Dispatch(rig.session, first, ((first + 101, 1), (first + 102, 1))))
    ended = [run[0] for run in rig.reports.get(timeout=SECONDS).runs]
    while len(ended) < 2:
        ended += [run[0] for run in rig.reports.get(timeout=SECONDS).runs]
    assert ended == [first + 101, first + 102]
    assert rig.shard(result)[0] == 8


@behaviour
def it_walks_several_legs_in_one_turn(rig: Rig) -> None:
    name = rig.function(add, spec(), spec())
    first, (result,) = start_legs(rig, doubling_legs(name), rig.ones())
    assert rig.reports.get(timeout=SECONDS).runs[0][0] == first
    rig.executor.submit(m.Dispatch(rig.session, first, ((first + 101, 2),)))
    assert [run[0] for run in rig.reports.get(timeout=SECONDS).runs] == [first + 101]
    assert rig.shard(result)[0] == 8
    assert rig.executor.walks._walks == {}


@behaviour
def it_walks_no_leg_after_one_that_failed(rig: Rig) -> None:
    name = rig.function(add, spec(), spec())
    segments = list(doubling_legs(name))
    segments[1] = p.Segment(1, (p.Execute("no such", (1, 1), 2, (), (), False),), drops=(1,))
    first, (result,) = start_legs(rig, tuple(segments), rig.ones())
    rig.reports.get(timeout=SECONDS)
    rig.executor.submit(m.Dispatch(rig.session, first, ((first + 101, 1), (first + 102, 1))))
    failed = rig.reports.get(timeout=SECONDS)
    assert (failed.sequence, failed.status.code) == (first + 101, Code.NOT_FOUND)
    assert rig.reports.get(timeout=SECONDS).runs[0][0] == first + 102
    says(rig.failure(rig.call(name, result, result)), Code.NOT_FOUND, "no such")


@behaviour
def it_tells_that_it_left_out_what_others_compute_with_it(rig: Rig) -> None:
    name = rig.function(add, spec(), spec())
    _, *others = doubling_legs(name)
    bad = p.Segment(0, (p.Execute("no such", (0, 0), 1, (), (), False),), drops=(0,))
    collective = msgspec.structs.replace(others[0], collective=True)
    sequence, _ = start_legs(rig, (bad, collective, others[1]), rig.ones())
    assert rig.reports.get(timeout=SECONDS).sequence == sequence
    rig.executor.submit(m.Dispatch(rig.session, sequence, ((sequence + 101, 1), (sequence + 102, 1))))
    failed = rig.reports.get(timeout=SECONDS)
    assert (failed.sequence, failed.status.code) == (sequence + 101, Code.NOT_FOUND)
    assert rig.reports.get(timeout=SECONDS).runs[0][0] == sequence + 102
    assert rig.executor.walks._walks == {}


@behaviour
def it_does_not_wait_for_what_it_left_out(rig: Rig) -> None:
    name = rig.function(add, spec(), spec())
    a = rig.ones()
    parked = []
    for _ in range(2):  # sessions, each with something to compute together behind bytes that are awaited
        feed, plan, sequence = rig.fresh(), rig.fresh(), rig.fresh()
        receive = p.Segment(0, (p.Receive(0, local(0), (p.ReceivePiece(0, ((0, 4),), 0),)),))
        call = p.Segment(1, (p.Execute(name, (0, 0), 1, (), (), False),), (1,), (0,), collective=True)
        rig.executor.submit(m.OpenStore(rig.session + 1000 * len(parked), "secret"))
        session = rig.session + 1000 * len(parked)
        rig.executor.submit(m.RegisterPlan(plan, p.Plan("train_step", (), (receive, call), (1,))))
        rig.executor.submit(m.Run(sequence, session, plan, (), (rig.fresh(),), (feed,)))
        rig.executor.submit(m.Dispatch(session, sequence, ((sequence + 500, 1),)))
        parked.append((session, feed, sequence))
    while len(rig.executor.walks._together) < 2:
        time.sleep(0.001)
    (_, feed, first), (other, failing, second) = parked
    rig.inbox.fail(other, (failing,), Status(Code.DATA_LOSS, "gone"))
    failed = [rig.reports.get(timeout=SECONDS).sequence for _ in range(2)]
    assert failed == [second, second + 500]
    rig.inbox.put(rig.session, feed, np.ones(16, np.uint8))
    ended: list[int] = []
    while len(ended) < 2:
        ended += [run[0] for run in rig.reports.get(timeout=SECONDS).runs]
    assert ended == [first, first + 500]
    report, _ = rig.call(name, a, a)
    assert isinstance(report, m.Done)
    assert not rig.executor.walks._together


@behaviour
def it_forgets_a_run_that_is_dropped(rig: Rig) -> None:
    name = rig.function(add, spec(), spec())
    first, _ = start_legs(rig, doubling_legs(name), rig.ones())
    rig.reports.get(timeout=SECONDS)
    rig.executor.submit(m.DropRun(rig.session, first))
    rig.executor.submit(m.Dispatch(rig.session, first, ((first + 101, 1),)))
    assert rig.reports.get(timeout=SECONDS).runs[0][0] == first + 101
    assert rig.executor.walks._walks == {}


@behaviour
def it_does_nothing_for_a_session_that_is_gone(rig: Rig) -> None:
    rig.executor.submit(m.Run(78, 999_999, 1, (), (), ()))
    assert rig.reports.get(timeout=SECONDS).runs[0][0] == 78


@behaviour
def it_fails_a_run_whose_plan_it_does_not_have(rig: Rig) -> None:
    rig.executor.submit(m.Run(77, rig.session, 999_999, (), (), ()))
    report = rig.reports.get(timeout=SECONDS)
    assert (report.sequence, report.status.code) == (77, Code.INTERNAL)


@behaviour
def it_moves_shards_to_other_devices(rig: Rig) -> None:
    a = rig.put(local(0, 1), np.full((4,), 5, np.float32), np.full((4,), 6, np.float32))
    move = p.Move((0,), (1,), (local(3, 2),), False)
    _, (moved,) = rig.run([move], [a])
    assert [rig.shard(moved, i)[0] for i in range(2)] == [5, 6]
    assert rig.shard(a)[0] == 5


@behaviour
def it_keeps_shards_of_different_shapes(rig: Rig) -> None:
    uneven = p.LocalArray("float32", (3,), ((1,), (2,)), (0, 1), (0, 1))
    a = rig.put(uneven, np.ones((1,), np.float32), np.full((2,), 2, np.float32))
    target = p.LocalArray("float32", (3,), ((1,), (2,)), (2, 3), (0, 1))
    _, (moved,) = rig.run([p.Move((0,), (1,), (target,), False)], [a])
    assert [rig.shard(moved, i).tolist() for i in range(2)] == [[1], [2, 2]]
    name = rig.function(add, spec(), spec(), devices=(0, 1))
    says(rig.failure(rig.call(name, a, a)), Code.INVALID_ARGUMENT, "argument 0")


@behaviour
def it_hands_an_array_to_itself_through_the_inbox(rig: Rig) -> None:
    a = rig.put(local(0), np.arange(4, dtype=np.float32))
    feed = rig.fresh()
    rig.run([p.Send(0, (p.SendPiece(0, ((1, 3),), 0, 0),))], [a], 0, [feed])
    pieces = (p.ReceivePiece(0, ((0, 2),), 0),)
    report, (b,) = rig.run([p.Receive(0, local(2, shape=(2,)), pieces)], feeds=[feed])
    assert isinstance(report, m.Done), report
    assert rig.shard(b).tolist() == [1, 2]
    assert rig.inbox.nbytes == 0


@behaviour
def it_puts_and_reads_every_stride_the_client_likes(rig: Rig) -> None:
    content = np.arange(6, dtype=np.float32).reshape(2, 3)
    piece = p.HostPiece(0, 0, (3, 2), (-4, 12), ((1, 3), (0, 2)))
    feed = rig.feed(content.tobytes())
    report, (a,) = rig.run([p.Put(0, local(1, shape=(2, 2)), (piece,))], feeds=[feed])
    assert isinstance(report, m.Done), report
    assert rig.shard(a).tolist() == content.T[::-1][1:].tolist()


# ---- what is wrong


@behaviour
def it_names_a_wrong_number_of_arguments(rig: Rig) -> None:
    name = rig.function(add, spec(), spec(), devices=(0, 1))
    a = rig.ones(0, 1)
    for arguments in ((), (a,), (a, a, a)):
        status = rig.failure(rig.call(name, *arguments))
        says(status, Code.INVALID_ARGUMENT, "expected 2 arguments", f"got {len(arguments)}", "train_step")


@behaviour
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


@behaviour
def it_names_a_function_that_is_not_there(rig: Rig) -> None:
    says(rig.failure(rig.call("no such", rig.ones())), Code.NOT_FOUND, "no such", "train_step")


@behaviour
def it_names_an_array_that_is_not_there(rig: Rig) -> None:
    name = rig.function(add, spec(), spec())
    says(rig.failure(rig.call(name, rig.ones(), 999_999)), Code.NOT_FOUND, "array 999999 is not on this host")


@behaviour
def it_passes_an_error_on_to_what_is_made_of_it(rig: Rig) -> None:
    name = rig.function(add, spec(), spec())
    _, (bad,) = rig.call(name, 999_999, 999_999, name="first")
    says(rig.failure(rig.call(name, bad, rig.ones())), Code.NOT_FOUND, "array 999999", "first")


@behaviour
def it_refuses_a_deleted_array(rig: Rig) -> None:
    for devices in ((0,), (0, 1)):
        name = rig.function(add, spec(), spec(), devices=devices)
        a = rig.ones(*devices)
        rig.executor.submit(m.Free(rig.session, (a,), True))
        says(rig.failure(rig.call(name, a, rig.ones(*devices))), Code.INVALID_ARGUMENT, "deleted or donated")


@behaviour
def it_refuses_a_donated_array(rig: Rig) -> None:
    for devices in ((0,), (0, 1)):
        name = rig.function(add, spec(), spec(), devices=devices, donate=(0,))
        a = rig.ones(*devices)
        report, _ = rig.call(name, a, rig.ones(*devices), donated=(0,))
        assert isinstance(report, m.Done), report
        says(rig.failure(rig.call(name, rig.ones(*devices), a)), Code.INVALID_ARGUMENT, "deleted or donated")
        move = p.Move((0,), (1,), (local(*devices),), False)
        says(rig.failure(rig.run([move], [a])), Code.INVALID_ARGUMENT, "deleted or donated")
        says(rig.failure(rig.run([p.Select((0,), 1, local(0), (p.Take(0, 0),), False)], [a])), Code.INVALID_ARGUMENT)


@behaviour
def it_refuses_to_donate_an_array_that_is_passed_twice(rig: Rig) -> None:
    for devices in ((0,), (0, 1)):
        name = rig.function(add, spec(), spec(), devices=devices, donate=(0,))
        a = rig.ones(*devices)
        says(rig.failure(rig.call(name, a, a, donated=(0,))), Code.INVALID_ARGUMENT, "argument 0 is donated")
        assert rig.shard(a).tolist() == [1, 1, 1, 1]


@behaviour
def it_refuses_to_donate_an_array_that_is_passed_again_under_another_name(rig: Rig) -> None:
    name = rig.function(add, spec(), spec(), donate=(0,))
    pair = rig.ones(0, 1)
    take = p.Select((0,), 1, local(0), (p.Take(0, 0),), False)
    _, (first,) = rig.run([take], [pair])
    _, (again,) = rig.run([take], [pair])
    report, _ = rig.call(name, first, again, donated=(0,))
    # XLA may notice or not; what counts is that the process lives and the answer is right.
    assert isinstance(report, m.Done | m.Failed)


@behaviour
def it_refuses_a_calls_completion_as_an_array(rig: Rig) -> None:
    name = rig.function(add, spec(), spec())
    step = p.Execute(name, (0, 1), 2, (), (), True)
    report, (_, completion) = rig.run([step], [rig.ones(), rig.ones()], results=2)
    assert isinstance(report, m.Done), report
    says(rig.failure(rig.call(name, completion, rig.ones())), Code.INVALID_ARGUMENT, "no array")
    says(rig.failure(rig.run([p.Move((0,), (1,), (local(1),), False)], [completion])), Code.INVALID_ARGUMENT)


@behaviour
def it_refuses_contents_of_the_wrong_size(rig: Rig) -> None:
    piece = p.HostPiece(0, 0, (4,), None, None)
    for size in (0, 15, 17):
        outcome = rig.run([p.Put(0, local(0), (piece,))], feeds=[rig.feed(bytes(size))])
        says(rig.failure(outcome), Code.INVALID_ARGUMENT, f"{size} bytes for float32[4]", "16")
    small = p.HostPiece(0, 0, (2,), None, None)
    outcome = rig.run([p.Put(0, local(0), (small,))], feeds=[rig.feed(bytes(8))])
    says(rig.failure(outcome), Code.INVALID_ARGUMENT, "[2]", "[4]")


@behaviour
def it_gives_shared_memory_back_also_where_its_contents_are_wrong(rig: Rig) -> None:
    given_back = threading.Event()
    feed = rig.fresh()
    rig.inbox.put(rig.session, feed, memoryview(bytes(7)), given_back.set)
    rig.failure(rig.run([p.Put(0, local(0), (p.HostPiece(0, 0, (4,), None, None),))], feeds=[feed]))
    assert given_back.is_set()
    given_back.clear()
    rig.inbox.put(rig.session, feed, memoryview(bytes(7)), given_back.set)
    rig.failure(rig.run([p.Receive(0, local(0), (p.ReceivePiece(0, ((0, 4),), 0),))], feeds=[feed]))
    assert given_back.is_set()


@behaviour
def it_names_a_feed_that_is_not_there(rig: Rig) -> None:
    outcome = rig.run([p.Put(0, local(0), (p.HostPiece(0, 0, (4,), None, None),))], feeds=[999_999])
    says(rig.failure(outcome), Code.INTERNAL, "feed 999999", "train_step")


@behaviour
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


@behaviour
def it_survives_a_memory_that_the_function_does_not_expect(rig: Rig) -> None:
    for devices in ((0,), (0, 1)):
        name = rig.function(add, spec(), spec(), devices=devices)
        a = rig.put(local(*devices, memory_kind="pinned_host"), *[np.ones((4,), np.float32)] * len(devices))
        report, handles = rig.call(name, a, rig.ones(*devices))
        if isinstance(report, m.Done):
            assert rig.shard(handles[0]).tolist() == [2, 2, 2, 2]


@behaviour
def it_goes_on_after_a_program_of_garbage(rig: Rig) -> None:
    feed = rig.feed(b"\x00 no program")
    rig.functions.compile(m.Compile("garbage", rig.session, feed, (((0, 0),),)))
    compiled = rig.reports.get(timeout=SECONDS)
    assert not compiled.status.ok
    assert rig.inbox.nbytes == 0


# ---- donation, deletion and pending reads


@behaviour
def it_copies_a_donated_input_that_the_caller_keeps(rig: Rig) -> None:
    name = rig.function(add, spec(), spec(), devices=(0, 1), donate=(0,))
    a = rig.ones(0, 1)
    report, (result,) = rig.call(name, a, rig.ones(0, 1), preserved=(0,))
    assert isinstance(report, m.Done), report
    assert rig.shard(result).tolist() == [2, 2, 2, 2]
    assert rig.shard(a).tolist() == [1, 1, 1, 1]


def read_pending(rig: Rig, handle: int) -> None:
    """Starts to read an array of LARGE elements. It cannot end: no proxy has opened its channel yet."""
    get = p.Get(0, 1, 0, (LARGE,), None, (0,), (((0, LARGE),),))
    rig.start([get], [handle], 1, [rig.fresh()], name="get")


def contents_of_pending_read(rig: Rig) -> set[float]:
    """Lets the read end."""
    got = set(rig.next_piece(rig.proxy()).tolist())
    report = rig.reports.get(timeout=SECONDS)
    assert isinstance(report, m.Done), report
    return got


@behaviour
def it_copies_what_is_donated_while_it_is_read(rig: Rig) -> None:
    for devices in ((0,), (0, 1)):
        rig.open_session()
        name = rig.function(add, spec((LARGE,)), spec((LARGE,)), devices=devices, donate=(0,))
        a, b = rig.ones(*devices, shape=(LARGE,)), rig.ones(*devices, shape=(LARGE,))
        read_pending(rig, a)
        report, (result,) = rig.call(name, a, b, donated=(0,))
        assert isinstance(report, m.Done), report
        assert set(rig.shard(result).tolist()) == {2}
        assert contents_of_pending_read(rig) == {1}


@behaviour
def it_copies_what_is_moved_away_while_it_is_read(rig: Rig) -> None:
    a = rig.ones(0, shape=(LARGE,))
    read_pending(rig, a)
    report, _ = rig.run([p.Move((0,), (1,), (local(1, shape=(LARGE,)),), True)], [a])
    assert isinstance(report, m.Done), report
    assert contents_of_pending_read(rig) == {1}


@behaviour
def it_deletes_after_reading(rig: Rig) -> None:
    a = rig.ones(0, shape=(LARGE,))
    read_pending(rig, a)
    rig.executor.submit(m.Free(rig.session, (a,), True))
    rig.executor.submit(m.Free(rig.session, (a,)))
    assert contents_of_pending_read(rig) == {1}


@behaviour
def it_copies_what_is_donated_while_a_part_of_it_is_read(rig: Rig) -> None:
    name = rig.function(add, spec((LARGE,)), spec((LARGE,)), devices=(0, 1), donate=(0,))
    a, b = rig.ones(0, 1, shape=(LARGE,)), rig.ones(0, 1, shape=(LARGE,))
    take = p.Select((0,), 1, local(0, shape=(LARGE,)), (p.Take(0, 0),), False)
    _, (part,) = rig.run([take], [a])
    read_pending(rig, part)
    report, _ = rig.call(name, a, b, donated=(0,))
    assert isinstance(report, m.Done), report
    assert contents_of_pending_read(rig) == {1}


@behaviour
def it_deletes_after_a_part_has_been_read(rig: Rig) -> None:
    a = rig.ones(0, 1, shape=(LARGE,))
    take = p.Select((0,), 1, local(0, shape=(LARGE,)), (p.Take(0, 0),), False)
    _, (part,) = rig.run([take], [a])
    read_pending(rig, part)
    rig.executor.submit(m.Free(rig.session, (a,), True))
    assert contents_of_pending_read(rig) == {1}


@behaviour
def it_fails_a_read_whose_session_has_ended(rig: Rig) -> None:
    read_pending(rig, rig.ones(0, shape=(LARGE,)))
    rig.port.close_session(rig.session)
    with socket.socket(socket.AF_UNIX) as knock:  # who waits for a channel looks again when one opens
        knock.connect(rig.port.address.path)
    rig.port.open_session(rig.fresh(), "another")
    report = rig.reports.get(timeout=SECONDS)
    assert isinstance(report, m.Failed)
    says(report.status, Code.CANCELLED, "has ended")


# ---- the child, and its tests


def main() -> None:
    sys.setswitchinterval(5e-4)
    with tempfile.TemporaryDirectory(prefix="at-") as directory:
        rig = Rig(Path(directory))
        for name, play in BEHAVIOURS.items():
            print(json.dumps([name, None]), flush=True)
            rig.open_session()
            try:
                play(rig)
                outcome = "ok"
            except BaseException:
                outcome = traceback.format_exc()
            while not rig.reports.empty():
                rig.reports.get()
            print(json.dumps([name, outcome]), flush=True)
    sys.stdout.flush()
    os._exit(0)  # the executor's threads last as long as the process


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    child = subprocess.run(
        [sys.executable, "-m", "tests.worker.test_executor"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=90,
    )
    lines = [json.loads(line) for line in child.stdout.splitlines() if line.startswith("[")]
    found = {name: outcome or "" for name, outcome in lines}
    end = f"the process ended with status {child.returncode}\n{child.stderr[-4000:]}"
    return {name: outcome or end for name, outcome in found.items()} | {"": end}


@pytest.mark.parametrize("name", BEHAVIOURS)
def test_the_executor(name, outcomes):
    assert outcomes.get(name, outcomes[""]) == "ok"


if __name__ == "__main__":
    main()
