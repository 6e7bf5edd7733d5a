"""Standing clusters: start and end them."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO

import msgspec

from atoll.cluster.cluster_runs import RunRecord, open_log
from atoll.cluster.directories import default_cache_directory, remove_tree, sockets_bases, usage_file
from atoll.cluster.held_directories import KEEP_SECONDS, is_held
from atoll.cluster.processes.client_directories import sweep
from atoll.cluster.processes.process_logging import logging_environment, parse_line, warnings_in
from atoll.cluster.settings import GRACE_SECONDS, ClusterSettings
from atoll.engines.engine_options import EngineEnd, EngineOptions
from atoll.engines.ray.actors import EngineStart
from atoll.engines.ray.ray_cluster import RayCluster, end_cluster
from atoll.engines.start_engine import EngineProcess, check_settings
from atoll.errors import AccessError, AddressError, AtollError, ClusterError, UnreachableError
from atoll.journal.persisted_state import check_persisted
from atoll.missing import exists
from atoll.operate.cluster_queries import Target, explained
from atoll.operate.cluster_registry import DEFAULT_NAME, ClusterRegistry
from atoll.operate.operator_requests import request_stop
from atoll.protocol.messages import StopReply
from atoll.security.join_token import JoinToken, host_join_file, join_file
from atoll.security.roles import Role
from atoll.security.start_security import advertised, kept_environment
from atoll.wire.address import Address, check_may_listen, check_reached_by_hosts, parse_address
from atoll.wire.sockets import check_can_listen, dial

END_SECONDS = 10.0
_FORCE_SECONDS = 2.0
_LEAVE_SECONDS = 10.0
_POLL_SECONDS = 0.02
_LOG_LINES = 20


@dataclass(frozen=True, kw_only=True)
class StandingOptions:
    """How to start a standing cluster.

    On TCP it listens with TLS unless `insecure`, and others reach it at `advertise`; see
    `security.start_security.advertised`. The file `authority`, if given, keeps its CA and tokens. With a
    directory for a `journal`, the engine restarts the controller if it exits. With the address of another controller as
    `standby`, the cluster is a standby of that one, and has no hosts. If it `continues` and the journal is that of a
    cluster that was killed, it is that cluster. With `stays` it outlives this process. Its controller must hold the
    `lease` at this address, unless it is "". If it `leaves`, its end by this process leaves the cluster to the standby
    of its controller, or to the next engine with its journal.
    """

    name: str
    settings: ClusterSettings
    listen: str
    token: str
    stays: bool
    advertise: str = ""
    insecure: bool = False
    authority: Path | None = None
    journal: Path | None = None
    standby: str = ""
    continues: bool = False
    lease: str = ""
    leaves: bool = False


class StandingCluster:
    """A standing cluster. The constructor starts it, and raises AtollError if that is not possible.

    Its processes write messages to `log` in its directory, or to standard error if it ends with this process.
    """

    def __init__(self, options: StandingOptions) -> None:
        settings, authority = options.settings, options.authority
        check_settings(settings)
        if options.journal is not None:
            check_persisted(options.journal, settings)
        registry = ClusterRegistry()
        self._directory = registry.directory(options.name)
        self._left = self._directory / "left"
        self._stays = options.stays
        self._leaves = options.leaves
        address = _listening_address(options.listen or registry.address(options.name), options)
        if settings.engine == "hosts":
            check_reached_by_hosts(address)
        reached = str(advertised(address, options.advertise))
        environment: dict[str, str] = {}
        if authority is not None and address.tls:
            environment = kept_environment(authority, options.token, must_exist=bool(options.standby))
        environment = logging_environment() | environment
        self._log: BinaryIO | None = None
        with registry.locked():
            check_is_free(registry, options.name)
            if not address.is_unix and not options.continues:  # the controller of its journal may still be ending
                check_can_listen(address)
            _make_directory(self._directory, options.name)
            run_directory = self._begin_run(options, address) if options.stays else ""
            engine = self._engine_options(options, address, run_directory)
            self.engine = EngineProcess(engine, output=self._log.fileno() if self._log else 2, environment=environment)
            try:
                self.record = registry.register(
                    options.name,
                    str(address),
                    settings.islands,
                    settings.platform,
                    self.engine.process.pid,
                    run=run_directory,
                    advertised="" if reached == str(address) else reached,
                )
            except BaseException:
                self.engine.end()
                remove_tree(self._directory)
                raise

    def _begin_run(self, options: StandingOptions, address: Address) -> str:
        """Open the log of a cluster that outlives this process, and record its run.

        Return the directory of the run, or "" if its log is not kept.
        """
        record = RunRecord(
            options.name,
            str(address),
            options.settings.islands,
            started=time.time(),
            journal=_absolute(options.journal),
            standby=options.standby,
        )
        # Held open, because the directory no longer exists when the log of a failed start is read.
        self._log, run = open_log(record, self._directory)
        return "" if run is None else str(run.directory)

    def _engine_options(self, options: StandingOptions, address: Address, run_directory: str) -> EngineOptions:
        return EngineOptions(
            options.settings,
            str(self._directory),
            listen=str(address),
            advertise=options.advertise,
            parent=os.getpid(),
            left=str(self._left) if options.stays else "",
            cache_directory=default_cache_directory(),
            usage_file=usage_file(options.name),
            journal=_absolute(options.journal),
            standby=options.standby,
            continues=options.continues,
            lease=options.lease,
            leaves=options.leaves,
            run_directory=run_directory,
        )

    def join_token(self, role: Role) -> JoinToken:
        """Return the join token for this role, if the cluster uses TLS. A copy is in the cluster's directory.

        Raises ClusterError, and cleans up, if the cluster does not start.
        """
        try:
            return self.engine.join_token(role)
        except BaseException:
            self.end()
            raise

    def wait(self) -> None:
        """Wait until the cluster is up. Raises ClusterError, and cleans up, if it does not start."""
        try:
            self.engine.wait_until_up(until_end=not self._stays)
        except BaseException:
            self.end()
            raise

    def leave(self) -> None:
        """Keep the cluster running after this process exits. Until this call, the end of this process ends it."""
        with contextlib.suppress(FileNotFoundError):  # the cluster has ended meanwhile
            self._left.touch()
        self.engine.leave()

    def wait_for_end(self) -> EngineEnd:
        """Block until a cluster that ends with this process has ended, and return why."""
        return self.engine.wait_for_end()

    def end(self) -> None:
        """End the cluster, killing remaining processes, and remove its directory."""
        self.engine.end()
        if self._leaves:  # the controller completes its journal and releases its lease
            _until(lambda: not self.record.pids(), _LEAVE_SECONDS)
        self.record.kill()

    def last_messages(self) -> str:
        """Return the last lines of the log that are not events, or "" if the processes wrote to standard error."""
        return "\n".join([line for line in self._logged().splitlines() if not _is_event(line)][-_LOG_LINES:])

    def warnings(self) -> str:
        """Return the last warnings and errors of a start that succeeded. "" if they are on standard error."""
        return "\n".join(warnings_in(self._logged(), _LOG_LINES))

    def _logged(self) -> str:
        """Return the log, or "" if the processes wrote to standard error."""
        if self._log is None:
            return ""
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    @property
    def directory(self) -> Path:
        """The cluster's directory, which has its join tokens if it uses TLS."""
        return self._directory


