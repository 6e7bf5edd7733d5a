"""TensorFlow 2: one process is the only controller of `hosts * devices` logical CPU devices.

TensorFlow's eager runtime over several processes is not measured: all devices are in this one process, whatever the
number of hosts, so the rates say what the runtime costs without a network. The sum is TensorFlow's own collective over
the devices, in its ring implementation, as MirroredStrategy takes it for CPUs; used directly, because MirroredStrategy
traces a thread for each device and takes a minute to build the chain.

Op by op, each computation is a call of a traced tf.function. Chained, a tf.function has 128 of them: its executor runs
the nodes of one graph. XLA (jit_compile) cannot compile one function for several devices, so nothing is fused.
"""

import itertools
import time
from collections.abc import Callable, Sequence

import tensorflow as tf

from benchmarks.harness.benchmark import Round, Settings

NODES_OF = {"TensorFlow, op by op": 1, "TensorFlow, chained": 128}  # computations in a call

Values = Sequence[tf.Tensor]  # a scalar on each device
GROUP = 1  # the key by which the devices of a collective find one another


def prepare(settings: Settings) -> Round:
    """Takes {"hosts", "devices"} from the point; devices are those of one host. `rate` is in computations a second."""
    return rounds(_logical_devices(int(settings.point["hosts"]) * int(settings.point["devices"])), settings)


def rounds(devices: Sequence[str], settings: Settings) -> Round:
    """Return the rounds of a backend on these devices."""
    nodes = NODES_OF[settings.system]
    step = tf.function(_chain(devices, nodes))
    zero = []
    for device in devices:
        with tf.device(device):
            zero.append(tf.constant(0.0))
    for _ in range(3):
        step(zero)
    full = 16384 // len(devices)
    calls = max(1, settings.size(full, full // 4) * (4 if nodes > 1 else 1) // nodes)

    def measure() -> dict[str, float]:
        values: Values = zero
        started = time.perf_counter()
        for _ in range(calls):
            values = step(values)
        results = [float(value) for value in values]
        seconds = time.perf_counter() - started
        if any(result != calls * nodes for result in results):
            raise ArithmeticError(f"after {calls * nodes} additions of one: {results}")
        return {"rate": calls * nodes / seconds}

    return measure


def _logical_devices(number: int) -> list[str]:
    """Create the logical devices, and return their names. TensorFlow must not have been used before."""
    processor = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(processor, [tf.config.LogicalDeviceConfiguration()] * number)
    return [device.name for device in tf.config.list_logical_devices("CPU")]


def _chain(devices: Sequence[str], nodes: int) -> Callable[[Values], Values]:
    keys = itertools.count()  # each collective of a graph has a separate key, or two of them would be mixed up

    def computation(values: Values) -> Values:
        key, results = next(keys), []
        for device, value in zip(devices, values, strict=True):
            with tf.device(device):
                total = tf.raw_ops.CollectiveReduce(
                    input=value,
                    group_size=len(devices),
                    group_key=GROUP,
                    instance_key=key,
                    merge_op="Add",
                    final_op="Id",
                    subdiv_offsets=[0],
                    communication_hint="ring",
                )
                results.append(total / len(devices) + 1.0)
        return results

    def chain(values: Values) -> Values:
        for _ in range(nodes):
            values = computation(values)
        return values

    return chain
