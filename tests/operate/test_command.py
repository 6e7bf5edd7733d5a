"""Tests of the command `atoll` as a user runs it: with real processes, in a runtime directory of the test."""

from __future__ import annotations

import fcntl
import importlib.metadata
import json
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from atoll import __version__
from atoll.operate import cluster_queries, standalone_proxy, standing
from atoll.operate.command import command_line as cli
from atoll.operate.command import main, scripts
from atoll.operate.log_replay import replay
from atoll.protocol.actions import Send
from atoll.protocol.messages import PROTOCOL, Run
from tests.cluster_process import Result, User, eventually, finish, first_line, free_port
from tests.forked_process import with_forked_children
from tests.operate.cluster_options import CLUSTER_OPTIONS, CLUSTER_SETTINGS, CLUSTER_VARIABLES

RUN_ON = {"JAX_PLATFORMS": "atoll"}
# For tests that compute nothing, because such a worker starts in a third of the time.
WITHOUT_XLA = ("--platform", "null")
DOUBLE = """
    import jax
    print(len(jax.devices()), jax.jit(lambda x: 2 * x)(21.0))
"""
# The start of a program that uses Google's client.
PATHWAYS = """
    import pathwaysutils
    pathwaysutils.initialize()
    import jax
    import numpy as np
    x = jax.device_put(np.arange(10.0), jax.devices()[-1])
    print([d.slice_index for d in jax.devices()], float(jax.jit(lambda x: x.sum())(x)))
"""

OWN_CLIENT = """
    import ast
    import os
    import jax
    from jax.extend.backend import ifrt_proxy, register_backend_factory

    def make_client():
        options = ifrt_proxy.ClientConnectionOptions()
        options.initialization_data = ast.literal_eval(os.environ["DATA"])
        options.connection_timeout_in_seconds = 3  # until then jaxlib's client tries again, refused or not
        return ifrt_proxy.get_client(os.environ["JAX_BACKEND_TARGET"], options)

    register_backend_factory("proxy", make_client, priority=-1)
    twice = lambda x: jax.pure_callback(lambda x: x * 2, jax.ShapeDtypeStruct((), "float32"), x)
    print(len(jax.devices()), jax.jit(twice)(21.0))
"""


@pytest.fixture(scope="module")
def owner(program_cache: Path) -> Iterator[tuple[User, str]]:
    """Return a user whose cluster is up, and the cluster's address."""
    with tempfile.TemporaryDirectory(prefix="at-") as directory, User(Path(directory), program_cache) as someone:
        address = someone.atoll("up", "--islands", "2x1x2").check().stdout.strip()
        yield someone, address
        someone.atoll("down").check()
        assert someone.leftovers() == []


# ---- a standing cluster


def test_status_as_json_has_islands_hosts_devices_and_sessions(owner: tuple[User, str]) -> None:
    report = json.loads(owner[0].atoll("status", "--json").check().stdout)
    assert report["sessions"] == []
    assert (report["name"], report["address"]) == ("default", owner[1])
    assert [(island["id"], island["state"]) for island in report["islands"]] == [(0, "ready"), (1, "ready")]
    hosts = [host for island in report["islands"] for host in island["hosts"]]
    assert [(host["id"], host["state"]) for host in hosts] == [(0, "ready"), (1, "ready")]
    assert [[device["id"] for device in host["devices"]] for host in hosts] == [[0, 1], [2, 3]]
    workers = {process.pid for process, command in owner[0].commands().items() if "atoll.worker.worker_main" in command}
    assert {host["pid"] for host in hosts} == workers


@pytest.fixture(scope="module")
def after_a_script(owner: tuple[User, str]) -> tuple[User, Result]:
    """Return the user, and the output of a script that ran on the cluster of ATOLL_ADDRESS."""
    user, address = owner
    return user, user.script(DOUBLE, ATOLL_ADDRESS=address, **RUN_ON)


def test_a_script_runs_on_the_cluster_of_atoll_address(after_a_script: tuple[User, Result]) -> None:
    assert after_a_script[1].check().stdout == "4 42.0\n"


