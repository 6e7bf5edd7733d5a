"""Inject the faults of docs/operate/runbook.md: each has the documented symptoms, and the documented action helps.

CONTRIBUTING.md lists the tests of each section. Other files have the tests of killed clusters, killed and frozen
workers, and refused sessions.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from atoll.telemetry.metrics import metrics_of
from atoll.telemetry.snapshot import read_snapshot
from tests import faults
from tests.cluster_process import User, eventually, finish, first_line, free_port
from tests.leadership.lease_servers import etcd_process

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not os.environ.get("ATOLL_TEST_RUNBOOK"), reason="run these by `make runbook`"),
]


@pytest.fixture
def user(program_cache: Path) -> Iterator[User]:
    with (
        tempfile.TemporaryDirectory(prefix="at-") as directory,
        tempfile.TemporaryDirectory(prefix="at-state-") as state,
        User(Path(directory), program_cache, ATOLL_STATE_DIR=state) as someone,
    ):
        yield someone


def metrics(user: User, *options: str) -> dict[tuple[str, ...], float]:
    """Return the metrics of the cluster, by name and values of labels."""
    snapshot = read_snapshot(user.atoll("status", "--json", *options).check().stdout.encode())
    return {
        (sample.name, *sample.labels.values()): sample.value for each in metrics_of(snapshot) for sample in each.samples
    }


def log(user: User) -> str:
    return user.atoll("logs").check().stdout


def up(user: User, *options: str, **env: str) -> None:
    """Start a cluster. From then on, scripts of the user connect to it."""
    user.env["ATOLL_ADDRESS"] = user.atoll("up", *options, **env).check().stdout.strip()


def background(user: User, code: str, **env: str) -> subprocess.Popen[str]:
    return user.start(sys.executable, "-u", "-c", textwrap.dedent(code), JAX_PLATFORMS="atoll", **env)


def script(user: User, code: str, **env: str) -> str:
    return user.script(code, JAX_PLATFORMS="atoll", **env).check().stdout


def until(holds: Callable[[], bool], seconds: float = 60.0) -> None:
    assert eventually(holds, seconds)


ADD = "import jax, jax.numpy as jnp; print(float(jax.jit(lambda x: x + 1)(jnp.ones(()))))"


def test_an_island_that_waits_for_a_host_names_it_and_starts_with_it(user: User) -> None:
    """Section: an island is not ready."""
    listen = f"127.0.0.1:{free_port()}"
    up = user.start_atoll("up", "--foreground", "--engine", "hosts", "--islands", "1x2x1", "--listen", listen)
    until(lambda: user.atoll("status", "--json").returncode == 0)
    join = next(user.runtime.rglob("join-hosts")).read_text()
    user.start_atoll("host", "--join", join)
    until(lambda: "waits for 1 of 2 hosts" in user.atoll("status").stdout)
    assert metrics(user)["atoll_island_state", "0", "starting"] == 1
    user.start_atoll("host", "--join", join)
    assert first_line(up) == f"tls://{listen}"
    assert metrics(user)["atoll_island_state", "0", "ready"] == 1


def test_an_island_that_failed_nine_times_is_removed_and_another_one_is_added(user: User) -> None:
    """Section: an island is not ready, because it was removed."""
    up(user, "--islands", "2x1x1")

    def state() -> str:
        found = metrics(user)
        return next(key[2] for key, value in found.items() if key[:2] == ("atoll_island_state", "1") and value)

    def kill() -> bool:
        for process, command in user.commands().items():
            if "worker_main" in command and '"host":1' in command.replace(" ", ""):
                process.kill()
        return state() == "removed"

    until(kill, 120)
    assert "failed: island 1: host 1 of island 1 is gone" in log(user)
    assert "killed by SIGKILL" in log(user)
    output = user.atoll("add-island").check()
    assert "is up" in output.stdout + output.stderr
    assert script(user, ADD) == "2.0\n"


def test_a_bug_in_the_controller_ends_one_session_and_is_in_the_log_with_a_traceback(
    user: User, tmp_path: Path
) -> None:
    """Section: a bug in the controller."""
    places = {"atoll.launch.launcher:Launcher.launch_within_window": "raises_if:len(arguments[2].arguments) == 7"}
    options = ("--islands", "1x1x1", "--journal", str(tmp_path / "journal"))
    up(user, *options, **faults.environment(places, user.env))
    wait = "import os, time\nwhile not os.path.exists(os.environ['CUE']): time.sleep(0.05)"
    neighbor = background(user, f"{ADD}\n{wait}\n{ADD}", CUE=str(tmp_path / "cue"))
    assert first_line(neighbor) == "2.0"
    failed = user.script(
        """
        import jax, jax.numpy as jnp
        x = jax.device_put(21.0)
        for _ in range(1000):
            jax.block_until_ready(jax.jit(lambda *seven: sum(seven))(*[x] * 7))
        """,
        JAX_PLATFORMS="atoll",
    )
    assert "an injected bug" in failed.stderr
    until(lambda: user.atoll("status").returncode == 0)
    assert any(key[:2] == ("atoll_events_total", "controller failed") and value for key, value in metrics(user).items())
    output = log(user)
    assert "controller failed" in output
    assert "Traceback" in output
    (tmp_path / "cue").touch()
    assert finish(neighbor).check().stdout == "2.0\n"
    assert user.atoll("bundle", "--output", str(tmp_path / "bundle.zip")).returncode in (0, 2)
    assert script(user, ADD) == "2.0\n"


def test_a_journal_that_cannot_be_written_is_reported_and_is_complete_again_later(user: User, tmp_path: Path) -> None:
    """Section: the journal cannot be written."""
    fails = tmp_path / "fails"
    env = faults.environment({"atoll.journal.segment:JournalSegment.append": f"fails_while:{fails}"}, user.env)
    up(user, "--islands", "1x1x1", "--journal", str(tmp_path / "journal"), **env)
    fails.touch()
    assert script(user, ADD) == "2.0\n"
    until(lambda: metrics(user)["atoll_journal_complete",] == 0)
    assert "cannot write the journal" in log(user)
    fails.unlink()
    until(lambda: metrics(user)["atoll_journal_complete",] == 1)
    user.process("atoll.controller_process.controller_main").kill()
    assert script(user, ADD) == "2.0\n"


def test_a_standby_that_is_lost_is_reported_and_can_be_started_again(user: User, tmp_path: Path) -> None:
    """Section: the standby is lost."""
    address, other = (f"unix:{user.runtime}/{name}.sock" for name in ("one", "two"))
    user.atoll("up", "--islands", "1x1x1", "--listen", address, "--journal", str(tmp_path / "1")).check()
    standby = ("up", "--standby", address, "--listen", other, "--name", "spare", "--journal")
    user.atoll(*standby, str(tmp_path / "2")).check()
    until(lambda: metrics(user, "--name", "default")["atoll_standby_follows",] == 1)
    for process, command in user.commands().items():
        if "engine_main" in command and "spare" in command:
            process.kill()
    until(lambda: metrics(user, "--name", "default")["atoll_standby_follows",] == 0)
    assert "does not follow anymore" in user.atoll("logs", "--name", "default").check().stdout
    until(lambda: user.atoll(*standby, str(tmp_path / "3")).returncode == 0)
    until(lambda: metrics(user, "--name", "default")["atoll_standby_follows",] == 1)


def test_a_controller_whose_lease_is_not_renewed_stops_launches_until_its_server_answers(
    user: User, tmp_path: Path
) -> None:
    """Section: the lease is not renewed."""
    if shutil.which("etcdctl") is None:
        pytest.skip("etcdctl is not installed: apt install etcd-client")
    with etcd_process(tmp_path) as (server, address):
        lease = f"etcd://{address}/atoll"
        up(user, "--islands", "1x1x1", "--journal", str(tmp_path / "journal"), "--leader-lease", lease)
        assert script(user, ADD) == "2.0\n"
        assert metrics(user)["atoll_leader_lease_held",] == 1
        server.send_signal(signal.SIGSTOP)
        until(lambda: metrics(user)["atoll_leader_lease_held",] == 0)
        assert "does not hold the lease atoll in etcd, so it sends nothing" in user.atoll("status").check().stdout
        assert f"no reply from etcd at {address}: timed out" in log(user)
        waits = background(user, ADD)
        time.sleep(5)
        assert waits.poll() is None, "the controller sends nothing"
        server.send_signal(signal.SIGCONT)
        until(lambda: metrics(user)["atoll_leader_lease_held",] == 1)
        assert finish(waits).check().stdout == "2.0\n"
        shown = subprocess.run(
            ["etcdctl", "--endpoints", address, "get", "atoll"],
            env=os.environ | {"ETCDCTL_API": "3"},
            capture_output=True,
            text=True,
            check=True,
        )
        assert '"holder":"' in shown.stdout
        user.atoll("down").check()


def test_a_certificate_that_is_not_renewed_is_reported_and_a_restarted_controller_has_a_new_one(
    user: User, tmp_path: Path
) -> None:
    """Section: a certificate is not renewed."""
    fails = tmp_path / "fails"
    place = {"atoll.security.certificate_authority:CertificateAuthority.certificate_for": f"fails_while:{fails}"}
    env = faults.environment(place, user.env) | {"ATOLL_CERTIFICATE_SECONDS": "30"}
    options = ("--islands", "1x1x1", "--listen", f"127.0.0.1:{free_port()}", "--journal", str(tmp_path / "journal"))
    up(user, *options, **env)
    fails.touch()
    until(lambda: "cannot renew the certificate of this controller" in log(user), 60)
    left = metrics(user)["atoll_certificate_expiry_seconds",]
    assert left < 15
    fails.unlink()
    user.process("atoll.controller_process.controller_main").kill()
    until(lambda: user.atoll("status").returncode == 0)
    assert metrics(user)["atoll_certificate_expiry_seconds",] > 20


def test_a_controller_that_lacks_cpu_shows_its_delay(user: User) -> None:
    """Section: the controller is slow."""
    up(user, "--islands", "1x1x1")
    controller = user.process("atoll.controller_process.controller_main")

    def late() -> float:
        """Return how often the loop was late by more than a second."""
        found = metrics(user)
        name = "atoll_controller_loop_lag_seconds"
        return found[f"{name}_count",] - max(
            value for key, value in found.items() if key[0] == f"{name}_bucket" and float(key[1]) <= 1.1
        )

    before = late()
    running = background(user, f"{ADD}\nimport time\nwhile True:\n    float(jnp.ones(()) + 1); time.sleep(0.01)")
    assert first_line(running) == "2.0"
    for _ in range(3):
        controller.send_signal(signal.SIGSTOP)
        time.sleep(1.5)
        controller.send_signal(signal.SIGCONT)
        time.sleep(0.5)
    assert late() > before


ENDLESS = """
    import jax, jax.numpy as jnp
    run = jax.jit(lambda x: jax.lax.while_loop(lambda x: x < 1, lambda x: x * 0.5, x))
    print("runs", flush=True)
    jax.block_until_ready(run(jnp.float32(0.5)))