def _make_directory(directory: Path, name: str) -> None:
    """Make the directory of a cluster. Raise ClusterError if another cluster has it."""
    try:
        directory.mkdir(mode=0o700)
    except FileExistsError:
        if is_held(directory):
            raise ClusterError(
                f"a cluster named {name} runs, and another program has removed its record from "
                f"{directory}: its engine writes the record again within {KEEP_SECONDS:.0f} s"
            ) from None
        # `live` has just removed leftovers of this machine, so another machine shares the directory.
        raise ClusterError(
            f"{directory} belongs to a cluster of another machine: give this one another --name"
        ) from None


def _absolute(path: Path | None) -> str:
    """Return the absolute path. Return "" for None."""
    return "" if path is None else str(path.absolute())


def _is_event(line: str) -> bool:
    found = parse_line(line)
    return found is not None and found.level == "info"


class StandingOnRay:
    """A standing cluster whose engine is a Ray actor (`atoll up --engine ray`). Otherwise as `StandingCluster`.

    The journal and the CA are on the node of the actor. This machine keeps the cluster's record, so that this
    user's commands find it by name, and its join tokens. Elsewhere, and for other users, a join token leads to the
    cluster.
    """

    def __init__(self, options: StandingOptions) -> None:
        name, settings = options.name, options.settings
        registry = ClusterRegistry()
        self.directory = registry.directory(name)
        where = settings.ray_address or "auto"
        check_is_free(registry, name, on_ray=where)
        files = [_absolute(each) for each in (options.journal, options.authority)]
        start = EngineStart(settings, options.listen, options.advertise, options.insecure, name, *files)
        self._cluster = RayCluster(name, start, stays=options.stays)
        try:
            with registry.locked():
                check_is_free(registry, name, on_ray=where)
                self.directory.mkdir(mode=0o700, exist_ok=True)
                for role, join in self._cluster.joins.items():
                    join.save((host_join_file if role is Role.HOST else join_file)(self.directory))
                self.record = registry.register(
                    name,
                    self._cluster.address,
                    settings.islands,
                    settings.platform,
                    os.getpid(),
                    ray=where,
                )
        except BaseException:
            self.end()
            raise

    def join_token(self, role: Role) -> JoinToken:
        """Return the join token for this role, if the cluster uses TLS. A copy is in the cluster's directory."""
        return self._cluster.joins[role]

    def wait(self) -> None:
        """Wait until the cluster is up. Raises ClusterError, and cleans up, if it does not start."""
        try:
            self._cluster.wait_until_up()
        except BaseException:
            self.end()
            raise

    def last_messages(self) -> str:
        """Return the last lines that its processes wrote, if it did not start."""
        return self._cluster.last_messages()

    def warnings(self) -> str:
        """Return the last warnings and errors of a start that succeeded."""
        return self._cluster.last_messages()

    def leave(self) -> None:
        """Keep the cluster running after this process exits."""
        self._cluster.leave()

    def wait_for_end(self) -> EngineEnd:
        """Block until the cluster has ended, and return why."""
        return self._cluster.wait_for_end()

    def end(self) -> None:
        """End the cluster, and remove its record."""
        self._cluster.end()
        remove_tree(self.directory)