def test_dump_writes_a_log_from_which_the_controllers_decisions_replay(
    after_a_script: tuple[User, Result], tmp_path: Path
) -> None:
    user, _ = after_a_script
    file = tmp_path / "log"
    user.atoll("dump", "--output", str(file)).check()
    events = list(replay(file.read_bytes().splitlines()))
    assert {"Started", "Received", "ConnectionLost", "Tick"} <= {type(event).__name__ for event, _ in events}
    sent = [action.message for _, actions in events for action in actions if isinstance(action, Send)]
    assert any(isinstance(message, Run) for message in sent)


def test_trace_writes_what_ran_for_perfetto(after_a_script: tuple[User, Result], tmp_path: Path) -> None:
    user, _ = after_a_script
    file = tmp_path / "trace.json"
    ended = user.atoll("trace", "--output", str(file)).check()
    assert ended.stdout == f"{file}: open it at https://ui.perfetto.dev\n"
    events = json.loads(file.read_text())["traceEvents"]
    assert {"put", "call", "get"} <= {event["cat"] for event in events if event["ph"] == "X"}
    # Nothing happens from now on.
    user.atoll("trace", "--seconds", "0.1", "--output", str(file)).check()
    trace = json.loads(file.read_text())
    assert (trace["traceEvents"], trace["otherData"]["missing"]) == ([], [])


def test_status_shows_a_person_the_sessions_and_their_memory(owner: tuple[User, str]) -> None:
    user, address = owner
    ended = user.script(
        """
        import subprocess, sys
        import jax
        x = jax.device_put(jax.numpy.ones((1024, 1024), "float32")).block_until_ready()
        command = [sys.executable, "-m", "atoll.operate.command", "status"]
        print(subprocess.run(command, capture_output=True, text=True).stdout)
        """,
        ATOLL_ADDRESS=address,
        **RUN_ON,
    ).check()
    for expected in (address, "2x1x2", "ready", "0-1", "2-3", "Sessions", "python", "4.0 MiB"):
        assert expected in ended.stdout


def test_another_cluster_of_the_same_name_is_refused_with_the_address(owner: tuple[User, str]) -> None:
    user, address = owner
    refused = user.atoll("up", "--islands", "1x1x1").error
    assert (
        f"default is up already, at {address}: use it with ATOLL_ADDRESS=default, end it with `atoll down`" in refused
    )


def test_a_journal_that_is_in_use_is_named_once(user: User) -> None:
    journal = user.runtime / "journal"
    journal.mkdir(mode=0o700)
    with open(journal / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        ended = user.atoll("up", *WITHOUT_XLA, "--islands", "1x1x1", "--journal", str(journal))
    output = ended.error.splitlines()
    assert len(output) == 1, output
    assert f"the cluster did not start: the controller cannot run: the journal in {journal} is in use" in output[0]
    assert output[0].endswith("or end the other cluster with `atoll down`")
    (journal / "lock").unlink()
    journal.rmdir()


def test_a_stranger_finds_no_cluster_by_name_but_by_address(owner: tuple[User, str], user: User) -> None:
    assert "no cluster is up" in user.atoll("status").error
    assert json.loads(user.atoll("status", "--json", "--address", owner[1]).check().stdout)["islands"]
    assert json.loads(user.atoll("status", "--json", ATOLL_ADDRESS=owner[1]).check().stdout)["islands"]


def test_up_prints_the_address_alone_and_down_leaves_no_process_socket_or_directory(user: User) -> None:
    ended = user.atoll("up", "--islands", "1x1x1", "--name", "mine").check()
    assert ended.stdout == f"unix:{user.runtime}/atoll/mine/controller.sock\n"
    assert "ATOLL_ADDRESS=mine python" in ended.stderr
    assert len(user.processes()) == 3
    assert user.atoll("down", "--name", "mine").check().stdout.endswith("has ended: 3 processes\n")
    assert user.leftovers() == []
    assert "no cluster mine is up" in user.atoll("down", "--name", "mine").error


def test_commands_leave_a_running_cluster_alone_whose_record_they_cannot_read(user: User) -> None:
    user.atoll("up", *WITHOUT_XLA, "--islands", "1x1x1").check()
    record = user.runtime / "atoll" / "default" / "cluster.json"
    kept = record.rename(record.with_name("kept.json"))
    record.symlink_to(record)
    for command in (["status"], ["up", *WITHOUT_XLA, "--islands", "1x1x1", "--name", "other"], ["down"]):
        error = user.atoll(*command).error
        assert f"cannot find out whether the cluster in {record.parent} runs" in error
        assert "Too many levels of symbolic links" in error
    record.unlink()
    kept.rename(record)
    user.atoll("status").check()
    user.atoll("down").check()


def test_a_cluster_stays_if_nobody_reads_what_the_command_prints(user: User) -> None:
    up = user.start_atoll("up", *WITHOUT_XLA, "--islands", "1x1x1")
    assert up.stdout is not None
    assert up.stderr is not None
    up.stderr.close()  # as `atoll up 2>&1 | head -1`
    assert up.stdout.readline().startswith("unix:")
    up.stdout.close()
    assert up.wait(60) != 0
    assert "ready" in user.atoll("status").check().stdout


def test_down_ends_by_force_what_does_not_go(user: User, monkeypatch: pytest.MonkeyPatch) -> None:
    address = user.atoll("up", *WITHOUT_XLA, "--islands", "1x1x1").check().stdout.strip()
    user.process("atoll.engines.engine_main").suspend()
    monkeypatch.setattr(standing, "END_SECONDS", 0.5)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(user.runtime))
    assert standing.stop(cluster_queries.find(address), token="").forced >= 1
    assert user.leftovers() == []


