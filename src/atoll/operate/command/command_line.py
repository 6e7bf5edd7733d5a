"""The command line: `atoll --help`.

A command writes its result (an address, a table, JSON) to standard output, and everything else to standard error. An
error is one line there. The exit status is then 1, or 2 for an invalid command line.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NoReturn

import typer
from typer.main import get_command_name
from typer.models import CommandInfo, TyperInfo

from atoll._version import __version__
from atoll.cluster.former_names import present_option
from atoll.cluster.misspelled_variables import misspelled_variables
from atoll.cluster.processes.process_runtime import freeze_gc, open_standard_streams
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
from atoll.operate.command.command_help import HelpCommand, MainGroup
from atoll.operate.command.standard_output import OUTPUT_CLOSED, OutputError, checked_output
from atoll.operate.command.terminal import fail, repeat_dropped_interrupts

# The exit status if the same command will always fail: EX_CONFIG of sysexits.h. Units of services do not try again.
REFUSED = 78

# Commands import modules when they run: importing them here would double the time of `atoll --help`.

app = typer.Typer(
    name="atoll",
    cls=MainGroup,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "token_normalize_func": present_option},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from atoll.protocol.messages import PROTOCOL

        print(f"atoll {__version__}, protocol {PROTOCOL}")
        raise typer.Exit


_HELP = """\
Run JAX programs unmodified on the devices of a cluster.

Without a cluster, `JAX_PLATFORMS=atoll python train.py` starts one that ends with the script.

To share a cluster, start it with `atoll up`, run any number of scripts with `JAX_PLATFORMS=atoll ATOLL_ADDRESS=default
python train.py`, and end it with `atoll down`.
"""


@app.callback(help=_HELP)
def atoll(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and the protocol, and exit.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Handle the options that precede a command."""


# The order of this table is that of `atoll --help` and of docs/reference/commands.md.
_COMMANDS: dict[str, tuple[Callable[..., None] | typer.Typer, ...]] = {
    "Start and end clusters": (cluster_commands.up, host_command.host, cluster_commands.down),
    "Run scripts": (scripts.run, run_commands.attach, run_commands.ps, scripts.proxy),
    "Watch a cluster": (
        cluster_commands.status,
        watch_commands.top,
        watch_commands.why,
        log_commands.logs,
        tenant_commands.usage,
        watch_commands.web,
        operator_commands.trace,
    ),
    "Change a cluster while programs run": (
        operator_commands.add_island,
        operator_commands.drain,
        operator_commands.undrain,
        operator_commands.remap,
        operator_commands.suspend,
        operator_commands.resume,
        operator_commands.end_session,
        tenant_commands.app,
        array_commands.app,
    ),
    "Deploy and monitor": (
        manifests.kubernetes,
        manifests.slurm,
        watch_commands.metrics,
        watch_commands.alerts,
        watch_commands.dashboard,
    ),
    "Report bugs": (bundle_commands.bundle, operator_commands.check, operator_commands.dump, bundle_commands.replay),
}
_OPTIONS_BEFORE_COMMAND = {"allow_interspersed_args": False}


def _add_commands() -> None:
    for title, commands in _COMMANDS.items():
        for each in commands:
            if isinstance(each, typer.Typer):
                app.add_typer(each, rich_help_panel=title)
                continue
            takes_command = each in (scripts.run, scripts.proxy)
            app.command(
                cls=HelpCommand,
                rich_help_panel=title,
                context_settings=_OPTIONS_BEFORE_COMMAND if takes_command else None,
                no_args_is_help=each is scripts.run,
            )(each)


_add_commands()


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
    if context is not None and message == context.get_help():  # a command that needs arguments got none
        print(message, file=sys.stderr)
        sys.exit(2)
    command = context.command_path if context is not None else "atoll"
    message = message.replace("Value error, ", "", 1)  # a word of the parser that Typer uses
    fail(f"{message} (see `{command} --help`)", getattr(error, "exit_code", 2))