"""


def test_a_computation_without_end_is_named_and_ends_with_its_session(user: User) -> None:
    """Section: a script hangs."""
    up(user, "--islands", "1x1x1")
    hangs = background(user, ENDLESS)
    assert first_line(hangs) == "runs"
    until(lambda: "the worker of host 0 has not reported its end" in user.atoll("why", "1").stdout)
    user.atoll("end-session", "1").check()
    assert finish(hangs).returncode != 0

    def has_restarted() -> bool:
        (island,) = json.loads(user.atoll("status", "--json").check().stdout)["islands"]
        return bool(island["restarts"] == 1 and island["state"] == "ready")

    until(has_restarted, 120)
    assert script(user, ADD) == "2.0\n"


TENANTS = '[tenant.ana]\ntoken = "{a}"\n[tenant.ben]\ntoken = "{b}"\n'.format(a="a" * 24, b="b" * 24)
ANA, BEN = {"ATOLL_TOKEN": "a" * 24}, {"ATOLL_TOKEN": "b" * 24}
BUSY = """
    import jax, jax.numpy as jnp
    work = jax.jit(lambda x: jax.lax.fori_loop(0, 200, lambda i, x: x @ x * 0.5, x))
    x = jnp.eye(300)
    running = [work(x) for _ in range(4)]
    print("runs", flush=True)
    while True:
        running = [*running[1:], work(x)]
        running[0].block_until_ready()