def test_down_says_that_a_controller_without_a_reply_has_kept_sessions_on_disk(user: User) -> None:
    user.atoll("up", *WITHOUT_XLA, "--islands", "1x1x1").check()
    user.process("atoll.controller_process.controller_main").suspend()
    ended = user.atoll("down", "--all")
    assert ended.returncode == 1
    assert "has ended" in ended.stdout
    assert "so sessions that are suspended on disk were not ended" in ended.stderr
    assert user.leftovers() == []


def test_a_cluster_whose_engine_was_killed_is_forgotten(user: User) -> None:
    user.atoll("up", *WITHOUT_XLA, "--islands", "1x1x1").check()
    user.process("atoll.engines.engine_main").kill()
    assert eventually(lambda: user.atoll("status").returncode), "its controller continues"
    assert "no cluster is up" in user.atoll("status").error
    assert eventually(lambda: not user.leftovers()), user.leftovers()


def test_a_start_that_sets_a_damaged_journal_aside_says_so(user: User, tmp_path: Path) -> None:
    user.env["ATOLL_STATE_DIR"] = str(tmp_path / "state")
    journal = tmp_path / "journal"
    journal.mkdir(mode=0o700)
    (journal / "00000001.snapshot").write_bytes(b"torn")
    up = user.atoll("up", *WITHOUT_XLA, "--islands", "1x1x1", "--journal", str(journal)).check()
    assert "messages of this start, which are also in `atoll logs`:" in up.stderr
    assert f"{journal} contained the journal of a cluster that was killed, and it cannot be read" in up.stderr
    assert f"The journal is now in {journal / 'damaged'}" in up.stderr
    user.atoll("down").check()
    again = user.atoll("up", *WITHOUT_XLA, "--islands", "1x1x1", "--journal", str(journal)).check()
    assert "messages of this start" not in again.stderr
    user.atoll("down").check()


def test_the_log_of_a_cluster_that_was_killed_survives_it_and_status_names_its_end(user: User, tmp_path: Path) -> None:
    user.env["ATOLL_STATE_DIR"] = str(tmp_path)
    user.atoll("up", *WITHOUT_XLA, "--islands", "1x1x1").check()
    user.process("atoll.controller_process.controller_main").kill()
    assert eventually(lambda: not user.leftovers()), user.leftovers()
    error = user.atoll("status").error
    assert "cluster default ended at " in error
    assert "the controller ended: killed by SIGKILL; log: " in error
    lines = user.atoll("logs").check().stdout.splitlines()
    assert "INFO atoll.controller_process.shell: ready: island 0: all of its hosts have joined" in "\n".join(lines)
    assert lines[-1].endswith("the cluster has ended: the controller ended: killed by SIGKILL")


def test_in_the_foreground_a_cluster_ends_with_ctrl_c(user: User) -> None:
    process = user.start_atoll("up", *WITHOUT_XLA, "--islands", "1x1x1", "--foreground")
    address = first_line(process)
    assert json.loads(user.atoll("status", "--json").check().stdout)["islands"], address
    process.send_signal(signal.SIGINT)
    assert "ending" in finish(process).check().stderr
    assert user.leftovers() == []


