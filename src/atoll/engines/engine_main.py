"""The engine process, which runs a cluster.

It ends at SIGTERM, when its parent ends, or when the controller ends. It removes everything that it started or made:
processes, sockets and directories. If it leaves the cluster to another engine instead, hosts and their work remain, and
its controller ends by itself, because it detects the end of this process.
"""

from __future__ import annotations

import gc

if __name__ == "__main__":
    gc.disable()  # until `run_loop`, since the objects of modules are permanent

import asyncio
import logging
import sys
from pathlib import Path

from atoll._version import __version__
from atoll.cluster.cluster_runs import ROTATE_SECONDS, ClusterRun, rotate
from atoll.cluster.directories import remove_tree
from atoll.cluster.held_directories import KEEP_SECONDS, HeldDirectory
from atoll.cluster.processes.adopted_process import watch_holder
from atoll.cluster.processes.lifeline import watch_in_loop
from atoll.cluster.processes.process_logging import start_logging
from atoll.cluster.processes.process_runtime import StopEvent, read_options, run_loop, write_ready
from atoll.cluster.sandbox.isolation import mechanisms_here
from atoll.cluster.sandbox.mechanisms import why_not_confined
from atoll.cluster.settings import DEFAULT_ENGINE, settings_text
from atoll.cluster.tenant_settings import persisted_tenants
from atoll.engines.engine_interface import make_engine
from atoll.engines.engine_options import EngineEnd, EngineOptions, Started
from atoll.engines.successor_supervisor import SuccessorSupervisor
from atoll.engines.supervisor import Supervisor
from atoll.errors import AtollError, ClusterError
from atoll.missing import exists
from atoll.retries import Reasons
from atoll.security.start_security import start_security
from atoll.wire.address import parse_address

_log = logging.getLogger(__name__)
_RETRY_SECONDS = 1.0  # until a file that is missing or cannot be examined is examined again


async def serve(options: EngineOptions, stop: StopEvent) -> None:
    """Run the cluster until `stop` is set. Report to `ready_fd` that it is up, or why it is not, and why it ended."""
    reason = ""
    parent = _Parent(options, stop)
    parent.watch()
    run = ClusterRun(Path(options.run_directory)) if options.run_directory else None
    loop = asyncio.get_running_loop()
    held = _hold(Path(options.directory))
    tasks = [loop.create_task(_rotate(run.log))] if run is not None else []
    tasks += [loop.create_task(_keep_record(held))] if held is not None else []
    if not options.has_one_client:
        given = settings_text(options.settings)
        _log.info("atoll %s starts %s with %s", __version__, "a standby" if options.standby else "a cluster", given)
    supervisor: Supervisor | SuccessorSupervisor | None = None
    try:
        address = parse_address(options.controller_address)
        has_agents = options.settings.engine != DEFAULT_ENGINE
        has_tenants = bool(persisted_tenants(options.directory))
        if has_tenants and not has_agents and not options.settings.insecure_sandbox:
            _check_sandbox()
        start_security(options.directory, address, options.advertise, has_agents, has_tenants, options.standby)
        if options.standby or (options.continues and _has_killed_cluster(options.journal)):
            supervisor = SuccessorSupervisor(options, stop)
        else:
            supervisor = Supervisor(options, make_engine(options), stop)
        await supervisor.start()
        if stop.is_set():
            reason = parent.reason or supervisor.reason
            write_ready(options.ready_fd, Started(error="the cluster was ended while it started"), is_last=False)
        else:
            write_ready(options.ready_fd, Started(address=options.controller_address), is_last=False)
            if not options.has_one_client:
                what = "standby" if options.standby else "cluster"
                _log.info("the %s is up at %s", what, options.controller_address)
            await stop.wait()
    except AtollError as error:
        reason = str(error)
        write_ready(options.ready_fd, Started(error=str(error), kind=type(error).__name__), is_last=False)
    finally:
        reason = reason or parent.reason or (supervisor.reason if supervisor is not None else "")
        reason = reason or f"its engine received {stop.reason}"
        is_replaced = supervisor is not None and supervisor.leaves
        leaves = options.leaves and (bool(parent.reason) or bool(stop.reason) or is_replaced)
        if supervisor is not None and not leaves:
            await supervisor.end()
        if not options.has_one_client:
            _log.info("this engine leaves the cluster: %s" if leaves else "the cluster has ended: %s", reason)
        for task in tasks:
            task.cancel()
        expected = bool(stop.reason) or (supervisor is not None and supervisor.was_asked)
        if run is not None:
            run.end(reason, expected=expected)
        for directory in (options.directory, *options.client_directories):
            remove_tree(directory)
        if held is not None:
            held.release()
        write_ready(options.ready_fd, EngineEnd(reason, expected))


def _has_killed_cluster(journal: str) -> bool:
    from atoll.journal.persisted_state import has_killed_cluster  # only needed by a cluster that continues another one

    return has_killed_cluster(Path(journal))


class _Parent:
    """The process that started the cluster. The cluster ends with it, unless it is to outlive that process.

    Attributes:
      reason: why the cluster ends, or "" if that is not because of this process.
    """

    def __init__(self, options: EngineOptions, stop: StopEvent) -> None:
        self.reason = ""
        self._options = options
        self._stop = stop
        self._unknown = Reasons(_log)

    def watch(self) -> None:
        """Set the stop event when the process has ended."""
        options = self._options
        if options.note:
            watch_holder(options.parent, Path(options.note), options.settings.grace_seconds, self._ended)
        elif options.parent:
            watch_in_loop(options.parent, self._ended)

    def _ended(self) -> None:
        try:
            if self._options.left and exists(self._options.left):
                return
        except OSError as error:
            self._unknown.log(f"cannot find out whether the cluster outlives the process that started it: {error}")
            asyncio.get_running_loop().call_later(_RETRY_SECONDS, self._ended)
            return
        self.reason = "the process that started it has ended"
        self._stop.set()


async def _rotate(log: Path) -> None:
    while True:
        await asyncio.sleep(ROTATE_SECONDS)
        rotate(log)


def _hold(directory: Path) -> HeldDirectory | None:
    """Lock the cluster's directory. Return None if that is not possible, for example on its file system."""
    try:
        return HeldDirectory(directory)
    except OSError as error:
        _log.warning("cannot lock %s: %s", directory, error.strerror)
        return None


async def _keep_record(held: HeldDirectory) -> None:
    problems = Reasons(_log)
    while True:
        await asyncio.sleep(KEEP_SECONDS if held.has_record else _RETRY_SECONDS)
        try:
            if held.keep_record():
                _log.warning("another program has removed the cluster's record, which is written again")
            problems.solved()
        except OSError as error:
            problems.log(f"cannot keep the cluster's record: {error}")


def _check_sandbox() -> None:
    """Raise ClusterError if this machine cannot confine the Python of tenants."""
    reason = why_not_confined(mechanisms_here())
    if reason:
        raise ClusterError(reason)


def main() -> None:
    options = read_options(EngineOptions)
    start_logging("engine")
    if options.settings.engine == DEFAULT_ENGINE and not options.has_one_client:
        mechanisms_here()
    run_loop(lambda stop: serve(options, stop))
    sys.exit(0)


if __name__ == "__main__":
    main()
