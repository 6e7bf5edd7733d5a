"""Compiled functions: which sessions use which, and the name that workers know it by.

A name is made of the program's and options' hash, of the devices and the tenant, so the same program is compiled once
an island, whichever session of a tenant sends it. The controller never looks inside; workers check the hash.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field

from atoll.cluster.locations import DeviceLocation
from atoll.errors import Status
from atoll.scheduling.function_reports import FunctionReport

# XLA's device assignment: [replica][partition].
DeviceAssignment = tuple[tuple[DeviceLocation, ...], ...]


@dataclass
class Registration:
    """One session's request for a function: answered when all its hosts have compiled, or one has failed."""

    session: int
    function: int
    name: str
    pending: set[int]
    failure: Status | None = None
    info: bytes = b""


@dataclass
class FunctionRegistry:
    """Names, and how many sessions and programs refer to each."""

    users: dict[str, int] = field(default_factory=dict)
    locations: dict[str, DeviceAssignment] = field(default_factory=dict)  # where each of them runs
    contents: dict[str, str] = field(default_factory=dict)  # the hashes of what their clients sent
    reports: dict[str, FunctionReport] = field(default_factory=dict)  # of those that have been compiled
    # Compilations under way, in the order in which each host was asked: its answers come in any order.
    waiting: dict[tuple[str, int], list[Registration]] = field(default_factory=dict)
    compiled: int = 0
    cached: int = 0
    seconds: float = 0.0

    def acquire(self, name: str) -> None:
        self.users[name] = self.users.get(name, 0) + 1

    def release(self, name: str) -> bool:
        """Drops a reference; True where it was the last."""
        left = self.users.get(name, 0) - 1
        if left > 0:
            self.users[name] = left
            return False
        self.users.pop(name, None)
        self.locations.pop(name, None)
        self.contents.pop(name, None)
        self.reports.pop(name, None)
        return True

    def expect(self, registration: Registration) -> None:
        for host in registration.pending:
            self.waiting.setdefault((registration.name, host), []).append(registration)

    def settle(self, name: str, host: int, status: Status, info: bytes) -> list[Registration]:
        """A host has compiled the function, or failed to. Returns the registrations that this completes."""
        done = []
        for registration in self.waiting.pop((name, host), []):
            registration.pending.discard(host)
            if not status.ok and registration.failure is None:
                registration.failure = status
            registration.info = registration.info or info
            if not registration.pending:
                done.append(registration)
        return done

    def abandon(self, name: str, hosts: Iterable[int]) -> list[Registration]:
        """None of these hosts answers for the function any more. Returns the registrations that waited."""
        abandoned: dict[int, Registration] = {}
        for host in hosts:
            abandoned.update({id(each): each for each in self.waiting.pop((name, host), ())})
        return list(abandoned.values())


def hosts_of(locations: DeviceAssignment) -> set[int]:
    return {location.host for partitions in locations for location in partitions}


def function_name(content: str, locations: DeviceAssignment, tenant: str = "") -> str:
    """The workers' name for a tenant's function on these physical devices: tenants share none, nor its fate."""
    places = [[(location.host, location.ordinal) for location in partitions] for partitions in locations]
    return hashlib.sha256(f"{content} {places} {tenant}".encode()).hexdigest()[:32]
