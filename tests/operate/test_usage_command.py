"""Tests of `atoll usage` with real processes: its sums are right, survive failures of the cluster, and are private to
users.

`ATOLL_TEST_USAGE_SECONDS=600` extends the mixed run to ten minutes. In runs of a minute or more, usage and trace must
agree within one percent.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import sys
import textwrap
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from atoll.operate.operator_requests import request_trace
from atoll.protocol.spans import Span
from atoll.wire.address import parse_address
from tests.cluster_process import COMMAND, User, eventually, finish, first_line

MIXED_SECONDS = float(os.environ.get("ATOLL_TEST_USAGE_SECONDS", "4"))
MIXED_ERROR = 0.01 if MIXED_SECONDS >= 60 else 0.03  # work in progress at the end matters more in a short run
DEVICES = 2
LOST_NS = 1_300_000_000  # of the time before a kill: a second until usage is written, and the time of the write

# Calls of two sizes on separate devices, transfers, and pauses. No gang uses both devices, because a trace shows such a
# gang from the time at which it had both, but each device is charged separately.
WORK = """
    import os, sys, time
    import jax, jax.numpy as jnp, numpy as np
    near, far = jax.devices()

    def small(x):
        return jnp.tanh(x) * 2

    def large(x):
        return jnp.tanh(x @ x)

    small, large = jax.jit(small), jax.jit(large)
    host = np.ones((400, 400), np.float32)
    until = time.time() + float(sys.argv[1])
    print("begins", flush=True)
    while time.time() < until:
        x = jax.device_put(host, near)
        for _ in range(20):
            x = small(x)
        y = large(jax.device_put(host, far))
        np.asarray(x), np.asarray(y)
        time.sleep(0.02)
"""


# Both devices have enqueued work all the time.
BUSY = """
    import sys, time
    import jax, jax.numpy as jnp

    step = jax.jit(lambda x: jax.lax.fori_loop(0, 1000, lambda _, v: jnp.sin(v) + 1.0, x))
    xs = [jax.device_put(jnp.zeros(4096), device) for device in jax.devices()]
    jax.block_until_ready([step(x) for x in xs])
    print("begins", flush=True)
    until, waiting = time.time() + float(sys.argv[1]), []
    while time.time() < until:
        xs = [step(x) for x in xs]
        waiting.append(xs)
        if len(waiting) > 8:
            jax.block_until_ready(waiting.pop(0))
    jax.block_until_ready(xs)