@pytest.mark.parametrize(
    ("process", "reason"),
    [
        ("atoll.controller_process.controller_main", "the controller ended: killed by SIGKILL"),
        ("atoll.engines.engine_main", "its engine ended: killed by SIGKILL"),
    ],
)
def test_a_command_in_the_foreground_fails_and_says_why_if_its_cluster_is_lost(
    user: User, process: str, reason: str
) -> None:
    command = user.start_atoll("up", *WITHOUT_XLA, "--islands", "1x1x1", "--foreground")
    first_line(command)
    user.process(process).kill()
    ended = finish(command)
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1] == f"atoll: cluster default has ended: {reason}"
    assert eventually(lambda: not user.leftovers()), user.leftovers()


def test_a_command_in_the_foreground_succeeds_if_its_cluster_is_ended(user: User) -> None:
    command = user.start_atoll("up", *WITHOUT_XLA, "--islands", "1x1x1", "--foreground")
    first_line(command)
    user.atoll("down").check()
    assert "cluster default has ended" in finish(command).check().stderr


def test_a_cluster_in_the_foreground_does_not_outlive_its_command(user: User) -> None:
    process = user.start_atoll("up", *WITHOUT_XLA, "--islands", "1x1x1", "--foreground")
    first_line(process)
    process.kill()
    finish(process)
    assert eventually(lambda: not user.leftovers()), user.leftovers()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_cluster_whose_command_is_stopped_while_it_starts_ends(user: User, number: signal.Signals) -> None:
    address = f"127.0.0.1:{free_port()}"
    command = user.start_atoll("up", *WITHOUT_XLA, "--islands", "1x1x1", "--engine", "hosts", "--listen", address)
    assert command.stderr is not None
    assert "waiting for hosts" in command.stderr.readline()
    command.send_signal(number)
    finish(command)
    assert eventually(lambda: not user.leftovers()), user.leftovers()


def run_python(text: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(text)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_ctrl_c_while_modules_are_imported_ends_the_command_without_a_traceback() -> None:
    result = run_python("""
        import signal, sys
        from atoll.operate.command import main
        class Finder:
            def find_spec(self, name, path=None, target=None):
                if name == "typer":
                    signal.raise_signal(signal.SIGINT)
        sys.meta_path.insert(0, Finder())
        main()
    """)
    assert (result.returncode, result.stdout, result.stderr) == (-signal.SIGINT, "", "")


def test_ctrl_c_that_python_drops_comes_again() -> None:
    result = run_python("""
        import signal, time
        from atoll.operate.command.terminal import repeat_dropped_interrupts
        repeat_dropped_interrupts()
        class Dropping:
            def __del__(self):
                signal.raise_signal(signal.SIGINT)
        try:
            Dropping()
            time.sleep(30)
        except KeyboardInterrupt:
            print("interrupted")
    """)
    assert (result.returncode, result.stdout, result.stderr) == (0, "interrupted\n", "")


def test_a_signal_that_the_caller_ignores_stays_ignored() -> None:
    result = run_python("""
        import signal
        from atoll.operate.command.terminal import end_on_signals
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        end_on_signals()
        signal.raise_signal(signal.SIGHUP)
        try:
            signal.raise_signal(signal.SIGTERM)
        except KeyboardInterrupt:
            print("interrupted")
    """)
    assert (result.returncode, result.stdout, result.stderr) == (0, "interrupted\n", "")


# ---- errors


@pytest.mark.parametrize("command", ["status", "down"])
def test_without_a_cluster_the_error_says_what_was_tried_and_what_to_start(user: User, command: str) -> None:
    error = user.atoll(command).error
    assert f"tried unix:{user.runtime}/atoll/default/controller.sock" in error
    assert "`atoll up " in error


@pytest.mark.parametrize("command", ["status", "down", "proxy"])
def test_an_address_without_a_listener_is_named(user: User, command: str) -> None:
    address = f"127.0.0.1:{free_port()}"
    error = user.atoll(command, "--address", address, ATOLL_INSECURE="1").error
    assert f"cannot reach the Atoll controller at {address}: Connection refused" in error
    assert "`atoll up " in error


@pytest.mark.parametrize("command", [("up", "--insecure", "--listen", "0.0.0.0:7000"), ("proxy", "--host", "0.0.0.0")])
def test_strangers_are_not_listened_to_without_a_token(user: User, command: tuple[str, ...]) -> None:
    assert "needs a token: set ATOLL_TOKEN" in user.atoll(*command).error
    assert user.leftovers() == []


@pytest.mark.parametrize(
    ("command", "islands", "reason"),
    [
        ("up", "8", "expected ISLANDSxHOSTSxDEVICES"),
        ("run", "1x0x8", "such as 1x1x8"),
        ("proxy", "1x2", "such as 1x1x8"),
    ],
)
def test_islands_that_cannot_be_are_explained(user: User, command: str, islands: str, reason: str) -> None:
    ended = user.atoll(command, "--islands", islands, *(["true"] if command == "run" else []))
    assert ended.returncode == 2
    assert "'--islands': " in ended.stderr
    assert islands in ended.stderr
    assert reason in ended.stderr


def test_up_tells_that_it_does_not_read_the_islands_of_embedded_clusters(user: User) -> None:
    started = user.atoll("up", *WITHOUT_XLA, ATOLL_ISLANDS="2x1x4").check()
    assert "ATOLL_ISLANDS is only for embedded clusters: this cluster has the islands 1x1x8\n" in started.stderr


def test_run_without_a_command_prints_its_help_alone(user: User) -> None:
    ended = user.atoll("run")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("Usage: atoll run ")
    assert "see `atoll run --help`" not in ended.stderr


def test_a_choice_that_does_not_exist_is_explained_without_words_of_the_parser(user: User) -> None:
    ended = user.atoll("usage", "--by", "foo")
    assert ended.returncode == 2
    assert "atoll: Invalid value for '--by': 'foo' is not one of 'tenant', 'session', 'program'" in ended.stderr


def test_without_runs_the_list_of_runs_is_a_sentence(user: User) -> None:
    assert user.atoll("ps").check().stdout == "no named runs\n"
    assert json.loads(user.atoll("ps", "--json").check().stdout) == []


@pytest.mark.parametrize("command", [("up",), ("run", "true"), ("proxy",)])
@pytest.mark.parametrize(("option", "known"), [("--platform", "cpu, cuda, gpu"), ("--engine", "local")])
def test_a_platform_or_engine_that_there_is_not_is_refused_with_those_that_there_are(
    user: User, command: tuple[str, ...], option: str, known: str
) -> None:
    ended = user.atoll(command[0], option, "foo", *command[1:])
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1), ended.stderr
    assert "'foo'; the known ones are: " + known in ended.stderr


