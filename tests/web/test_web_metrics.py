"""Tests of `/metrics` over HTTP, also with a real Prometheus."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.web.metrics_server import serve_metrics
from atoll.web.poller import Poller
from atoll.wire.address import parse_address
from tests.cluster_process import User, eventually, finish, first_line, free_port
from tests.web.cluster import ScriptedSource, serving

PROMETHEUS = shutil.which("prometheus")
PROMTOOL = shutil.which("promtool")
_MAX_SECONDS = 300.0


def get(url: str, **headers: str) -> tuple[int, str, str]:
    request = urllib.request.Request(url, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=_MAX_SECONDS) as reply:
            return reply.status, reply.headers["Content-Type"], reply.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers["Content-Type"], error.read().decode()


def asked(source: ScriptedSource, request: bytes, key: str = "") -> bytes:
    """Return the reply of the metrics server."""

    async def ask() -> bytes:
        ports: asyncio.Queue[int] = asyncio.Queue()
        serving = asyncio.create_task(
            serve_metrics(Poller(source), parse_address("127.0.0.1:0"), key, ports.put_nowait)
        )
        reader, writer = await asyncio.open_connection("127.0.0.1", await ports.get())
        writer.write(request)
        answer = await asyncio.wait_for(reader.read(), 10)
        writer.close()
        serving.cancel()
        await asyncio.wait([serving])
        return answer

    return asyncio.run(ask())


def test_the_metrics_are_served_to_scrapers():
    head, _, body = asked(ScriptedSource(topology="1x1x1"), b"GET /metrics HTTP/1.1\r\n\r\n").partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4")
    assert f"Content-Length: {len(body)}".encode() in head
    assert b'atoll_cluster_info{topology="1x1x1"' in body


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", b"404"),
        (b"POST /metrics HTTP/1.1\r\n\r\n", b"405"),
        (b"nonsense\r\n\r\n", b"405"),
    ],
)
def test_what_is_no_request_for_them_is_refused(request_: bytes, status: bytes):
    source = ScriptedSource()
    assert asked(source, request_).split(b" ")[1] == status
    assert source.asked == 0


def test_a_request_without_end_is_not_awaited_beyond_a_bound():
    assert asked(ScriptedSource(), b"GET /metrics HTTP/1.1\r\n" + b"x: y\r\n" * 10_000) == b""


def test_a_scraper_shows_the_key_where_one_is_asked_for():
    source = ScriptedSource()
    assert asked(source, b"GET /metrics HTTP/1.1\r\n\r\n", "secret key").split(b" ")[1] == b"401"
    request = b"GET /metrics HTTP/1.1\r\nAuthorization: Bearer secret key\r\n\r\n"
    assert asked(source, request, "secret key").split(b" ")[1] == b"200"


def test_a_cluster_that_does_not_answer_is_a_scrape_that_fails():
    source = ScriptedSource()
    source.fails = "nobody is there"
    answer = asked(source, b"GET /metrics HTTP/1.1\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert answer.endswith(b"nobody is there\n")


@pytest.fixture(scope="module")
def up(program_cache: Path) -> Iterator[User]:
    """Return a user whose cluster of null devices is up."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix="at-") as directory, User(Path(directory), program_cache) as user:
        user.atoll("up", "--islands", "2x1x2", "--platform", "null").check()
        yield user
        user.atoll("down").check()
        assert user.leftovers() == []


def test_metrics_for_other_machines_are_in_the_clear_only_where_somebody_says_so(up: User, tmp_path: Path):
    arguments = ("metrics", "--key-file", str(tmp_path / "key"))
    refused = up.atoll(*arguments, "--listen", "0.0.0.0:0").error
    assert "give --tls-certificate and --tls-key, or --insecure" in refused
    with serving(up, *arguments, "--insecure", listen="0.0.0.0:0") as url:
        assert url.startswith("http://")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_page_ends_at_a_signal_without_a_traceback(up: User, number: signal.Signals):
    pytest.importorskip("nicegui", reason="the extra web is not installed")
    process = up.start_atoll("web", "--listen", "127.0.0.1:0")
    assert get(first_line(process).partition("?")[0] + "metrics")[0] == 200
    process.send_signal(number)
    ended = finish(process)
    assert ended.returncode == 0, ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.slow
def test_a_page_that_is_killed_has_nothing_to_lose(up: User, tmp_path: Path):
    """It writes no file but its key, and the next one is the same page, at the same URL, of the same numbers."""
    pytest.importorskip("nicegui", reason="the extra web is not installed")
    arguments = ("web", "--key-file", str(tmp_path / "key"), "--listen", f"127.0.0.1:{free_port()}")
    files, seen = set(up.runtime.rglob("*")), []
    for _ in range(2):
        process = up.start_atoll(*arguments)
        url = first_line(process)
        text = get(url.partition("?")[0] + "metrics")[2]
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        counted = sorted(line for line in text.splitlines() if line.startswith("atoll_events_total"))
        assert 'atoll_events_total{kind="ready"} 2.0' in counted
        seen.append((url, counted, up.atoll("usage", "--json").check().stdout))
        assert set(up.runtime.rglob("*")) == files
    assert seen[0][:2] == seen[1][:2]
    first, second = (json.loads(each[2]) for each in seen)
    assert first["rows"] == second["rows"]


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed (Debian's package prometheus has it)")
def test_promtool_finds_nothing_in_the_metrics_of_a_cluster(up: User):
    assert PROMTOOL is not None
    with serving(up, "metrics") as url:
        status, _, text = get(url)
    assert status == 200
    checked = subprocess.run([PROMTOOL, "check", "metrics"], input=text.encode(), capture_output=True, timeout=60)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")


@pytest.mark.slow
@pytest.mark.skipif(PROMETHEUS is None, reason="prometheus is not installed (Debian has it)")
def test_a_real_prometheus_scrapes_them(up: User, tmp_path: Path):
    assert PROMETHEUS is not None
    with serving(up, "metrics") as url:
        target = url.removeprefix("http://").removesuffix("/metrics")
        (tmp_path / "prometheus.yml").write_text(
            "global: {scrape_interval: 1s, scrape_timeout: 1s}\n"
            f"scrape_configs: [{{job_name: atoll, static_configs: [{{targets: ['{target}']}}]}}]\n"
        )
        port = free_port()
        process = subprocess.Popen(
            [
                PROMETHEUS,
                f"--config.file={tmp_path}/prometheus.yml",
                f"--storage.tsdb.path={tmp_path}/data",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            query = f"http://127.0.0.1:{port}/api/v1/query?query="

            def value(expression: str) -> str | None:
                try:
                    status, _, text = get(query + urllib.parse.quote(expression))
                except OSError:  # it has just been started
                    return None
                found = json.loads(text)["data"]["result"] if status == 200 else []
                return found[0]["value"][1] if found else None

            assert eventually(lambda: value("up") == "1")
            assert eventually(lambda: value('sum(atoll_island_state{state="ready"})') == "2")
            assert float(value('atoll_controller_messages_total{direction="in"}') or 0) > 0
        finally:
            process.terminate()
            process.wait(300)
