"""A cluster that lasts for several tests, with proxies that serve these tests' clients."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil
from msgspec.structs import replace

from atoll.cluster.processes.process_runtime import command
from atoll.cluster.settings import ClusterSettings
from atoll.cluster.tenant_settings import keep_tenants
from atoll.engines.engine_options import EngineOptions, Started
from atoll.errors import ConnectError
from atoll.ifrt.proxy_options import ProxyOptions, Ready
from atoll.operate.operator_requests import request_report
from atoll.security.join_token import JoinToken, host_join_file, join_file, read_join
from atoll.security.start_security import new_environment
from atoll.wire.address import parse_address
from tests.cluster_process import kill_at_once
from tests.end_to_end.host_agents import HostAgent
from tests.forked_process import Popen, children

START_SECONDS = 300.0
_END_SECONDS = 120.0


class StandingCluster:
    """Processes of one cluster, in a private directory.

    The engine starts with `environment`, and `settings` are its `ClusterSettings` other than the islands. `spare` is
    the address of a standby; its certificate authority is then one that standbys also have. `agents` is the number of
    host agents on this machine, one per island, which get `agent_options`. Set `has_bugs` for tests that inject faults.
    Standbys have the same `lease`.
    """

    def __init__(
        self,
        directory: Path,
        environment: dict[str, str],
        *,
        islands: str = "1x1x4",
        listen: str = "",
        advertise: str = "",
        token: str = "",
        journal: str = "",
        spare: str = "",
        agents: int = 0,
        agent_options: Sequence[str] = (),
        has_bugs: bool = False,
        lease: str = "",
        **settings: Any,
    ) -> None:
        self.directory = directory / "cluster"
        self.directory.mkdir(mode=0o700)
        self._stopped = False
        self._has_bugs = has_bugs
        self.token = token
        self.standby = ""
        keep_tenants(str(self.directory), settings.pop("tenants", ()))
        options = EngineOptions(
            ClusterSettings(islands, **settings),
            str(self.directory),
            listen=listen,
            advertise=advertise,
            parent=os.getpid(),
            cache_directory=environment.get("ATOLL_CACHE_DIR", ""),
            journal=journal,
            lease=lease,
        )
        self._lease = lease
        self.address = options.controller_address
        self._spare = spare
        self._environment = environment | ({"ATOLL_TOKEN": token} if token else {})
        if spare:
            self._environment |= new_environment()
        self._log = directory / "log"
        self._children: list[subprocess.Popen[bytes]] = []
        hosts = host_join_file(self.directory)
        self.agents = [
            HostAgent(island, hosts, environment, directory / f"agent-{island}", agent_options)
            for island in range(agents)
        ]
        started = self._start("atoll.engines.engine_main", options, Started)
        if started.error:
            self.wait()
        assert not started.error, started.error

    def _start(self, module: str, options: Any, kind: type[Any]) -> Any:
        readable, writable = os.pipe()
        with open(self._log, "ab") as log:
            process = Popen(
                command(module, msgspec.structs.replace(options, ready_fd=writable)),
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(writable,),
            )
        self._children.append(process)
        os.close(writable)
        with open(readable, "rb") as lines:
            assert select.select([lines], [], [], START_SECONDS)[0], f"{module} is not up in time"
            line = lines.readline()
        assert line, f"{module} ended before it was up"
        return msgspec.json.decode(line, type=kind)

    def start_proxy(self, path: Path, transfer_directory: Path | None = None) -> psutil.Process:
        """Start a proxy that listens at a unix socket for any number of clients."""
        options = ProxyOptions(
            f"unix:{path}", self.address, os.getpid(), transfer_directory=str(transfer_directory or "")
        )
        ready = self._start("atoll.ifrt.proxy_main", options, Ready)
        assert not ready.error, ready.message
        return psutil.Process(self._children[-1].pid)

    def start_standby(self, directory: Path) -> psutil.Process:
        """Start a standby of the controller at `address`, and set `standby` to its address. The process is that of its
        engine.

        If the cluster has a spare address, the standby listens there. If the controller is already at the spare
        address, the standby listens at the first one.
        """
        directory.mkdir(mode=0o700)
        self._spare, listen = self.address if self._spare else "", self._spare
        options = EngineOptions(
            ClusterSettings(),
            str(directory),
            listen=listen,
            parent=os.getpid(),
            cache_directory=self._environment.get("ATOLL_CACHE_DIR", ""),
            journal=str(directory / "journal"),
            standby=self.address,
            lease=self._lease,
        )
        self.standby = options.controller_address
        started = self._start("atoll.engines.engine_main", options, Started)
        assert not started.error, started.error
        return psutil.Process(self._children[-1].pid)

    @property
    def join(self) -> JoinToken | None:
        """Return the clients' join token for the controller's current address, if there is a spare one."""
        if not self._spare:
            return None
        return replace(read_join(str(join_file(self.directory))), address=parse_address(self.address))

    def report(self, join: JoinToken | None = None) -> dict[str, Any]:
        """Return the output of `atoll status --json`, called with a join token if the cluster listens with TLS."""
        join = join or self.join
        address = parse_address(self.address) if join is None else join.address
        report: dict[str, Any] = json.loads(request_report(address, self.token, join))
        return report

    def until(
        self, holds: Callable[[dict[str, Any]], bool], seconds: float, join: JoinToken | None = None
    ) -> dict[str, Any]:
        """Return the report as soon as `holds(report)` is true. Fail the test if that takes longer.

        If the controller cannot be reached, try again: it may be restarting, or slow on a busy machine.
        """
        deadline = time.monotonic() + seconds
        while True:
            try:
                report = self.report(join)
            except ConnectError:
                if time.monotonic() > deadline:
                    raise
            else:
                if holds(report):
                    return report
                assert time.monotonic() < deadline, (
                    f"after {seconds} s still: {json.dumps([report['islands'], report['sessions']])}\n{self.messages()}"
                )
            time.sleep(0.02)

    def messages(self) -> str:
        """Return the last output of the cluster's processes."""
        return self._log.read_text(errors="replace")[-5000:]

    def engine(self) -> psutil.Process:
        return psutil.Process(self._children[0].pid)

    def processes(self) -> dict[str, psutil.Process]:
        """Return the controller and the workers as (module, pid)."""
        return {f"{each.cmdline()[3]} {each.pid}": each for each in children(self._children[0].pid)}

    def worker(self, host: int, join: JoinToken | None = None) -> psutil.Process:
        """Return the process of a host's worker, according to the controller."""
        hosts = (each for island in self.report(join)["islands"] for each in island["hosts"])
        return psutil.Process(next(each["pid"] for each in hosts if each["id"] == host))

    def proxies(self) -> list[psutil.Process]:
        """Return the proxies that `start_proxy` has started."""
        return [psutil.Process(child.pid) for child in self._children[1:]]

    def wait(self) -> None:
        """Wait until the cluster has ended by itself. Fail the test if it does not end."""
        self._children[0].wait(_END_SECONDS)

    def kill(self) -> None:
        """Kill the engine and the controller at once, as a power loss does. Workers end when they notice."""
        engine = self.engine()
        processes = children(engine.pid, recursive=True)
        kill_at_once(engine, *(each for each in processes if "controller" in " ".join(each.cmdline()[3:4])))
        psutil.wait_procs(processes, _END_SECONDS)
        self._children[0].wait(_END_SECONDS)
        shutil.rmtree(self.directory)
        self.stop()

    def stop(self) -> None:
        """End the cluster and its proxies, once. Fail if any of them reported an unexpected error."""
        if self._stopped:
            return
        self._stopped = True
        for process in reversed(self._children):
            process.terminate()
        for process in reversed(self._children):
            try:
                process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                raise AssertionError(f"{process.args} does not end") from None
        for agent in self.agents:
            agent.close()
        log = self._log.read_text(errors="replace")
        assert self._has_bugs or "Traceback" not in log, log[max(0, log.index("Traceback") - 1000) :][:10000]


StartCluster = Callable[..., StandingCluster]
