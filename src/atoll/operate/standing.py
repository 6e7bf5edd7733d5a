"""Clusters that stay: how one is started, and ended."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from msgspec.structs import replace

from atoll.cluster.directories import default_cache_directory, usage_file
from atoll.cluster.processes.child import wait_for_any
from atoll.cluster.processes.client_directories import sweep
from atoll.cluster.settings import GRACE_SECONDS, ClusterSettings
from atoll.engines.engine_options import EngineOptions, sockets_base
from atoll.engines.ray.ray_cluster import end_cluster
from atoll.engines.start_engine import EngineProcess, check_settings
from atoll.errors import AccessError, AddressError, AtollError, ClusterError, ConnectError
from atoll.journal.persisted_state import check_persisted
from atoll.operate.cluster_queries import Target, explained
from atoll.operate.cluster_registry import ClusterRegistry
from atoll.operate.operator_requests import request_stop
from atoll.operate.standing_on_ray import StandingOnRay
from atoll.protocol.messages import StopReply
from atoll.security.join_token import JoinToken
from atoll.security.roles import Role
from atoll.security.start_security import advertised, kept_environment
from atoll.wire.address import Address, check_may_listen, parse_address
from atoll.wire.sockets import dial

END_SECONDS = 10.0
_FORCE_SECONDS = 2.0
_POLL_SECONDS = 0.02
_LOG_LINES = 20


class StandingCluster:
    """A cluster that is being started. Raises AtollError from the constructor where it may not be.

    `parent`: the process that it must not outlive, or 0. Its messages go to `log` in its directory; with a parent to
    standard error. On TCP it listens with TLS, unless it is `insecure`; others know it by what it is to `advertise`
    then: see `security.start_security.advertised`. Its authority and tokens are kept in the file `authority`, if there
    is one. With a directory for a `journal` its controller is started again where it ends. With the address of
    another's controller as `standby` it is that one's standby, and has no hosts of its own.
    """

    def __init__(
        self,
        *,
        name: str,
        settings: ClusterSettings,
        listen: str,
        token: str,
        parent: int = 0,
        advertise: str = "",
        insecure: bool = False,
        authority: Path | None = None,
        journal: Path | None = None,
        standby: str = "",
    ) -> None:
        if journal is not None and not settings.grace_seconds:
            settings = replace(settings, grace_seconds=GRACE_SECONDS)
        check_settings(settings)
        if journal is not None:
            check_persisted(journal, settings)
        registry = ClusterRegistry()
        self._directory = registry.directory(name)
        address = _listening_address(listen or registry.address(name), token, insecure)
        advertised(address, advertise)
        environment = kept_environment(authority, token) if authority is not None and address.tls else {}
        self._log: BinaryIO | None = None
        with registry.locked():
            for each in registry.live():
                if each.name == name:
                    raise ClusterError(
                        f"a cluster named {name} is up already, at {each.address}: use it, end it with "
                        "`atoll down`, or give the new one another --name"
                    )
            try:
                self._directory.mkdir(mode=0o700)
            except (
                FileExistsError
            ):  # another machine, which shares the directory, has it: this machine's own was removed just now
                raise ClusterError(
                    f"{self._directory} belongs to a cluster of another machine: give this one another --name"
                ) from None
            if not parent:
                # Held open: where the start fails, its directory no longer exists when the log is to be read.
                self._log = open(self._directory / "log", "a+b")  # noqa: SIM115
            options = EngineOptions(
                settings,
                str(self._directory),
                listen=str(address),
                advertise=advertise,
                parent=parent,
                cache_directory=default_cache_directory(),
                usage_file=usage_file(name),
                journal=str(journal.absolute()) if journal is not None else "",
                standby=standby,
            )
            self.engine = EngineProcess(options, output=self._log.fileno() if self._log else 2, environment=environment)
            pid = self.engine.process.pid
            try:
                self.record = registry.register(name, str(address), settings.islands, settings.platform, pid)
            except BaseException:
                self.engine.end()
                shutil.rmtree(self._directory, ignore_errors=True)
                raise

    def join_token(self, role: Role) -> JoinToken:
        """By which others join it in that role, where it listens with TLS; a copy is in its directory.

        Raises ClusterError where it does not start, with nothing left of it.
        """
        try:
            return self.engine.join_token(role)
        except BaseException:
            self.end()
            raise

    def wait(self) -> None:
        """Returns once the cluster is up. Raises ClusterError where it does not start, with nothing left of it."""
        try:
            self.engine.wait_until_up()
        except BaseException:
            self.end()
            raise

    def leave(self) -> None:
        """Leaves it running: this process will end first."""
        self.engine.leave()

    def wait_for_end(self) -> None:
        """Blocks until the cluster has ended."""
        wait_for_any([self.engine])

    def end(self) -> None:
        """Ends the cluster, by force where it does not go, and removes its directory."""
        self.engine.end()
        self.record.kill()

    def last_messages(self) -> str:
        """The last lines that its processes wrote to the log; "" where they wrote to standard error."""
        if self._log is None:
            return ""
        self._log.seek(0)
        return "\n".join(self._log.read().decode(errors="replace").splitlines()[-_LOG_LINES:])

    @property
    def directory(self) -> Path:
        """The cluster's own, with its join tokens where it listens with TLS."""
        return self._directory


