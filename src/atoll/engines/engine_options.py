"""The options of an engine process, and its answers."""

from __future__ import annotations

import msgspec

from atoll.cluster.settings import ClusterSettings


class EngineOptions(msgspec.Struct, frozen=True):
    """The options of an engine process."""

    settings: ClusterSettings
    directory: str
    listen: str = ""  # address of the controller; "" for a socket in `directory`
    advertise: str = ""  # its address in join tokens; "" for the default of `security.start_security.advertised`
    parent: int = 0  # process that the cluster must not outlive; 0 for none
    left: str = ""  # file that the parent creates when the cluster may outlive it; "" if it never may
    note: str = ""  # file with which another process can replace the parent: see `cluster.processes.adopted_process`
    cache_directory: str = ""
    usage_file: str = ""  # file for the controller's usage records; "" for memory only
    journal: str = ""  # directory of the controller's journal; "" for none
    standby: str = ""  # address of a controller: if given, this engine runs its standby, without hosts
    continues: bool = False  # the cluster in the journal if it was killed, and leave it to the next engine if killed
    # At SIGTERM, or if the parent ends or another controller takes over, leave the cluster to another engine.
    leaves: bool = False
    lease: str = ""  # address of an external lease, which the controller must hold: see `leadership.lease_address`
    ready_fd: int = -1  # descriptor for the answers `Started` and `EngineEnd`
    run_directory: str = ""  # of a standing cluster, with its log: see `cluster.cluster_runs`; "" for none
    client_directories: tuple[str, ...] = ()  # of the client of an embedded cluster, removed in this order at the end

    @property
    def has_one_client(self) -> bool:
        """Return whether the cluster is embedded in the client that started it."""
        return bool(self.client_directories)

    @property
    def controller_address(self) -> str:
        return self.listen or f"unix:{self.directory}/controller.sock"


class Started(msgspec.Struct, frozen=True):
    """The engine's answer when the cluster is up, or when its start has failed with `error`.

    `kind` is the name of the error's class (`errors.error_kind`).
    """

    address: str = ""
    error: str = ""
    kind: str = ""


class EngineEnd(msgspec.Struct, frozen=True):
    """The engine's answer when the cluster has ended. `expected` says whether somebody asked for the end."""

    reason: str
    expected: bool
