"""(i): the cost of order.

One client's computations of a millisecond through proxy, controller and scheduler, against the same worker
without them. The peer does what the controller does: it starts a worker, sends it a function, a plan, and runs
of it, with as many in flight as the controller would have.
"""

import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from atoll.cluster.processes.process_runtime import command
from atoll.ir import plan as p
from atoll.protocol import messages as m
from atoll.transfers.channel import DataChannel
from atoll.wire.address import parse_address
from atoll.wire.blocking import BlockingConnection
from atoll.wire.sockets import bind_unix
from atoll.worker.worker_options import WorkerOptions
from benchmarks.harness.benchmark import Round, Settings

DIRECT = "bare worker"
ELEMENTS = 4096
IN_FLIGHT = 8  # of 1 ms: the controller's limit in time, and as many again


MILLISECOND_LOOPS = 98  # of a sine of this many elements, on one core of the machine on which this was written


def one_millisecond(x: jax.Array) -> jax.Array:
    """About a millisecond on one core; in a loop, so that no pool helps."""
    return jax.lax.fori_loop(0, MILLISECOND_LOOPS, lambda _, v: jnp.sin(v) + 1.0, x)


def order(settings: Settings) -> Round:
    calls = settings.size(full=1000, quick=200)
    return (_direct if settings.system == DIRECT else _through_the_controller)(calls)


def _rate(calls: int, run: Callable[[], None]) -> Round:
    def measure() -> dict[str, float]:
        started = time.perf_counter()
        run()
        seconds = time.perf_counter() - started
        return {"rate": calls / seconds, "each": 1e3 * seconds / calls}

    measure()
    return measure


def _through_the_controller(calls: int) -> Round:
    step = jax.jit(one_millisecond)
    zero = jax.device_put(jnp.zeros(ELEMENTS, jnp.float32), jax.devices()[0])

    def run() -> None:
        x = zero
        for _ in range(calls):
            x = step(x)
        x.block_until_ready()

    return _rate(calls, run)


def _direct(calls: int) -> Round:
    directory = tempfile.mkdtemp(prefix="bench-order-")
    control = f"unix:{directory}/control.sock"
    listener = bind_unix(parse_address(control).path)
    listener.listen(1)
    options = WorkerOptions(control, f"unix:{directory}/data.sock", 0, 0, 1, os.getpid())
    env = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_X64": "1"}
    subprocess.Popen(command("atoll.worker.worker_main", options), stdin=subprocess.DEVNULL, env=env)
    sock, _ = listener.accept()
    worker = BlockingConnection(sock, m.ToController, name="the worker")
    replies = worker.receive()
    _expect(replies, m.WorkerReady)
    worker.send(m.OpenStore(1, "secret"))
    channel = DataChannel.dial(parse_address(options.data_address))
    channel.open(1, "secret")

    channel.send(1, 1, [msgspec.msgpack.encode(_source())])
    _expect(replies, m.FeedsArrived)
    worker.send(m.Compile("step", 1, 1, (((0, 0),),)))
    status = _expect(replies, m.Compiled).status
    status.raise_if_error()
    array = p.LocalArray("float32", (ELEMENTS,), ((ELEMENTS,),), (0,), (0,))
    put = p.Put(0, array, (p.HostPiece(0, 0, (ELEMENTS,), None, None),))
    step = p.Execute("step", (0,), 1, (), (), False)
    worker.send(m.RegisterPlan(1, p.Plan("put", (), (p.Segment(0, (put,), (0,), (), (0,)),), (0,))))
    worker.send(m.RegisterPlan(2, p.Plan("step", (0,), (p.Segment(0, (step,), (1,)),), (1,))))
    channel.send(1, 2, [np.zeros(ELEMENTS, np.float32)])
    _expect(replies, m.FeedsArrived)
    worker.send(m.Run(1, 1, 1, (), (1,), (2,)))
    _expect(replies, m.Done)
    handle = 1

    def run() -> None:
        nonlocal handle
        sent = ended = 0
        while ended < calls:
            batch: list[m.Message] = []
            while sent < calls and sent - ended < IN_FLIGHT:
                batch += [m.Run(handle + 1, 1, 2, (handle,), (handle + 1,), ()), m.Free(1, (handle,))]
                handle += 1
                sent += 1
            worker.send(*batch)
            ended += len(_expect(replies, m.Done).runs)

    return _rate(calls, run)


def _expect(replies: Iterator[Any], kind: type[Any]) -> Any:
    for message in replies:
        if isinstance(message, m.Failed):
            message.status.raise_if_error()
        if isinstance(message, kind):
            return message
    raise ConnectionError(f"the worker ended before it sent {kind.__name__}")


def _source() -> m.FunctionSource:
    """Return the function as a proxy sends it."""
    from jax._src.lib import _jax
    from jax._src.lib import xla_client as xc
    from jaxlib.mlir.dialects import stablehlo

    lowered = jax.jit(one_millisecond).lower(jax.ShapeDtypeStruct((ELEMENTS,), jnp.float32))
    program = _jax.mlir.serialize_portable_artifact(lowered.compiler_ir(), stablehlo.get_current_version())
    return m.FunctionSource(program, xc.CompileOptions().SerializeAsString())
