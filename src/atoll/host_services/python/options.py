"""How a Python process beside a worker is started."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from atoll.errors import unimplemented
from atoll.protocol.messages.python import ClientSettings, PythonOptions
from atoll.quantities import parse_bytes
from atoll.wire.address import parse_address

_MEMORY_VARIABLE = "ATOLL_PYTHON_MEMORY"


@dataclass(frozen=True)
class PythonHost:
    """The host beside whose worker the processes run: its number in the cluster, and its rank in its island."""

    number: int
    island_rank: int
    controller: str  # an address
    data_address: str


def python_options(
    host: PythonHost, session: int, settings: ClientSettings, devices: Sequence[tuple[int, int]]
) -> PythonOptions:
    """For the process of a session with these devices: (host of the island, the client's id). Raises UNIMPLEMENTED."""
    controller, port = parse_address(host.controller), parse_address(host.data_address)
    sockets = {Path(controller.path), Path(port.path)} - {Path()}
    if not port.is_unix:
        raise unimplemented("colocated Python needs hosts whose data ports are unix sockets, on one machine")
    # In the cluster's own folder, which is removed with it.
    folder = Path(port.path).parent / f"python-{session}"
    by_host: dict[int, list[int]] = {}
    for where, device in devices:
        by_host.setdefault(where, []).append(device)
    hosts = sorted(by_host)
    return PythonOptions(
        -1,
        tuple(tuple(by_host[each]) for each in hosts),
        hosts.index(host.island_rank),
        settings,
        str(folder / f"host-{host.number}"),
        f"unix:{folder}/meet" if len(hosts) > 1 else "",
        _memory_bytes(),
        tuple({str(path if path.parent.stat().st_mode & 0o077 else path.parent) for path in sockets}),
    )


def _memory_bytes() -> int:
    """What one process may use: as the environment says, or three quarters of the machine's."""
    chosen = os.environ.get(_MEMORY_VARIABLE, "")
    return parse_bytes(chosen) if chosen else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4 * 3
