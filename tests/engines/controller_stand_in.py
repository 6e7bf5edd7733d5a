"""Controllers without processes, for tests of what their engines do."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Sequence


class ControllerStandIn:
    """Stands for the process of a controller, in place of `LocalProcess`."""

    def __init__(
        self,
        started: list[ControllerStandIn],
        command: Sequence[str],
        on_end: Callable[[int], None],
        descriptors: tuple[int, ...],
    ) -> None:
        self.command = command
        self._on_end = on_end
        self._pipe = os.dup(descriptors[0])
        started.append(self)

    def report(self, content: bytes) -> None:
        """Write to the engine's pipe, which it reads in a later step of the loop, or at the end."""
        os.write(self._pipe, content)

    def end(self, status: int) -> None:
        """End with this exit status."""
        if self._pipe >= 0:
            self.close()
            self._on_end(status)

    def close(self) -> None:
        if self._pipe >= 0:
            os.close(self._pipe)
            self._pipe = -1

    def terminate(self) -> None:
        asyncio.get_running_loop().call_soon(self.end, -signal.SIGTERM)

    kill = terminate
