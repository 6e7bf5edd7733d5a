"""Scripts on a cluster: `atoll run` for any on this machine, `atoll proxy` for those that use Google's client."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from atoll.cluster.cluster_file import FILE_VARIABLE
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
from atoll.operate.command.terminal import end_on_signals, fail, say
from atoll.security.join_token import JOIN_VARIABLE, read_join

_NOT_EXECUTABLE, _NOT_FOUND = 126, 127  # exit statuses, as of a shell


@with_option_groups
def run(
    *,
    command: Annotated[list[str], typer.Argument(help="The command and its arguments.", metavar="COMMAND")],
    islands: EmbeddedIslands = None,
    cluster: ClusterOptions,
    address: Annotated[str, typer.Option(help="Run on the cluster at this address instead.")] = "",
    join: ClusterJoin = "",
) -> None:
    """Run a command with JAX on Atoll.

    For instance `atoll run --islands 2x1x4 -- python train.py --steps 100`.

    The command takes the place of this process, so signals and the exit status are its own. It gets an
    embedded cluster of these islands, which ends with it; without --islands, the cluster of ATOLL_ADDRESS or ATOLL_JOIN
    if one is set, else an embedded one. `atoll status` shows that cluster, too: without options from within the script,
    with `--name embedded-PID` from elsewhere.

    JAX_PLATFORMS becomes "atoll", unless it names atoll already ("atoll,cpu").
    """
    check_one_of(islands, address, join)
    env = dict(os.environ)
    if "atoll" not in env.get("JAX_PLATFORMS", "").split(","):
        env["JAX_PLATFORMS"] = "atoll"
    if islands is not None:
        env.pop("ATOLL_ADDRESS", None)
        env.pop(JOIN_VARIABLE, None)
    if address or join:
        env["ATOLL_ADDRESS"] = address
    if join:
        env[JOIN_VARIABLE] = str(read_join(join))
    said = given(islands, cluster)
    if islands is not None:
        env.pop(FILE_VARIABLE, None)
    elif "cluster_file" in said:
        settings_of(islands, cluster)  # raises what is wrong with it
        env[FILE_VARIABLE] = os.path.abspath(said.pop("cluster_file"))
    env.update(environment_of(said))
    try:
        os.execvpe(command[0], command, env)
    except FileNotFoundError:
        fail(f"{command[0]}: no such command", _NOT_FOUND)
    except OSError as error:
        fail(f"{command[0]}: {error.strerror}", _NOT_EXECUTABLE)


@with_option_groups
def proxy(
    *,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Where to listen; 0 takes any free port.")] = 29000,
    host: Annotated[
        str, typer.Option(help="On which address; one that is not loopback needs ATOLL_TOKEN.")
    ] = "127.0.0.1",
    address: ClusterAddress = "",
    join: ClusterJoin = "",
    islands: EmbeddedIslands = None,
    fail_on_loss: Annotated[
        bool,
        typer.Option(
            "--fail-on-loss",
            help="What a client sends to a failed island fails at once, as in Google's cloud, and does not wait until "
            "that is back: for `elastic_retry` with fewer slices than there are.",
        ),
    ] = False,
    cluster: ClusterOptions,
) -> None:
    """Serve clients that know nothing of Atoll: those that start with Google's `pathwaysutils`.

    With --address or --join (or ATOLL_ADDRESS or ATOLL_JOIN, unless --islands is given) they work on that cluster;
    otherwise on an embedded one, which they share, and which ends with this command. Ctrl-C ends it.

    A client then runs as it does in Google's cloud, its script calling `pathwaysutils.initialize()`:
    `IFRT_PROXY_USE_INSECURE_GRPC_CREDENTIALS=true JAX_PLATFORMS=proxy
    JAX_BACKEND_TARGET=grpc://127.0.0.1:29000 python train.py`

    On an address that is not loopback, a client must bring the token, which `pathwaysutils` cannot pass on: such a
    script makes its own client, with `ClientConnectionOptions.initialization_data = {"token": b"..."}`. jaxlib's client
    speaks no TLS: what it sends to another machine, and the token, travel in the clear. Better, let `atoll proxy` run
    on the client's machine: from there to the cluster it speaks TLS.
    """
    from atoll.operate.cluster_queries import Target, report_of
    from atoll.operate.joining import Reach, reach
    from atoll.operate.standalone_proxy import run_proxy
    from atoll.wire.address import Address, check_may_listen

    check_one_of(islands, address, join)
    listen = Address(host=host.removeprefix("[").removesuffix("]"), port=port)
    check_may_listen(listen, token())
    settings = settings_of(islands, cluster)
    if not (address or join or islands is not None):
        address, join = os.environ.get("ATOLL_ADDRESS", ""), os.environ.get(JOIN_VARIABLE, "")
    existing: Reach | None = None
    if address or join:
        existing = reach(address, join)
        report_of(Target(existing.address, None, existing.join), token())  # raises at once where nobody listens

    def announce(where: str) -> None:
        print(f"grpc://{where}", flush=True)
        say(
            # Else jaxlib's client prints a stack trace at each normal end.
            "  run:   TF_CPP_MIN_LOG_LEVEL=2 IFRT_PROXY_USE_INSECURE_GRPC_CREDENTIALS=true JAX_PLATFORMS=proxy "
            f"JAX_BACKEND_TARGET=grpc://{where} python train.py"
        )
        if not listen.is_local:
            say(
                "  note:  without TLS, which jaxlib's client does not speak: the token and all data travel in the clear"
            )
        say("  end:   Ctrl-C")

    end_on_signals()
    try:
        if existing is None:
            run_proxy(listen, "", settings, announce, fail_on_loss=fail_on_loss)
        else:
            run_proxy(listen, str(existing.address), settings, announce, existing.join, fail_on_loss)
    except KeyboardInterrupt:
        say("the proxy has ended")
