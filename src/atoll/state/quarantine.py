"""Functions that crash the workers that run or compile them.

If a worker crashed with one function in flight, this function is the cause and is refused from then on. If several
functions were in flight, or if a bug in Atoll may be the cause, all of them become suspects. The gangs of suspects run
exclusively, so that the next crash has one cause. A suspect that ends well is cleared.
"""

from __future__ import annotations

import signal

from atoll.cluster.processes.leases import FAILED_STATUS, LAPSED_STATUS
from atoll.errors import Code, Details, Kind, Status, failure

# Exit statuses of a worker that was killed from outside, or that ended because its lease lapsed.
_KILLED = {-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP, LAPSED_STATUS}


def is_crash(status: int) -> bool:
    """Return whether a worker with this exit status crashed. If not, it was ended on purpose."""
    return status not in _KILLED and status != 0


def is_own_crash(status: int, has_others: bool) -> bool:
    """Return whether the programs of a host certainly caused its crash.

    A bug in Atoll ends a worker with `FAILED_STATUS`. XLA aborts a process after the loss of the first host of its
    island, possibly before the controller detects that loss. `has_others` is set if the island has other hosts.
    """
    return status != FAILED_STATUS and not (has_others and status == -signal.SIGABRT)


class Quarantine:
    """The suspected and the refused functions, by the workers' names for them."""

    def __init__(self) -> None:
        self.suspects: set[str] = set()
        self.refused: dict[str, Status] = {}
        self._compiling: set[str] = set()  # functions that were being compiled at the last crash

    def crashed(self, status: int, text: str, running: set[str], compiling: set[str], has_others: bool = False) -> None:
        """Find the possible causes if a worker crashed.

        Args:
          status: the worker's exit status.
          text: a description of the status.
          running: functions that the worker was running.
          compiling: functions that the worker was compiling.
          has_others: whether the island has other hosts.
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
        # Compilations cannot be exclusive, but one that was under way at two crashes in a row is probably the cause.
        for name in self._compiling & compiling:
            self._refuse(name, text)
        self._compiling = compiling

    def ended_well(self, name: str) -> None:
        self.suspects.discard(name)

    def _refuse(self, name: str, text: str) -> None:
        self.suspects.discard(name)
        self.refused[name] = failure(
            Code.ABORTED,
            f"this computation ended the worker that ran or compiled it ({text}), so this cluster refuses to run it "
            "again: change the computation, or restart the cluster to try it once more",
            Details(Kind.REFUSED),
        )
