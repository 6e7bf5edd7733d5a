"""Clusters that stay: how one is found, started and ended."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from atoll.cluster.settings import ClusterSettings
from atoll.cluster.topology import read_topology
from atoll.errors import AccessError, AddressError, AtollError, ClusterError, ConnectError
from atoll.operate.engines.options import EngineOptions, Started, default_cache_directory, sockets_base
from atoll.operate.question import ask_for_dump, ask_for_report, ask_for_trace, ask_to_change, ask_to_stop
from atoll.operate.registrations import DEFAULT_NAME, Registration, Registrations
from atoll.operate.traces import chrome_trace
from atoll.processes.child import Child
from atoll.processes.client_folders import sweep
from atoll.protocol.messages import AddIslandRequest, DrainRequest, RemapRequest
from atoll.wire.address import Address, check_may_listen, parse_address

END_SECONDS = 10.0
_FORCE_SECONDS = 2.0
_POLL_SECONDS = 0.02
_LOG_LINES = 20
_WHAT_TO_START = "start one with `atoll up --islands 1x1x8`, or set ATOLL_ADDRESS to where one listens"


@dataclass(frozen=True)
class Target:
    """A cluster that a command is about; with its registration where it is this user's, on this machine."""

    address: Address
    registration: Registration | None = None


def find(address: str = "", name: str = "") -> Target:
    """The cluster at `address`, or of that `name`; else ATOLL_ADDRESS's, or the default, or the only one.

    Raises AddressError or ClusterError, which names the address that was tried and what to start.
    """
    registrations = Registrations()
    live = registrations.all()
    address = address or ("" if name else os.environ.get("ATOLL_ADDRESS", ""))
    if address:
        parsed = parse_address(address)
        same = [each for each in live if each.address == str(parsed)]
        return Target(parsed, same[0] if same else None)
    chosen = [each for each in live if each.name == (name or DEFAULT_NAME)]
    if not chosen and not name:
        chosen = live
    if not chosen:
        tried = registrations.address(name or DEFAULT_NAME)
        raise ClusterError(f"no cluster{' ' + name if name else ''} is up (tried {tried}): {_WHAT_TO_START}")
    if len(chosen) > 1:
        names = ", ".join(each.name for each in chosen)
        raise ClusterError(f"several clusters are up: choose one with --name ({names})")
    return Target(parse_address(chosen[0].address), chosen[0])


def report_of(target: Target, token: str) -> dict[str, Any]:
    """What the cluster has and does; see `atoll.controller.operators.report`. Raises ConnectError and its kin."""
    with _explained():
        report: dict[str, Any] = msgspec.json.decode(ask_for_report(target.address, token))
        return report


def dump_of(target: Target, token: str) -> bytes:
    """The controller's event log; see `atoll.controller.log`. Raises ConnectError and its kin."""
    with _explained():
        return ask_for_dump(target.address, token)


def change(target: Target, token: str, question: RemapRequest | AddIslandRequest | DrainRequest) -> str:
    """Has a cluster do something; returns what it has done. Raises StatusError, ConnectError and its kin."""
    with _explained():
        return ask_to_change(target.address, token, question)


