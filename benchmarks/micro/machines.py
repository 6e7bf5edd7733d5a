"""(r): arrays between two machines, which are network namespaces joined by a veth pair (root).

Controller, client, its proxy and the first island's worker are on one; the second island's worker is on the other.
The peer is `sendall` and `recv_into` between two processes in such namespaces, over one blocking socket, into memory
that is there already. Both do nothing but move bytes: what differs is what Atoll adds.
"""

import atexit
import ctypes
import os
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.harness.benchmark import Round, Settings

SOCKET = "blocking socket, 2 machines"
SIZES = {"64": 64_000_000, "1024": 1 << 30}
_HERE, _THERE = "10.91.0.1", "10.91.0.2"
_PEER_PORT = 7301
_CLONE_NEWNET = 0x40000000


class OtherMachine:
    """A second network namespace, joined to this process's own, which it makes first; ends with this process."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(_CLONE_NEWNET):
            raise PermissionError(f"no network namespaces here: {os.strerror(ctypes.get_errno())} (root is needed)")
        self._processes: list[subprocess.Popen[bytes]] = []
        atexit.register(self.close)
        holder = self._start(["unshare", "-n", "sh", "-c", "echo up; exec sleep infinity"], stdout=subprocess.PIPE)
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"up\n"
        self._pid = holder.pid
        _ip("link", "set", "lo", "up")
        _ip("link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", str(self._pid))
        _ip("addr", "add", f"{_HERE}/24", "dev", "eth0")
        _ip("link", "set", "eth0", "up")
        for command in (("link", "set", "lo", "up"), ("addr", "add", f"{_THERE}/24", "dev", "eth0")):
            self.run("ip", *command).wait()
        self.run("ip", "link", "set", "eth0", "up").wait()

    def run(self, *command: str) -> "subprocess.Popen[bytes]":
        """Starts a command there."""
        return self._start(["nsenter", "-t", str(self._pid), "-n", *command])

    def limit(self, rate: str) -> None:
        """The link has this rate from now on, each way, as `tc` writes it: "1gbit"."""
        for where in ([], ["nsenter", "-t", str(self._pid), "-n"]):
            # A burst is sent at any rate: what is measured has to be much more.
            shape = ["tc", "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", rate, "burst", "256kb"]
            subprocess.run([*where, *shape, "latency", "100ms"], check=True)

    def run_here(self, *command: str) -> "subprocess.Popen[bytes]":
        return self._start(list(command))

    def _start(self, command: list[str], **options: int) -> "subprocess.Popen[bytes]":
        dies = ["setpriv", "--pdeathsig", "KILL"]
        process = subprocess.Popen([*dies, *command], stdin=subprocess.DEVNULL, **options)  # type: ignore[call-overload]
        self._processes.append(process)
        return process  # type: ignore[no-any-return]

    def close(self) -> None:
        for process in reversed(self._processes):
            process.send_signal(signal.SIGKILL)
            process.wait()


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def between_machines(settings: Settings) -> Round:
    """GB/s, by size: from island to island, from the client to the far worker, and back."""
    repeats = {"64": settings.size(full=7, quick=3), "1024": settings.size(full=2, quick=1)}
    machine = OtherMachine()
    moves = _socket_moves(machine) if settings.system == SOCKET else _atoll_moves(machine)

    def measure() -> dict[str, float]:
        found = {}
        for size, nbytes in SIZES.items():
            for name, move in moves(nbytes).items():
                found[f"{name}_{size}"] = nbytes / 1e9 / statistics.median(move() for _ in range(repeats[size]))
        return found

    measure()
    return measure


def start_cluster(machine: OtherMachine, islands: int = 2) -> None:
    """A controller and the worker of the first island here, those of the others there. They are yet to come up."""
    from atoll.cluster.processes.process_runtime import command
    from atoll.cluster.settings import ClusterSettings
    from atoll.controller_process.controller_options import ControllerOptions
    from atoll.worker.worker_options import WorkerOptions

    os.environ |= {"ATOLL_TOKEN": "a benchmark's", "ATOLL_INSECURE": "1"}
    os.environ["ATOLL_ADDRESS"] = address = f"{_HERE}:7300"
    settings = ClusterSettings(islands=f"{islands}x1x1")
    machine.run_here(
        *command("atoll.controller_process.controller_main", ControllerOptions(address, settings, os.getpid()))
    )
    env = ["env", "JAX_PLATFORMS=cpu", "JAX_ENABLE_X64=1"]
    for host in range(islands):
        own, run = (_THERE, machine.run) if host else (_HERE, machine.run_here)
        options = WorkerOptions(
            address, f"{own}:0", host, host, 1, os.getpid(), tempfile.mkdtemp(prefix="bench-cache-")
        )
        run(*env, *command("atoll.worker.worker_main", options))


def _atoll_moves(machine: OtherMachine) -> Callable[[int], dict[str, Callable[[], float]]]:
    start_cluster(machine)
    import jax

    here, there = until_up()
    assert here.slice_index != there.slice_index
    add_one = jax.jit(lambda x: x + 1)

    def moves(nbytes: int) -> dict[str, Callable[[], float]]:
        values = np.arange(nbytes // 4, dtype=np.float32)
        array = jax.device_put(values, here).block_until_ready()
        far = jax.device_put(values, there).block_until_ready()

        def seconds(operation: Callable[[], Any]) -> tuple[float, Any]:
            started = time.perf_counter()
            found = operation()
            return time.perf_counter() - started, found

        def sample(found: jax.Array) -> np.ndarray:
            return np.asarray(found[:: nbytes // 64])

        def island() -> float:
            taken, moved = seconds(lambda: jax.device_put(array, there).block_until_ready())
            np.testing.assert_array_equal(sample(moved), values[:: nbytes // 64])
            return taken

        def put() -> float:
            taken, moved = seconds(lambda: jax.device_put(values, there).block_until_ready())
            np.testing.assert_array_equal(sample(moved), values[:: nbytes // 64])
            return taken

        def get() -> float:
            fresh = add_one(far).block_until_ready()  # JAX keeps the host's copy of what was read once
            taken, found = seconds(lambda: np.asarray(fresh))
            np.testing.assert_array_equal(found[:: nbytes // 64], values[:: nbytes // 64] + 1)
            return taken

        return {"island": island, "put": put, "get": get}

    return moves


def _socket_moves(machine: OtherMachine) -> Callable[[int], dict[str, Callable[[], float]]]:
    machine.run(sys.executable, "-P", "-m", "benchmarks.micro.machines")
    sock = _dial((_THERE, _PEER_PORT))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def moves(nbytes: int) -> dict[str, Callable[[], float]]:
        buffer = np.ones(nbytes, np.uint8)

        def send() -> float:
            started = time.perf_counter()
            sock.sendall(struct.pack("<q", nbytes))
            sock.sendall(buffer.data)
            assert sock.recv(1) == b"."
            return time.perf_counter() - started

        def receive() -> float:
            started = time.perf_counter()
            sock.sendall(struct.pack("<q", -nbytes))
            _receive(sock, buffer.data)
            return time.perf_counter() - started

        return {"island": send, "put": send, "get": receive}

    return moves


def _receive(sock: socket.socket, view: memoryview) -> None:
    position = 0
    while position < view.nbytes:
        count = sock.recv_into(view[position:])
        if not count:
            raise EOFError
        position += count


def _serve() -> None:
    """The far end of the peer: takes so many bytes, or gives them where the number is negative."""
    with socket.create_server((_THERE, _PEER_PORT)) as server:
        sock, _ = server.accept()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    head = bytearray(8)
    buffer = np.ones(0, np.uint8)
    while True:
        _receive(sock, memoryview(head))
        (nbytes,) = struct.unpack("<q", head)
        if buffer.nbytes != abs(nbytes):
            buffer = np.ones(abs(nbytes), np.uint8)
        if nbytes < 0:
            sock.sendall(buffer.data)
        else:
            _receive(sock, buffer.data)
            sock.sendall(b".")


def _dial(address: tuple[str, int]) -> socket.socket:
    deadline = time.monotonic() + 30
    while True:
        try:
            return socket.create_connection(address)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def until_up() -> Sequence[Any]:
    """Wait until the cluster is up. Return its devices."""
    import jax

    deadline = time.monotonic() + 60
    while True:
        try:
            return jax.devices()  # type: ignore[no-any-return]
        except RuntimeError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


if __name__ == "__main__":
    _serve()