def start_cluster(
    *,
    name: str,
    settings: ClusterSettings,
    listen: str,
    token: str,
    stays: bool,
    advertise: str = "",
    insecure: bool = False,
    authority: Path | None = None,
    journal: Path | None = None,
    standby: str = "",
) -> StandingCluster | StandingOnRay:
    """Starts a cluster; it outlives this process where it `stays`. Raises AtollError where it may not be."""
    if settings.engine == "ray":
        address = _listening_address(listen, token, insecure) if listen else None
        if address is not None and address.is_unix:
            raise AddressError(f"{listen}: Ray's nodes reach a cluster over TCP: expected HOST:PORT, or no --listen")
        return StandingOnRay(
            name=name,
            settings=settings,
            listen=listen,
            stays=stays,
            advertise=advertise,
            insecure=insecure,
            authority=authority,
            journal=journal,
        )
    return StandingCluster(
        name=name,
        settings=settings,
        listen=listen,
        token=token,
        parent=0 if stays else os.getpid(),
        advertise=advertise,
        insecure=insecure,
        authority=authority,
        journal=journal,
        standby=standby,
    )


def _listening_address(text: str, token: str, insecure: bool) -> Address:
    address = parse_address(text)
    if not insecure:
        address = address.secured()
    if not address.is_unix and address.port == 0:
        raise AddressError(f"{text}: a cluster listens on a port that its clients know: name one")
    check_may_listen(address, token)
    return address


@dataclass(frozen=True)
class Ended:
    """What `stop` ended: how many processes, and how many of them by force; and what the controller said of it."""

    processes: int  # -1: they are not ours to count
    forced: int = 0
    said: StopReply = field(default_factory=StopReply)

    @property
    def persisted(self) -> list[str]:
        """Lines that name the sessions that stay, and say how they go on; none where all have ended."""
        if not self.said.persisted:
            return []
        names = ", ".join(name for _, name in self.said.persisted)
        numbers = " and ".join(f"`atoll resume {number}`" for number, _ in self.said.persisted)
        again = "`atoll up` with the same --journal, then"
        return [
            f"suspended on disk, {self.said.seconds / 3600:.3g} h at most: {names}",
            f"  to go on: {again} {numbers}",
            f"  to end all of them, too: {again} `atoll down --all`",
        ]


def stop(target: Target, token: str, all_sessions: bool = False) -> Ended:
    """Ends a cluster, and returns when nothing of it is left, nor of its clients that were killed. With `all_sessions`
    also those that would go on in the next one.

    Asks the controller. What is ours and has not ended in time is ended by force. Raises ConnectError and its
    kin, or ClusterError where a cluster that is not ours stays.
    """
    try:
        return _stop(target, token, all_sessions)
    finally:
        sweep(sockets_base())


def stop_on_ray(ray_address: str, name: str) -> None:
    """Ends the cluster of that name on a Ray cluster, from wherever that is reached; as `stop`. Raises ClusterError."""
    if not end_cluster(ray_address, name):
        raise ClusterError(f"there is no cluster named {name} on the Ray cluster at {ray_address}")


def _stop(target: Target, token: str, all_sessions: bool) -> Ended:
    record = target.record
    if record is None:
        with explained():
            said = request_stop(target.address, token, target.join, all_sessions)
        if not _until(lambda: not _listens(target.address), END_SECONDS):
            raise ClusterError(
                f"the cluster at {target.address} agreed to end, but still listens after {END_SECONDS:.0f} s"
            )
        return Ended(-1, said=said)
    processes = len(record.pids())
    agreed, said = True, StopReply()
    try:
        said = request_stop(target.address, token, target.join, all_sessions)
    except AccessError:
        raise
    except AtollError:
        agreed = False  # its controller hangs, has ended, or only stands by
        record.terminate()
    directory = Path(record.directory)
    if record.ray:
        try:
            end_cluster(record.ray, record.name)
        except ClusterError:
            if not agreed:  # else its engine removes what it has in Ray
                raise
        shutil.rmtree(directory, ignore_errors=True)
        return Ended(-1, said=said)
    if _until(lambda: not directory.exists() and not record.pids(), END_SECONDS):
        return Ended(processes, said=said)
    forced = record.kill()
    if not _until(lambda: not record.pids(), _FORCE_SECONDS):
        raise ClusterError(f"cluster {record.name}: processes {record.pids()} do not end")
    shutil.rmtree(directory, ignore_errors=True)
    return Ended(processes, len(forced), said)


def _until(holds: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True


def _listens(address: Address) -> bool:
    try:
        dial(address, timeout=1.0).close()
    except ConnectError:
        return False
    return True
