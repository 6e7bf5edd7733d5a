"""Start the engine process of a cluster, in whatever way the cluster is started."""

from __future__ import annotations

import time
from collections.abc import Mapping

from msgspec.structs import replace

from atoll.cluster.processes.child import Child, describe_exit, wait_for_any
from atoll.cluster.settings import ClusterSettings
from atoll.cluster.tenant_settings import keep_tenants
from atoll.devices.device_kinds import check_platform
from atoll.engines.engine_interface import check_engine
from atoll.engines.engine_options import EngineEnd, EngineOptions, Started
from atoll.errors import ClusterError, error_kind
from atoll.launch.policies import check_policy
from atoll.security.join_token import JoinToken, host_join_file, join_file, read_join
from atoll.security.roles import Role

START_GRACE_SECONDS = 30.0  # beyond the time to start, for the engine to report why the cluster is not up
_JOIN_SECONDS = 30.0  # for the engine to make its join tokens, which it does first
_POLL_SECONDS = 0.02


def check_settings(settings: ClusterSettings) -> None:
    """Raise SettingsError for settings that no cluster can have, as far as known without starting a process."""
    for platform in settings.topology.platforms:
        check_platform(platform)
    check_engine(settings.engine)
    check_policy(settings.policy)
    if settings.engine == "ray":
        from atoll.engines.ray.bundles import demand_of

        for shape in settings.topology.shapes:
            demand_of(settings, shape)


class EngineProcess(Child):
    """The engine process of a cluster, as a child of this process.

    `address` is the address of the controller. `start_seconds` is the time for which the cluster may start.

    `who` names the cluster in errors. Its processes print to the descriptor `output`. `environment` is added to that
    of this process. The constructor raises SettingsError before it starts a process.
    """

    def __init__(
        self,
        options: EngineOptions,
        who: str = "the cluster",
        output: int = 2,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        check_settings(options.settings)
        if options.settings.tenants:
            keep_tenants(options.directory, options.settings.tenants)
            options = replace(options, settings=replace(options.settings, tenants=()))
        super().__init__("atoll.engines.engine_main", options, who, output, environment)
        self.address = options.controller_address
        self._directory = options.directory
        self.start_seconds = options.settings.start_seconds + START_GRACE_SECONDS

    def wait_until_up(self, *, until_end: bool = False) -> None:
        """Return when the cluster is up. Raise ClusterError with the reason if it does not start.

        With `until_end`, this process calls `wait_for_end` later.
        """
        started = self.read(Started, self.start_seconds, is_last=not until_end)
        if started.error:
            kind = error_kind(started.kind)
            raise (kind if kind is not None and issubclass(kind, ClusterError) else ClusterError)(started.error)

    def wait_for_end(self) -> EngineEnd:
        """Block until the engine has ended, and return why. An exception of a signal handler ends the wait."""
        wait_for_any([self])
        status = self.process.wait()
        try:
            return self.read(EngineEnd, 0.0)
        except ClusterError:
            return EngineEnd(f"its engine ended: {describe_exit(status)}", expected=False)

    def join_token(self, role: Role) -> JoinToken:
        """Wait for the engine to make the join token of a role (host or client), and return it. Requires TLS.

        Raise ClusterError with the reason if the cluster does not start.
        """
        file = host_join_file(self._directory) if role is Role.HOST else join_file(self._directory)
        deadline = time.monotonic() + _JOIN_SECONDS
        while not file.exists():
            if self.process.poll() is not None:
                self.wait_until_up()
            if time.monotonic() > deadline:
                raise ClusterError(f"{self.who} made no join token within {_JOIN_SECONDS:.0f} s")
            time.sleep(_POLL_SECONDS)
        return read_join(str(file))
