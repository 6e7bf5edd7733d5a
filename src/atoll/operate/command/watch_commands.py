"""Watch a cluster in a terminal, in a browser, or with Prometheus."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Coroutine
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from msgspec.structs import replace

from atoll.cluster.processes.process_runtime import ending_signals
from atoll.decodable import decodable
from atoll.operate.command.command_help import TLS
from atoll.operate.command.command_options import RunningCluster, token, with_option_groups
from atoll.operate.command.json_output import AsJson, print_json
from atoll.operate.command.terminal import echo, end_on_signals, fail

if TYPE_CHECKING:
    from atoll.operate.cluster_queries import Target
    from atoll.web.tls import PageTls
    from atoll.wire.address import Address

KeyFile = Annotated[
    Path | None,
    typer.Option(
        "--key-file",
        help="File with the key, which is created if it does not exist, so that the URL stays the same at the next "
        "start. Defaults to a new key.",
        metavar="FILE",
    ),
]
Listen = Annotated[
    str,
    typer.Option(
        help="HOST:PORT to listen on; port 0 for any free port. Uses TLS if HOST is not loopback, or at "
        "tls://HOST:PORT.",
        metavar="ADDRESS",
    ),
]


@dataclass(frozen=True)
class TlsOptions:
    """The TLS options of a page."""

    certificate: Annotated[
        Path | None,
        typer.Option(
            "--tls-certificate",
            help="Certificate for TLS in PEM, with its chain, read again each hour. Defaults to one that the cluster's "
            "authority signs, if this user started the cluster on this machine, on TCP.",
            metavar="FILE",
            rich_help_panel=TLS,
        ),
    ] = None
    key: Annotated[
        Path | None,
        typer.Option(
            "--tls-key",
            help="Private key of the certificate, in PEM. Defaults to the certificate's file.",
            metavar="FILE",
            rich_help_panel=TLS,
        ),
    ] = None
    authority: Annotated[
        Path | None,
        typer.Option(
            "--tls-authority",
            help="Write the certificate of the cluster's authority to this file, if the authority signs, for browsers "
            "and scrapers to verify the page (`ca_file`, `curl --cacert`).",
            metavar="FILE",
            rich_help_panel=TLS,
        ),
    ] = None
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure",
            help="Disable TLS for any HOST: the key and all content travel unencrypted.",
            rich_help_panel=TLS,
        ),
    ] = False


@with_option_groups
def top(
    once: Annotated[bool, typer.Option("--once", help="Print once and exit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON once and exit.")] = False,
    follow: Annotated[
        bool, typer.Option("--follow", help="With --json: print a line of JSON per second until Ctrl-C.")
    ] = False,
    *,
    cluster: RunningCluster,
) -> None:
    """Show a cluster as it changes.

    Shows islands, devices, tenants, sessions, waiting gangs and events. Runs until Ctrl-C. If standard output is not a
    terminal, prints once. Addresses the same cluster as `atoll status`.

    The JSON has the fields of `atoll status --json`, and `{"problem", "rates": {...}, "shares": {...}, "busy": {...}}`.
    """
    from atoll.operate.cluster_queries import ClusterSource
    from atoll.operate.top import json_fields, poll, print_once, show

    if follow and (once or not as_json):
        raise typer.BadParameter("--follow prints lines of JSON: add --json, and remove --once")
    target = cluster.find()
    source = ClusterSource(target, token())
    if as_json:
        _run(poll(source, lambda watch: print_json(target, json_fields(watch), in_one_line=follow), once=not follow))
    else:
        _run(print_once(source) if once or not sys.stdout.isatty() else show(source))


@with_option_groups
def why(
    session: Annotated[
        int | None,
        typer.Argument(
            help="Number of the session, as `atoll status` shows it. Needed if there are several.",
            metavar="SESSION",
        ),
    ] = None,
    as_json: AsJson = False,
    *,
    cluster: RunningCluster,
) -> None:
    """Explain what a session waits for.

    Prints for how long it waits, and which process must act next. Names programs as JAX does: `jit_step` is the
    function `step`. Addresses the same cluster as `atoll status`.

    The JSON is `{"name", "address", "session": {...}, "waits": [...], "owed": [...], "behind": [...], "ahead": [...]}`
    and more.
    """
    from atoll.operate.cluster_queries import report_of
    from atoll.operate.why import explain, explanation
    from atoll.telemetry.snapshot import Snapshot

    target = cluster.find()
    snapshot = msgspec.convert(report_of(target, token()), decodable(Snapshot))
    if as_json:
        print_json(target, msgspec.to_builtins(explain(snapshot, session)))
    else:
        print("\n".join(explanation(snapshot, session)))


@with_option_groups
def web(
    *,
    listen: Listen = "127.0.0.1:8473",
    key_file: KeyFile = None,
    tls: TlsOptions,
    cluster: RunningCluster,
) -> None:
    """Serve a page that shows a cluster, and its metrics.

    Prints the URL of the page. The metrics are at /metrics. The URL has a key, which is required to view the page. The
    page has the permissions of this command's token or join token. Runs until Ctrl-C.

    Needs `pip install 'atoll[web]'`. Addresses the same cluster as `atoll status`.
    """
    _check_installed("web", "nicegui", "prometheus_client")
    from atoll.operate.cluster_queries import ClusterSource
    from atoll.web.page_key import new_key, read_key
    from atoll.web.page_server import serve_page
    from atoll.web.poller import Poller

    where, target = _address(listen), cluster.find()
    security = _security(where, target, tls)
    key = read_key(key_file) if key_file else new_key()
    source = ClusterSource(target, token())

    def listening(port: int) -> None:
        print(f"{_base(where, port, security)}/?key={key}", flush=True)
        echo(f"anyone who has this URL can view the cluster {source.name}; Ctrl-C ends the page")

    _run(serve_page(Poller(source), where, key, listening, security))


@with_option_groups
def metrics(
    *,
    listen: Listen = "127.0.0.1:9473",
    key_file: KeyFile = None,
    tls: TlsOptions,
    cluster: RunningCluster,
) -> None:
    """Serve the metrics of a cluster for Prometheus.

    Prints the URL, which ends with /metrics. On loopback the metrics are public. On other addresses a scraper must send
    the key as its bearer token, so --key-file is required.

    Needs `pip install 'atoll[metrics]'`. Addresses the same cluster as `atoll status`.
    """
    _check_installed("metrics", "prometheus_client")
    from atoll.operate.cluster_queries import ClusterSource
    from atoll.web.metrics_server import serve_metrics
    from atoll.web.page_key import METRICS, read_key
    from atoll.web.poller import Poller

    where = _address(listen)
    if not where.is_local and key_file is None:
        raise typer.BadParameter("--listen: other machines can connect to this address: add --key-file")
    target = cluster.find()
    security = _security(where, target, tls)
    key = read_key(key_file) if key_file else ""

    def listening(port: int) -> None:
        print(f"{_base(where, port, security)}{METRICS}", flush=True)

    _run(serve_metrics(Poller(ClusterSource(target, token())), where, key, listening, security))


def alerts(
    *,
    runbook: Annotated[
        str,
        typer.Option(
            help="URL of your copy of the page Runbook, for the links in the alerts. Defaults to its path in the "
            "repository.",
            metavar="URL",
        ),
    ] = "",
) -> None:
    """Print the alert rules for Prometheus.

    For example: `atoll alerts > alerts.yml`, and `rule_files: [alerts.yml]` in Prometheus' configuration.
    """
    from atoll.web.alert_rules import alert_rules

    print(alert_rules(runbook), end="")


def dashboard() -> None:
    """Print a dashboard for Grafana.

    For example: `atoll dashboard > atoll.json`, and import this file into Grafana (Dashboards, New, Import).
    """
    from atoll.web.grafana_dashboard import grafana_dashboard

    print(grafana_dashboard(), end="")


def _address(listen: str) -> Address:
    from atoll.wire.address import parse_address

    return parse_address(listen)


def _base(address: Address, port: int, tls: PageTls | None) -> str:
    """Return the URL for browsers, without its path."""
    from atoll.security.start_security import advertised

    reached = replace(advertised(address), port=port)
    return f"{'https' if tls else 'http'}://{reached.host_and_port}"


def _security(address: Address, target: Target, options: TlsOptions) -> PageTls | None:
    """Return the TLS for serving at `address`. Writes the authority's certificate if requested."""
    from atoll.operate.output_files import write_whole
    from atoll.security.access import is_insecure
    from atoll.web.tls import page_tls

    directory = target.record.directory if target.record else ""
    tls = page_tls(address, options.certificate, options.key, directory, options.insecure or is_insecure())
    if options.authority is not None:
        if tls is None or not tls.authority:
            raise typer.BadParameter("--tls-authority: the cluster's authority does not sign this page's certificate")
        try:
            write_whole(options.authority, tls.authority)
        except OSError as error:
            fail(f"cannot write {options.authority}: {error.strerror}")
    return tls


def _check_installed(extra: str, *modules: str) -> None:
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        are = "is" if len(missing) == 1 else "are"
        fail(f"{' and '.join(missing)} {are} not installed: pip install 'atoll[{extra}]'")


def _run(work: Coroutine[Any, Any, None]) -> None:
    """Run until the work ends, or until Ctrl-C or a signal, which exit without a message."""
    end_on_signals()
    with contextlib.suppress(KeyboardInterrupt, asyncio.CancelledError):
        asyncio.run(_until_signal(work))


async def _until_signal(work: Coroutine[Any, Any, None]) -> None:
    """Await the work. The `ending_signals` cancel it, as asyncio does for SIGINT.

    Python drops a KeyboardInterrupt that is raised while a `__del__` runs, and the command would continue.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    for number in ending_signals():
        loop.add_signal_handler(number, task.cancel)
    await work
