"""Watching a cluster: in a terminal, in a browser, by Prometheus."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Coroutine
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atoll.operate.command.command_options import ClusterAddress, ClusterJoin, ClusterName, token, with_option_groups
from atoll.operate.command.terminal import end_on_signals, fail, say

if TYPE_CHECKING:
    from atoll.operate.cluster_queries import Target
    from atoll.web.tls import PageTls
    from atoll.wire.address import Address

KeyFile = Annotated[
    Path | None,
    typer.Option(
        "--key-file",
        help="Take the key from this file, which is made if it does not exist: the URL is then the same at the next "
        "start. A new key if not given.",
        metavar="FILE",
    ),
]
Listen = Annotated[
    str,
    typer.Option(
        help="HOST:PORT; port 0 is any free one. With TLS where HOST is not loopback, and at tls://HOST:PORT.",
        metavar="ADDRESS",
    ),
]


@dataclass(frozen=True)
class TlsOptions:
    """By what a page is served with TLS."""

    certificate: Annotated[
        Path | None,
        typer.Option(
            "--tls-certificate",
            help="Serve with TLS by this certificate, in PEM, with those that lead to one that is trusted; it is read "
            "again each hour. If not given, by one that the cluster's authority signs: that of a cluster on TCP which "
            "this user has started on this machine.",
            metavar="FILE",
        ),
    ] = None
    key: Annotated[
        Path | None,
        typer.Option(
            "--tls-key",
            help="The certificate's private key, in PEM; in the certificate's file if not given.",
            metavar="FILE",
        ),
    ] = None
    authority: Annotated[
        Path | None,
        typer.Option(
            "--tls-authority",
            help="Write the certificate of the cluster's authority there, where it signs: browsers and scrapers verify "
            "the page by it (`ca_file`, `curl --cacert`).",
            metavar="FILE",
        ),
    ] = None
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure", help="No TLS, whatever HOST is: the key, and all that is shown, travel in the clear."
        ),
    ] = False


def top(
    once: Annotated[bool, typer.Option("--once", help="Print it once, and end.")] = False,
    address: ClusterAddress = "",
    name: ClusterName = "",
    join: ClusterJoin = "",
) -> None:
    """Show a cluster as it changes: islands, tenants, sessions, who waits for what, and what happened.

    Until Ctrl-C. Where standard output is no terminal, it is printed once. Which cluster: as for `atoll status`.
    """
    from atoll.operate.cluster_queries import ClusterSource
    from atoll.operate.top import print_once, show

    source = ClusterSource(_target(address, name, join), token())
    _run(print_once(source) if once or not sys.stdout.isatty() else show(source))


@with_option_groups
def web(
    *,
    listen: Listen = "127.0.0.1:8473",
    key_file: KeyFile = None,
    tls: TlsOptions,
    address: ClusterAddress = "",
    name: ClusterName = "",
    join: ClusterJoin = "",
) -> None:
    """Serve a page that shows a cluster, and its metrics at /metrics; print its URL.

    The URL has a key, without which nobody sees the page. It shows what the token or the join token of this command
    may see, and does what that may do. Until Ctrl-C.

    Needs `pip install 'atoll[web]'`. Which cluster: as for `atoll status`.
    """
    _check_installed("web", "nicegui", "prometheus_client")
    from atoll.operate.cluster_queries import ClusterSource
    from atoll.web.page_key import new_key, read_key
    from atoll.web.page_server import serve_page
    from atoll.web.poller import Poller

    where, target = _address(listen), _target(address, name, join)
    security = _security(where, target, tls)
    key = read_key(key_file) if key_file else new_key()
    source = ClusterSource(target, token())

    def listening(port: int) -> None:
        print(f"{_base(where, port, security)}/?key={key}", flush=True)
        say(f"shows the cluster {source.name} to whoever has this URL; Ctrl-C ends it")

    _run(serve_page(Poller(source), where, key, listening, security))


@with_option_groups
def metrics(
    *,
    listen: Listen = "127.0.0.1:9473",
    key_file: KeyFile = None,
    tls: TlsOptions,
    address: ClusterAddress = "",
    name: ClusterName = "",
    join: ClusterJoin = "",
) -> None:
    """Serve a cluster's metrics for Prometheus at /metrics, and nothing else; print the URL.

    On loopback to everybody. Elsewhere a scraper shows the key as its bearer token: --key-file is then needed.

    Needs `pip install 'atoll[metrics]'`. Which cluster: as for `atoll status`.
    """
    _check_installed("metrics", "prometheus_client")
    from atoll.operate.cluster_queries import ClusterSource
    from atoll.web.metrics_server import serve_metrics
    from atoll.web.page_key import METRICS, read_key
    from atoll.web.poller import Poller

    where = _address(listen)
    if not where.is_local and key_file is None:
        raise typer.BadParameter("--listen: other machines can connect there, so give --key-file, too")
    target = _target(address, name, join)
    security = _security(where, target, tls)
    key = read_key(key_file) if key_file else ""

    def listening(port: int) -> None:
        print(f"{_base(where, port, security)}{METRICS}", flush=True)

    _run(serve_metrics(Poller(ClusterSource(target, token())), where, key, listening, security))


def _address(listen: str) -> Address:
    from atoll.wire.address import parse_address

    return parse_address(listen)


def _base(address: Address, port: int, tls: PageTls | None) -> str:
    """The URL by which a browser comes, but for its path."""
    from atoll.security.start_security import advertised

    reached = replace(advertised(address), port=port)
    return f"{'https' if tls else 'http'}://{reached.host_and_port}"


def _security(address: Address, target: Target, options: TlsOptions) -> PageTls | None:
    """How to serve there; writes the authority's certificate where it is asked for."""
    from atoll.security.access import is_insecure
    from atoll.web.tls import page_tls

    directory = target.record.directory if target.record else ""
    tls = page_tls(address, options.certificate, options.key, directory, options.insecure or is_insecure())
    if options.authority is not None:
        if tls is None or not tls.authority:
            raise typer.BadParameter("--tls-authority: the cluster's authority does not sign this page's certificate")
        try:
            options.authority.write_bytes(tls.authority)
        except OSError as error:
            fail(f"cannot write {options.authority}: {error.strerror}")
    return tls


def _target(address: str, name: str, join: str) -> Target:
    from atoll.operate.cluster_queries import find

    return find(address, name, join)


def _check_installed(extra: str, *modules: str) -> None:
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        fail(f"{' and '.join(missing)} is not installed: pip install 'atoll[{extra}]'")


def _run(work: Coroutine[Any, Any, None]) -> None:
    """Until it ends, or somebody ends it: then in silence."""
    end_on_signals()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(work)
