"""Which program ends the workers that run it.

A worker that crashed (and was not killed) was running something. With one function in flight that was it, and it is
refused from then on. With several, all are suspects: they run alone from then on, so that the next crash has one
author, and a suspect that ends well is one no more.
"""

from __future__ import annotations

import signal

from atoll.errors import Code, Status

# How a process ends that somebody else has ended.
_KILLED = {-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP}


class Quarantine:
    """Suspects and refused functions, by the workers' names for them."""

    def __init__(self) -> None:
        self.suspects: set[str] = set()
        self.refused: dict[str, Status] = {}
        self._compiling: set[str] = set()  # when a worker crashed last

    def crashed(self, status: int, text: str, running: set[str], compiling: set[str]) -> None:
        """A worker ended with exit `status`, in words `text`, while it ran and compiled these."""
        if status in _KILLED or status == 0:
            return
        if len(running | compiling) == 1:
            self._refuse(next(iter(running | compiling)), text)
            return
        self.suspects |= running
        # What is compiled cannot be had alone, but what was compiled at two crashes is hardly there by chance.
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