"""


@pytest.fixture
def up(user: User, short_directory: Path) -> Callable[..., User]:
    """Start a cluster of two tenants and an operator that stores usage."""
    tenants = short_directory / "tenants.toml"
    names = {"ana": "user", "ben": "user", "ops": "operator"}
    entries = (f'[tenant.{n}]\ntoken = "token-of-the-tenant-{n}"\nrole = "{role}"\n' for n, role in names.items())
    tenants.write_text("".join(entries))
    user.env["ATOLL_STATE_DIR"] = str(short_directory / "state")

    def start(*more: str) -> User:
        options = ("--islands", f"1x1x{DEVICES}", "--tenants", str(tenants), *more)
        output = user.atoll("up", *options, ATOLL_TOKEN="token-of-the-cluster")
        assert output.returncode == 0, output.stderr
        user.env["ATOLL_ADDRESS"] = output.stdout.strip()
        return user

    return start


def usage(user: User, *arguments: str, tenant: str = "ops") -> dict[str, Any]:
    output = user.atoll("usage", "--json", *arguments, ATOLL_TOKEN=f"token-of-the-tenant-{tenant}")
    assert output.returncode == 0, output.stderr
    found: dict[str, Any] = json.loads(output.stdout)
    return found


def working(user: User, tenant: str, seconds: float, code: str = WORK) -> Any:
    token = f"token-of-the-tenant-{tenant}"
    code = textwrap.dedent(code)
    return user.start(sys.executable, "-c", code, str(seconds), JAX_PLATFORMS="atoll", ATOLL_TOKEN=token)


def device_ns(spans: Iterable[Span]) -> int:
    return sum((span.ended - span.started) * len(span.devices) for span in spans)


def traced(user: User) -> list[Span]:
    return list(request_trace(parse_address(user.env["ATOLL_ADDRESS"]), "token-of-the-tenant-ops", 0).spans)


class Killed:
    """Kill the controller while it keeps devices busy. Compare the work until then with the stored usage."""

    def __init__(self, user: User, directory: Path) -> None:
        spans = traced(user)
        controller = user.process("atoll.controller_process.controller_main")
        controller.send_signal(signal.SIGKILL)
        self.seconds = time.time()
        controller.wait(10)
        with contextlib.closing(sqlite3.connect(directory / "state" / "usage" / "default.sqlite")) as database:
            (self.busy,) = database.execute("SELECT SUM(device_ns) FROM usage").fetchone()
            (self.present,) = database.execute("SELECT SUM(device_ns) FROM present").fetchone()
        self.until = max(span.ended for span in spans)  # devices are busy: a gang has just ended
        self.spans = spans

    def ran(self, since: int, until: int) -> int:
        """Return the device nanoseconds of gangs that ended between these times."""
        return device_ns(span for span in self.spans if since < span.ended <= until)


@pytest.mark.timeout(MIXED_SECONDS + 120)
def test_usage_adds_up(up: Callable[..., User]):
    user = up()
    before = usage(user)
    assert before["total"]["device_seconds"] == 0
    address = parse_address(user.env["ATOLL_ADDRESS"])
    scripts = [working(user, tenant, MIXED_SECONDS) for tenant in ("ana", "ben", "ben")]
    spans: dict[tuple[int, int], Span] = {}
    is_over = False
    while not is_over:
        is_over = all(script.poll() is not None for script in scripts)
        time.sleep(1.0)
        since = max((span.ended for span in spans.values()), default=0)  # a trace contains the last 100,000 spans
        for span in request_trace(address, "token-of-the-tenant-ops", max(0, since - 3_000_000_000)).spans:
            # Repeated, because gangs that ended before may have been reported later.
            spans[span.host, span.sequence] = span
    for script in scripts:
        assert finish(script).returncode == 0
    after = usage(user)

    wall = after["now"] - before["now"]
    present = after["present_device_seconds"] - before["present_device_seconds"]
    assert present == pytest.approx(wall * DEVICES, rel=0.01, abs=0.05)
    busy = after["total"]["device_seconds"]
    assert 0 < busy < present
    # If ends are reported in another order than they occurred, the two differ slightly. On a busy machine, a short run
    # has less than 0.1 s of device time.
    assert busy == pytest.approx(device_ns(spans.values()) / 1e9, rel=MIXED_ERROR, abs=0.01)

    assert {row["tenant"] for row in after["rows"]} == {"ana", "ben"}
    assert after["total"]["bytes_moved"] > 1e6
    assert after["total"]["memory_byte_seconds"] > 1e5
    for by in ("session", "program"):
        found = usage(user, "--by", by)
        for name, total in after["total"].items():
            assert found["total"][name] == pytest.approx(total, rel=1e-6), (by, name)
    assert len(usage(user, "--by", "session")["rows"]) == 3
    programs = {row["program"]: row for row in usage(user, "--by", "program")["rows"] if row["tenant"] == "ana"}
    assert min(programs[name]["device_seconds"] for name in ("jit_large", "jit_small")) > 0
    assert programs["jit_large"]["memory_byte_seconds"] > 0
    assert programs["device_put"]["bytes_moved"] > 0
    assert programs["copy to host"]["bytes_moved"] > 0

    own = usage(user, tenant="ana")
    (ana,) = [row for row in after["rows"] if row["tenant"] == "ana"]
    assert [row["tenant"] for row in own["rows"]] == ["ana"]
    assert own["total"]["device_seconds"] == pytest.approx(ana["device_seconds"])
    assert "idle_device_seconds" not in own
    table = user.atoll("usage", "--since", "1h", ATOLL_TOKEN="token-of-the-tenant-ops").stdout
    assert "ana" in table
    assert "idle" in table
    assert user.atoll("down", ATOLL_TOKEN="token-of-the-tenant-ops").returncode == 0


def test_killing_the_controller_loses_a_second_at_most(up: Callable[..., User], short_directory: Path):
    user = up()
    script = working(user, "ana", 60, BUSY)
    assert first_line(script) == "begins"
    assert eventually(lambda: usage(user)["total"]["device_seconds"] > 0)
    asked = usage(user)
    since = max(span.ended for span in traced(user))
    time.sleep(3.0)
    killed = Killed(user, short_directory)
    assert finish(script).returncode != 0
    assert eventually(lambda: not any("atoll.engines.engine_main" in each for each in user.commands().values()))

    seconds = killed.seconds - asked["now"]
    more = killed.present / 1e9 - asked["present_device_seconds"]
    assert seconds * DEVICES * 1.01 + 0.1 > more > (seconds - LOST_NS / 1e9) * DEVICES
    busy = killed.busy - asked["total"]["device_seconds"] * 1e9
    least = killed.ran(since, killed.until - LOST_NS)
    assert least > 0.5 * DEVICES * (killed.until - LOST_NS - since), "the devices were busy"
    assert 0.97 * least < busy < seconds * DEVICES * 1.03e9

    up()
    again = usage(user, "--by", "session")
    assert [(row["tenant"], row["session"]) for row in again["rows"]] == [("ana", 1)]
    assert again["total"]["device_seconds"] == pytest.approx(killed.busy / 1e9)
    assert again["kept"] is True
    assert user.atoll("down", ATOLL_TOKEN="token-of-the-tenant-ops").returncode == 0


@pytest.mark.thorough
def test_with_a_journal_each_kill_loses_a_second_at_most_and_nothing_counts_twice(
    up: Callable[..., User], short_directory: Path
):
    user = up("--journal", str(short_directory / "journal"))
    script = working(user, "ana", 25, BUSY)
    assert first_line(script) == "begins"
    for _ in range(3):
        before = usage(user)["total"]["device_seconds"] * 1e9
        since = max(span.ended for span in traced(user))
        time.sleep(3.0)
        killed = Killed(user, short_directory)
        least = killed.ran(since, killed.until - LOST_NS)
        assert least > 0.5 * DEVICES * (killed.until - LOST_NS - since), "the devices were busy"
        assert killed.busy - before > 0.97 * least
        token = "token-of-the-tenant-ops"
        assert eventually(lambda token=token: user.atoll("status", ATOLL_TOKEN=token).returncode == 0)
        assert eventually(lambda killed=killed: usage(user)["total"]["device_seconds"] > killed.busy / 1e9)
    assert finish(script).returncode == 0
    busy, ran = usage(user)["total"]["device_seconds"], device_ns(traced(user)) / 1e9
    assert ran - 3 * DEVICES * LOST_NS / 1e9 < busy < 1.03 * ran
    assert user.atoll("down", ATOLL_TOKEN="token-of-the-tenant-ops").returncode == 0


def test_an_embedded_cluster_has_usage_too_which_goes_with_it(user: User):
    output = user.script(
        f"""
        import subprocess
        import jax
        jax.block_until_ready(jax.jit(lambda x: x @ x)(jax.numpy.ones((300, 300))))
        print(subprocess.run({[*COMMAND, "usage"]!r}, capture_output=True, text=True, check=True).stdout)
        """,
        JAX_PLATFORMS="atoll",
        ATOLL_ISLANDS="1x1x2",
    )
    assert output.returncode == 0, output.stderr
    assert "default" in output.stdout
    assert "this usage is lost when the cluster ends" in output.stdout


@pytest.mark.parametrize("text", ["1", "h", "-1h", "0h", "1y", "1 h"])
def test_a_time_that_is_none_is_refused(user: User, text: str):
    output = user.atoll("usage", f"--since={text}")
    assert output.returncode == 2
    assert "is not a time span" in output.stderr
