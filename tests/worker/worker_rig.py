"""An executor with real devices, for tests of what it does with the controller's messages.

XLA ends a process over a bad argument, and an executor's threads last as long as theirs; so a module's tests run in one
child process, which plays each behaviour (a function `it_...`) in turn and says how that went.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from atoll.errors import Code, Status
from atoll.ir import plan as p
from atoll.ir.exchange import Exchange, spread
from atoll.ir.types import Replicated
from atoll.protocol import messages as m
from atoll.transfers.channel import DataChannel
from atoll.transfers.transfer_engine import Piece
from atoll.wire.address import Address
from tests.forked_process import run

SECONDS = 120.0
LARGE = 100_000  # elements: too many to be read at once on the executor's own thread


def local(*devices: int, shape: tuple[int, ...] = (4,), dtype: str = "float32", **options: Any) -> p.LocalArray:
    """One shard of `shape` on each device."""
    return p.LocalArray(dtype, shape, (shape,) * len(devices), devices, tuple(range(len(devices))), **options)


def copying(count: int, shape: tuple[int, ...] = (4,)) -> Exchange:
    """Shard i of one array becomes shard i of another, all of them on host 0."""
    here = spread(shape, Replicated(), (0,) * count)
    return Exchange(here, here, False, 0)


class Rig:
    """Executor with a session, and its reports. With a `tenant`, its programs are compiled separately."""

    def __init__(self, directory: Path, tenant: str = "") -> None:
        from atoll.devices.xla.xla_backend import XlaBackend
        from atoll.peers.data_port import DataPort
        from atoll.transfers.inbox import Inbox
        from atoll.worker.executor_thread import ExecutorThread
        from atoll.worker.host_functions import HostFunctions
        from atoll.worker.host_network import DataPortNetwork
        from atoll.worker.host_worlds import HostWorlds
        from atoll.worker.spill_store import SpillStore
        from atoll.worker.step_runner import StepRunner
        from atoll.worker.store import TypeKeys
        from atoll.worker.worker_main import compilers_of

        self.reports: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.backend = XlaBackend()
        keys = TypeKeys()
        self.inbox = Inbox(lambda session, feed: None)
        self.port = DataPort(Address(path=str(directory / "data.sock")), self.inbox)
        self._tenant = tenant
        compilers = compilers_of(self.backend) if tenant else None
        assert self.backend.worlds is not None
        self.worlds = HostWorlds(
            self.backend.worlds, self.report, lambda world: f"unix:{directory}/world-{world}", "127.0.0.1"
        )
        self.functions = HostFunctions(
            self.backend, self.inbox, keys, report=self.report, compilers=compilers, worlds=self.worlds
        )
        network = DataPortNetwork(self.backend, self.port, 0)
        messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
        steps = StepRunner(self.backend, self.functions, self.port, network, keys, self.report, messages.put)
        self.spill_store = SpillStore(self.backend, self.inbox, self.port, 0, steps.holds, self.report)
        self.executor = ExecutorThread(steps, self.inbox, self.report, self.spill_store, messages)
        self.session = 0
        self._next = 0

    def report(self, *messages: Any) -> None:
        for message in messages:
            self.reports.put(message)

    def fresh(self) -> int:
        self._next += 1
        return self._next

    def open_session(self) -> None:
        """Use a new session from now on."""
        if self.session:
            self.executor.submit(m.CloseStore(self.session))
            self.port.close_session(self.session)
        self.session = self.fresh()
        self.executor.submit(m.OpenStore(self.session, "secret"))
        self.port.open_session(self.session, "secret")

    # ---- functions

    def function(
        self, call: Any, *arguments: Any, devices: tuple[int, ...] = (0,), donate: Any = (), world: int = 0
    ) -> str:
        """Compile `call` for shards like `arguments` on these devices. Return its name."""
        name, status = self.compile(self.lower(call, *arguments, devices=devices, donate=donate), devices, world)
        assert status.ok, status
        return name

    def lower(self, call: Any, *arguments: Any, devices: tuple[int, ...] = (0,), donate: Any = ()) -> Any:
        """The module of `call` for shards like `arguments` on these devices."""
        import jax
        from jax.sharding import Mesh, NamedSharding, PartitionSpec

        mesh = Mesh(np.array([self.backend.devices[i] for i in devices]), ("x",))
        sharding = NamedSharding(mesh, PartitionSpec("x"))
        shapes = [
            jax.ShapeDtypeStruct((len(devices) * a.shape[0], *a.shape[1:]), a.dtype, sharding=sharding)
            for a in arguments
        ]
        return jax.jit(call, donate_argnums=donate, out_shardings=sharding).lower(*shapes).compiler_ir()

    def compile(self, module: Any, devices: tuple[int, ...] = (0,), world: int = 0) -> tuple[str, Status]:
        """Compile a module for these devices. Return the function's name, and the outcome."""
        name = self.request(module, devices, world)
        return name, self.reports.get(timeout=SECONDS).status

    def request(
        self,
        module: Any,
        devices: tuple[int, ...] = (0,),
        world: int = 0,
        name: str = "",
        rank: int = -1,
    ) -> str:
        """Asks for a module to be compiled for these devices; the function's name.

        With a rank, the module is for these devices on two islands of one host, of which this host has that rank.
        """
        from jax._src.lib import _jax
        from jax._src.lib import xla_client as xc
        from jaxlib.mlir.dialects import stablehlo

        program = _jax.mlir.serialize_portable_artifact(module, stablehlo.get_current_version())
        options = xc.CompileOptions()
        hosts = range(1 if rank < 0 else 2)
        assignment = (tuple((host, ordinal) for host in hosts for ordinal in devices),)
        options.num_partitions = len(assignment[0])
        options.executable_build_options.num_partitions = len(assignment[0])
        options.executable_build_options.use_spmd_partitioning = True
        options.executable_build_options.use_shardy_partitioner = True
        source = m.FunctionSource(program, options.SerializeAsString())
        feed = self.feed(msgspec.msgpack.encode(source))
        name = name or f"function {feed}"
        ranks, islands = ((0, int(bool(world))), ()) if rank < 0 else ((rank, 1), (1, 1))
        self.functions.compile(
            m.Compile(
                name, self.session, feed, assignment, tenant=self._tenant, world=world, ranks=ranks, islands=islands
            )
        )
        return name

    # ---- runs

    def feed(self, content: Any) -> int:
        number = self.fresh()
        self.inbox.put(self.session, number, np.frombuffer(content, np.uint8).copy() if len(content) else b"")
        return number

    def run(self, steps: Any, arguments: Any = (), results: int = 1, feeds: Any = (), **options: Any) -> Any:
        """Run a plan of values: arguments first, then results. Return its report, and the results' handles."""
        outcome = self.start(steps, arguments, results, feeds, **options)
        return self.reports.get(timeout=SECONDS), outcome

    def start(
        self,
        steps: Any,
        arguments: Any = (),
        results: int = 1,
        feeds: Any = (),
        name: str = "train_step",
        host_feeds: int = 0,
        contents: bytes | None = None,
    ) -> tuple[int, ...]:
        plan, sequence = self.fresh(), self.fresh()
        count = len(arguments)
        values = tuple(range(count, count + results))
        segment = p.Segment(0, tuple(steps), values, awaited=tuple(range(len(feeds))))
        body = p.Plan(name, tuple(range(count)), (segment,), values)
        handles = tuple(self.fresh() for _ in range(results))
        self.executor.submit(m.RegisterPlan(plan, body))
        ends = tuple(arguments), handles, tuple(feeds)
        self.executor.submit(m.Run(sequence, self.session, plan, *ends, host_feeds, contents=contents))
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
        """Return the error of a run, after checking that its results have the same error."""
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
        """Return the contents of a shard without using the data port."""
        from atoll.devices.xla.xla_arrays import shards_of

        buffer = self.executor.plan_executor.buffer(self.session, handle)
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


