"""The command line: `atoll --help`.

The result of a command (an address, a table, JSON) goes to standard output, everything else to standard error. An error
is one line there; the exit status is then 1, or 2 where the command line itself is wrong.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Any, NoReturn

import typer
from typer.main import get_command_name
from typer.models import CommandInfo, TyperInfo

from atoll._version import __version__
from atoll.cluster.former_names import present_option
from atoll.cluster.processes.process_runtime import freeze_gc
from atoll.errors import AtollError
from atoll.operate.command import (
    cluster_commands,
    host_command,
    manifests,
    operator_commands,
    scripts,
    tenant_commands,
    usage_command,
    watch_commands,
)
from atoll.operate.command.terminal import fail

# Each command imports what it needs when it runs: all imports here would double the time of `atoll --help`.

app = typer.Typer(
    name="atoll",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "token_normalize_func": present_option},
)


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
    """Atoll runs unmodified JAX programs on the devices of a cluster, under one controller.

    Without any of these commands, `JAX_PLATFORMS=atoll python train.py` starts an embedded cluster, which ends with
    the script.

    For a cluster that stays: `atoll up`, then `JAX_PLATFORMS=atoll ATOLL_ADDRESS=... python train.py` as
    often as you like, `atoll status` to see what it does, `atoll down` to end it.

    **Environment.**

    - `ATOLL_ADDRESS`: where a cluster listens, for scripts and for all commands but up.

    - `ATOLL_ISLANDS`, `ATOLL_TOPOLOGY`, `ATOLL_PLATFORM`, `ATOLL_DEVICE_MEMORY`, `ATOLL_DISPATCH`, `ATOLL_POLICY`,
    `ATOLL_ENGINE`, `ATOLL_LEASE`, `ATOLL_WAIT`: what an embedded cluster has. All but the first count for `atoll up`,
    too.

    - `ATOLL_JOIN`: the join token of a cluster on TCP, or the file that has it, for scripts and for all commands but
    up.

    - `ATOLL_TOKEN`: a cluster that is started with it serves only clients that bring the same.

    - `ATOLL_BULK_TLS`: "off" leaves the data connections of a cluster on TCP without TLS. `ATOLL_INSECURE=1`: no TLS at
    all.

    - `ATOLL_CACHE_DIR`: where compiled programs are kept; "off" keeps none. `ATOLL_STATE_DIR`: the same for usage.
    `ATOLL_KEY_FILE`: the file with the user's key, which protects compiled programs and journals.

    - `ATOLL_LOG`: debug or info makes the processes log more.
    """


app.command(context_settings={"allow_interspersed_args": False}, no_args_is_help=True)(scripts.run)
app.command()(cluster_commands.up)
app.command()(host_command.host)
app.command()(manifests.kubernetes)
app.command()(manifests.slurm)
app.command()(cluster_commands.status)
app.command()(watch_commands.top)
app.command()(watch_commands.web)
app.command()(watch_commands.metrics)
app.command()(operator_commands.remap)
app.command()(operator_commands.suspend)
app.command()(operator_commands.resume)
app.command("add-island")(operator_commands.add_island)
app.command()(operator_commands.drain)
app.command("end-session")(operator_commands.end_session)
app.add_typer(tenant_commands.app)
app.command()(usage_command.usage)
app.command()(operator_commands.check)
app.command()(operator_commands.dump)
app.command()(operator_commands.trace)
app.command()(cluster_commands.down)
app.command()(scripts.proxy)


def main() -> None:
    """The command `atoll`."""
    freeze_gc()
    _leave_out_others(sys.argv[1:])
    try:
        sys.exit(app(prog_name="atoll", standalone_mode=False))
    except AtollError as error:
        fail(str(error))
    except (KeyboardInterrupt, typer.Abort):
        fail("interrupted", 130)
    except Exception as error:
        # Typer's error for a wrong command line; its class has moved between typer's versions.
        if not hasattr(error, "format_message"):
            raise
        _end_of_usage(error)


def _leave_out_others(arguments: Sequence[str]) -> None:
    """Remove all commands but the one that the arguments begin with: Typer takes 45 ms for the signatures of all."""
    commands = [each for each in app.registered_commands if _command_name(each) in arguments[:1]]
    groups = [each for each in app.registered_groups if _group_name(each) in arguments[:1]]
    if commands or groups:
        app.registered_commands, app.registered_groups = commands, groups


def _command_name(info: CommandInfo) -> str:
    assert info.callback is not None
    return info.name or get_command_name(info.callback.__name__)


def _group_name(info: TyperInfo) -> str:
    assert info.typer_instance is not None
    return str(info.typer_instance.info.name)


def _end_of_usage(error: Any) -> NoReturn:
    message = error.format_message()
    if not message:  # no arguments at all: the help has been shown
        sys.exit(2)
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "atoll"
    fail(f"{message} (see `{command} --help`)", getattr(error, "exit_code", 2))
