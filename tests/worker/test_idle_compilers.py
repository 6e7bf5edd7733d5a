"""The compiler processes that a host keeps for its sessions."""

from __future__ import annotations

from typing import Any, cast

import pytest

from atoll.worker.compilers import Compilers


class Process:
    """A process that has not ended."""

    has_ended = False
    is_closed = False

    def close(self) -> None:
        self.is_closed = True


class Server:
    """Gives out new processes."""

    def take(self) -> Process:
        return Process()

    def prepare(self) -> None:
        raise AssertionError("no process may be started before the first program")


@pytest.mark.parametrize("is_open", [True, False])
def test_an_idle_process_is_kept_for_an_open_session_only(is_open: bool) -> None:
    compilers = Compilers(cast(Any, Server()))
    if is_open:
        compilers.open(7, prepare=False)
    process = cast(Any, compilers.take(7))
    compilers.give_back(7, process, takes_more=True)
    assert process.is_closed is not is_open
    assert (compilers.take(7) is process) is is_open