def trace_of(target: Target, token: str) -> bytes:
    """What ran on the cluster lately, as Chrome's trace events. Raises ConnectError and its kin."""
    with _explained():
        return chrome_trace(ask_for_trace(target.address, token))


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Adds what to do to the error that nobody listens."""
    try:
        yield
    except ConnectError as error:
        if not str(error).startswith("cannot reach"):
            raise
        raise ConnectError(f"{error}; {_WHAT_TO_START}") from None


class NewCluster:
    """A cluster that is being started. Raises AtollError from the constructor where it may not be.

    `parent`: the process that it must not outlive, or 0. Its messages go to `log` in its folder; with a
    parent to standard error.
    """

    def __init__(
        self,
        *,
        name: str,
        settings: ClusterSettings,
        listen: str,
        token: str,
        parent: int = 0,
    ) -> None:
        read_topology(settings.islands, settings.mesh)
        registrations = Registrations()
        self._directory = registrations.directory(name)
        address = _listening_address(listen or registrations.address(name), token)
        self._log: BinaryIO | None = None
        with registrations.locked():
            for each in registrations.live():
                if each.name == name:
                    raise ClusterError(
                        f"a cluster named {name} is up already, at {each.address}: use it, end it with "
                        "`atoll down`, or give the new one another --name"
                    )
            self._directory.mkdir(mode=0o700)
            if not parent:
                # Held open: where the start fails, its folder is gone when the log is to be read.
                self._log = open(self._directory / "log", "a+b")  # noqa: SIM115
            options = EngineOptions(
                settings,
                str(self._directory),
                listen=str(address),
                parent=parent,
                cache_directory=default_cache_directory(),
            )
            output = self._log.fileno() if self._log else 2
            self.child = Child("atoll.operate.engines.local", options, "the cluster", output)
            pid = self.child.process.pid
            try:
                self.registration = registrations.register(name, str(address), settings.islands, settings.platform, pid)
            except BaseException:
                self.child.end()
                shutil.rmtree(self._directory, ignore_errors=True)
                raise

    def wait(self) -> None:
        """Returns once the cluster is up. Raises ClusterError where it does not, with nothing left of it."""
        try:
            started = self.child.read(Started)
            if started.error:
                raise ClusterError(started.error)
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        self.child.end()
        self.registration.kill()

    def last_messages(self) -> str:
        """The last lines of the log: what its processes said; "" where they said it on standard error."""
        if self._log is None:
            return ""
        self._log.seek(0)
        return "\n".join(self._log.read().decode(errors="replace").splitlines()[-_LOG_LINES:])


def _listening_address(text: str, token: str) -> Address:
    address = parse_address(text)
    if not address.is_unix and address.port == 0:
        raise AddressError(f"{text}: a cluster listens on a port that its clients know: name one")
    check_may_listen(address, token)
    return address


@dataclass(frozen=True)
class Ended:
    """What `stop` ended: how many processes, and how many of them by force."""

    processes: int  # -1: they are not ours to count
    forced: int = 0


def stop(target: Target, token: str) -> Ended:
    """Ends a cluster, and returns when nothing of it is left, nor of its clients that were killed.

    Asks the controller. What is ours and has not gone in time is ended by force. Raises ConnectError and its
    kin, or ClusterError where a cluster that is not ours stays.
    """
    try:
        return _stop(target, token)
    finally:
        sweep(sockets_base())


def _stop(target: Target, token: str) -> Ended:
    registration = target.registration
    if registration is None:
        with _explained():
            ask_to_stop(target.address, token)
        if not _until(lambda: not _answers(target.address), END_SECONDS):
            raise ClusterError(
                f"the cluster at {target.address} agreed to end, but still listens after {END_SECONDS:.0f} s"
            )
        return Ended(-1)
    processes = len(registration.pids())
    asked = True
    try:
        ask_to_stop(target.address, token)
    except AccessError:
        raise
    except AtollError:
        asked = False  # its controller hangs, or is gone already
    directory = Path(registration.directory)
    if asked and _until(lambda: not directory.exists() and not registration.pids(), END_SECONDS):
        return Ended(processes)
    forced = registration.kill()
    if not _until(lambda: not registration.pids(), _FORCE_SECONDS):
        raise ClusterError(f"cluster {registration.name}: processes {registration.pids()} do not end")
    shutil.rmtree(directory, ignore_errors=True)
    return Ended(processes, len(forced))


def _until(holds: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True


def _answers(address: Address) -> bool:
    with socket.socket(address.family, socket.SOCK_STREAM) as sock:
        sock.settimeout(1.0)
        return sock.connect_ex(address.sockaddr) == 0