class Behaviours:
    """The behaviours of a test module, in order."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._behaviours: dict[str, Callable[[Rig], None]] = {}

    def add(self, play: Callable[[Rig], None]) -> Callable[[Rig], None]:
        self._behaviours[play.__name__] = play
        return play

    def add_case(self, name: str, play: Callable[[Rig], None]) -> None:
        """One of many that are made by a table."""
        self._behaviours[name] = play

    @property
    def names(self) -> list[str]:
        return list(self._behaviours)

    def outcomes(self, tenant: str = "") -> dict[str, str]:
        """Run all behaviours in a child process.

        Return "ok" or a traceback for each name, and for "" how the process ended.
        """
        code = f"import runpy; runpy.run_module({self._module!r}, run_name='__main__')"
        child = run([sys.executable, "-c", code, tenant], cwd=Path(__file__).parents[2], timeout=300.0)
        lines = [json.loads(line) for line in child.stdout.splitlines() if line.startswith("[")]
        found = {name: outcome or "" for name, outcome in lines}
        end = f"the process ended with status {child.returncode}\n{child.stderr[-4000:]}"
        return {name: outcome or end for name, outcome in found.items()} | {"": end}

    def play(self) -> None:
        """The child's part."""
        sys.setswitchinterval(5e-4)
        with tempfile.TemporaryDirectory(prefix="at-") as directory:
            rig = Rig(Path(directory), sys.argv[1])
            for name, play in self._behaviours.items():
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
