"""The text of `atoll status` for a standby."""

from __future__ import annotations

import time

from atoll.controller_process.standby_status import StandbyState, StandbyStatus
from atoll.controller_process.takeover import KNOWS_SECONDS
from atoll.quantities import human_seconds


def standby_title(name: str) -> str:
    """Return the words for the standby with a name, such as "standby lab", without saying "standby" twice."""
    return name if name == "standby" else f"standby {name}"


def standby_text(standby: StandbyStatus, name: str, address: str, now: float) -> list[str]:
    """Return lines that describe a standby: its state, what it would do, and how to end it.

    `now` is in seconds since 1970.
    """
    return [
        f"{standby_title(name)} at {address}, of the controller at {standby.controller}",
        _state(standby, max(0.0, now - standby.since)),
        f"atoll down --name {name} ends the standby; the cluster continues without it",
    ]


def _state(standby: StandbyStatus, seconds: float) -> str:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(standby.since))
    at = f"{when} ({human_seconds(seconds)} ago)"
    takes_over = "takes over when more than half of the hosts have lost the controller and connect here"
    if standby.lease:
        takes_over = f"takes over when the controller has lost {standby.lease} and a host or a script connects here"
    match standby.state:
        case StandbyState.FOLLOWING:
            return f"follows since {at}; {takes_over}"
        case StandbyState.LOST if not standby.has_copy:
            return f"lost the controller at {at}: {standby.reason}; cannot take over, because its copy was not complete"
        case StandbyState.LOST if standby.lease:
            return (
                f"lost the controller at {at}: {standby.reason}; {takes_over}, unless the lease names another standby"
            )
        case StandbyState.LOST if seconds < KNOWS_SECONDS:
            return f"lost the controller at {at}: {standby.reason}; {takes_over} within {KNOWS_SECONDS:.0f} s"
        case StandbyState.LOST:
            return (
                f"lost the controller at {at}: {standby.reason}; cannot take over anymore, because its copy is too "
                "old; follows again if the controller returns"
            )
    return f"copies the controller's state since {at}; cannot take over yet"
