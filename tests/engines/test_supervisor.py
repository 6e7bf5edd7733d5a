"""What every engine process does: a start that takes too long says what is missing."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from atoll.cluster.settings import ClusterSettings
from atoll.controller_process.controller_options import FOLLOWED, RUNS, SUPERSEDED
from atoll.engines import supervisor
from atoll.engines.controller_child import ControllerChild
from atoll.engines.engine_options import EngineOptions
from atoll.engines.hosts.hosts_engine import HostsEngine
from atoll.engines.standby_supervisor import StandbySupervisor
from atoll.engines.supervisor import Supervisor
from atoll.errors import ClusterError
from tests.cluster_process import free_port


def test_a_cluster_whose_controller_does_not_come_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ControllerChild, "start", lambda _: None)
    monkeypatch.setattr(supervisor, "_LISTEN_SECONDS", 0.1)
    monkeypatch.setenv("ATOLL_INSECURE", "1")
    listen = f"127.0.0.1:{free_port()}"
    options = EngineOptions(ClusterSettings("1x1x1", engine="hosts", wait_seconds=0.1), str(tmp_path), listen=listen)

    async def start() -> None:
        await Supervisor(options, HostsEngine(options), asyncio.Event()).start()

    with pytest.raises(ClusterError, match=f"not up within 0 s: its controller does not listen at {listen}"):
        asyncio.run(start())


@pytest.mark.parametrize("status", [SUPERSEDED, -signal.SIGKILL])
def test_a_standby_ends_if_another_controller_takes_over_from_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    started: list[ControllerChild] = []
    monkeypatch.setattr(ControllerChild, "start", lambda child: started.append(child))
    options = EngineOptions(ClusterSettings(), str(tmp_path), standby="unix:/the-first", journal=str(tmp_path))

    async def main() -> None:
        stop = asyncio.Event()
        standby = StandbySupervisor(options, stop)
        starting = asyncio.create_task(standby.start())
        await asyncio.sleep(0)
        (child,) = started
        monkeypatch.setattr("os.read", lambda descriptor, size: RUNS + FOLLOWED)
        child._read()
        child._ended(status)
        assert stop.is_set()
        assert len(started) == 1  # and it is not started again
        starting.cancel()

    asyncio.run(main())
