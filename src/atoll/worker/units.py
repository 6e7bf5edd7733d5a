"""The units of a host, for the thread that reads the controller's messages."""

from __future__ import annotations

from atoll.worker.endings import Endings
from atoll.worker.occupancy import Occupancy
from atoll.worker.static_runs import StaticRuns


class Units:
    """Any thread may call all of this, also while the executor's thread is inside a unit that lasts."""

    def __init__(self, endings: Endings, occupancy: Occupancy, static_runs: StaticRuns) -> None:
        self._occupancy = occupancy
        self._static_runs = static_runs
        self.report_completed = endings.report_completed

    def running(self) -> tuple[int, ...]:
        """Return the gangs that keep this host's devices busy."""
        return tuple(dict.fromkeys(map(self._static_runs.gang_of, self._occupancy.running())))

    def of_gang(self, sequence: int) -> list[int]:
        """Return the units of the gang that are in flight: a gang that is no static run is one unit."""
        return self._static_runs.units_of(sequence)
