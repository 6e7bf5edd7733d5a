"""Ends what a Ray cluster leaves, and removes its folder, once the process that started it has ended.

    python -m benchmarks.paper.peers.ray_janitor FOLDER

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


def users_of(folder: Path) -> list[psutil.Process]:
    """The other processes that have a file open in the folder, or its path in their command line."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            named = [*process.cmdline(), *(file.path for file in process.open_files())]
            if process.pid != os.getpid() and any(str(folder) in name for name in named):
                found.append(process)
    return found


def main() -> None:
    folder = Path(sys.argv[1])
    sys.stdin.buffer.read()
    deadline = time.monotonic() + ENDING
    while (found := users_of(folder)) and time.monotonic() < deadline:
        for process in found:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(found, timeout=1)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
