"""Tests of `atoll top`, and of watching a cluster over one connection."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from atoll.errors import ConnectError, StatusError
from atoll.operate.cluster_queries import ClusterSource, Target
from atoll.operate.operator_requests import OperatorConnection
from atoll.operate.top import json_fields, view
from atoll.protocol.messages import EndSessionRequest, StatusRequest
from atoll.telemetry.watch import Watch
from atoll.wire.address import parse_address
from tests.cluster_process import COMMAND, User


@pytest.fixture(scope="module")
def owner(program_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[User]:
    """Return a user whose cluster of null devices is up."""
    with tempfile.TemporaryDirectory(prefix="at-") as directory, User(Path(directory), program_cache) as user:
        user.env["ATOLL_STATE_DIR"] = str(tmp_path_factory.mktemp("state"))
        user.atoll("up", "--islands", "2x1x2", "--platform", "null").check()
        yield user
        user.atoll("down").check()
        assert user.leftovers() == []


def text_of(watch: Watch) -> str:
    console = Console(width=140, record=True, file=tempfile.TemporaryFile("w"))  # noqa: SIM115
    with console.file:
        console.print(view(watch, "mine", 10.0, 1000.0))
        return console.export_text()


def test_it_shows_what_the_model_has():
    watch = Watch()
    output = {
        "topology": "1x1x2",
        "islands": [{"id": 0, "state": "ready", "hosts": [{"id": 0, "devices": [{"id": 0, "used_bytes": 1024}]}]}],
        "sessions": [{"id": 7, "label": "[bold]train.py", "bytes": 2048}],
        "waits": [{"session": 7, "island": 0, "gangs": 3, "program": "step", "text": "1.0 GiB on device 0"}],
        "events": [{"number": 1, "seconds": 0.0, "kind": "failed", "text": "host 0 is gone", "island": 0}],
    }
    watch.update(msgspec.json.encode(output), 10.0)
    text = text_of(watch)
    for each in ("cluster mine", "1x1x2", "[bold]train.py", "2.0 KiB", "1.0 GiB on device 0", "host 0 is gone"):
        assert each in text
    watch.fail("nobody is there", 20.0)
    assert "nobody is there" in text_of(watch)


def test_more_devices_than_fit_have_one_row_for_each_host():
    watch = Watch()
    hosts = [[{"id": 8 * host + each, "used_bytes": 1024 * host} for each in range(8)] for host in range(2)]
    islands = [
        {"id": host, "state": "ready", "hosts": [{"id": host, "pid": 7 + host, "devices": devices}]}
        for host, devices in enumerate(hosts)
    ]
    watch.update(msgspec.json.encode({"topology": "2x1x8", "islands": islands}), 10.0)
    console = Console(width=80, highlight=False)
    with console.capture() as capture:
        console.print(view(watch, "mine", 10.0, 1000.0, max_devices=15))
    lines = [" ".join(line.split()) for line in capture.get().splitlines()]
    assert "8-15 1 1 (pid 8) 1.0 KiB 0 %" in lines
    with console.capture() as capture:
        console.print(view(watch, "mine", 10.0, 1000.0, max_devices=16))
    assert "Devices by host" not in capture.get()


def test_its_json_has_the_report_and_what_follows_from_several():
    watch = Watch()
    report = {
        "topology": "1x1x2",
        "islands": [{"id": 0, "state": "ready", "hosts": [{"id": 0, "devices": [{"id": 0}, {"id": 1}]}]}],
        "tenants": [{"name": "ana"}],
    }
    watch.update(msgspec.json.encode({**report, "seconds": 1.0}), 10.0)
    tenants = [{"name": "ana", "device_seconds": 3.0}]
    watch.update(msgspec.json.encode({**report, "seconds": 2.0, "tenants": tenants}), 11.0)
    found = json.loads(json.dumps(json_fields(watch)))
    assert found["topology"] == "1x1x2"
    assert found["rates"]["seconds"] == 1.0
    assert found["shares"] == {"ana": 1.0}
    assert found["busy"] == {"0": 0.0, "1": 0.0}
    assert found["problem"] == ""
    watch.fail("nobody is there", 12.0)
    assert json_fields(watch)["problem"].startswith("nobody is there")


def test_its_json_is_one_document_or_follows_with_one_line_per_second(owner: User):
    address = json.loads(owner.atoll("status", "--json").check().stdout)["address"]
    found = json.loads(owner.atoll("top", "--json").check().stdout)
    assert (found["name"], found["address"], found["topology"]) == ("default", address, "2x1x2")
    assert found["rates"]["seconds"] > 0
    process = owner.start_atoll("top", "--json", "--follow")
    assert process.stdout is not None
    first, second = (json.loads(process.stdout.readline()) for _ in range(2))
    process.terminate()
    process.communicate(timeout=300)
    assert process.returncode == 0
    assert first["seconds"] < second["seconds"]


@pytest.mark.parametrize("options", [("--follow",), ("--json", "--follow", "--once")])
def test_only_lines_of_json_follow(owner: User, options: tuple[str, ...]):
    refused = owner.atoll("top", *options)
    assert refused.returncode == 2
    assert "add --json, and remove --once" in refused.stderr


def test_check_and_logs_as_json_are_an_object_and_an_object_per_line(owner: User):
    found = json.loads(owner.atoll("check", "--json").check().stdout)
    assert (found["name"], found["contradictions"], found["differences"]) == ("default", [], [])
    assert found["hosts"] == 2
    records = [json.loads(line) for line in owner.atoll("logs", "--json").check().stdout.splitlines()]
    assert len(records) > 1
    assert {"controller", "engine"} & {each["process"] for each in records}
    (run,) = [json.loads(line) for line in owner.atoll("logs", "--runs", "--json").check().stdout.splitlines()]
    assert (run["run"], run["ended"]) == (0, 0.0)


def test_it_is_printed_once_where_there_is_no_terminal(owner: User):
    shown = owner.atoll("top").check().stdout
    for each in ("cluster default", "2x1x2, 4 devices", "Islands", "Devices", "Events", "all of its hosts have joined"):
        assert each in shown


def test_in_a_terminal_it_goes_on_until_it_is_ended(owner: User):
    terminal, end = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, "top"], stdin=end, stdout=end, stderr=end, env={**owner.env, "TERM": "xterm"}, start_new_session=True
    )
    os.close(end)
    try:
        # The whole screen is drawn again, once per second.
        shown = read_until(terminal, lambda text: text.count("2x1x2, 4 devices") > 2)
        assert "Islands" in shown
        process.send_signal(signal.SIGTERM)
        read_until(terminal, lambda text: False)
        assert process.wait(300) == 0
    finally:
        os.close(terminal)
        process.kill()
        process.wait()


def read_until(terminal: int, enough: Callable[[str], bool]) -> str:
    """Return the terminal output of a process, until `enough` is true or it ends."""
    read = b""
    while not enough(read.decode(errors="replace")):
        try:
            read += os.read(terminal, 65536)
        except OSError:  # it has ended
            break
    return read.decode(errors="replace")


def test_what_is_asked_twice_over_one_connection_is_answered_in_order_and_again_after_a_loss(owner: User):
    address = parse_address(owner.atoll("status").check().stdout.split(" at ")[1].split()[0])

    async def ask() -> None:
        source = ClusterSource(Target(address), "")
        first, (spans, position), second = await asyncio.gather(source.report(), source.spans(0, 10), source.report())
        assert json.loads(first)["topology"] == json.loads(second)["topology"] == "2x1x2"
        assert (spans, position) == ([], 0)
        assert source._connection is not None
        source._connection._replies.connection_lost("the test has cut it")
        source._connection.close()
        assert json.loads(await source.report())["topology"] == "2x1x2"
        source.close()

    asyncio.run(ask())


def test_who_does_not_reply_in_time_is_asked_no_more_over_that_connection(short_directory: Path):
    address = parse_address(f"unix:{short_directory}/silent")

    async def ask() -> None:
        closed: asyncio.Queue[None] = asyncio.Queue()

        async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()
            writer.close()
            await writer.wait_closed()
            closed.put_nowait(None)

        server = await asyncio.start_unix_server(silent, address.path)
        connection = await OperatorConnection.open(address, "")
        for _ in range(2):
            with pytest.raises(ConnectError, match="did not reply within 0 s"):
                await connection.ask(StatusRequest(), 0.05)
        assert connection.is_lost
        await closed.get()
        server.close()

    asyncio.run(ask())


def test_a_number_of_more_than_64_bits_is_refused_and_the_next_request_gets_its_own_reply(owner: User):
    address = parse_address(owner.atoll("status").check().stdout.split(" at ")[1].split()[0])

    async def ask() -> None:
        source = ClusterSource(Target(address), "")
        for _ in range(2):
            with pytest.raises(StatusError, match="EndSessionRequest has a number of more than 64 bits"):
                await source.operate(EndSessionRequest(1 << 64))
            assert json.loads(await source.report())["topology"] == "2x1x2"
        source.close()

    asyncio.run(ask())


def test_a_session_that_is_not_there_cannot_be_ended(owner: User):
    assert (
        owner.atoll("end-session", "99").error
        == "atoll: NOT_FOUND: session 99 does not exist (atoll status lists them)"
    )


def test_metrics_for_other_machines_want_a_key(owner: User):
    refused = owner.atoll("metrics", "--listen", "0.0.0.0:0")
    assert refused.returncode == 2
    assert "add --key-file" in refused.stderr
