"""Options for the start of a Python process beside a worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from atoll.cluster.environment_variables import PYTHON_MEMORY, PYTHON_SCRATCH
from atoll.cluster.processes.machine_memory import machine_memory
from atoll.cluster.sandbox.grants import USER_RULES, PythonRules, Sandbox, View
from atoll.cluster.sandbox.mechanisms import Mechanisms, why_not_confined
from atoll.errors import Code, StatusError
from atoll.host_services.python.rendezvous import KeyValues, Rendezvous, nowhere, told_by_the_first
from atoll.protocol.messages.python_messages import ClientSettings, PythonOptions
from atoll.wire.address import parse_address


@dataclass(frozen=True)
class PythonHost:
    """The host of the Python processes.

    Attributes:
        number: The host's number in the cluster.
        island_rank: The host's rank in its island.
        controller: The controller's address.
        data_address: The address of the host's data port.
        directory: The parent of the processes' directories. Processes see only their own directories in it.
        hidden: Other paths that processes cannot see.
        hostname: The name at which other hosts of the island reach this one.
        key_values: The key-value store of the island, if it has several hosts.
        mechanisms: The sandbox mechanisms of this host. None: each process detects them.
    """

    number: int
    island_rank: int
    controller: str
    data_address: str
    directory: str
    hidden: tuple[str, ...] = ()
    hostname: str = ""
    key_values: KeyValues | None = None
    mechanisms: Mechanisms | None = None


def python_options(
    host: PythonHost,
    session: int,
    settings: ClientSettings,
    devices: Sequence[tuple[int, int]],
    rules: PythonRules = USER_RULES,
) -> tuple[PythonOptions, Rendezvous]:
    """Return the options of a session's process, and the rendezvous that returns the coordinator address at each start.

    `devices` are pairs of the host's rank in the island and the client's device id. Raises FAILED_PRECONDITION if this
    host cannot enforce the rules.
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
    """Return the directory of a socket if only its user can access it, otherwise the socket."""
    return str(path if path.parent.stat().st_mode & 0o077 else path.parent)


def _check(host: PythonHost, rules: PythonRules, hosts: int) -> None:
    if hosts > 1 and not rules.network:
        raise StatusError(
            Code.FAILED_PRECONDITION,
            f"Python on the {hosts} hosts of an island needs the network, which this cluster does not grant: start the "
            "cluster with --python-network on",
        )
    if rules.view is View.GRANTED and not rules.insecure and host.mechanisms is not None:
        reason = why_not_confined(host.mechanisms)
        if reason:
            raise StatusError(Code.FAILED_PRECONDITION, f"host {host.number}: {reason}")


def _sandbox(host: PythonHost, session: int, rules: PythonRules, directory: Path, sockets: Sequence[Path]) -> Sandbox:
    return Sandbox(
        rules.view,
        scratch=str(directory / f"host-{host.number}"),
        scratch_bytes=PYTHON_SCRATCH.get() or _memory(1 / 4),
        shared=str(directory),
        hidden=tuple({host.directory, *host.hidden, *map(_private, sockets)}),
        read=rules.read,
        write=rules.write,
        network=rules.network,
        memory_bytes=PYTHON_MEMORY.get() or _memory(3 / 4),
        identity=session,
    )


def _memory(part: float) -> int:
    """Return a fraction of the machine's memory in bytes."""
    return int(machine_memory() * part)