def start_cluster(options: StandingOptions) -> StandingCluster | StandingOnRay:
    """Start a cluster. Raises AtollError if that is not possible."""
    if options.journal is not None and not options.settings.grace_seconds:
        settings = msgspec.structs.replace(options.settings, grace_seconds=GRACE_SECONDS)
        options = replace(options, settings=settings)
    if options.settings.engine != "ray":
        return StandingCluster(options)
    if options.listen and _listening_address(options.listen, options).is_unix:
        raise AddressError(f"{options.listen}: Ray's nodes reach a cluster over TCP; give HOST:PORT, or omit --listen")
    return StandingOnRay(options)


def check_is_free(registry: ClusterRegistry, name: str, on_ray: str = "") -> None:
    """Raise ClusterError if this user has a cluster with the name on this machine.

    A cluster on the Ray cluster `on_ray` does not count: Ray refuses a second engine with its name, if there still is
    the first.
    """
    for each in registry.live():
        if each.name == name and each.ray and each.ray == on_ray:
            continue
        if each.name == name and each.continues_at:
            raise ClusterError(
                f"the engine of cluster {name} runs on this machine, and the cluster continues at {each.continues_at}: "
                "give the new one another --name"
            )
        if each.name == name:
            chosen = "" if name == DEFAULT_NAME else f" --name {name}"
            raise ClusterError(
                f"a cluster named {name} is up already, at {each.reached_at}: use it with ATOLL_ADDRESS={name}, end it "
                f"with `atoll down{chosen}`, or give the new one another --name"
            )


