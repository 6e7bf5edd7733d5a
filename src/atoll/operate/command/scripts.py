"""Scripts on a cluster: `atoll run` for any script on this machine, `atoll proxy` for those with Google's client."""

from __future__ import annotations

import os
import signal
import sys
from typing import Annotated, NoReturn

import typer

from atoll.cluster.array_names import check_array_name
from atoll.cluster.environment_variables import ADDRESS, CLUSTER_FILE, DETACH, JAX_PLATFORMS, JOIN, RUN
from atoll.cluster.named_runs import DEFAULT_DETACHED_SECONDS
from atoll.cluster.settings import environment_of
from atoll.operate.command.command_options import (
    ClusterAddress,
    ClusterJoin,
    ClusterOptions,
    EmbeddedIslands,
    check_one_of,
    given,
    settings_of,
    token,
    with_option_groups,
)
from atoll.operate.command.terminal import echo, end_on_signals, fail
from atoll.security.join_token import read_join

NOT_EXECUTABLE, NOT_FOUND, INTERRUPTED = 126, 127, 130  # exit statuses, as of a shell


@with_option_groups
def run(
    *,
    command: Annotated[list[str], typer.Argument(help="The command and its arguments.", metavar="COMMAND")],
    islands: EmbeddedIslands = None,
    cluster: ClusterOptions,
    address: Annotated[
        str,
        typer.Option(
            help="Address of a running cluster to use instead, or the name of your cluster on this machine.",
            metavar="ADDRESS",
        ),
    ] = "",
    join: ClusterJoin = "",
    name: Annotated[
        str,
        typer.Option(
            help="Name of the run, not of a cluster (--address). A script with the name of an earlier one continues "
            "where that one ended.",
            metavar="NAME",
        ),
    ] = "",
    detach: Annotated[
        bool,
        typer.Option(
            "--detach",
            help="Run the command without this terminal. `atoll attach` follows its output. If the script ends, its "
            "submitted work continues for at most 10 minutes. Needs --name.",
        ),
    ] = False,
) -> None:
    """Run a command with JAX on Atoll.

    For example: `atoll run --islands 2x1x4 -- python train.py --steps 100`.

    The command replaces this process, so it handles signals and sets the exit status. With --islands it gets an
    embedded cluster, which ends with it. Without, it uses the cluster of ATOLL_ADDRESS or ATOLL_JOIN, or an embedded
    one if neither is set. `atoll status` also shows an embedded cluster: without options inside the script, and with
    `--name embedded-PID` elsewhere.

    Sets JAX_PLATFORMS to "atoll", unless it already contains atoll ("atoll,cpu").
    """
    check_one_of(islands, address, join)
    if detach and not name:
        raise typer.BadParameter("--detach needs the name of the run: give --name")
    env = dict(os.environ)
    if name:
        env[RUN.variable] = check_array_name(name)
    if "atoll" not in env.get(JAX_PLATFORMS.variable, "").split(","):
        env[JAX_PLATFORMS.variable] = "atoll"
    if islands is not None:
        env.pop(ADDRESS.variable, None)
        env.pop(JOIN.variable, None)
    if address or join:
        env[ADDRESS.variable] = address
    if join:
        env[JOIN.variable] = str(read_join(join))
    options = given(islands, cluster)
    if islands is not None:
        env.pop(CLUSTER_FILE.variable, None)
    elif cluster.cluster_file is not None:
        settings_of(islands, cluster)  # raises if the file is invalid
        env[CLUSTER_FILE.variable] = os.path.abspath(cluster.cluster_file)
    env.update(environment_of(options))
    if detach:
        from atoll.operate.detached_scripts import start

        env.setdefault(DETACH.variable, f"{DEFAULT_DETACHED_SECONDS:.0f}")
        start(name, command, env)
        print(name)
        echo(f"  output:  atoll attach {name}\n  state:   atoll ps")
        return
    try:
        os.execvpe(command[0], command, env)
    except OSError as error:
        _fail_to_start(command[0], error)


