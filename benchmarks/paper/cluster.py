"""A cluster for one measurement, and how much CPU time its processes take."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

import psutil

from atoll.cluster.settings import DEFAULT_POLICY, NULL_PLATFORM, ClusterSettings, Dispatch
from atoll.cluster.tenant_settings import TenantSettings
from atoll.engines.engine_options import EngineOptions
from atoll.engines.start_engine import EngineProcess
from atoll.session.bare import BareClient

Result = TypeVar("Result")

_OF_ALL_THREADS = 2  # CPUCLOCK_SCHED of Linux
_LEASE_SECONDS = 60.0  # a machine that is measured is a busy one
_MAX_SESSIONS = 512
_DELEGATE_AFTER_SECONDS = ClusterSettings("").delegate_after_seconds


class Cluster:
    """Starts a cluster; it ends with this process. Raises ClusterError where it does not start."""

    def __init__(
        self,
        islands: str,
        platform: str,
        dispatch: Dispatch = Dispatch.PARALLEL,
        tenants: tuple[TenantSettings, ...] = (),
        policy: str = DEFAULT_POLICY,
        grace_seconds: float = 0.0,
        journal: str = "",
        delegate_after_seconds: float | None = _DELEGATE_AFTER_SECONDS,
    ) -> None:
        directory = tempfile.mkdtemp(prefix="atoll-bench-")
        settings = ClusterSettings(
            islands,
            platform,
            dispatch=dispatch,
            policy=policy,
            lease_seconds=_LEASE_SECONDS,
            max_sessions=_MAX_SESSIONS,
            tenants=tenants,
            grace_seconds=grace_seconds,
            delegate_after_seconds=delegate_after_seconds,
        )
        options = EngineOptions(settings, directory, parent=os.getpid(), journal=journal)
        self.address = options.controller_address
        try:
            self.engine = EngineProcess(options, "the cluster to be measured")
            self.engine.wait_until_up()
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            raise


class NullCluster(Cluster):
    """One of null devices, and its clients in this process."""

    def __init__(
        self,
        islands: str,
        dispatch: Dispatch = Dispatch.PARALLEL,
        tenants: tuple[TenantSettings, ...] = (),
        policy: str = DEFAULT_POLICY,
        grace_seconds: float = 0.0,
        journal: str = "",
        delegate_after_seconds: float | None = _DELEGATE_AFTER_SECONDS,
    ) -> None:
        super().__init__(
            islands, NULL_PLATFORM, dispatch, tenants, policy, grace_seconds, journal, delegate_after_seconds
        )
        self._loop = asyncio.new_event_loop()

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Runs it to its end on the loop of the clients."""
        return self._loop.run_until_complete(work)

    def client(self, label: str = "bare client", token: str = "") -> BareClient:
        return self.run(BareClient.open(self.address, label, token))

    def cpu_seconds(self) -> Mapping[str, float]:
        """Return the CPU time so far of the controller, and of the processes of the null hosts."""
        seconds = {"controller": 0.0, "hosts": 0.0}
        for process in psutil.Process(self.engine.process.pid).children():
            name = "controller" if _is_controller(process) else "hosts"
            seconds[name] += cpu_seconds_of(process.pid)
        return seconds

    def controller_bytes(self) -> int:
        """Return the number of bytes of all messages that the controller has read and written."""
        controller = next(p for p in psutil.Process(self.engine.process.pid).children() if _is_controller(p))
        counters = controller.io_counters()
        return int(counters.read_chars + counters.write_chars)

    def controller_memory(self) -> int:
        """Bytes of memory that the controller's process uses."""
        controller = next(p for p in psutil.Process(self.engine.process.pid).children() if _is_controller(p))
        return int(controller.memory_info().rss)


def cpu_seconds_of(pid: int) -> float:
    """Return the CPU time of a process so far, by its CPU clock (clock_getcpuclockid(3)), to the nanosecond.

    psutil only provides ticks of 10 ms.
    """
    return time.clock_gettime(~pid << 3 | _OF_ALL_THREADS)


def _is_controller(process: psutil.Process) -> bool:
    return "atoll.controller_process.controller_main" in process.cmdline()


def costs(cluster: NullCluster, gangs: int, hosts: int, work: Callable[[], None]) -> dict[str, float]:
    """Does the work; microseconds of CPU time for one gang and host, by process."""
    before = cluster.cpu_seconds()
    work()
    after = cluster.cpu_seconds()
    return {f"{name}_us": 1e6 * (after[name] - before[name]) / gangs / hosts for name in after}
