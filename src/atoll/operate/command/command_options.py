"""Options that several commands share, and their conversion to settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import wraps
from inspect import Parameter, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import msgspec
import typer

from atoll.cluster.cluster_file import read_cluster_file
from atoll.cluster.environment_variables import CLUSTER_FILE, TENANTS_FILE, TOKEN
from atoll.cluster.setting_forms import Setting
from atoll.cluster.settings import DEFAULT_ISLANDS, SETTINGS, ClusterSettings, default_text
from atoll.cluster.tenant_settings import read_tenant_tokens, read_tenants
from atoll.errors import AtollError
from atoll.operate.command.command_help import CHOICE_OF_CLUSTER, CLUSTER_SETTINGS
from atoll.quantities import parse_bytes, parse_seconds

if TYPE_CHECKING:
    from atoll.operate.cluster_queries import Target


def _check_platform(text: str | None) -> str | None:
    from atoll.devices.device_kinds import check_platform

    return _checked(check_platform, text)


def _check_engine(text: str | None) -> str | None:
    from atoll.engines.engine_interface import check_engine

    return _checked(check_engine, text)


def _checked(check: Callable[[str], object], text: str | None) -> str | None:
    """Return the text if `check` accepts it or if it is None; otherwise end the command."""
    if text is not None:
        try:
            check(text)
        except AtollError as error:
            raise typer.BadParameter(str(error)) from None
    return text


def _check_policy(text: str | None) -> str | None:
    from atoll.launch.policies import find_policy

    return _checked(find_policy, text)


def read_time_span(text: str) -> float:
    """Return the seconds of a time span such as 10m; 0 for "". Ends the command if the text is invalid."""
    try:
        return parse_seconds(text) if text else 0.0
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def read_amount(text: str) -> int:
    """Return an amount of bytes, or end the command."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


_FILE_HELP = (
    "A TOML file with islands, which may differ in hosts, devices, platform and topology, and with settings named like "
    'these options, which override it; see the page "Clusters". Replaces --islands.'
)
_TENANTS_HELP = (
    "A TOML file with the tenants that share the cluster: their tokens, shares, priorities, quotas and roles; see the "
    'page "Sharing".'
)


def _help(text: str, setting: Setting[Any], default: str = "") -> str:
    """Return the help text of an option that has an environment variable."""
    return f"{text} Defaults to {setting.variable}" + (f", then to {default}." if default else ".")


def _parser(setting: Setting[Any]) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            return setting.form.parse(text)
        except ValueError as error:
            raise typer.BadParameter(f"{text!r}: {error}") from None

    return parse


def _item_parser(check: Callable[[str], object]) -> Callable[[str], Any]:
    """Return the function that checks one of the values of an option that can be repeated."""

    def parse(text: str) -> str:
        try:
            check(text)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
        return text

    return parse


# By field: the checks of names that packages above `cluster` know.
_CHECKS = {"platform": _check_platform, "engine": _check_engine, "policy": _check_policy}


def _option_of(field: str) -> Parameter:
    """Return the option of the setting of this field of `ClusterSettings`."""
    setting = SETTINGS[field]
    form, name = setting.form, f"--{setting.name}"
    text, metavar = _help(setting.help, setting, default_text(field)), setting.metavar or form.metavar
    kind: Any
    if form.is_flag:
        kind, option = bool | None, typer.Option(name, help=text, show_default=False, rich_help_panel=CLUSTER_SETTINGS)
    elif form.check_item is not None:
        text += " Repeat the option for several, or separate them by colons in the variable."
        kind = list[str] | None
        option = typer.Option(
            name, help=text, metavar=metavar, parser=_item_parser(form.check_item), rich_help_panel=CLUSTER_SETTINGS
        )
    else:
        kind = str | None
        option = typer.Option(
            name,
            help=text,
            metavar=metavar,
            parser=_parser(setting),
            callback=_CHECKS.get(field),
            rich_help_panel=CLUSTER_SETTINGS,
        )
    return Parameter(field, Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, option])


_ISLANDS = SETTINGS["islands"]
Islands = Annotated[
    str | None,
    typer.Option(
        help=f"{_ISLANDS.help} Give this or --cluster.",
        parser=_parser(_ISLANDS),
        metavar=_ISLANDS.form.metavar,
    ),
]
StandingIslands = Annotated[
    str | None,
    typer.Option(
        help=f"{_ISLANDS.help} Without this and --cluster both, {DEFAULT_ISLANDS}. {_ISLANDS.variable} is only for "
        "embedded clusters.",
        parser=_parser(_ISLANDS),
        metavar=_ISLANDS.form.metavar,
    ),
]
EmbeddedIslands = Annotated[
    str | None,
    typer.Option(
        help=_help(f"Islands of an embedded cluster. {_ISLANDS.help}", _ISLANDS, DEFAULT_ISLANDS),
        parser=_parser(_ISLANDS),
        metavar=_ISLANDS.form.metavar,
    ),
]


@dataclass(frozen=True)
class ClusterOptions:
    """The options of a new cluster. `settings` has those that were given, by field of `ClusterSettings`."""

    cluster_file: Annotated[
        Path | None, typer.Option("--cluster", help=_help(_FILE_HELP, CLUSTER_FILE), metavar="FILE")
    ] = None
    tenants_file: Annotated[
        Path | None,
        typer.Option("--tenants", help=_help(_TENANTS_HELP, TENANTS_FILE, TENANTS_FILE.default), metavar="FILE"),
    ] = None
    settings: Mapping[str, Any] = field(
        default_factory=dict,
        metadata={"options": [_option_of(name) for name, each in SETTINGS.items() if each.name and each.is_option]},
    )


