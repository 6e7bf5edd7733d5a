"""Cuts sockets of the controller that is started with this folder in PYTHONPATH, while ATOLL_TEST_CUTS names a file.

Every 30 ms the next connection that can be resumed loses its socket, in turn, with all that is on its way in both
directions. Its name goes to the file, a line for each cut.
"""

import os
import sys

if any("atoll.controller_process.main" in argument for argument in getattr(sys, "orig_argv", [])):
    from atoll.controller_process.main import ControllerShell

    PERIOD_SECONDS = 0.03
    path = os.environ.get("ATOLL_TEST_CUTS", "")
    start = ControllerShell.start

    def start_and_cut(self: ControllerShell) -> None:
        start(self)
        self._loop.call_later(PERIOD_SECONDS, cut, self, 0)

    def cut(self: ControllerShell, turn: int) -> None:
        connections = [each for each in self._resumable.all() if not each.is_away]
        if connections and os.path.exists(path):
            connection = connections[turn % len(connections)]
            with open(path, "a") as file:
                file.write(f"{connection.name}\n")
            connection._leg._transport.abort()  # type: ignore[union-attr]
        self._loop.call_later(PERIOD_SECONDS, cut, self, turn + 1)

    ControllerShell.start = start_and_cut  # type: ignore[method-assign]
