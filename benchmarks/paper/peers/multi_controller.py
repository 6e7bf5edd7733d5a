"""Multi-controller JAX: every host runs the same program on its own devices, and gloo adds over all of them.

Each host is a process with CPU devices, joined by jax.distributed. The process of the benchmark is host 0; it starts
the other hosts and each round, after which each host reports that its own values were right. They are in its process
group and read from it, so they end when it does.

Op by op, a host calls the compiled computation for every step. Fused, one compiled function has 128 of them.
"""

import atexit
import socket
import subprocess
import sys
import time

import jax
import msgspec

from benchmarks.harness.benchmark import Round, Settings
from benchmarks.harness.child import read_line
from benchmarks.harness.worker import replies_alone
from benchmarks.micro.dispatch import allreduce_and_add, counting_rounds, repeated
from benchmarks.paper.workload import Loop

NODES = 128
NODES_OF = {"JAX, op by op": 1, "JAX, fused": NODES}  # computations in a call

BEGIN, DONE = b"round\n", b"done\n"
PATIENCE = 60.0  # seconds that a host may be behind host 0 at the end of a round


class Work(msgspec.Struct, frozen=True):
    """Work in a round of each of `hosts` processes with `devices` devices: `calls` calls of `nodes` computations.

    With `milliseconds`, computations are those of `workload`, and about so long. Otherwise a device has `elements`.
    """

    hosts: int
    devices: int
    calls: int
    nodes: int = 1
    milliseconds: float = 0.0
    elements: int = 1


class Share(msgspec.Struct, frozen=True):
    """One host's part, and the port on loopback where all of them meet."""

    work: Work
    host: int
    port: int


def prepare(settings: Settings) -> Round:
    """Takes {"hosts", "devices"} from the point; devices are those of one host. `rate` is in computations a second."""
    hosts, devices, nodes = int(settings.point["hosts"]), int(settings.point["devices"]), NODES_OF[settings.system]
    # A sum over processes takes a millisecond or so, and more with every process; one within a process, microseconds.
    full = 4096 // hosts if hosts > 1 else 32768
    return over_hosts(Work(hosts, devices, calls=max(1, settings.size(full, full // 4) // nodes), nodes=nodes))


def over_hosts(work: Work) -> Round:
    """Rounds of `work` over its hosts, of which this process becomes host 0: it must not have used JAX before."""
    port = free_port() if work.hosts > 1 else 0
    others = [_start(Share(work, host, port)) for host in range(1, work.hosts)]
    join(work.hosts, work.devices, 0, port)
    # After jax.distributed has registered its own, so before it in time: it waits for the others to leave with it.
    atexit.register(_end, others)
    measure_here = _rounds(work)  # the others prepare at the same time: compiling is a collective, too

    def measure() -> dict[str, float]:
        for process in others:
            assert process.stdin
            process.stdin.write(BEGIN)
        values = dict(measure_here())
        for host, process in enumerate(others, start=1):
            if (line := read_line(process, time.monotonic() + PATIENCE)) != DONE:
                raise RuntimeError(
                    f"host {host} of {work.hosts} did not end its round: it sent {line!r}, status {process.poll()}"
                )
        return values

    return measure


def join(hosts: int, devices: int, host: int, port: int) -> None:
    """Makes this process one of `hosts`, with `devices` CPU devices; returns when all have joined.

    A single host joins no other process, and adds within its own.
    """
    jax.config.update("jax_num_cpu_devices", devices)
    if hosts > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{port}", hosts, host)
    if len(jax.devices()) != hosts * devices:
        raise RuntimeError(
            f"host {host} sees {len(jax.devices())} devices, and {hosts} hosts of {devices} should have"
            f" {hosts * devices}; set JAX_PLATFORMS=cpu"
        )


def free_port() -> int:
    """A port of loopback at which no process listens now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def _rounds(work: Work) -> Round:
    if work.milliseconds:
        return Loop(work.milliseconds).rounds(work.calls)
    add_one, zero = allreduce_and_add(jax.devices(), work.elements)
    return counting_rounds(jax.jit(repeated(add_one, work.nodes)), zero, work.calls, each=work.nodes)


def _start(share: Share) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", __name__, msgspec.json.encode(share).decode()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
    )


def _end(others: list[subprocess.Popen[bytes]]) -> None:
    for process in others:
        assert process.stdin
        process.stdin.close()


def _main() -> None:
    replies = replies_alone()
    share = msgspec.json.decode(sys.argv[1], type=Share)
    join(share.work.hosts, share.work.devices, share.host, share.port)
    measure = _rounds(share.work)
    for _ in sys.stdin.buffer:
        measure()
        replies.write(DONE)


if __name__ == "__main__":
    _main()
