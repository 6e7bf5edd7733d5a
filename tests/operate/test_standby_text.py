"""Tests of the output of `atoll status` for a standby."""

from __future__ import annotations

import pytest

from atoll.controller_process.standby_status import StandbyState, StandbyStatus
from atoll.operate.standby_text import standby_text, standby_title


@pytest.mark.parametrize(
    ("state", "has_copy", "seconds", "expected"),
    [
        (StandbyState.COPYING, False, 3, "cannot take over yet"),
        (StandbyState.FOLLOWING, False, 3, "(3 s ago); takes over when more than half of the hosts"),
        (StandbyState.LOST, True, 3, "(3 s ago): it ended; takes over when more than half"),
        (StandbyState.LOST, True, 60, "cannot take over anymore, because its copy is too old"),
        (StandbyState.LOST, False, 3, "cannot take over, because its copy was not complete"),
    ],
)
def test_a_standby_tells_what_it_would_do(state: StandbyState, has_copy: bool, seconds: float, expected: str) -> None:
    status = StandbyStatus("tls://one:7000", state, 1000.0, "it ended", has_copy)
    first, text, last = standby_text(status, "lab", "tls://two:7000", 1000.0 + seconds)
    assert first == "standby lab at tls://two:7000, of the controller at tls://one:7000"

    assert expected in text
    assert "atoll down --name lab" in last


def test_a_standby_with_the_name_of_the_guides_is_not_called_standby_twice() -> None:
    assert standby_title("standby") == "standby"
    assert standby_title("spare") == "standby spare"


@pytest.mark.parametrize("seconds", [3, 60])
def test_a_standby_with_a_lease_takes_over_when_it_can_acquire_it(seconds: float) -> None:
    lease = "the lease lab in etcd"
    status = StandbyStatus("tls://one:7000", StandbyState.LOST, 1000.0, "it ended", True, lease)
    _, text, _ = standby_text(status, "lab", "tls://two:7000", 1000.0 + seconds)
    assert "it ended; takes over when the controller has lost the lease lab in etcd and a host" in text
