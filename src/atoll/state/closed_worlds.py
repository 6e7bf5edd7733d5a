"""The errors of runs that end because their world is closed (see `launch.worlds`)."""

from __future__ import annotations

from atoll.errors import Code, Details, Kind, Status, failure


def ended_with_others(status: Status) -> Status:
    """Return the status of runs that end because another run of their world ends with this status."""
    text = "this run ended with another one of its tenant, because only some of its hosts may have begun it"
    return failure(Code.UNAVAILABLE, f"{text}: {status.message}", Details(Kind.LINK, retriable=True))


def is_of_closed_world(status: Status) -> bool:
    """Return whether a run may have failed on a host only because its world was closed, or a link of its hosts broke.

    Other hosts may not have begun it then.
    """
    return status.code == Code.UNAVAILABLE and status.details.kind is Kind.LINK