"""


def test_a_tenant_that_waits_behind_a_priority_gets_a_part_by_a_reserve(user: User, tmp_path: Path) -> None:
    """Section: a tenant waits for long."""
    (tmp_path / "tenants.toml").write_text(TENANTS)
    options = ("--islands", "1x1x1", "--tenants", str(tmp_path / "tenants.toml"), "--insecure-sandbox")
    up(user, *options)
    user.atoll("tenants", "set", "ana", "--priority", "1").check()
    assert first_line(background(user, BUSY, **ANA)) == "runs"
    waits = background(user, ADD, **BEN)
    time.sleep(5)
    assert waits.poll() is None, "ana's work has priority"
    user.atoll("tenants", "set", "ana", "--reserve", "0").check()
    user.atoll("tenants", "set", "ben", "--reserve", "50").check()
    assert finish(waits).check().stdout == "2.0\n"
    assert any(key[0] == "atoll_gang_waiting_seconds_count" for key in metrics(user))


# A script that keeps all but 2 MiB of a device of 64 MiB, and allocates 1 MiB more for each file that appears.
HOLDS = """
    import os, time
    import jax, jax.numpy as jnp
    kept = [jax.block_until_ready(jnp.ones((62, 1 << 18)))]
    print("holds", flush=True)
    for number in range(10):
        while not os.path.exists(os.path.join(os.environ["CUES"], str(number))):
            time.sleep(0.05)
        try:
            kept.append(jax.block_until_ready(jnp.ones((1, 1 << 18))))
            print(sum(float(each[:, 0].sum()) for each in kept), flush=True)
        except Exception as error:
            print("refused:", " ".join(str(error).split()), flush=True)
