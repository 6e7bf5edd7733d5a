"""How a Python process beside a worker is started."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from atoll.host_services.python.meeting import KeyValues, Meeting, nowhere, told_by_the_first
from atoll.protocol.messages.python import ClientSettings, PythonOptions
from atoll.quantities import parse_bytes
from atoll.wire.address import parse_address

_MEMORY_VARIABLE = "ATOLL_PYTHON_MEMORY"


@dataclass(frozen=True)
class PythonHost:
    """The host beside whose worker the processes run: its number in the cluster, and its rank in its island.

    Processes have folders in its `directory`; they do not see that otherwise, nor what is `hidden`. The hosts of its
    island reach it at `hostname`, where there are others, and tell one another `key_values`.
    """

    number: int
    island_rank: int
    controller: str  # an address
    data_address: str
    directory: str
    hidden: tuple[str, ...] = ()
    hostname: str = ""
    key_values: KeyValues | None = None


def python_options(
    host: PythonHost, session: int, settings: ClientSettings, devices: Sequence[tuple[int, int]]
) -> tuple[PythonOptions, Meeting]:
    """For the process of a session with these devices: (host of the island, the client's id).

    Its `meeting` is to be asked for at each start.
    """
    sockets = [Path(each.path) for each in map(parse_address, (host.controller, host.data_address)) if each.is_unix]
    folder = Path(host.directory) / f"python-{session}"
    by_host: dict[int, list[int]] = {}
    for where, device in devices:
        by_host.setdefault(where, []).append(device)
    hosts = sorted(by_host)
    options = PythonOptions(
        -1,
        tuple(tuple(by_host[each]) for each in hosts),
        hosts.index(host.island_rank),
        settings,
        str(folder / f"host-{host.number}"),
        "",
        host.hostname,
        _memory_bytes(),
        tuple({host.directory, *host.hidden, *map(_private, sockets)}),
    )
    if len(hosts) == 1:
        return options, nowhere
    if parse_address(host.data_address).is_unix:
        return options, lambda: f"unix:{folder}/meet"
    assert host.key_values is not None
    return options, told_by_the_first(session, options.rank == 0, host.hostname, host.key_values)


def _private(path: Path) -> str:
    """The folder of a socket, where it is its user's alone."""
    return str(path if path.parent.stat().st_mode & 0o077 else path.parent)


def _memory_bytes() -> int:
    """What one process may use: as the environment says, or three quarters of the machine's."""
    chosen = os.environ.get(_MEMORY_VARIABLE, "")
    return parse_bytes(chosen) if chosen else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4 * 3
