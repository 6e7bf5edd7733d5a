"""How a Python process beside a worker is started."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from atoll.cluster.sandbox.grants import USER_RULES, PythonRules, Sandbox, View
from atoll.cluster.sandbox.mechanisms import Mechanisms, why_not_confined
from atoll.errors import Code, StatusError
from atoll.host_services.python.rendezvous import KeyValues, Rendezvous, nowhere, told_by_the_first
from atoll.protocol.messages.python_messages import ClientSettings, PythonOptions
from atoll.quantities import parse_bytes
from atoll.wire.address import parse_address

_MEMORY_VARIABLE, _SCRATCH_VARIABLE = "ATOLL_PYTHON_MEMORY", "ATOLL_PYTHON_SCRATCH"


@dataclass(frozen=True)
class PythonHost:
    """The host beside whose worker the processes run: its number in the cluster, and its rank in its island.

    Processes have directories in its `directory`; they do not see that otherwise, nor what is `hidden`. The hosts of
    its island reach it at `hostname`, where there are others, and tell one another `key_values`.
    """

    number: int
    island_rank: int
    controller: str  # an address
    data_address: str
    directory: str
    hidden: tuple[str, ...] = ()
    hostname: str = ""
    key_values: KeyValues | None = None
    mechanisms: Mechanisms | None = None  # None: each process finds out


def python_options(
    host: PythonHost,
    session: int,
    settings: ClientSettings,
    devices: Sequence[tuple[int, int]],
    rules: PythonRules = USER_RULES,
) -> tuple[PythonOptions, Rendezvous]:
    """For the process of a session with these devices: (host of the island, the client's id).

    Its `coordinator_address` is to be asked for at each start. Raises FAILED_PRECONDITION if the rules cannot be kept
    here.
    """
    _check(host, rules, len({where for where, _ in devices}))
    sockets = [Path(each.path) for each in map(parse_address, (host.controller, host.data_address)) if each.is_unix]
    directory = Path(host.directory) / f"python-{session}"
    by_host: dict[int, list[int]] = {}
    for where, device in devices:
        by_host.setdefault(where, []).append(device)
    hosts = sorted(by_host)
    options = PythonOptions(
        -1,
        tuple(tuple(by_host[each]) for each in hosts),
        hosts.index(host.island_rank),
        settings,
        _sandbox(host, session, rules, directory, sockets),
        "",
        host.hostname,
        host.mechanisms,
    )
    if len(hosts) == 1:
        return options, nowhere
    if parse_address(host.data_address).is_unix:
        return options, lambda: f"unix:{directory}/meet"
    assert host.key_values is not None
    return options, told_by_the_first(session, options.rank == 0, host.hostname, host.key_values)


def _private(path: Path) -> str:
    """The directory of a socket, where it is its user's alone."""
    return str(path if path.parent.stat().st_mode & 0o077 else path.parent)


def _check(host: PythonHost, rules: PythonRules, hosts: int) -> None:
    if hosts > 1 and not rules.network:
        raise StatusError(
            Code.FAILED_PRECONDITION,
            f"Python on the {hosts} hosts of an island needs the network, which this cluster does not give it: "
            "start it with --python-network on",
        )
    if rules.view is View.GRANTED and not rules.insecure and host.mechanisms is not None:
        reason = why_not_confined(host.mechanisms)
        if reason:
            raise StatusError(Code.FAILED_PRECONDITION, f"host {host.number}: {reason}")


def _sandbox(host: PythonHost, session: int, rules: PythonRules, directory: Path, sockets: Sequence[Path]) -> Sandbox:
    return Sandbox(
        rules.view,
        scratch=str(directory / f"host-{host.number}"),
        scratch_bytes=_bytes(_SCRATCH_VARIABLE, 1 / 4),
        shared=str(directory),
        hidden=tuple({host.directory, *host.hidden, *map(_private, sockets)}),
        read=rules.read,
        write=rules.write,
        network=rules.network,
        memory_bytes=_bytes(_MEMORY_VARIABLE, 3 / 4),
        identity=session,
    )


def _bytes(variable: str, part: float) -> int:
    """How much memory the environment says; or that part of the machine's."""
    chosen = os.environ.get(variable, "")
    if chosen:
        return parse_bytes(chosen)
    return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * part)