@pytest.mark.parametrize("command", ["trace", "dump"])
def test_a_file_that_cannot_be_written_is_named_in_one_line(owner: tuple[User, str], command: str) -> None:
    assert "cannot write /nope/x: the directory /nope does not exist" in owner[0].atoll(command, "-o", "/nope/x").error


def test_a_user_whose_state_cannot_be_written_starts_clusters_but_no_detached_scripts(user: User) -> None:
    user.env |= {"ATOLL_STATE_DIR": "/proc/nope"}
    started = user.atoll("up", "--islands", "1x1x1", *WITHOUT_XLA).check()
    assert "the log of cluster default will be lost when the cluster ends: " in started.stderr
    ended = user.atoll("run", "--detach", "--name", "one", "true")
    assert (ended.returncode, ended.stderr) == (1, "atoll: /proc/nope: No such file or directory\n")


@pytest.mark.parametrize("command", ["up", "run", "proxy"])
def test_a_policy_that_does_not_exist_is_named_with_those_that_do(user: User, command: str) -> None:
    ended = user.atoll(command, "--policy", "random", *(["true"] if command == "run" else []))
    assert ended.returncode == 2
    assert "'--policy': " in ended.stderr
    assert "first-come" in ended.stderr


def test_a_policy_of_the_environment_that_does_not_exist_starts_no_cluster(user: User) -> None:
    error = user.atoll("up", ATOLL_POLICY="random").error
    assert "there is no scheduling policy 'random'; the known ones are: fair, first-come" in error
    assert user.leftovers() == []


@pytest.mark.parametrize(
    "name", ["../up", *(pytest.param(n, marks=pytest.mark.thorough) for n in ("", "a b", "-x", "n" * 33))]
)
def test_a_name_that_could_be_a_path_is_refused(user: User, name: str) -> None:
    ended = user.atoll("up", f"--name={name}")
    assert "invalid cluster name" in ended.error
    assert ended.returncode == 78, "a service manager would try again"


