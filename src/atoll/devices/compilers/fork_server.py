"""The fork server of a host's compilers: it imports their modules once, and forks one process per request.

It has one thread and no devices, and reads nothing that a tenant has sent. Each child gets a link to the worker, and a
pipe for its standard error. The kernel ends a child with the server; the server exits when its worker ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from pkgutil import resolve_name

import msgspec

from atoll.cluster.environment_variables import JAX_PLATFORMS
from atoll.cluster.processes.priorities import lower_priority
from atoll.cluster.processes.process_runtime import read_options
from atoll.decodable import decodable
from atoll.devices.compilers.compiler_messages import CompilerOptions, Ended, Fork, Forked, Kill, ToServer
from atoll.devices.compilers.compiler_process import Compiler, limit_process, serve
from atoll.devices.partial_jax import partial_jax

_SET_DEATH_SIGNAL, _SET_DUMPABLE, _NO_NEW_PRIVILEGES = 1, 4, 38
_PACKET_BYTES = 4096
_DESCRIPTORS = 2  # of a request: the link and the pipe
# Computations on CPU devices have priority over compilations.
_NICENESS = 5
_decode = msgspec.msgpack.Decoder(decodable(ToServer)).decode
_encode = msgspec.msgpack.Encoder().encode


class ForkServer:
    """Serves the worker at the other end of `control`, a packet socket, until the worker closes it."""

    def __init__(self, control: socket.socket, options: CompilerOptions, make: Callable[[int], Compiler]) -> None:
        self._control = control
        self._options = options
        self._make = make
        self._pids: dict[int, int] = {}  # by number
        self._numbers: dict[int, int] = {}  # by pid
        self._woken, self._wakes = os.pipe()  # SIGCHLD writes to it
        os.set_blocking(self._woken, False)
        os.set_blocking(self._wakes, False)

    def run(self) -> None:
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wakes, warn_on_full_buffer=False)
        poller = select.poll()
        poller.register(self._control, select.POLLIN)
        poller.register(self._woken, select.POLLIN)
        while True:
            ready = {descriptor for descriptor, _ in poller.poll()}
            if self._woken in ready:
                os.read(self._woken, _PACKET_BYTES)
                self._reap()
            if self._control.fileno() in ready and not self._serve():
                return

    def _serve(self) -> bool:
        """Handle one packet. Return False if the worker has closed its end."""
        packet, descriptors, _, _ = socket.recv_fds(self._control, _PACKET_BYTES, _DESCRIPTORS)
        if not packet:
            return False
        message = _decode(packet)
        if isinstance(message, Kill):
            pid = self._pids.get(message.number)
            if pid is not None:  # the process is not reaped yet, so no other process has its PID
                os.kill(pid, signal.SIGKILL)
            return True
        self._fork(message, descriptors)
        return True

    def _fork(self, message: Fork, descriptors: list[int]) -> None:
        pid, problem = 0, "the fork server has too many open files"  # the kernel has dropped descriptors
        if len(descriptors) == _DESCRIPTORS:
            try:
                pid = os.fork()
            except OSError as error:
                problem = f"it cannot be forked: {error.strerror}"
            else:
                if pid == 0:
                    self._become_compiler(*descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        if not pid:
            self._control.send(_encode(Ended(message.number, 1, 0, problem)))
            return
        self._pids[message.number], self._numbers[pid] = pid, message.number
        self._control.send(_encode(Forked(message.number, pid)))

    def _become_compiler(self, link: int, errors: int) -> None:
        """Run a compiler process in the child. Does not return."""
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            libc = ctypes.CDLL(None, use_errno=True)
            libc.prctl(_SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
            libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
            null = os.open(os.devnull, os.O_RDWR)
            for target, descriptor in enumerate((null, errors, errors)):
                os.dup2(descriptor, target)
            kept = os.dup2(link, 3)
            os.closerange(4, os.sysconf("SC_OPEN_MAX"))
            libc.prctl(_SET_DUMPABLE, 0, 0, 0, 0)  # other compiler processes cannot read its memory
            limit_process(self._options)
            serve(socket.socket(fileno=kept), self._options, self._make)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        os._exit(0)

    def _reap(self) -> None:
        while self._numbers:
            pid, status, usage = os.wait4(-1, os.WNOHANG)
            if pid == 0:
                return
            number = self._numbers.pop(pid, None)
            if number is None:
                continue
            del self._pids[number]
            most = usage.ru_maxrss << 10
            self._control.send(_encode(Ended(number, os.waitstatus_to_exitcode(status), most)))


def main() -> None:
    options = read_options(CompilerOptions)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    lower_priority(_NICENESS)
    gc.disable()
    with partial_jax(JAX_PLATFORMS.text()):  # also in the children, which open the devices
        make = resolve_name(options.compiler)
        gc.freeze()  # children share the memory of imported modules, which the collector would write to
        gc.enable()
        control = socket.socket(fileno=options.control)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the worker has ended
            ForkServer(control, options, make).run()
    os._exit(0)


if __name__ == "__main__":
    main()