"""
NEEDS = "import jax, jax.numpy as jnp; print(float(jnp.ones((32, 1 << 18))[:, 0].sum()))"


def with_full_memory(user: User, tmp_path: Path, *options: str) -> subprocess.Popen[str]:
    """Start a cluster with one device of 64 MiB, of which ana's script holds 62 MiB. Return the script."""
    (tmp_path / "tenants.toml").write_text(TENANTS)
    tenants = ("--tenants", str(tmp_path / "tenants.toml"), "--insecure-sandbox")
    up(user, "--islands", "1x1x1", "--device-memory", "64MiB", *tenants, *options)
    holds = background(user, HOLDS, CUES=str(tmp_path), **ANA)
    assert first_line(holds) == "holds"
    return holds


def test_a_script_without_memory_learns_who_holds_it_and_runs_when_that_session_is_suspended(
    user: User, tmp_path: Path
) -> None:
    """Section: device memory is full. The holder is idle, and later exceeds its part."""
    holds = with_full_memory(user, tmp_path)
    failed = user.script(NEEDS, JAX_PLATFORMS="atoll", **BEN)
    assert failed.returncode == 1
    assert "RESOURCE_EXHAUSTED" in failed.stderr
    assert "session 1 of tenant ana: 62" in failed.stderr
    found = metrics(user)
    (used,) = [value for key, value in found.items() if key[0] == "atoll_device_memory_used_bytes"]
    (limit,) = [value for key, value in found.items() if key[0] == "atoll_device_memory_limit_bytes"]
    assert used / limit > 0.95
    assert any("ana" in line and "62.0 MiB" in line for line in user.atoll("status").check().stdout.splitlines())
    assert any("ana" in line and "62.0 MiB" in line for line in user.atoll("tenants").check().stdout.splitlines())

    assert "is suspended in memory" in user.atoll("suspend", "1").check().stdout
    assert script(user, NEEDS, **BEN) == "32.0\n"
    assert "continues" in user.atoll("resume", "1").check().stdout
    (tmp_path / "0").touch()
    assert first_line(holds) == "63.0"

    user.atoll("tenants", "set", "ana", "--memory", "8MiB").check()
    (tmp_path / "1").touch()
    assert "of its quota `memory`, 8.0 MiB of each device" in first_line(holds)
    user.atoll("end-session", "1").check()
    assert script(user, NEEDS, **BEN) == "32.0\n"


def test_with_spilling_idle_arrays_make_room_by_themselves(user: User, tmp_path: Path) -> None:
    """Section: device memory is full, on a cluster that spills."""
    holds = with_full_memory(user, tmp_path, "--spill", "256MiB")
    assert script(user, NEEDS, **BEN) == "32.0\n"
    (tmp_path / "0").touch()
    assert first_line(holds) == "63.0"