@pytest.mark.parametrize(
    ("platform", "reason"), [("oneapi", "Backend 'oneapi' is not in the list"), ("cuda", "no devices of platform cuda")]
)
def test_a_start_that_fails_shows_why_and_leaves_nothing(user: User, platform: str, reason: str) -> None:
    ended = user.atoll("up", "--islands", "1x1x1", "--platform", platform)
    assert ended.returncode == 1
    assert reason in ended.stderr
    assert "install JAX for this platform" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert ended.stderr.splitlines()[-1].startswith("atoll: the cluster did not start: the worker of host 0 ended")
    assert user.leftovers() == []


def test_a_port_that_is_taken_is_named(user: User) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        ended = user.atoll("up", *WITHOUT_XLA, "--islands", "1x1x1", "--listen", address)
    assert ended.returncode == 1
    assert ended.stderr == (
        f"atoll: cannot listen at tls://{address}: Address already in use: another process listens there; choose "
        "another port, or end that process\n"
    )
    assert user.leftovers() == []


def test_a_port_that_is_taken_is_named_by_the_proxy_as_well(user: User) -> None:
    cluster = user.atoll("up", *WITHOUT_XLA, "--islands", "1x1x1").check().stdout.strip()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        ended = user.atoll("proxy", "--address", cluster, "--port", port)
    assert ended.error == (
        f"atoll: cannot listen at 127.0.0.1:{port}: Address already in use: another process listens there; choose "
        "another port, or end that process"
    )
    user.atoll("down").check()
    assert user.leftovers() == []


@pytest.mark.parametrize(
    ("address", "advice"),
    [("192.0.2.1:7000", "this machine does not have the address"), ("nowhere.invalid:7000", "use an IP address")],
)
def test_an_address_of_another_machine_is_refused_with_what_to_do(user: User, address: str, advice: str) -> None:
    ended = user.atoll("up", *WITHOUT_XLA, "--islands", "1x1x1", "--listen", address)
    assert ended.stderr.startswith(f"atoll: cannot listen at tls://{address}: ")
    assert advice in ended.stderr
    assert user.leftovers() == []


def test_with_a_token_who_brings_it_is_served_from_elsewhere_and_nobody_else(user: User) -> None:
    port = free_port()
    with_token, wrong = {"ATOLL_TOKEN": "open sesame"}, {"ATOLL_TOKEN": "open barley"}
    user.env["ATOLL_INSECURE"] = "1"
    user.atoll("up", "--islands", "1x1x2", "--listen", f"0.0.0.0:{port}", **with_token).check()
    for other in ({}, wrong):
        assert "asks for a token: set ATOLL_TOKEN" in user.atoll("status", **other).error
        assert "asks for a token: set ATOLL_TOKEN" in user.atoll("down", **other).error
    # Another address of the loopback device replaces a second machine.
    elsewhere = f"127.0.0.2:{port}"
    refused = user.script(DOUBLE, ATOLL_ADDRESS=elsewhere, **RUN_ON, **wrong)
    assert refused.returncode == 1
    assert "asks for a token: set ATOLL_TOKEN" in refused.stderr
    served = user.script(DOUBLE, ATOLL_ADDRESS=elsewhere, **RUN_ON, **with_token)
    assert served.check().stdout == "2 42.0\n"
    user.atoll("down", **with_token).check()
    assert user.leftovers() == []


# ---- run


def test_run_gives_the_command_its_islands_and_passes_its_exit_status_on(user: User) -> None:
    code = "import jax, sys; print([d.slice_index for d in jax.devices()]); sys.exit(7)"
    user.env = with_forked_children(user.env)
    ended = user.atoll("run", "--islands", "2x1x2", "--", sys.executable, "-c", code)
    assert (ended.stdout, ended.returncode) == ("[0, 0, 1, 1]\n", 7), ended.stderr
    assert eventually(lambda: not user.leftovers()), user.leftovers()


def test_run_becomes_the_command(user: User) -> None:
    process = user.start_atoll("run", sys.executable, "-c", "import os; print(os.getpid())")
    assert int(finish(process).check().stdout) == process.pid


def _environment_of_run(user: User, *options: str, **env: str) -> dict[str, str]:
    code = "import json, os; print(json.dumps(dict(os.environ)))"
    ended = user.atoll("run", *options, "--", sys.executable, "-c", code, **env).check()
    environment: dict[str, str] = json.loads(ended.stdout)
    return environment


