"""Options for the start of a Python process beside a worker."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec

from atoll.cluster.environment_variables import PYTHON_MEMORY, PYTHON_SCRATCH
from atoll.cluster.processes.machine_memory import machine_memory
from atoll.cluster.sandbox.grants import USER_RULES, PythonRules, Sandbox, View
from atoll.cluster.sandbox.mechanisms import Mechanisms, why_not_confined
from atoll.errors import Code, StatusError
from atoll.host_services.python.failed_starts import ProgramStarts
from atoll.host_services.python.rendezvous import JoinedWorlds, KeyValues, Rendezvous, nowhere, rendezvous_at_first_host
from atoll.protocol.messages.python_messages import ClientSettings, PythonOptions
from atoll.wire.address import parse_address


class PythonHost(msgspec.Struct, frozen=True):
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
        worlds: The worlds that this host joins, if its devices can join any.
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
    worlds: JoinedWorlds | None = None


class ProcessWorld(msgspec.Struct):
    """The world whose hosts run a JAX program together.

    Attributes:
        number: The number of the world. It changes if another world of the same hosts replaces the world.
        first_rank: The first rank of this island's hosts.
    """

    number: int
    first_rank: int


def python_options(
    host: PythonHost,
    session: int,
    settings: ClientSettings,
    devices: Sequence[tuple[int, int]],
    rules: PythonRules = USER_RULES,
    world: ProcessWorld | None = None,
) -> tuple[PythonOptions, Rendezvous]:
    """Return the options of a session's process, and the rendezvous that returns the coordinator address at each start.

    `devices` are pairs of a host's rank and the client's device id. The rank is that in the island, or in the `world`.
    Raises FAILED_PRECONDITION if this host cannot enforce the rules, or has left the world.
    """
    rank, hostname, name = host.island_rank, host.hostname, f"python-{session}"
    key_values = partial(_key_values, host, world)
    if world is not None:
        assert host.worlds is not None  # because this host has joined one
        rank, hostname, name = world.first_rank + rank, host.worlds.hostname, f"{name}-{world.number}"
        key_values()
    _check(host, rules, len({where for where, _ in devices}))
    sockets = [Path(each.path) for each in map(parse_address, (host.controller, host.data_address)) if each.is_unix]
    directory = Path(host.directory) / name
    by_host: dict[int, list[int]] = {}
    for where, device in devices:
        by_host.setdefault(where, []).append(device)
    hosts = sorted(by_host)
    meets_here = len(hosts) > 1 and parse_address(host.data_address).is_unix
    options = PythonOptions(
        -1,
        tuple(tuple(by_host[each]) for each in hosts),
        hosts.index(rank),
        settings,
        _sandbox(host, session, rules, directory, sockets, meets_here),
        "",
        hostname,
        host.mechanisms,
    )
    if meets_here:
        return options, lambda: f"unix:{directory}/meet"
    if len(hosts) == 1:
        return options, nowhere
    return options, rendezvous_at_first_host(session, options.rank == 0, hostname, key_values)


def program_starts(
    host: PythonHost, session: int, devices: Sequence[tuple[int, int]], world: ProcessWorld | None = None
) -> ProgramStarts | None:
    """Return the starts of the session's processes, with `devices` as in `python_options`. None for one host."""
    if len({where for where, _ in devices}) == 1:
        return None
    rank = host.island_rank if world is None else world.first_rank + host.island_rank
    return ProgramStarts(session, rank, partial(_key_values, host, world))


def _key_values(host: PythonHost, world: ProcessWorld | None) -> KeyValues:
    """Return the key-value store of the hosts of a world, or of the island. Raise FAILED_PRECONDITION."""
    if world is not None and host.worlds is not None:
        return host.worlds.key_values(world.number)
    assert host.key_values is not None
    return host.key_values


def _private(path: Path) -> str:
    """Return the directory of a socket if only its user can access it, otherwise the socket."""
    return str(path if path.parent.stat().st_mode & 0o077 else path.parent)


def _check(host: PythonHost, rules: PythonRules, hosts: int) -> None:
    if hosts > 1 and not rules.network:
        raise StatusError(
            Code.FAILED_PRECONDITION,
            f"Python on {hosts} hosts together needs the network, which this cluster does not grant: start the cluster "
            "with --python-network on",
        )
    if rules.view is View.GRANTED and not rules.insecure and host.mechanisms is not None:
        reason = why_not_confined(host.mechanisms)
        if reason:
            raise StatusError(Code.FAILED_PRECONDITION, f"host {host.number}: {reason}")


def _sandbox(
    host: PythonHost, session: int, rules: PythonRules, directory: Path, sockets: Sequence[Path], is_shared: bool
) -> Sandbox:
    return Sandbox(
        rules.view,
        scratch=str(directory / f"host-{host.number}"),
        scratch_bytes=PYTHON_SCRATCH.get() or _memory(1 / 4),
        shared=str(directory) if is_shared else "",  # on disk, where nothing limits what the processes write
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
