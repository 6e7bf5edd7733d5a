"""The units of a host, for the thread that reads the controller's messages."""

from __future__ import annotations

from atoll.worker.completion_reporter import CompletionReporter
from atoll.worker.delegated_run_dispatcher import DelegatedRunDispatcher
from atoll.worker.occupancy import Occupancy


class Units:
    """Any thread may call all of this, also while the executor's thread is inside a unit that lasts."""

    def __init__(
        self, reporter: CompletionReporter, occupancy: Occupancy, delegated_runs: DelegatedRunDispatcher
    ) -> None:
        self._occupancy = occupancy
        self._delegated_runs = delegated_runs
        self.report_completed = reporter.report_completed

    def running(self) -> tuple[int, ...]:
        """Return the gangs that keep this host's devices busy."""
        return tuple(dict.fromkeys(map(self._delegated_runs.gang_of, self._occupancy.running())))

    def of_gang(self, sequence: int) -> list[int]:
        """Return the units of the gang that are in flight: a gang that is no delegated run is one unit."""
        return self._delegated_runs.units_of(sequence)
