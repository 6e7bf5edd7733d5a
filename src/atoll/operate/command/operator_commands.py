"""What an operator does to a cluster, and reads from it, while programs run."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from atoll.operate.command.command_options import ClusterAddress, ClusterJoin, ClusterName, token
from atoll.operate.command.terminal import fail, terminal

if TYPE_CHECKING:
    from atoll.cluster.topology import IslandShape

_MOST_DEVICES = 1 << 16  # of a slice


class Medium(StrEnum):
    """The place to which a session is suspended."""

    MEMORY = "memory"
    DISK = "disk"


def remap(
    session: Annotated[int, typer.Argument(help="The session, by its number in `atoll status`.")],
    slice_number: Annotated[int, typer.Argument(help="The slice, by its number there.", metavar="SLICE")],
    to: Annotated[
        str,
        typer.Option(
            help="An island, and which of its devices by their numbers in `atoll status`, in the order of the slice: "
            "1, or 1:4,5,6,7, or 1:4-7. Without devices, those on which the fewest slices are.",
            metavar="ISLAND[:DEVICES]",
        ),
    ],
    address: ClusterAddress = "",
    name: ClusterName = "",
    join: ClusterJoin = "",
) -> None:
    """Move a slice to other devices of the same shape, while its program runs.

    Everything on the slice moves with it: arrays are copied, functions compiled again. The program waits meanwhile, and
    notices nothing else. A move that cannot be made leaves everything as it was, and says why.

    Which cluster: as for `atoll status`.
    """
    from atoll.operate.cluster_queries import find, operate
    from atoll.protocol.messages import RemapRequest

    island, devices = _target(to)
    request = RemapRequest(session, slice_number, island, devices)
    with terminal.status(f"moving slice {slice_number} of session {session} ..."):
        done = operate(find(address, name, join), token(), request)
    print(done)


def add_island(
    like: Annotated[
        int | None, typer.Option(min=0, help="The number of the island that it is to be like.", metavar="ISLAND")
    ] = None,
    shape: Annotated[
        str, typer.Option(help="HOSTSxDEVICES: 2x4 has two hosts with four devices each.", metavar="HxD")
    ] = "",
    platform: Annotated[
        str, typer.Option(help="With --shape: what its workers compute on; the first island's platform if not given.")
    ] = "",
    topology: Annotated[str, typer.Option(help="With --shape: the mesh of its devices, such as 2x4.")] = "",
    kind: Annotated[str, typer.Option(help="With --shape: a name for its devices, for add_slice(kind=).")] = "",
    wait: Annotated[
        float,
        typer.Option(
            min=0.0, help="Seconds until it is given up; those of the cluster's own --wait if not given.", metavar="S"
        ),
    ] = 0.0,
    address: ClusterAddress = "",
    name: ClusterName = "",
    join: ClusterJoin = "",
) -> None:
    """Start one more island, while programs run: like the others, or like one of them where they differ.

    New sessions have its devices; slices of those that run can be moved there (`atoll remap`). Returns when it is up.

    Which cluster: as for `atoll status`.
    """
    from atoll.operate.cluster_queries import add_island as add
    from atoll.operate.cluster_queries import find, report_of
    from atoll.protocol.messages import AddIslandRequest

    if shape and like is not None:
        raise typer.BadParameter("--like and --shape say both what it is to be: give one")
    if (platform or topology or kind) and not shape:
        raise typer.BadParameter("--platform, --topology and --kind are for --shape")
    target = find(address, name, join)
    wanted = None
    if shape:
        platform = platform or report_of(target, token())["islands"][0]["shape"]["platform"]
        wanted = _shape(shape, platform, topology, kind)
    request = AddIslandRequest(wanted, -1 if like is None else like, wait)
    with terminal.status("starting an island ..."):
        done = add(target, token(), request)
    print(done)


def _shape(text: str, platform: str, topology: str, kind: str) -> IslandShape:
    from atoll.cluster.mesh import parse_mesh
    from atoll.cluster.topology import Topology, make_topology
    from atoll.devices.device_kinds import check_platform
    from atoll.errors import SettingsError

    try:
        check_platform(platform)
        (shape,) = Topology.parse(f"1x{text}", platform, parse_mesh(topology)).shapes
        make_topology([shape])
    except SettingsError as error:
        raise typer.BadParameter(str(error)) from None
    except ValueError:
        raise typer.BadParameter(f"--shape {text!r}: expected HOSTSxDEVICES, such as 2x4") from None
    return msgspec.structs.replace(shape, kind=kind)


def drain(
    island: Annotated[int, typer.Argument(help="The island, by its number in `atoll status`.")],
    address: ClusterAddress = "",
    name: ClusterName = "",
    join: ClusterJoin = "",
) -> None:
    """Move everything on an island to others like it, while programs run, and end its workers.

    Slices, arrays and functions of all sessions move; their programs notice nothing. Where something cannot be moved,
    the island stays, and the error says what is in the way.

    Which cluster: as for `atoll status`.
    """
    from atoll.operate.cluster_queries import find, operate
    from atoll.protocol.messages import DrainRequest

    with terminal.status(f"draining island {island} ..."):
        done = operate(find(address, name, join), token(), DrainRequest(island))
    print(done)


def _target(text: str) -> tuple[int, tuple[int, ...]]:
    """An island and devices of it, from 1, 1:4,5 or 1:4-7."""
    island, _, rest = text.partition(":")
    devices: list[int] = []
    try:
        for part in rest.split(",") if rest else []:
            first, dash, last = part.partition("-")
            numbers = range(int(first), int(last if dash else first) + 1)
            if len(devices) + len(numbers) > _MOST_DEVICES:
                raise ValueError
            devices.extend(numbers)
        if not island.isdecimal() or (":" in text and not devices):
            raise ValueError
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} names no devices: expected an island and perhaps devices of it, such as 1, 1:4,5 or 1:4-7"
        ) from None
    return int(island), tuple(devices)


def suspend(
    session: Annotated[int, typer.Argument(help="The session, by its number in `atoll status`.")],
    to: Annotated[Medium, typer.Option(help="Where its arrays go: the hosts' memory, or their disks.")] = Medium.MEMORY,
    address: ClusterAddress = "",
    name: ClusterName = "",
    join: ClusterJoin = "",
) -> None:
    """Suspend a session: its arrays leave the devices, which others may use; its script waits until `atoll resume`.

    What the session has launched ends first. Its hosts copy its arrays, all at the same time, to their memory or to
    files in the directory of `atoll up --suspend-directory`. The script's next call waits, and notices nothing else.
    Where it cannot be done the session goes on, and the error says why.

    A tenant that is no operator may suspend its own. Which cluster: as for `atoll status`.
    """
    from atoll.operate.cluster_queries import find, operate
    from atoll.protocol.messages import SuspendRequest

    target = find(address, name, join)
    with terminal.status(f"suspending session {session} ..."):
        done = operate(target, token(), SuspendRequest(session, to is Medium.DISK))
    print(done)


def resume(
    session: Annotated[int, typer.Argument(help="The session, by its number in `atoll status`.")],
    on: Annotated[
        list[int] | None,
        typer.Option(
            min=0,
            help="The island that it is to go on on, for each that it was on, in the order of their numbers; where it "
            "was if not given.",
            metavar="ISLAND",
        ),
    ] = None,
    wait: Annotated[
        float,
        typer.Option(
            min=0.0, max=800.0, help="For how long it may wait for room; 0: it must be there now.", metavar="S"
        ),
    ] = 600.0,
    address: ClusterAddress = "",
    name: ClusterName = "",
    join: ClusterJoin = "",
) -> None:
    """Have a suspended session go on, where it was or on other islands of the same shape, with all that it had.

    Where there is no room it waits: `atoll status` says for what, and who has it. A session that is not resumed stays
    suspended. A tenant that is no operator may resume its own. Which cluster: as for `atoll status`.
    """
    from atoll.operate.cluster_queries import find, operate
    from atoll.protocol.messages import ResumeRequest

    target = find(address, name, join)
    with terminal.status(f"resuming session {session} ..."):
        done = operate(target, token(), ResumeRequest(session, tuple(on or ()), wait))
    print(done)


def end_session(
    session: Annotated[int, typer.Argument(help="The session, by its number in `atoll status`.")],
    address: ClusterAddress = "",
    name: ClusterName = "",
    join: ClusterJoin = "",
) -> None:
    """End a session: its program gets an error, and all that it has on the cluster goes.

    A tenant that is no operator may end its own. Which cluster: as for `atoll status`.
    """
    from atoll.operate.cluster_queries import find, operate
    from atoll.protocol.messages import EndSessionRequest

    print(operate(find(address, name, join), token(), EndSessionRequest(session)))


def dump(
    output: Annotated[Path | None, typer.Option("--output", "-o", help="A file; standard output if not given.")] = None,
    address: ClusterAddress = "",
    name: ClusterName = "",
    join: ClusterJoin = "",
) -> None:
    """Write the controller's event log: every event, in order, a line of JSON each.

    A log that begins at the start of the cluster (it keeps the last 50,000 events) replays the controller's decisions:
    see `atoll.operate.log_replay.replay`. Which cluster: as for `atoll status`.
    """
    from atoll.operate.cluster_queries import dump_of, find

    target = find(address, name, join)
    _check_writable(output)
    _write(dump_of(target, token()), output)


def check(address: ClusterAddress = "", name: ClusterName = "", join: ClusterJoin = "") -> None:
    """Compare what the controller keeps of arrays, memory and gangs with itself, and with what its hosts have.

    Prints what disagrees, a line each, and ends with status 1 if anything does: a fault of Atoll's. Which cluster: as
    for `atoll status`.
    """
    from atoll.operate.cluster_queries import check, find

    reply = check(find(address, name, join), token())
    problems = (*reply.contradictions, *reply.differences)
    for problem in problems:
        print(problem)
    if problems:
        raise typer.Exit(1)
    print(f"the controller and {reply.hosts} hosts agree: {reply.arrays} arrays")


def trace(
    output: Annotated[Path | None, typer.Option("--output", "-o", help="A file; standard output if not given.")] = None,
    seconds: Annotated[float, typer.Option(min=0, max=600, help="Record for so long, from now, also clients.")] = 0.0,
    address: ClusterAddress = "",
    name: ClusterName = "",
    join: ClusterJoin = "",
) -> None:
    """Write what ran on the cluster's hosts lately, and when, as a trace that https://ui.perfetto.dev opens.

    The last 100,000 computations and transfers, a row for each device, with what they waited for. With --seconds what
    runs from now on, and what clients ask of their proxies meanwhile. All sessions', or a user's own. Which cluster: as
    for `atoll status`.
    """
    from atoll.operate.cluster_queries import find, trace_of

    target = find(address, name, join)
    _check_writable(output)
    _write(trace_of(target, token(), seconds), output)


def _check_writable(output: Path | None) -> None:
    """Ends the command where there is no directory for the file: before the cluster is asked for what goes into it."""
    if output is not None and not output.absolute().parent.is_dir():
        fail(f"cannot write {output}: there is no directory {output.absolute().parent}")


def _write(body: bytes, output: Path | None) -> None:
    from atoll.operate.output_files import write_whole

    if output is None:
        sys.stdout.buffer.write(body)
        return
    try:
        write_whole(output, body)
    except OSError as error:
        fail(f"cannot write {output}: {error.strerror}")
