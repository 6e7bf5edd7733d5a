"""A standby's engine process, once its controller is one."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from atoll.cluster.settings import ClusterSettings
from atoll.controller_process.controller_options import FOLLOWED, RUNS, SUPERSEDED
from atoll.engines.controller_child import ControllerChild
from atoll.engines.engine_options import EngineOptions
from atoll.engines.standby_supervisor import StandbySupervisor


@pytest.mark.parametrize("status", [SUPERSEDED, -signal.SIGKILL])
def test_it_ends_where_another_one_takes_over_from_its_controller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    started: list[ControllerChild] = []
    monkeypatch.setattr(ControllerChild, "start", lambda child: started.append(child))
    options = EngineOptions(ClusterSettings(), str(tmp_path), standby="unix:/the-first", journal=str(tmp_path))

    async def main() -> None:
        stop = asyncio.Event()
        supervisor = StandbySupervisor(options, stop)
        starting = asyncio.create_task(supervisor.start())
        await asyncio.sleep(0)
        (child,) = started
        monkeypatch.setattr("os.read", lambda descriptor, size: RUNS + FOLLOWED)
        child._read()
        child._ended(status)
        assert stop.is_set()
        assert len(started) == 1  # and it is not started again
        starting.cancel()

    asyncio.run(main())
