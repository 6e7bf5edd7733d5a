"""Controllers of engines that are no processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import pytest

from atoll.engines import controller_child
from tests.engines.controller_stand_in import ControllerStandIn


@pytest.fixture
def controllers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[ControllerStandIn]]:
    """Return the controllers that engines of this process have started, none of which is a process."""
    started: list[ControllerStandIn] = []

    def start(
        command: Sequence[str],
        environment: Mapping[str, str],
        on_end: Callable[[int], None],
        descriptors: tuple[int, ...],
    ) -> ControllerStandIn:
        return ControllerStandIn(started, command, on_end, descriptors)

    monkeypatch.setattr(controller_child, "LocalProcess", start)
    yield started
    for each in started:
        each.close()
