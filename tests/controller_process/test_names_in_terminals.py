"""Test of a session whose name contains escape sequences, in `atoll status`, `atoll top`, the page, metrics
and logs.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from atoll.cluster.settings import ClusterSettings
from atoll.cluster.topology import Topology
from atoll.controller_process.controller_main import serve
from atoll.controller_process.controller_options import ControllerOptions
from atoll.operate.status_tables import status_tables
from atoll.operate.top import view
from atoll.protocol import messages as m
from atoll.telemetry.metrics import exposition
from atoll.telemetry.snapshot import read_snapshot
from atoll.telemetry.watch import Watch
from atoll.web.drawing import legend_html
from tests.controller.play import ready
from tests.controller_process.test_shell import Peer

EVIL = "train\x1b]0;owned\x07\x1b[2J\u202e.py"
SHOWN = r"train\x1b]0;owned\x07\x1b[2J\u202e.py"
WELCOME = 60


async def report_with_an_evil_session(path: Path) -> bytes:
    stop = asyncio.Event()
    readable, writable = os.pipe()
    options = ControllerOptions(f"unix:{path}", ClusterSettings("1x1x1"), os.getpid(), writable)
    running = asyncio.create_task(serve(options, stop))
    try:
        worker = await Peer.open(path, "worker")
        worker.connection.send(ready(Topology.parse("1x1x1"), 0, "unix:/data-0"))
        proxy = await Peer.open(path, "proxy", label=EVIL)
        await proxy.next_of(WELCOME)
        operator = await Peer.open(path, "operator")
        operator.connection.send(m.StatusRequest())
        report = bytes((await operator.next())[1])
        for peer in (worker, proxy, operator):
            peer.connection.close()
        await asyncio.sleep(0)
    finally:
        stop.set()
        await running
        os.close(readable)
        os.close(writable)
    return report


def test_a_name_with_escape_sequences_reaches_no_terminal(short_directory: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("ATOLL_TOKEN", "a token")
    report = asyncio.run(asyncio.wait_for(report_with_an_evil_session(short_directory / "c"), 60))
    assert [each["label"] for each in json.loads(report)["sessions"]] == [SHOWN]
    snapshot, watch = read_snapshot(report), Watch()
    watch.update(report, 0.0)
    console = Console(width=200, highlight=False, force_terminal=False)
    texts = []
    for shown in (status_tables(snapshot, "unix:/c"), view(watch, "c", 0.0, 0.0)):
        with console.capture() as captured:
            console.print(shown)
        texts.append(captured.get())
        assert SHOWN in texts[-1]
    texts += [legend_html({1: snapshot.sessions[0].label}), exposition(snapshot)[0].decode()]
    for text in texts:
        assert text.replace("\n", "").isprintable()


def test_a_log_has_no_escape_sequences() -> None:
    script = (
        "import logging; from atoll.cluster.processes.process_logging import start_logging; start_logging('test');"
        f"logging.getLogger('atoll').warning('the session of %s\\nends', {EVIL!r})"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=200)
    assert f"the session of {SHOWN}\n  ends\n" in ended.stderr
