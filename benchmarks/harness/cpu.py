"""CPU time of a contestant's processes."""

from __future__ import annotations

from contextlib import suppress

import psutil

# The kind of a process of Atoll, by the package of its module. All processes of a peer run the script.
_KINDS = {"operate": "engine", "ifrt": "proxy", "controller_process": "controller", "worker": "worker"}


def cpu_seconds() -> dict[str, float]:
    """Return the CPU seconds so far of this process and all processes below it, by kind of process.

    Processes that have ended count for the process that has waited for them.
    """
    found: dict[str, float] = {}
    me = psutil.Process()
    for process in (me, *me.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            modules = [part for part in process.cmdline() if part.startswith("atoll.")]
            kind = _KINDS.get(modules[0].split(".")[1], modules[0]) if modules else "script"
            times = process.cpu_times()
            spent = times.user + times.system + times.children_user + times.children_system
            found[kind] = found.get(kind, 0.0) + spent
    return found
