"""Operations on a running cluster, and what operators read from it."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from atoll.errors import AtollError
from atoll.operate.command.command_options import RunningCluster, token, with_option_groups
from atoll.operate.command.json_output import AsJson, print_json
from atoll.operate.command.terminal import echo, fail, terminal
from atoll.quantities import counted

if TYPE_CHECKING:
    from atoll.cluster.topology import IslandShape
    from atoll.protocol.messages import Operation

Output = Annotated[
    Path | None, typer.Option("--output", "-o", help="File to write. Defaults to standard output.", metavar="FILE")
]


_NOTE_SECONDS = 2.0  # after which `atoll resume` prints what it waits for


class Medium(StrEnum):
    """The place to which a session is suspended."""

    MEMORY = "memory"
    DISK = "disk"


@with_option_groups
def remap(
    session: Annotated[int, typer.Argument(help="Number of the session in `atoll status`.", metavar="SESSION")],
    slice_number: Annotated[int, typer.Argument(help="Number of the slice in `atoll status`.", metavar="SLICE")],
    to: Annotated[
        str,
        typer.Option(
            help="Island, and optionally its devices by their numbers in `atoll status`, in the order of the slice: 1, "
            "1:4,5,6,7 or 1:4-7. Without devices, the slice gets those with the fewest slices.",
            metavar="ISLAND[:DEVICES]",
        ),
    ],
    *,
    cluster: RunningCluster,
) -> None:
    """Move a slice to other devices while its program runs.

    The devices must have the same shape. Everything on the slice moves with it: arrays are copied, and functions
    recompiled. The program pauses meanwhile, and does not observe the move otherwise. If the move fails, everything
    stays as it was, and the error names the reason.

    Addresses the same cluster as `atoll status`.
    """
    from atoll.cluster.migration_target import read_migration_target
    from atoll.protocol.messages import RemapRequest

    try:
        island, devices = read_migration_target(to)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    request = RemapRequest(session, slice_number, island, devices)
    _operate(cluster, f"moving slice {slice_number} of session {session}", request)


@with_option_groups
def add_island(
    like: Annotated[
        int | None, typer.Option(min=0, help="Number of the island to copy the shape of.", metavar="ISLAND")
    ] = None,
    shape: Annotated[
        str, typer.Option(help="HOSTSxDEVICES: 2x4 has two hosts with four devices each.", metavar="SHAPE")
    ] = "",
    platform: Annotated[
        str,
        typer.Option(help="With --shape: platform of the workers. Defaults to the first island's.", metavar="PLATFORM"),
    ] = "",
    topology: Annotated[str, typer.Option(help="With --shape: mesh of the devices, such as 2x4.", metavar="MESH")] = "",
    kind: Annotated[
        str, typer.Option(help="With --shape: name of the kind of devices, for add_slice(kind=).", metavar="NAME")
    ] = "",
    wait: Annotated[
        float,
        typer.Option(
            min=0.0, help="Seconds to wait for the island's hosts. Defaults to the cluster's --wait.", metavar="SECONDS"
        ),
    ] = 0.0,
    *,
    cluster: RunningCluster,
) -> None:
    """Start one more island while programs run.

    New sessions include its devices, and `atoll remap` moves slices of running sessions there. Returns when the island
    is up. Islands that differ need --like or --shape.

    Addresses the same cluster as `atoll status`.
    """
    from atoll.operate.cluster_queries import operate, report_of
    from atoll.protocol.messages import AddIslandRequest

    if shape and like is not None:
        raise typer.BadParameter("--like and --shape both define the island: give only one of them")
    if (platform or topology or kind) and not shape:
        raise typer.BadParameter("--platform, --topology and --kind need --shape")
    target = cluster.find()
    wanted = None
    if shape:
        platform = platform or report_of(target, token())["islands"][0]["shape"]["platform"]
        wanted = _shape(shape, platform, topology, kind)
    request = AddIslandRequest(wanted, -1 if like is None else like, wait)
    with terminal.status("starting an island ..."):
        done = operate(target, token(), request)
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


@with_option_groups
def drain(
    island: Annotated[int, typer.Argument(help="Number of the island in `atoll status`.", metavar="ISLAND")],
    *,
    cluster: RunningCluster,
) -> None:
    """Move all work of an island to others, and end its workers.

    The other islands must have the same shape. Slices, arrays and functions of all sessions move, without effect on
    their programs. If something cannot move, the island stays, and the error names the obstacle.

    Addresses the same cluster as `atoll status`.
    """
    from atoll.protocol.messages import DrainRequest

    _operate(cluster, f"draining island {island}", DrainRequest(island))


@with_option_groups
def undrain(
    island: Annotated[int, typer.Argument(help="Number of the island in `atoll status`.", metavar="ISLAND")],
    *,
    cluster: RunningCluster,
) -> None:
    """Start the workers of a drained island again.

    The island has the same number and devices as before. Returns at once; `atoll status` shows what the island waits
    for. New sessions then get its devices, and slices can move there (`atoll remap`).

    Addresses the same cluster as `atoll status`.
    """
    from atoll.protocol.messages import UndrainRequest

    _operate(cluster, f"starting island {island} again", UndrainRequest(island))


@with_option_groups
def suspend(
    session: Annotated[int, typer.Argument(help="Number of the session in `atoll status`.", metavar="SESSION")],
    to: Annotated[Medium, typer.Option(help="Destination of the arrays: the hosts' memory or disks.")] = Medium.MEMORY,
    *,
    cluster: RunningCluster,
) -> None:
    """Suspend a session, to free its devices for others.

    Its arrays leave the devices, and its script waits until `atoll resume`. The session's launches end first. Then its
    hosts copy its arrays to their memory, or to files in the directory of `atoll up --suspend-directory`. The script's
    next call waits, and the script does not observe anything else. If suspending fails, the session continues, and the
    error names the reason.

    Tenants may suspend their own sessions, operators all. Addresses the same cluster as `atoll status`.
    """
    from atoll.protocol.messages import SuspendRequest

    _operate(cluster, f"suspending session {session}", SuspendRequest(session, to is Medium.DISK))


@with_option_groups
def resume(
    session: Annotated[int, typer.Argument(help="Number of the session in `atoll status`.", metavar="SESSION")],
    on: Annotated[
        list[int] | None,
        typer.Option(
            min=0,
            help="Island on which to resume. Repeat the option once per original island, in the order of their "
            "numbers. Defaults to the original islands.",
            metavar="ISLAND",
        ),
    ] = None,
    wait: Annotated[
        float,
        typer.Option(
            min=0.0, max=800.0, help="Seconds to wait for free memory and devices; 0 fails instead.", metavar="SECONDS"
        ),
    ] = 600.0,
    *,
    cluster: RunningCluster,
) -> None:
    """Resume a suspended session with all its state.

    The session resumes on its islands or on others of the same shape. If memory or devices are lacking, or if the
    session's script has not connected again after a restart of the cluster, the command waits. After two seconds, it
    prints what the session waits for, and so does `atoll status`. A session that cannot be resumed stays suspended.
    Tenants may resume their own sessions, operators all. Addresses the same cluster as `atoll status`.
    """
    from atoll.protocol.messages import ResumeRequest

    note = threading.Timer(_NOTE_SECONDS, _echo_wait, (cluster, session))
    note.daemon = True
    note.start()
    try:
        _operate(cluster, f"resuming session {session}", ResumeRequest(session, tuple(on or ()), wait))
    finally:
        note.cancel()


def _echo_wait(cluster: RunningCluster, session: int) -> None:
    """Print what a session waits for, unless it continues meanwhile or its cluster cannot be reached."""
    from atoll.operate.cluster_queries import report_of

    with contextlib.suppress(AtollError):
        for line in wait_lines(report_of(cluster.find(), token()), session):
            echo(line)


def wait_lines(report: Mapping[str, Any], session: int) -> list[str]:
    """Return the lines of text that say what a suspended session of a report waits for."""
    rows = [each for each in report["sessions"] if each["id"] == session and each["state"]]
    return [f"atoll: session {session} is {each['state']}" for each in rows]


@with_option_groups
def end_session(
    session: Annotated[int, typer.Argument(help="Number of the session in `atoll status`.", metavar="SESSION")],
    *,
    cluster: RunningCluster,
) -> None:
    """End a session, whose program gets an error.

    Its arrays and functions are deleted. Tenants may end their own sessions, operators all. Addresses the same cluster
    as `atoll status`.
    """
    from atoll.protocol.messages import EndSessionRequest

    _operate(cluster, f"ending session {session}", EndSessionRequest(session))


@with_option_groups
def dump(
    output: Output = None,
    *,
    cluster: RunningCluster,
) -> None:
    """Write the event log of the controller.

    The log has one line of JSON per event, in order. The controller keeps the last 50,000 events.
    `atoll.operate.log_replay.replay` replays its decisions from a log that includes the cluster's start. Addresses the
    same cluster as `atoll status`.
    """
    from atoll.operate.cluster_queries import dump_of

    _check_writable(output)
    _write(dump_of(cluster.find(), token()), output)


@with_option_groups
def check(as_json: AsJson = False, *, cluster: RunningCluster) -> None:
    """Check the records of the controller for contradictions.

    Compares its records of arrays, memory and gangs with each other, with its hosts and with the proxies. Prints one
    line per contradiction, which is a bug in Atoll, and exits with status 1 if there are any. Addresses the same
    cluster as `atoll status`.

    The JSON is `{"name", "address", "contradictions": [...], "differences": [...], "arrays", "hosts"}`.
    """
    from atoll.operate.cluster_queries import check

    target = cluster.find()
    reply = check(target, token())
    problems = (*reply.contradictions, *reply.differences)
    if as_json:
        print_json(target, msgspec.structs.asdict(reply))
    else:
        print(
            "\n".join(problems)
            or f"the controller and {counted(reply.hosts, 'host')} agree: {counted(reply.arrays, 'array')}"
        )
    if problems:
        raise typer.Exit(1)


@with_option_groups
def trace(
    output: Output = None,
    seconds: Annotated[
        float,
        typer.Option(
            min=0, max=600, help="Record this many seconds from now, including clients' calls.", metavar="SECONDS"
        ),
    ] = 0.0,
    *,
    cluster: RunningCluster,
) -> None:
    """Write a trace of the work on the hosts of a cluster.

    https://ui.perfetto.dev opens the file. The trace has the last 100,000 computations and transfers, one row per
    device, and their waits. With --seconds, it has the work from now on, and the calls of clients. Operators get all
    sessions, users their own. Addresses the same cluster as `atoll status`.
    """
    from atoll.operate.cluster_queries import trace_of

    _check_writable(output)
    _write(trace_of(cluster.find(), token(), seconds), output)
    if output is not None:
        print(f"{output}: open it at https://ui.perfetto.dev")


def _operate(cluster: RunningCluster, doing: str, operation: Operation) -> None:
    """Perform an operation, showing what the command is `doing`, and print the result."""
    from atoll.operate.cluster_queries import operate

    target = cluster.find()
    with terminal.status(f"{doing} ..."):
        done = operate(target, token(), operation)
    print(done)


def _check_writable(output: Path | None) -> None:
    """End the command, before it asks the cluster for data, if the output file's directory is missing."""
    if output is not None and not output.absolute().parent.is_dir():
        fail(f"cannot write {output}: the directory {output.absolute().parent} does not exist")


def _write(body: bytes, output: Path | None) -> None:
    from atoll.operate.output_files import write_whole

    if output is None:
        sys.stdout.buffer.write(body)
        return
    try:
        write_whole(output, body)
    except OSError as error:
        fail(f"cannot write {output}: {error.strerror}")
