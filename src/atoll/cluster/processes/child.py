"""A child process of Atoll: it writes one line once it is up, or says why it is not."""

from __future__ import annotations

import os
import select
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import TypeVar

import msgspec

from atoll.cluster.processes.process_runtime import command, end, own_environment
from atoll.errors import ClusterError

Message = TypeVar("Message")

START_SECONDS = 150.0
END_SECONDS = 5.0


class Child:
    """A process in a session of its own, so that Ctrl-C reaches the command and not the process.

    `options` has a field `ready_fd`. `who` names the process in errors; what it prints goes to the descriptor `output`;
    `environment` is added to this process's own.
    """

    def __init__(
        self,
        module: str,
        options: msgspec.Struct,
        who: str,
        output: int = 2,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.who = who
        self._readable, writable = os.pipe()
        # The user's choice of JAX platforms is for the user's own scripts.
        env = {**own_environment(), **(environment or {})}
        env.pop("JAX_PLATFORMS", None)
        try:
            self.process = subprocess.Popen(
                command(module, msgspec.structs.replace(options, ready_fd=writable)),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=env,
                pass_fds=(writable,),
                start_new_session=True,
            )
        finally:
            os.close(writable)

    def read(self, kind: type[Message], seconds: float = START_SECONDS) -> Message:
        """The line that the process writes once it is up. Raises ClusterError where none comes."""
        deadline = time.monotonic() + seconds
        line = b""
        try:
            while not line.endswith(b"\n"):
                ready, _, _ = select.select([self._readable], [], [], max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise ClusterError(f"{self.who} was not up within {seconds:.0f} s")
                part = os.read(self._readable, 65536)
                if not part:
                    raise ClusterError(f"{self.who} ended before it was up; its messages are above")
                line += part
        finally:
            os.close(self._readable)
        return msgspec.json.decode(line, type=kind)

    def leave(self) -> None:
        """Leaves the process running: this process will end first, and does not wait for it."""
        self.process.returncode = 0  # or Popen warns that it still runs

    def wait(self) -> None:
        """Blocks until it has ended."""
        self.process.wait()

    def end(self) -> None:
        """Ends the process, by SIGKILL where it does not end within a few seconds."""
        end(self.process, END_SECONDS)


def wait_for_any(children: Sequence[Child]) -> Child:
    """Blocks until one of them has ended, and returns it. A signal handler's exception ends the wait."""
    poller = select.poll()
    descriptors = {os.pidfd_open(child.process.pid): child for child in children}
    try:
        for descriptor in descriptors:
            poller.register(descriptor, select.POLLIN)
        return descriptors[poller.poll()[0][0]]
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
