"""Kill the processes of a test run after the run has ended, in case it was killed and could not do so itself.

A standing cluster (`atoll up`) has no parent by design, so nothing else would end it. This is a script that runs
without Python's site packages: `python -I -S guardian.py PID RUN DIRECTORY`. It identifies processes by ATOLL_TEST_RUN
in their environment.
"""

from __future__ import annotations

import glob
import os
import select
import shutil
import signal
import sys
import time

_MAX_SECONDS = 30.0


def main(pid: int, run: str, directory: str) -> None:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        pass
    else:
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        poller.poll()
    directories, deadline = {directory}, time.monotonic() + _MAX_SECONDS
    # Until no process is left, because a process may start another one before it is killed.
    while (found := of_run(run)) and time.monotonic() < deadline:
        for each, runtime in found.items():
            if os.path.basename(runtime).startswith("at-") and os.path.dirname(runtime) == os.path.dirname(directory):
                directories.add(runtime)
            directories.update(
                glob.glob(f"/dev/shm/atoll-{each}-*")
            )  # of a client, whose proxy would remove it but was also killed
            try:
                os.kill(each, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.05)
    for each in directories:
        shutil.rmtree(each, ignore_errors=True)


def of_run(run: str) -> dict[int, str]:
    """Return the live processes of a test run, each with its runtime directory."""
    found = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{entry}/environ", "rb") as file:
                pairs = [pair.partition(b"=") for pair in file.read().split(b"\0")]
        except OSError:
            continue
        environment = {name: os.fsdecode(value) for name, _, value in pairs}
        if environment.get(b"ATOLL_TEST_RUN") == run:  # a zombie has no environment
            found[int(entry)] = environment.get(b"XDG_RUNTIME_DIR", "")
    return found


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
