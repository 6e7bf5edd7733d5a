"""Ends what a Ray cluster leaves, and removes its directory, once the process that started it has ended.

    python -m benchmarks.paper.peers.ray_janitor DIRECTORY

It learns of that from the end of its input, so it needs no signal, which a killed process cannot send. It looks for the
cluster's processes by the files they have open, because Ray's workers overwrite their command lines. It does not import
Ray: it is there for the whole benchmark, and should cost nothing.
"""

import os
import shutil
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil

ENDING = 20.0  # seconds in which what appears is killed, too


def users_of(directory: Path) -> list[psutil.Process]:
    """The other processes that have a file open in the directory, or its path in their command line."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            named = [*process.cmdline(), *(file.path for file in process.open_files())]
            if process.pid != os.getpid() and any(str(directory) in name for name in named):
                found.append(process)
    return found


def main() -> None:
    directory = Path(sys.argv[1])
    sys.stdin.buffer.read()
    deadline = time.monotonic() + ENDING
    while (found := users_of(directory)) and time.monotonic() < deadline:
        for process in found:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(found, timeout=1)
    shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