def with_option_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Replace each keyword argument that is a dataclass by one option per field of it.

    Typer reads options from a function's signature, in which one parameter cannot stand for several. A field with
    `options` in its metadata stands for these; its value is a dict of those that were given.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters: list[Parameter] = []
    for each in signature(command).parameters.values():
        if each.name in groups:
            parameters += [option for options in _options(groups[each.name]).values() for option in options]
        else:
            parameters.append(each.replace(annotation=hints[each.name]))

    @wraps(command)
    def with_each(**given: Any) -> None:
        made = {name: group(**_values(group, given)) for name, group in groups.items()}
        command(**made, **given)

    with_each.__signature__ = signature(command).replace(parameters=parameters)  # type: ignore[attr-defined]
    with_each.__annotations__ = {each.name: each.annotation for each in parameters}
    return with_each


def _options(group: Any) -> dict[str, list[Parameter]]:
    """Return the options of a dataclass by field."""
    hints = get_type_hints(group, include_extras=True)
    return {
        each.name: each.metadata.get("options")
        or [Parameter(each.name, Parameter.KEYWORD_ONLY, default=each.default, annotation=hints[each.name])]
        for each in fields(group)
    }


def _values(group: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a dataclass, and remove them from the values of the options."""
    values = {}
    for each in fields(group):
        options = each.metadata.get("options")
        if options is None:
            values[each.name] = given.pop(each.name)
        else:
            found = {option.name: given.pop(option.name) for option in options}
            # An option that can be repeated gives a list; settings are immutable.
            values[each.name] = {
                name: tuple(value) if isinstance(value, list) else value
                for name, value in found.items()
                if value is not None
            }
    return values


ClusterAddress = Annotated[
    str,
    typer.Option(
        "--address",
        help="Address of the cluster: unix:/path or HOST:PORT, or the name of your cluster on this machine. "
        "Defaults to ATOLL_ADDRESS.",
        metavar="ADDRESS",
        rich_help_panel=CHOICE_OF_CLUSTER,
    ),
]
ClusterJoin = Annotated[
    str,
    typer.Option(
        "--join",
        metavar="FILE",
        rich_help_panel=CHOICE_OF_CLUSTER,
        help="File with the cluster's join token, which `atoll up --join-file FILE` writes, or the token itself. Other "
        "users see a command line, so prefer a file. Your own clusters on this machine need no join token. Defaults to "
        "ATOLL_JOIN.",
    ),
]
ClusterName = Annotated[
    str,
    typer.Option(
        "--name",
        help="Name of the cluster, as of `atoll up --name`, or embedded-PID for a script's.",
        metavar="NAME",
        rich_help_panel=CHOICE_OF_CLUSTER,
    ),
]


@dataclass(frozen=True)
class RunningCluster:
    """The options that choose a running cluster."""

    address: ClusterAddress = ""
    name: ClusterName = ""
    join: ClusterJoin = ""

    def find(self, *, embedded: bool = True, standby: bool = False) -> Target:
        """Return the cluster, as `cluster_queries.find` does."""
        from atoll.operate.cluster_queries import find

        return find(self.address, self.name, self.join, embedded=embedded, standby=standby)


def check_one_of(islands: str | None, address: str, join: str) -> None:
    """End the command if it has options both of an embedded cluster and of a running one."""
    if islands is not None and (address or join):
        given = "--address" if address else "--join"
        raise typer.BadParameter(
            f"--islands starts an embedded cluster, {given} uses a running one: give only one of them"
        )


def given(islands: str | None, cluster: ClusterOptions) -> dict[str, Any]:
    """Return the settings that the user gave, by the field names of `ClusterSettings`."""
    if islands is not None and cluster.cluster_file is not None:
        raise typer.BadParameter("--islands and --cluster both define islands: give only one")
    return {**cluster.settings, **({"islands": islands} if islands is not None else {})}


def settings_of(islands: str | None, cluster: ClusterOptions) -> ClusterSettings:
    """Return the settings of a new cluster, from the options and then from the environment. Raises ClusterError."""
    options, settings = given(islands, cluster), ClusterSettings.from_environment()
    tenants = tenants_file(cluster)
    if tenants is not None:
        options["tenants"] = read_tenants(tenants)
    file = cluster.cluster_file or CLUSTER_FILE.text()
    if file and islands is None:
        return read_cluster_file(file, settings, options)
    return msgspec.structs.replace(settings, **options)


def tenants_file(cluster: ClusterOptions) -> Path | None:
    """Return the file of tenants, from the options or the environment."""
    named = TENANTS_FILE.text()
    return cluster.tenants_file or (Path(named) if named else None)


def tenant_tokens(cluster: ClusterOptions) -> dict[str, str]:
    """Return the tokens in the file of tenants, by name. Raises SettingsError."""
    file = tenants_file(cluster)
    return read_tenant_tokens(file) if file is not None else {}


def up_settings(islands: str | None, cluster: ClusterOptions) -> ClusterSettings:
    """Return the settings of a standing cluster: as `settings_of`, but without ATOLL_ISLANDS."""
    settings = settings_of(islands, cluster)
    return settings if settings.shapes or islands else msgspec.structs.replace(settings, islands=DEFAULT_ISLANDS)


def token() -> str:
    """Return the token of the environment, or ""."""
    return TOKEN.text()