@pytest.mark.parametrize(
    ("before", "after"),
    [("", "atoll"), ("cpu", "atoll"), ("atoll,cpu", "atoll,cpu"), ("cuda,atoll", "cuda,atoll")],
)
def test_run_keeps_platforms_that_name_atoll(user: User, before: str, after: str) -> None:
    assert _environment_of_run(user, JAX_PLATFORMS=before)["JAX_PLATFORMS"] == after


def test_run_with_islands_takes_no_cluster_that_is_up(user: User) -> None:
    env = _environment_of_run(user, "--islands", "1x1x2", ATOLL_ADDRESS="unix:/a")
    assert "ATOLL_ADDRESS" not in env


def test_run_passes_its_options_on_in_the_environment(user: User) -> None:
    env = _environment_of_run(user, *CLUSTER_OPTIONS)
    assert {name: env[name] for name in CLUSTER_VARIABLES} == CLUSTER_VARIABLES


@pytest.mark.parametrize("options", [(), ("--address", "unix:/a")])
def test_run_without_islands_takes_the_cluster_that_is_up(user: User, options: tuple[str, ...]) -> None:
    other = {} if options else {"ATOLL_ADDRESS": "unix:/a"}
    assert _environment_of_run(user, *options, **other)["ATOLL_ADDRESS"] == "unix:/a"


def test_run_leaves_the_commands_options_alone(user: User) -> None:
    ended = user.atoll("run", "echo", "--islands", "2", "--help").check()
    assert ended.stdout == "--islands 2 --help\n"


def test_run_says_that_there_is_no_such_command(user: User) -> None:
    ended = user.atoll("run", "--", "no-such-command")
    assert (ended.returncode, ended.stderr) == (127, "atoll: no-such-command: no such command\n")


# ---- proxy


def _pathways_environment(target: str) -> dict[str, str]:
    return {
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "JAX_PLATFORMS": "proxy",
        "JAX_BACKEND_TARGET": target,
        "IFRT_PROXY_USE_INSECURE_GRPC_CREDENTIALS": "true",
    }


def test_a_proxy_serves_googles_clients_on_a_cluster_of_its_own(user: User) -> None:
    process = user.start_atoll("proxy", "--port", "0", "--islands", "2x1x1")
    target = first_line(process)
    assert target.startswith("grpc://127.0.0.1:")
    ended = user.script(PATHWAYS, **_pathways_environment(target))
    process.send_signal(signal.SIGINT)
    assert finish(process).check().stdout == ""
    assert (ended.check().stdout, ended.stderr) == ("[0, 1] 45.0\n", "")
    assert user.leftovers() == []


def test_a_proxy_runs_a_command_and_ends_with_it_and_its_status(user: User) -> None:
    script = "import os, sys; print(os.environ['JAX_PLATFORMS'], os.environ['JAX_BACKEND_TARGET'][:17]); sys.exit(3)"
    ended = user.atoll("proxy", "--islands", "1x1x1", "--", sys.executable, "-c", script)
    assert (ended.returncode, ended.stdout, ended.stderr) == (3, "proxy grpc://127.0.0.1:\n", "")
    assert user.leftovers() == []


def test_a_proxy_names_a_command_that_does_not_exist(user: User) -> None:
    ended = user.atoll("proxy", "--islands", "1x1x1", "--", "no-such-command")
    assert (ended.returncode, ended.stderr) == (127, "atoll: no-such-command: no such command\n")
    assert user.leftovers() == []


def test_a_proxy_serves_googles_clients_on_a_cluster_that_is_up(owner: tuple[User, str], user: User) -> None:
    port = free_port()
    process = user.start_atoll("proxy", "--port", str(port), "--address", owner[1])
    target = first_line(process)
    assert target == f"grpc://127.0.0.1:{port}"
    ended = user.script(PATHWAYS, **_pathways_environment(target))
    process.terminate()
    finish(process).check()
    assert ended.check().stdout == "[0, 0, 1, 1] 45.0\n"
    assert user.leftovers() == []
    assert eventually(lambda: not json.loads(owner[0].atoll("status", "--json").check().stdout)["sessions"])


