"""Clusters that stay on a Ray cluster: `atoll up --engine ray`."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from msgspec.structs import replace

from atoll.cluster.settings import GRACE_SECONDS, ClusterSettings
from atoll.engines.ray.actors import EngineStart
from atoll.engines.ray.ray_cluster import RayCluster
from atoll.errors import ClusterError
from atoll.operate.cluster_registry import ClusterRegistry
from atoll.security.join_token import JoinToken
from atoll.security.roles import Role
from atoll.security.start_security import host_join_file, join_file


class StandingOnRay:
    """A cluster that is being started; as `standing.StandingCluster`, but its engine is an actor of Ray's.

    With `stays` False it ends with this process. The directory of its `journal` is on its actor's node, and so is the
    file of its `authority`. What is kept here is its record, by which commands find it by name, and its join tokens.
    Both are of use to this user alone: elsewhere, a join token leads to it.
    """

    def __init__(
        self,
        *,
        name: str,
        settings: ClusterSettings,
        listen: str,
        stays: bool,
        advertise: str = "",
        insecure: bool = False,
        authority: Path | None = None,
        journal: Path | None = None,
    ) -> None:
        if journal is not None and not settings.grace_seconds:
            settings = replace(settings, grace_seconds=GRACE_SECONDS)
        registry = ClusterRegistry()
        self.directory = registry.directory(name)
        self._check(registry, name)
        there = [str(each.absolute()) if each is not None else "" for each in (journal, authority)]
        start = EngineStart(settings, listen, advertise, insecure, name, *there)
        self._cluster = RayCluster(name, start, stays=stays)
        try:
            with registry.locked():
                self._check(registry, name)
                self.directory.mkdir(mode=0o700, exist_ok=True)
                for role, join in self._cluster.joins.items():
                    join.save((host_join_file if role is Role.HOST else join_file)(self.directory))
                self.record = registry.register(
                    name,
                    self._cluster.address,
                    settings.islands,
                    settings.platform,
                    os.getpid(),
                    ray=settings.ray_address or "auto",
                )
        except BaseException:
            self.end()
            raise

    def _check(self, registry: ClusterRegistry, name: str) -> None:
        for each in registry.live():
            if each.name == name:
                raise ClusterError(
                    f"a cluster named {name} is up already, at {each.address}: use it, end it with `atoll down`, or "
                    "give the new one another --name"
                )

    def join_token(self, role: Role) -> JoinToken:
        """By which others join it in that role, where it listens with TLS; a copy is in its directory."""
        return self._cluster.joins[role]

    def wait(self) -> None:
        """Returns once the cluster is up. Raises ClusterError where it does not start, with nothing left of it."""
        try:
            self._cluster.wait_until_up()
        except BaseException:
            self.end()
            raise

    def last_messages(self) -> str:
        """The last lines that its processes wrote, where it did not start."""
        return self._cluster.last_messages()

    def leave(self) -> None:
        """Leaves it running."""
        self._cluster.leave()

    def wait_for_end(self) -> None:
        """Blocks until the cluster has ended."""
        self._cluster.wait_for_end()

    def end(self) -> None:
        """Ends the cluster, and removes its record."""
        self._cluster.end()
        shutil.rmtree(self.directory, ignore_errors=True)
