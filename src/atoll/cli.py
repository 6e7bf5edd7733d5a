"""The command line: `atoll --help`.

What a command is asked for goes to standard output (an address, a table, JSON), everything else to standard
error. An error is one line there; the exit status is then 1, or 2 where the command line itself is wrong.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import msgspec
import typer
from rich.console import Console

from atoll._version import __version__
from atoll.cluster_settings import DEFAULT_ISLANDS, DEFAULT_PLATFORM, VARIABLES, ClusterSettings, Dispatch
from atoll.errors import AtollError
from atoll.operate.registrations import DEFAULT_NAME
from atoll.quantities import parse_bytes
from atoll.transport.messages import DEFAULT_TOKEN_VARIABLE

# The commands import what they need: the engine and all below it would double the time of `atoll --help`.

_TABLE_WIDTH = 140  # where there is no terminal to ask
_MOST_DEVICES = 1 << 16  # of a slice
_NOT_EXECUTABLE, _NOT_FOUND = 126, 127  # exit statuses, as of a shell

app = typer.Typer(
    name="atoll",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_terminal = Console(stderr=True, highlight=False, soft_wrap=True)


def _check_islands(text: str | None) -> str | None:
    from atoll.controller.topology import read_topology

    if text is not None:
        try:
            read_topology(text)
        except AtollError as error:
            raise typer.BadParameter(str(error)) from None
    return text


def _memory(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _check_one_of(islands: str | None, address: str) -> None:
    if islands is not None and address:
        raise typer.BadParameter("--islands is for an embedded cluster, --address for one that is up: give one")


_ISLANDS_HELP = (
    "ISLANDSxHOSTSxDEVICES: 2x1x4 has two islands, of one host with four devices each. JAX sees them as "
    "2 slices (`slice_index`) of 4 devices."
)
_MEMORY_HELP = (
    "The memory of each device, such as 16GiB, where the platform does not tell (cpu) or tells too much. What does not "
    "fit waits, and what cannot fit fails. ATOLL_DEVICE_MEMORY if not given."
)
_PLATFORM_HELP = (
    "What the workers compute on: cpu, cuda or tpu, as JAX names it. ATOLL_PLATFORM if not given, else "
    f"{DEFAULT_PLATFORM}."
)
_DISPATCH_HELP = (
    "Whether a launch is sent off at once, or waits until the one before it is enqueued. ATOLL_DISPATCH if not given, "
    f"else {Dispatch.PARALLEL}."
)
_TOPOLOGY_HELP = (
    "The mesh in which the devices of an island stand, such as 4x4 or 2x2x2, where the platform does not tell (cpu): "
    "slices of a shape are parts of it. ATOLL_TOPOLOGY if not given, else a line."
)

Islands = Annotated[str, typer.Option(help=_ISLANDS_HELP, callback=_check_islands, metavar="IxHxD")]
EmbeddedIslands = Annotated[
    str | None,
    typer.Option(
        help=f"Of an embedded cluster; ATOLL_ISLANDS if not given, else {DEFAULT_ISLANDS}. {_ISLANDS_HELP}",
        callback=_check_islands,
        metavar="IxHxD",
    ),
]
Platform = Annotated[str | None, typer.Option(help=_PLATFORM_HELP)]
DeviceMemory = Annotated[
    int | None, typer.Option("--device-memory", help=_MEMORY_HELP, parser=_memory, metavar="AMOUNT")
]
MeshShape = Annotated[str | None, typer.Option("--topology", help=_TOPOLOGY_HELP, metavar="MESH")]
DispatchMode = Annotated[Dispatch | None, typer.Option("--dispatch", help=_DISPATCH_HELP)]
ClusterAddress = Annotated[
    str,
    typer.Option(
        "--address", help="The cluster at this address (unix:/path or HOST:PORT). ATOLL_ADDRESS if not given."
    ),
]
ClusterName = Annotated[str, typer.Option("--name", help="The cluster that `atoll up --name` started.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"atoll {__version__}")
        raise typer.Exit


@app.callback()
def atoll(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version, and end.", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    """Atoll runs unmodified JAX programs on devices that live in other processes, under one controller.

    Without any command, `JAX_PLATFORMS=atoll python train.py` starts an embedded cluster with the script, and
    ends it with it.

    For a cluster that stays: `atoll up`, then `JAX_PLATFORMS=atoll ATOLL_ADDRESS=... python train.py` as
    often as you like, `atoll status` to look, `atoll down` to end it.

    **Environment.**

    - `ATOLL_ADDRESS`: where a cluster listens, for scripts and for status, down and proxy.

    - `ATOLL_ISLANDS`, `ATOLL_TOPOLOGY`, `ATOLL_PLATFORM`, `ATOLL_DEVICE_MEMORY`, `ATOLL_DISPATCH`: what an embedded
    cluster has. All but the first count for `atoll up`, too.

    - `ATOLL_TOKEN`: a cluster that is started with it serves only those who bring the same. What listens on
    anything but loopback or a unix socket must have it.

    - `ATOLL_CACHE_DIR`: where compiled programs are kept; "off" keeps none.

    - `ATOLL_LOG`: debug or info makes the processes tell more.
    """


@app.command(context_settings={"allow_interspersed_args": False}, no_args_is_help=True)
def run(
    command: Annotated[list[str], typer.Argument(help="The command and its arguments.", metavar="COMMAND")],
    islands: EmbeddedIslands = None,
    platform: Platform = None,
    device_memory: DeviceMemory = None,
    dispatch: DispatchMode = None,
    topology: MeshShape = None,
    address: Annotated[str, typer.Option(help="Run on the cluster at this address instead.")] = "",
) -> None:
    """Run a command with JAX on Atoll.

    For instance `atoll run --islands 2x1x4 -- python train.py --steps 100`.

    The command takes the place of this process, so signals and the exit status are its own. It gets an
    embedded cluster of these islands, which ends with it; without --islands, the cluster of ATOLL_ADDRESS if
    that is set, else an embedded one.

    JAX_PLATFORMS becomes "atoll", unless it names atoll already ("atoll,cpu").
    """
    _check_one_of(islands, address)
    env = dict(os.environ)
    if "atoll" not in env.get("JAX_PLATFORMS", "").split(","):
        env["JAX_PLATFORMS"] = "atoll"
    if islands is not None:
        env.pop("ATOLL_ADDRESS", None)
    if address:
        env["ATOLL_ADDRESS"] = address
    given = _given(islands=islands, platform=platform, device_memory=device_memory, dispatch=dispatch, mesh=topology)
    env.update({VARIABLES[name]: str(value) for name, value in given.items()})
    try:
        os.execvpe(command[0], command, env)
    except FileNotFoundError:
        _fail(f"{command[0]}: no such command", _NOT_FOUND)
    except OSError as error:
        _fail(f"{command[0]}: {error.strerror}", _NOT_EXECUTABLE)


@app.command()
def up(
    islands: Islands = DEFAULT_ISLANDS,
    listen: Annotated[
        str,
        typer.Option(
            help="Where the controller listens: unix:/path or HOST:PORT. A unix socket that only you can "
            "open, unless given; anything but loopback needs ATOLL_TOKEN.",
            metavar="ADDRESS",
        ),
    ] = "",
    platform: Platform = None,
    device_memory: DeviceMemory = None,
    dispatch: DispatchMode = None,
    topology: MeshShape = None,
    name: Annotated[str, typer.Option(help="Its name, for status and down.")] = DEFAULT_NAME,
    foreground: Annotated[
        bool, typer.Option("--foreground", help="Stay in the foreground; Ctrl-C ends the cluster.")
    ] = False,
) -> None:
    """Start a cluster that stays, and print its address.

    The address alone goes to standard output: `export ATOLL_ADDRESS=$(atoll up --islands 1x1x8)`. The cluster
    runs until `atoll down`, whoever comes and goes; its messages are in the file `log` of its folder.
    """
    from atoll.operate.clusters import NewCluster
    from atoll.transport.address import parse_address
    from atoll.transport.child import wait_for_any

    settings = _settings(
        islands=islands, platform=platform, device_memory=device_memory, dispatch=dispatch, mesh=topology
    )
    cluster = NewCluster(
        name=name, settings=settings, listen=listen, token=_token(), parent=os.getpid() if foreground else 0
    )
    try:
        with _terminal.status(f"starting {islands} ..."):
            cluster.wait()
    except AtollError:
        messages = cluster.last_messages()
        if messages:
            print(messages, file=sys.stderr)
        raise
    address = cluster.registration.address
    print(address, flush=True)
    _tell(f"cluster {name} is up: {islands} on {settings.platform}")
    _tell(f"  run:   JAX_PLATFORMS=atoll ATOLL_ADDRESS={address} python train.py")
    if not parse_address(address).is_local:
        _tell("         (elsewhere: with this machine's name in the address, and the same ATOLL_TOKEN)")
    if not foreground:
        chosen = "" if name == DEFAULT_NAME else f" --name {name}"
        _tell(f"  look:  atoll status{chosen}")
        _tell(f"  end:   atoll down{chosen}")
        cluster.child.leave()
        return
    _tell("  end:   Ctrl-C")
    _end_on_signals()
    try:
        wait_for_any([cluster.child])
    except KeyboardInterrupt:
        _tell("ending")
    finally:
        cluster.end()


@app.command()
def status(
    as_json: Annotated[bool, typer.Option("--json", help="The same as JSON, for programs.")] = False,
    address: ClusterAddress = "",
    name: ClusterName = "",
) -> None:
    """Show a cluster: its islands, hosts and devices, the sessions that are open, and the memory they hold.

    Which cluster: --address, --name, ATOLL_ADDRESS, the one named "default", or the only one that is up; the
    first of these that applies.

    The JSON is `{"islands": [{"id", "state", "hosts": [{"id", "pid", "state", "devices": [...]}]}],
    "sessions": [...]}` and more. States are "starting", "ready", "restarting", "draining", "drained" and "lost".
    """
    from atoll.operate.clusters import find, report_of
    from atoll.operate.tables import status_tables

    target = find(address, name)
    report = report_of(target, _token())
    if as_json:
        print(json.dumps(report, indent=1))
    else:
        width = None if sys.stdout.isatty() else _TABLE_WIDTH
        Console(width=width, highlight=False).print(status_tables(report, str(target.address)))


@app.command()
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
) -> None:
    """Move a slice to other devices of the same shape, while its program runs.

    All that is on the slice moves with it: arrays are copied, functions compiled anew. The program waits meanwhile, and
    notices nothing else. A move that cannot be made leaves everything as it was, and says why.

    Which cluster: as for `atoll status`.
    """
    from atoll.operate.clusters import change, find
    from atoll.transport.messages import AskRemap

    island, devices = _place(to)
    question = AskRemap(session, slice_number, island, devices)
    with _terminal.status(f"moving slice {slice_number} of session {session} ..."):
        done = change(find(address, name), _token(), question)
    print(done)


@app.command("add-island")
def add_island(address: ClusterAddress = "", name: ClusterName = "") -> None:
    """Start one more island like the others, while programs run.

    New sessions have its devices; slices of those that run can be moved there (`atoll remap`). Returns when it is up.

    Which cluster: as for `atoll status`.
    """
    from atoll.operate.clusters import change, find
    from atoll.transport.messages import AskAddIsland

    with _terminal.status("starting an island ..."):
        done = change(find(address, name), _token(), AskAddIsland())
    print(done)


@app.command()
def drain(
    island: Annotated[int, typer.Argument(help="The island, by its number in `atoll status`.")],
    address: ClusterAddress = "",
    name: ClusterName = "",
) -> None:
    """Move all that is on an island to others like it, while programs run, and end its workers.

    Slices, arrays and functions of all sessions move; their programs notice nothing. Where something cannot be moved,
    the island stays, and the error says what is in the way.

    Which cluster: as for `atoll status`.
    """
    from atoll.operate.clusters import change, find
    from atoll.transport.messages import AskDrain

    with _terminal.status(f"draining island {island} ..."):
        done = change(find(address, name), _token(), AskDrain(island))
    print(done)


def _place(text: str) -> tuple[int, tuple[int, ...]]:
    """Reads 1, 1:4,5 or 1:4-7."""
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
            f"{text!r} is no place: expected an island and perhaps devices of it, such as 1, 1:4,5 or 1:4-7"
        ) from None
    return int(island), tuple(devices)


@app.command()
def dump(
    output: Annotated[Path | None, typer.Option("--output", "-o", help="A file; standard output if not given.")] = None,
    address: ClusterAddress = "",
    name: ClusterName = "",
) -> None:
    """Write the controller's event log: all that it was told, in order, a line of JSON each.

    From a log that begins at the start of the cluster (it keeps the last 50,000 events) the controller's decisions
    replay: see `atoll.controller.events.replay`. Which cluster: as for `atoll status`.
    """
    from atoll.operate.clusters import dump_of, find

    _write(dump_of(find(address, name), _token()), output)


def _write(body: bytes, output: Path | None) -> None:
    if output is None:
        sys.stdout.buffer.write(body)
    else:
        output.write_bytes(body)


@app.command()
def trace(
    output: Annotated[Path | None, typer.Option("--output", "-o", help="A file; standard output if not given.")] = None,
    address: ClusterAddress = "",
    name: ClusterName = "",
) -> None:
    """Write what ran on the cluster's hosts lately, and when, as a trace that https://ui.perfetto.dev opens.

    The last 100,000 computations and transfers of all sessions, a row for each host. Which cluster: as for
    `atoll status`.
    """
    from atoll.operate.clusters import find, trace_of

    _write(trace_of(find(address, name), _token()), output)


@app.command()
def down(address: ClusterAddress = "", name: ClusterName = "") -> None:
    """End a cluster, and return when nothing is left of it: no process, no socket, no folder.

    Sessions that are open end with an error. A process that does not go within 10 seconds is ended by force,
    where it is yours and on this machine. Which cluster: as for `atoll status`.
    """
    from atoll.operate.clusters import find, stop

    target = find(address, name)
    label = f"cluster {target.registration.name}" if target.registration else "the cluster"
    with _terminal.status(f"ending {label} ..."):
        ended = stop(target, _token())
    text = f"{label} at {target.address} has ended"
    if ended.processes >= 0:
        text += f": {ended.processes} processes"
    if ended.forced:
        text += f", {ended.forced} of them by force"
    print(text)


@app.command()
def proxy(
    port: Annotated[int, typer.Option(min=0, max=65535, help="Where to listen; 0 takes any free port.")] = 29000,
    host: Annotated[
        str, typer.Option(help="On which address; one that is not loopback needs ATOLL_TOKEN.")
    ] = "127.0.0.1",
    address: ClusterAddress = "",
    islands: EmbeddedIslands = None,
    platform: Platform = None,
    device_memory: DeviceMemory = None,
    dispatch: DispatchMode = None,
    topology: MeshShape = None,
) -> None:
    """Serve clients that know nothing of Atoll: those that start with Google's `pathwaysutils`.

    With --address (or ATOLL_ADDRESS, unless --islands is given) they work on that cluster; otherwise on an
    embedded one, which they share, and which ends with this command. Ctrl-C ends it.

    A client then runs as it does in Google's cloud, its script calling `pathwaysutils.initialize()`:
    `IFRT_PROXY_USE_INSECURE_GRPC_CREDENTIALS=true JAX_PLATFORMS=proxy
    JAX_BACKEND_TARGET=grpc://127.0.0.1:29000 python train.py`

    On an address that is not loopback, a client must bring the token, which `pathwaysutils` cannot pass on: it makes
    its own client, with `ClientConnectionOptions.initialization_data = {"token": b"..."}`.
    """
    from atoll.operate.clusters import Target, report_of
    from atoll.operate.serving import serve_proxy
    from atoll.transport.address import Address, check_may_listen, parse_address

    _check_one_of(islands, address)
    listen = Address(host=host.removeprefix("[").removesuffix("]"), port=port)
    check_may_listen(listen, _token())
    settings = _settings(
        islands=islands, platform=platform, device_memory=device_memory, dispatch=dispatch, mesh=topology
    )
    cluster = "" if islands is not None else address or os.environ.get("ATOLL_ADDRESS", "")
    if cluster:
        report_of(Target(parse_address(cluster)), _token())  # where it does not answer, say so at once

    def tell(where: str) -> None:
        print(f"grpc://{where}", flush=True)
        _tell(
            "  run:   IFRT_PROXY_USE_INSECURE_GRPC_CREDENTIALS=true JAX_PLATFORMS=proxy "
            f"JAX_BACKEND_TARGET=grpc://{where} python train.py"
        )
        _tell("  end:   Ctrl-C")

    _end_on_signals()
    try:
        serve_proxy(listen, cluster, settings, tell)
    except KeyboardInterrupt:
        _tell("the proxy has ended")


@app.command(add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def bench(context: typer.Context) -> None:
    """Measure Atoll beside its peers, in turn, in one run."""
    from atoll.bench.command import bench as commands

    raise typer.Exit(commands(context.args, prog_name="atoll bench", standalone_mode=False) or 0)


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _settings(**options: Any) -> ClusterSettings:
    """The cluster of these options, and of the environment where one is None. Raises ClusterError."""
    return msgspec.structs.replace(ClusterSettings.from_environment(), **_given(**options))


def _token() -> str:
    return os.environ.get(DEFAULT_TOKEN_VARIABLE, "")


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _end_on_signals() -> None:
    """SIGTERM, and the terminal's end, work as Ctrl-C does."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)


def _fail(message: str, status: int = 1) -> NoReturn:
    _tell(f"atoll: {message}")
    sys.exit(status)


def main() -> None:
    """The command `atoll`."""
    try:
        sys.exit(app(prog_name="atoll", standalone_mode=False))
    except AtollError as error:
        _fail(str(error))
    except (KeyboardInterrupt, typer.Abort):
        _fail("interrupted", 130)
    except Exception as error:
        # What typer says of a wrong command line; its class has moved between typer's versions.
        if not hasattr(error, "format_message"):
            raise
        _end_of_usage(error)


def _end_of_usage(error: Any) -> NoReturn:
    message = error.format_message()
    if not message:  # no arguments at all: the help has been shown
        sys.exit(2)
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "atoll"
    _fail(f"{message} (see `{command} --help`)", getattr(error, "exit_code", 2))


if __name__ == "__main__":
    main()
