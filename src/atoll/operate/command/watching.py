"""Watching a cluster: in a terminal, in a browser, by Prometheus."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Coroutine
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atoll.operate.command.options import ClusterAddress, ClusterJoin, ClusterName, token
from atoll.operate.command.terminal import end_on_signals, fail, say

if TYPE_CHECKING:
    from atoll.operate.watching import ClusterSource
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
        help="HOST:PORT; port 0 is any free one. Other machines can connect only where HOST is not loopback; put a "
        "proxy with TLS before it there.",
        metavar="ADDRESS",
    ),
]


def top(
    once: Annotated[bool, typer.Option("--once", help="Print it once, and end.")] = False,
    address: ClusterAddress = "",
    name: ClusterName = "",
    join: ClusterJoin = "",
) -> None:
    """Show a cluster as it changes: islands, tenants, sessions, who waits for what, and what happened.

    Until Ctrl-C. Where standard output is no terminal, it is printed once. Which cluster: as for `atoll status`.
    """
    from atoll.operate.top import print_once, show

    source = _source(address, name, join)
    _run(print_once(source) if once or not sys.stdout.isatty() else show(source))


def web(
    listen: Listen = "127.0.0.1:8473",
    key_file: KeyFile = None,
    address: ClusterAddress = "",
    name: ClusterName = "",
    join: ClusterJoin = "",
) -> None:
    """Serve a page that shows a cluster, and its metrics at /metrics; print its URL.

    The URL has a key, without which nobody sees the page. It shows what the token or the join string of this command
    may see, and does what that may do. Until Ctrl-C.

    Needs `pip install 'atoll[web]'`. Which cluster: as for `atoll status`.
    """
    _check_installed("web", "nicegui", "prometheus_client")
    from atoll.web.access import new_key, read_key
    from atoll.web.poller import Poller
    from atoll.web.server import serve_page

    where, source = _address(listen), _source(address, name, join)
    key = read_key(key_file) if key_file else new_key()

    def listening(port: int) -> None:
        print(f"http://{_host(where)}:{port}/?key={key}", flush=True)
        say(f"shows the cluster {source.name} to whoever has this URL; Ctrl-C ends it")

    _run(serve_page(Poller(source), where, key, listening))


def metrics(
    listen: Listen = "127.0.0.1:9473",
    key_file: KeyFile = None,
    address: ClusterAddress = "",
    name: ClusterName = "",
    join: ClusterJoin = "",
) -> None:
    """Serve a cluster's metrics for Prometheus at /metrics, and nothing else; print the URL.

    On loopback to everybody. Elsewhere a scraper shows the key as its bearer token: --key-file is then needed.

    Needs `pip install 'atoll[metrics]'`. Which cluster: as for `atoll status`.
    """
    _check_installed("metrics", "prometheus_client")
    from atoll.web.access import METRICS, read_key
    from atoll.web.metrics_server import serve_metrics
    from atoll.web.poller import Poller

    where = _address(listen)
    if not where.is_local and key_file is None:
        raise typer.BadParameter("--listen: other machines can connect there, so give --key-file, too")
    source = _source(address, name, join)
    key = read_key(key_file) if key_file else ""

    def listening(port: int) -> None:
        print(f"http://{_host(where)}:{port}{METRICS}", flush=True)

    _run(serve_metrics(Poller(source), where, key, listening))


def _address(listen: str) -> Address:
    from atoll.wire.address import parse_address

    return parse_address(listen)


def _host(address: Address) -> str:
    return f"[{address.host}]" if ":" in address.host else address.host


def _source(address: str, name: str, join: str) -> ClusterSource:
    from atoll.operate.clusters import find
    from atoll.operate.watching import ClusterSource

    return ClusterSource(find(address, name, join), token())


def _check_installed(extra: str, *modules: str) -> None:
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        fail(f"{' and '.join(missing)} is not installed: pip install 'atoll[{extra}]'")


def _run(work: Coroutine[Any, Any, None]) -> None:
    """Until it ends, or somebody ends it: then in silence."""
    end_on_signals()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(work)