def test_a_proxy_that_strangers_reach_serves_who_brings_the_token(owner: tuple[User, str], user: User) -> None:
    command = ("proxy", "--host", "0.0.0.0", "--port", "0", "--address", owner[1])
    process = user.start_atoll(*command, ATOLL_TOKEN="open sesame")
    port = first_line(process).rpartition(":")[2]
    env = _pathways_environment(f"grpc://127.0.0.2:{port}")
    refused = user.script(OWN_CLIENT, DATA="{'token': b'open barley'}", **env)
    served = user.script(OWN_CLIENT, DATA="{'token': b'open sesame'}", **env)
    process.terminate()
    finish(process).check()
    assert refused.returncode == 1
    assert "asks for a token: set ATOLL_TOKEN" in refused.stderr
    assert served.check().stdout == "4 42.0\n"


def test_a_proxy_of_its_own_cluster_has_the_options_of_run(monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[Any] = []
    monkeypatch.setattr(standalone_proxy, "run_proxy", lambda *arguments, **_: served.extend(arguments) or 0)
    monkeypatch.setattr(scripts, "end_on_signals", lambda: None)
    cli.app(["proxy", *CLUSTER_OPTIONS], standalone_mode=False)
    assert served[1:3] == ["", CLUSTER_SETTINGS]


def test_a_proxy_names_a_command_that_cannot_be_executed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text("")
    command = str(tmp_path / "train.py")
    monkeypatch.setattr(standalone_proxy, "run_proxy", lambda listen, cluster, settings, up, **_: up("127.0.0.1:1"))
    monkeypatch.setattr(scripts, "end_on_signals", lambda: None)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit) as ended:
        cli.app(["proxy", *CLUSTER_OPTIONS, "--", command], standalone_mode=False)
    assert (ended.value.code, capsys.readouterr().err) == (126, f"atoll: {command}: Permission denied\n")


# ---- the command itself


def test_the_command_is_installed() -> None:
    (entry,) = importlib.metadata.entry_points(group="console_scripts", name="atoll")
    assert entry.load() is main


def test_version(user: User) -> None:
    assert user.atoll("--version").check().stdout == f"atoll {__version__}, protocol {PROTOCOL}\n"


def test_a_command_reports_a_misspelled_variable(user: User) -> None:
    ended = user.atoll("--version", ATOLL_ADRESS="unix:/gone").check()
    assert "ATOLL_ADRESS has no effect; did you mean ATOLL_ADDRESS?" in ended.stderr
    assert ended.stdout == f"atoll {__version__}, protocol {PROTOCOL}\n"


def test_help_lists_the_commands(user: User) -> None:
    text = user.atoll("--help").check().stdout
    assert all(command in text for command in ("run", "up", "status", "down", "proxy", "ATOLL_ADDRESS"))


@pytest.mark.parametrize("arguments", [("up", "--bogus"), ("bogus",), ("proxy", "--port", "70000")])
def test_a_wrong_command_line_is_one_line_and_status_2(user: User, arguments: tuple[str, ...]) -> None:
    ended = user.atoll(*arguments)
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1), ended.stderr
    assert "--help`" in ended.stderr


# ---- slices


def test_remap_says_what_it_cannot_do(owner: tuple[User, str]) -> None:
    user, _ = owner
    assert "session 99 does not exist" in user.atoll("remap", "99", "1", "--to", "1").error


def test_a_mesh_that_is_not_that_of_the_islands_is_refused(user: User) -> None:
    output = user.atoll("up", "--islands", "1x2x2", "--topology", "3x2").error
    assert "has 4 devices, which cannot form a mesh of 3x2" in output
    assert user.leftovers() == []


def test_an_island_more_and_one_fewer(user: User) -> None:
    user.atoll("up", "--islands", "1x1x1").check()
    assert user.atoll("add-island").check().stdout == "island 1 is up, with devices 1\n"
    assert user.script(DOUBLE, ATOLL_ADDRESS=address_of(user), **RUN_ON).check().stdout == "2 42.0\n"
    assert user.atoll("drain", "0").check().stdout == "island 0 is empty, and its workers have ended\n"
    assert user.script(DOUBLE, ATOLL_ADDRESS=address_of(user), **RUN_ON).check().stdout == "1 42.0\n"
    assert "drained" in user.atoll("status").check().stdout
    assert "the only one that is ready" in user.atoll("drain", "1").error
    user.atoll("down").check()
    assert user.leftovers() == []


def address_of(user: User) -> str:
    return f"unix:{user.runtime}/atoll/default/controller.sock"
