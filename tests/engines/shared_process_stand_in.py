"""Stand-in for a process of several islands, without hosts. It reports the end of each island that the engine ends.

If the environment contains DEAF, it reports nothing.
"""

from __future__ import annotations

import os
import socket
import sys

import msgspec

from atoll.engines.shared_islands import EndIsland, IslandEnded, Lines, SharedOptions, line


def main() -> None:
    options = msgspec.json.decode(sys.argv[1].encode(), type=SharedOptions)
    os.close(int(sys.argv[2]))  # it has started
    lines = Lines()
    with socket.socket(fileno=options.descriptor) as engine:
        while data := engine.recv(1 << 16):
            for message in lines.messages(data):
                if isinstance(message, EndIsland) and "DEAF" not in os.environ:
                    engine.sendall(line(IslandEnded(message.island, 3)))


if __name__ == "__main__":
    main()
