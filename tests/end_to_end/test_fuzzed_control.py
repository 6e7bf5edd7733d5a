"""Tests of fuzzed conversations with a controller, using a tenant's token, beside an honest session of another tenant.

`make thorough` sends a million messages, and prints what the honest session noticed.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Self

import psutil
import pytest

from tests.cluster_process import User
from tests.faults import VARIABLE, environment
from tests.fuzzing.control_messages import ControlFuzzer

MESSAGES = int(os.environ.get("ATOLL_TEST_FUZZED_MESSAGES", "2000"))
TOKENS = {name: f"the token of {name}, which is long" for name in ("ana", "ben", "op")}
MAX_GROWTH = 50 << 20  # growth of the controller's memory after the first `WARM_UP` conversations
WARM_UP = 50  # conversations of about 650 messages: the first of each kind imports modules and fills caches
MAX_CPU_MS = 50.0  # of one turn of the controller's loop, which is the longest wait of honest sessions
# Functions that the controller's loop calls for reads of connections and their messages, for turns, and for ticks.
_TURNS = (
    "atoll.wire.connection:Connection.buffer_updated",
    "atoll.controller_process.shell:ControllerShell._flush",
    "atoll.controller_process.shell:ControllerShell._tick",
)
SECONDS = 60.0
QUIET_SECONDS = 1.0  # to measure how long an honest step takes without other work
_TOGETHER = 8  # connections
PARTS = 20  # of the run; the memory is measured after each


@pytest.fixture(scope="module")
def user(module_directory: Path, program_cache: Path) -> Iterator[User]:
    tenants = module_directory / "tenants.toml"
    roles = {"op": 'role = "operator"\n'}
    lines = [f'[tenant.{name}]\ntoken = "{token}"\n{roles.get(name, "")}' for name, token in TOKENS.items()]
    tenants.write_text("".join(lines))
    faults = environment(dict.fromkeys(_TURNS, f"timed:{module_directory / 'turns'}"))
    added = {name: faults[name] for name in (VARIABLE, "PYTHONPATH")}
    with User(module_directory, program_cache, **added) as user:
        user.atoll("up", "--platform", "null", "--islands", "2x1x2", "--tenants", str(tenants)).check()
        yield user
        user.atoll("down", ATOLL_TOKEN=TOKENS["op"]).check()


class Honest:
    """The honest session, which counts its steps. This is a context manager."""

    def __init__(self, user: User, address: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.fuzzing.honest", address],
            env=user.env | {"ATOLL_TOKEN": TOKENS["ben"]},
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._stdout.readline() == "ready\n"

    @property
    def _stdout(self) -> IO[str]:
        assert self._process.stdout is not None
        return self._process.stdout

    def since(self) -> tuple[int, float]:
        """Return the steps since the last call, and the milliseconds of the longest step."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        count, longest = self._stdout.readline().split()
        return int(count), float(longest)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        status = self._process.wait(SECONDS)
        self._stdout.close()
        assert status == 0


def send_all(path: str, conversations: list[list[bytes]]) -> None:
    """Send each conversation on its own connection until that closes.

    Wait until the controller has read all of them.
    """
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) for _ in conversations]
        for sock, frames in zip(socks, conversations, strict=True):
            with contextlib.suppress(ConnectionError):
                sock.settimeout(SECONDS)
                sock.connect(path)
                sock.sendall(b"".join(frames))
                sock.shutdown(socket.SHUT_WR)
        for sock in socks:
            with contextlib.suppress(ConnectionError):
                while sock.recv(1 << 16):
                    pass


def longest_turn(directory: Path, pid: int) -> float:
    """Return the milliseconds of CPU time of a process's longest turn since the last call."""
    files = list(directory.glob(f"turns.*.{pid}"))
    assert files, "the process has measured no turn"
    longest = max(float(file.read_text()) for file in files)
    for file in files:
        file.unlink()
    return longest


def report(user: User) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(user.atoll("status", "--json", ATOLL_TOKEN=TOKENS["op"]).check().stdout)
    return found


@pytest.mark.timeout(7200)
def test_fuzzed_conversations_cost_an_honest_session_nothing(user: User, module_directory: Path) -> None:
    path = f"{user.runtime}/atoll/default/controller.sock"
    fuzzer = ControlFuzzer(20250701, TOKENS["ana"])
    (controller,) = [each for each in user.processes() if "atoll.controller_process.controller_main" in each.cmdline()]
    with Honest(user, f"unix:{path}") as honest:
        sent = 0
        for _ in range(WARM_UP):
            send_all(path, [fuzzer.conversation()])
        before, handled_before = controller.memory_info().rss, report(user)["load"]["messages_in"]
        time.sleep(QUIET_SECONDS)
        _, alone = honest.since()
        longest_turn(module_directory, controller.pid)
        batch: list[list[bytes]] = []
        sizes: list[int] = []  # the growth after each of `PARTS` parts
        begin = time.monotonic()
        while sent < MESSAGES:
            frames = fuzzer.conversation()
            batch.append(frames)
            sent += len(frames)
            if len(batch) == _TOGETHER:
                send_all(path, batch)
                batch.clear()
            if sent // (MESSAGES // PARTS + 1) > len(sizes):
                sizes.append(controller.memory_info().rss - before)
        send_all(path, batch)
        count, longest = honest.since()
        turn = longest_turn(module_directory, controller.pid)
        now = report(user)
        growth = controller.memory_info().rss - before
        print(
            f"\n{sent} messages sent, {now['load']['messages_in'] - handled_before} handled, "
            f"in {time.monotonic() - begin:.0f} s; {count} honest steps, longest {longest} ms (before: {alone} ms); "
            f"longest turn {turn:.1f} ms of CPU time; "
            f"controller's growth {[f'{each / 2**20:.1f}' for each in (*sizes, growth)]} MiB"
        )
        assert controller.is_running()
        assert controller.status() != psutil.STATUS_ZOMBIE
        assert count > 0
        assert max(*sizes, growth) < MAX_GROWTH
        assert turn < MAX_CPU_MS
        assert {each["state"] for each in now["islands"]} == {"ready"}
        assert [each["tenant"] for each in now["sessions"]] == ["ben"]
