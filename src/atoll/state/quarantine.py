"""Programs that crash the workers that run them.

A worker that crashed (and was not killed) was running something. With one function in flight, that one is the cause,
and is refused from then on. With several, or after a bug in Atoll, which need not be their fault, all are suspects:
their gangs are exclusive from then on, so that the next crash has one cause, and a suspect that ends well is cleared.
"""

from __future__ import annotations

import signal

from atoll.cluster.processes.leases import FAILED_STATUS, LAPSED_STATUS
from atoll.errors import Code, Status

# Exit statuses of a process that was killed from outside, or that has ended because it heard nothing of its cluster.
_KILLED = {-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP, LAPSED_STATUS}


def is_crash(status: int) -> bool:
    """Return whether a worker that ended with this exit status crashed, rather than was ended by someone."""
    return status not in _KILLED and status != 0


def is_own_crash(status: int, has_others: bool) -> bool:
    """Return whether the programs of a host certainly caused its crash.

    A bug in Atoll may have ended the worker just as well. XLA also aborts a process after the loss of the first host of
    its island, before anybody else knows of that loss; `has_others` says that the island has other hosts.
    """
    return status != FAILED_STATUS and not (has_others and status == -signal.SIGABRT)


class Quarantine:
    """Suspects and refused functions, by the workers' names for them."""

    def __init__(self) -> None:
        self.suspects: set[str] = set()
        self.refused: dict[str, Status] = {}
        self._compiling: set[str] = set()  # when a worker crashed last

    def crashed(self, status: int, text: str, running: set[str], compiling: set[str], has_others: bool = False) -> None:
        """A worker ended with exit `status`, which `text` describes, while it ran and compiled these. `has_others`: its
        island has other hosts.
        """
        if not is_crash(status):
            return
        is_sure = is_own_crash(status, has_others)
        if len(running | compiling) == 1:
            (name,) = running | compiling
            if is_sure or name in self.suspects:
                self._refuse(name, text)
                return
        self.suspects |= running
        # Compilations cannot be made exclusive, but one that was under way at two crashes is hardly there by chance.
        for name in self._compiling & compiling:
            self._refuse(name, text)
        self._compiling = compiling

    def ended_well(self, name: str) -> None:
        self.suspects.discard(name)

    def _refuse(self, name: str, text: str) -> None:
        self.suspects.discard(name)
        self.refused[name] = Status(
            Code.ABORTED,
            f"this computation ended the worker that ran or compiled it ({text}), and is refused on this cluster from "
            "then on: change the computation, or start the cluster anew to try it again",
        )