def _listening_address(text: str, options: StandingOptions) -> Address:
    address = parse_address(text)
    if not options.insecure:
        address = address.secured()
    if not address.is_unix and address.port == 0:
        raise AddressError(f"{text}: clients need to know the port; give one other than 0")
    check_may_listen(address, options.token)
    return address


@dataclass(frozen=True)
class Ended:
    """The result of `stop`: the number of processes that ended, those that were killed, and the controller's reply."""

    processes: int  # -1: unknown, because the cluster is not this user's on this machine
    forced: int = 0
    reply: StopReply = field(default_factory=StopReply)
    controller_replied: bool = True  # otherwise sessions on disk are left

    @property
    def persisted(self) -> list[str]:
        """Lines that name the persisted sessions, if any, and explain how to resume them."""
        if not self.reply.persisted:
            return []
        names = ", ".join(name for _, name in self.reply.persisted)
        numbers = " and ".join(f"`atoll resume {number}`" for number, _ in self.reply.persisted)
        again = "`atoll up` with the same --journal, then"
        return [
            f"suspended on disk, {self.reply.seconds / 3600:.3g} h at most: {names}",
            f"  to resume: {again} {numbers}",
            f"  to end them: {again} `atoll down --all`",
        ]


def stop(target: Target, token: str, all_sessions: bool = False) -> Ended:
    """End a cluster, and return when no process or file of it or of its killed clients is left.

    With `all_sessions`, also end sessions that would resume in the next cluster. Asks the controller to end, and kills
    this user's processes that do not exit in time. Raises ConnectError or a subclass, or ClusterError if another user's
    cluster does not end.
    """
    try:
        return _stop(target, token, all_sessions)
    finally:
        for base in sockets_bases():
            sweep(base)


def stop_on_ray(ray_address: str, name: str) -> None:
    """End the cluster with this name on a Ray cluster, which may be remote. As `stop`. Raises ClusterError."""
    if not end_cluster(ray_address, name):
        raise ClusterError(f"no cluster named {name} on the Ray cluster at {ray_address}")


def _stop(target: Target, token: str, all_sessions: bool) -> Ended:
    record = target.record
    if record is None:
        with explained(target):
            reply = request_stop(target.address, token, target.join, all_sessions)
        if not _until(lambda: not listens(target.address), END_SECONDS):
            raise ClusterError(
                f"the cluster at {target.address} agreed to end, but still listens after {END_SECONDS:.0f} s"
            )
        return Ended(-1, reply=reply)
    processes = len(record.pids())
    agreed, reply = True, StopReply()
    if target.standby is not None:  # which answers no requests
        record.terminate()
    else:
        try:
            reply = request_stop(target.address, token, target.join, all_sessions)
        except AccessError:
            raise
        except AtollError:
            agreed = False  # the controller hangs or has exited
            record.terminate()
    directory = Path(record.directory)
    if record.ray:
        try:
            end_cluster(record.ray, record.name)
        except ClusterError:
            # If the controller agreed, the engine removes its actors itself. If neither Ray nor the controller is
            # there, only the record is left.
            if not agreed and not record.refuses:
                raise
        remove_tree(directory)
        return Ended(-1, reply=reply, controller_replied=agreed)
    if _until(lambda: not exists(directory) and not record.pids(), END_SECONDS):
        return Ended(processes, reply=reply, controller_replied=agreed)
    forced = record.kill()
    if not _until(lambda: not record.pids(), _FORCE_SECONDS):
        raise ClusterError(f"cluster {record.name}: processes {record.pids()} do not end")
    remove_tree(directory)
    return Ended(processes, len(forced), reply, agreed)


def _until(holds: Callable[[], bool], seconds: float) -> bool:
    """Wait until the condition holds. Return whether it did in time. If it cannot be checked, check it again."""
    deadline = time.monotonic() + seconds
    while True:
        with contextlib.suppress(ClusterError, OSError):
            if holds():
                return True
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)


def listens(address: Address) -> bool:
    """Return whether a process listens at the address. Raises ConnectError if that is unknown."""
    try:
        dial(address, timeout=1.0).close()
    except UnreachableError:
        return False
    return True