def _fail_to_start(command: str, error: OSError) -> NoReturn:
    """End as a shell does if it cannot start a command."""
    if isinstance(error, FileNotFoundError):
        fail(f"{command}: no such command", NOT_FOUND)
    fail(f"{command}: {error.strerror}", NOT_EXECUTABLE)


@with_option_groups
def proxy(
    *,
    command: Annotated[
        list[str] | None, typer.Argument(help="A command to run with the proxy, and its arguments.", metavar="COMMAND")
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65535,
            help="Port to listen on; 0 for any free port. Defaults to 29000, and with COMMAND to any free port.",
            metavar="PORT",
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on. One other than loopback needs ATOLL_TOKEN.", metavar="HOST")
    ] = "127.0.0.1",
    address: ClusterAddress = "",
    join: ClusterJoin = "",
    islands: EmbeddedIslands = None,
    fail_on_loss: Annotated[
        bool,
        typer.Option(
            "--fail-on-loss",
            help="Fail work for a failed island immediately, as in Google's cloud, instead of waiting for the island's "
            "restart. For `elastic_retry` with fewer slices than the cluster has.",
        ),
    ] = False,
    cluster: ClusterOptions,
) -> None:
    """Serve clients that use Google's `pathwaysutils`.

    With --address or --join (or ATOLL_ADDRESS or ATOLL_JOIN, unless --islands is given) the clients use that cluster.
    Otherwise they share an embedded one, which ends with this command. Ctrl-C ends it.

    With COMMAND, such as `atoll proxy --islands 2x1x4 -- python train.py`, the proxy serves this command, and ends with
    its exit status. The command gets the environment variables that Google's client needs.

    Without COMMAND, a client runs as in Google's cloud, with a script that calls `pathwaysutils.initialize()`:
    `IFRT_PROXY_USE_INSECURE_GRPC_CREDENTIALS=true JAX_PLATFORMS=proxy JAX_BACKEND_TARGET=grpc://127.0.0.1:29000 python
    train.py`

    On an address other than loopback, a client must send the token, which `pathwaysutils` cannot do: the script then
    creates a client with `ClientConnectionOptions.initialization_data = {"token": b"..."}`. jaxlib's client does not
    support TLS, so the token and all data travel unencrypted. Prefer to run `atoll proxy` on the client's machine: it
    connects to the cluster with TLS.
    """
    from atoll.operate.cluster_queries import Target, report_of
    from atoll.operate.joining import Reach, reach
    from atoll.operate.standalone_proxy import Script, client_environment, run_proxy
    from atoll.wire.address import Address, check_may_listen

    check_one_of(islands, address, join)
    if port is None:
        port = 0 if command else 29000
    listen = Address(host=host.removeprefix("[").removesuffix("]"), port=port)
    check_may_listen(listen, token())
    settings = settings_of(islands, cluster)
    if not (address or join or islands is not None):
        address, join = ADDRESS.text(), JOIN.text()
    existing: Reach | None = None
    if address or join:
        existing = reach(address, join)
        report_of(Target(existing.address, None, existing.join), token())  # raises if no controller listens

    def up(where: str) -> Script | None:
        variables = client_environment(where)
        if command:
            signal.signal(signal.SIGINT, lambda *_: None)  # Ctrl-C is for the command, which gets it as well
            return Script(command, {**os.environ, **variables})
        print(f"grpc://{where}", flush=True)
        echo(f"  run:   {' '.join(f'{name}={value}' for name, value in variables.items())} python train.py")
        if not listen.is_local:
            echo("  note:  jaxlib's client does not support TLS: the token and all data travel unencrypted")
        echo("  end:   Ctrl-C")
        return None

    end_on_signals()
    try:
        if existing is None:
            status = run_proxy(listen, "", settings, up, fail_on_loss=fail_on_loss)
        else:
            status = run_proxy(listen, str(existing.address), settings, up, existing.join, fail_on_loss)
    except KeyboardInterrupt:
        echo("the proxy has ended")
        if command:
            sys.exit(INTERRUPTED)
        return
    except OSError as error:
        if command and error.filename == command[0]:
            _fail_to_start(command[0], error)
        raise
    if status:
        sys.exit(status if status > 0 else 128 - status)
