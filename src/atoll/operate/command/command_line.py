"""The command line: `atoll --help`.

A command writes its result (an address, a table, JSON) to standard output, and everything else to standard error. An
error is one line there. The exit status is then 1, or 2 for an invalid command line.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any, NoReturn

import typer
from typer.main import get_command_name
from typer.models import CommandInfo, TyperInfo

from atoll._version import __version__
from atoll.cluster.environment_variables import PROCESSES, SCRIPTS
from atoll.cluster.former_names import present_option
from atoll.cluster.misspelled_variables import misspelled_variables
from atoll.cluster.processes.process_runtime import freeze_gc, open_standard_streams
from atoll.cluster.settings import SETTINGS
from atoll.errors import AddressError, AtollError, IncompatibleJournalError, ListenError, SettingsError, SupersededError
from atoll.operate.command import (
    array_commands,
    bundle_commands,
    cluster_commands,
    host_command,
    log_commands,
    manifests,
    operator_commands,
    run_commands,
    scripts,
    tenant_commands,
    watch_commands,
)
from atoll.operate.command.standard_output import OUTPUT_CLOSED, OutputError, checked_output
from atoll.operate.command.terminal import fail, repeat_dropped_interrupts

# The exit status if the same command will always fail: EX_CONFIG of sysexits.h. Units of services do not try again.
REFUSED = 78

# Commands import modules when they run: importing them here would double the time of `atoll --help`.

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
        from atoll.protocol.messages import PROTOCOL

        print(f"atoll {__version__}, protocol {PROTOCOL}")
        raise typer.Exit


def _help() -> str:
    """Return the text of `atoll --help` above the commands."""
    return "\n\n".join(
        (
            "Atoll runs unmodified JAX programs on the devices of a cluster, under one controller.",
            "Without any of these commands, `JAX_PLATFORMS=atoll python train.py` starts an embedded cluster that ends "
            "with the script.",
            "For a standing cluster: start it with `atoll up`, run any number of scripts with `JAX_PLATFORMS=atoll "
            "ATOLL_ADDRESS=... python train.py`, show its state with `atoll status`, and end it with `atoll down`.",
        )
    )


def _environment() -> str:
    """Return the text of `atoll --help` below the commands."""
    variables = [f"- `{each.variable}`: {each.help}" for each in SCRIPTS.settings]
    others = ", ".join(f"`{each.variable}`" for each in (*SETTINGS.values(), *PROCESSES.settings))
    return "\n\n".join(("**Environment.**", *variables, f'- The page "Settings" also describes {others}.'))


@app.callback(help=_help(), epilog=_environment())
def atoll(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and the protocol, and exit.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Handle the options that precede a command."""


app.command(context_settings={"allow_interspersed_args": False}, no_args_is_help=True)(scripts.run)
app.command()(run_commands.attach)
app.command()(run_commands.ps)
app.command()(cluster_commands.up)
app.command()(host_command.host)
app.command()(manifests.kubernetes)
app.command()(manifests.slurm)
app.command()(cluster_commands.status)
app.command()(watch_commands.top)
app.command()(watch_commands.why)
app.command()(watch_commands.web)
app.command()(watch_commands.metrics)
app.command()(watch_commands.alerts)
app.command()(watch_commands.dashboard)
app.command()(operator_commands.remap)
app.command()(operator_commands.suspend)
app.command()(operator_commands.resume)
app.command("add-island")(operator_commands.add_island)
app.command()(operator_commands.drain)
app.command()(operator_commands.undrain)
app.command()(log_commands.logs)
app.command("end-session")(operator_commands.end_session)
app.add_typer(array_commands.app)
app.add_typer(tenant_commands.app)
app.command()(tenant_commands.usage)
app.command()(operator_commands.check)
app.command()(operator_commands.dump)
app.command()(bundle_commands.bundle)
app.command()(bundle_commands.replay)
app.command()(operator_commands.trace)
app.command()(cluster_commands.down)
app.command(context_settings={"allow_interspersed_args": False})(scripts.proxy)


def main() -> None:
    """Run the command `atoll`."""
    open_standard_streams()
    repeat_dropped_interrupts()
    freeze_gc()
    _leave_out_others(sys.argv[1:])
    for line in misspelled_variables(os.environ):
        print(f"atoll: {line}", file=sys.stderr)
    try:
        with checked_output():
            sys.exit(app(prog_name="atoll", standalone_mode=False))
    except OutputError as error:
        if error.is_closed:
            sys.exit(OUTPUT_CLOSED)
        fail(str(error))
    except ListenError as error:  # a port may be free later
        fail(str(error))
    except (AddressError, SettingsError, IncompatibleJournalError, SupersededError) as error:
        fail(str(error), REFUSED)
    except AtollError as error:
        fail(str(error))
    except OSError as error:
        if error.filename is None:
            raise
        fail(f"{error.filename}: {error.strerror}")
    except (KeyboardInterrupt, typer.Abort):
        fail("interrupted", 130)
    except Exception as error:
        # Typer's error for an invalid command line. Its class differs between versions of Typer.
        if not hasattr(error, "format_message"):
            raise
        _fail_usage(error)


def _leave_out_others(arguments: Sequence[str]) -> None:
    """Remove all commands but the one that the arguments name, because Typer takes 45 ms to read all signatures."""
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


def _fail_usage(error: Any) -> NoReturn:
    message = error.format_message()
    if not message:  # without arguments, Typer has shown the help
        sys.exit(2)
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "atoll"
    fail(f"{message} (see `{command} --help`)", getattr(error, "exit_code", 2))
