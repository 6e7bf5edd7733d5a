"""The end of a controller, and the next step of its engine. Pure."""

from __future__ import annotations

import enum

import msgspec

from atoll.cluster.processes.child import describe_exit
from atoll.cluster.processes.leases import FAILED_STATUS
from atoll.controller_process.controller_options import CANNOT, CANNOT_RESTART, CHARGED, FAILED, SUPERSEDED


class NextStep(enum.Enum):
    """The engine's step after the end of a controller."""

    RESTART = enum.auto()  # start the controller again, if it has not failed too often
    SERVE_OTHER = enum.auto()  # serve the controller that takes over
    END = enum.auto()  # end the cluster


class ControllerReports(msgspec.Struct):
    """The reports of a controller about its end, which it writes to its pipe before it exits."""

    bug: str = ""  # the bug that ends it
    problem: str = ""  # what prevents its start
    is_charged: bool = False  # whether a tenant is charged for the bug

    def take(self, line: bytes) -> None:
        """Read one line of the pipe. Ignore lines that are not about the controller's end."""
        if line.startswith(FAILED):
            self.bug = line.removeprefix(FAILED).decode(errors="replace").strip()
        elif line.startswith(CANNOT):
            self.problem = line.removeprefix(CANNOT).decode(errors="replace").strip()
        elif line == CHARGED:
            self.is_charged = True


class ControllerEnd(msgspec.Struct, frozen=True):
    """The end of a controller.

    Attributes:
        status: The exit status, or the negative number of the signal that killed the controller.
        reports: The controller's reports before its exit.
        followed_by: The address of the standby that takes over, or "".
        is_ending: Whether this process ends the controller.
    """

    status: int
    reports: ControllerReports
    followed_by: str = ""
    is_ending: bool = False

    @property
    def is_superseded(self) -> bool:
        """Whether another controller has taken over."""
        return self.status == SUPERSEDED

    @property
    def successor(self) -> str:
        """Return a name for the controller that takes over."""
        return f"the standby at {self.followed_by}" if self.followed_by else "another controller"

    @property
    def text(self) -> str:
        """Return the reason for the end."""
        reports = self.reports
        if reports.bug:
            return f"the controller failed: {reports.bug}" + (" (charged to a tenant)" if reports.is_charged else "")
        if reports.problem:
            return f"the controller cannot run: {reports.problem}"
        if self.is_superseded:
            return f"the controller ended: {self.successor} has taken over"
        return f"the controller ended: {describe_exit(self.status)}"

    @property
    def has_reason(self) -> bool:
        """Whether `text` says why a controller could not start. Otherwise only the log does."""
        return bool(self.reports.problem) or self.is_superseded

    @property
    def was_asked(self) -> bool:
        """Whether the controller has ended because an operator asked for it."""
        return not self.status and not self.reports.bug and not self.is_ending

    @property
    def is_expected(self) -> bool:
        """Whether nothing has failed."""
        return not self.reports.bug and (not self.status or self.is_ending)

    @property
    def counts(self) -> bool:
        """Whether a restart counts against the controller: it has ended by a bug that no tenant is charged for."""
        return self.status == FAILED_STATUS and not self.reports.is_charged

    @property
    def next_step(self) -> NextStep:
        """Return the engine's next step. It may have restarted the controller too often for a restart."""
        if self.is_ending or not self.status:
            return NextStep.END
        if self.is_superseded or self.followed_by:
            return NextStep.SERVE_OTHER
        return NextStep.END if self.status == CANNOT_RESTART else NextStep.RESTART
