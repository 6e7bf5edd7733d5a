"""Cut sockets of the controller that is started with this directory in PYTHONPATH, as long as the file ATOLL_CUTS
exists.

Every 30 ms, the next resumable connection loses its socket, with all data in transit in both directions. For each cut,
a line with the name of the connection is added to the file.
"""

import asyncio
import os
import sys
from typing import Any

if any("atoll.controller_process.controller_main" in argument for argument in getattr(sys, "orig_argv", [])):
    from atoll.wire.resumption.resumable_connections import ResumableConnections

    PERIOD_SECONDS = 0.03
    path = os.environ["ATOLL_CUTS"]
    make = ResumableConnections.__init__

    def make_and_cut(self: ResumableConnections, *arguments: Any, **named: Any) -> None:
        make(self, *arguments, **named)
        asyncio.get_running_loop().call_later(PERIOD_SECONDS, cut, self, 0)

    def cut(self: ResumableConnections, turn: int) -> None:
        connections = [each for each in self.all() if not each.is_away]
        if connections and os.path.exists(path):
            connection = connections[turn % len(connections)]
            with open(path, "a") as file:
                file.write(f"{connection.name}\n")
            connection._transport._transport.abort()  # type: ignore[union-attr]
        asyncio.get_running_loop().call_later(PERIOD_SECONDS, cut, self, turn + 1)

    ResumableConnections.__init__ = make_and_cut  # type: ignore[method-assign]
