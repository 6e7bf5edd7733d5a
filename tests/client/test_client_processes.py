"""Tests of client processes: the directory for large arrays, and the run from the environment."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from atoll.client import processes
from atoll.client.processes import TRANSITIONS, ClientProcesses, ClusterChoice, ProxyState, place_with_room
from atoll.cluster.named_runs import UNNAMED, NamedRun
from atoll.cluster.processes import child
from atoll.cluster.settings import ClusterSettings
from atoll.errors import ClusterError
from atoll.ifrt.proxy_options import ProxyOptions, Ready
from tests.state_tables import check_table

SHM, TMP = Path("/dev/shm"), Path("/tmp")


@pytest.mark.parametrize(
    ("free", "chosen"),
    [({SHM: 2 << 30, TMP: 9 << 30}, SHM), ({SHM: 64 << 20, TMP: 9 << 30}, TMP), ({SHM: 64 << 20, TMP: 8 << 20}, SHM)],
)
def test_shared_memory_is_used_if_it_has_room(free: dict[Path, int], chosen: Path) -> None:
    """By default, a container has 64 MiB of shared memory, and jaxlib's client aborts its process if it cannot write
    there.
    """
    assert place_with_room([SHM, TMP], free) == chosen


def test_processes_that_a_script_starts_do_not_have_its_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_taken", (0, UNNAMED))
    monkeypatch.setenv("ATOLL_RUN", "run-7")
    monkeypatch.setenv("ATOLL_DETACH", "60")
    run = NamedRun("run-7", 60.0)
    assert ClusterChoice.from_environment().run == run
    assert not {"ATOLL_RUN", "ATOLL_DETACH"} & set(os.environ)
    assert ClusterChoice.from_environment().run == run, "the next client of the script has the run"
    parent = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: parent + 1)
    assert ClusterChoice.from_environment().run == UNNAMED, "a fork is another process"


@pytest.mark.parametrize(
    ("first", "notebook", "expected"),
    [
        ("/home/ana/train.py", "/home/ana/other.ipynb", "train.py"),
        ("/lib/ipykernel_launcher.py", "/home/ana/my study.ipynb", "my study.ipynb"),
        ("/lib/ipykernel_launcher.py", "", "notebook"),
        ("-c", "", "python"),
    ],
)
def test_a_session_has_the_name_of_its_script_or_notebook(monkeypatch, first, notebook, expected):
    monkeypatch.setattr(processes.sys, "argv", [first])
    monkeypatch.setenv("JPY_SESSION_NAME", notebook)
    assert processes.script_name() == expected


class Process:
    """An engine or a proxy that does nothing."""

    address, start_seconds = "unix:/nowhere", 330.0
    process = SimpleNamespace(pid=os.getpid(), poll=lambda: None)

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def end(self) -> None: ...
    def stop_reading(self) -> None: ...
    def wait_until_up(self) -> None:
        raise ClusterError("the cluster does not start")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[ProxyOptions]:
    """Return the options of the proxies that are started meanwhile."""
    found: list[ProxyOptions] = []

    def start_proxy(options: ProxyOptions, _: Any) -> Process:
        found.append(options)
        return Process()

    monkeypatch.setattr(processes, "EngineProcess", Process)
    monkeypatch.setattr(processes, "start_proxy", start_proxy)
    return found


def test_the_proxy_waits_for_as_long_as_its_cluster_may_start(started: list[ProxyOptions]) -> None:
    """A proxy that gives up removes the client's directory, in which the controller is about to listen."""
    with pytest.raises(ClusterError, match="does not start"):
        ClientProcesses(ClusterChoice("", "", ClusterSettings())).wait_until_up()
    assert started[0].patience > Process.start_seconds


def test_the_number_of_losses_stays_when_the_proxy_has_removed_its_file(started: list[ProxyOptions]) -> None:
    client = ClientProcesses(ClusterChoice("", "", ClusterSettings()))
    try:
        file = Path(started[0].losses)
        assert client.losses() == 0
        file.write_bytes(b"..")
        assert client.losses() == 2
        file.unlink()
        assert client.losses() == 2
    finally:
        client.close()


def test_a_start_that_fails_leaves_no_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    def start() -> int:
        with pytest.raises(ClusterError, match="ended before it was up"):
            ClientProcesses(ClusterChoice("", "", ClusterSettings())).wait_until_up()
        return len(os.listdir("/proc/self/fd"))

    monkeypatch.setattr(child, "command", lambda *_: [sys.executable, "-c", ""])
    assert start() == start()


class Proxy(Process):
    """A proxy that is up until `status` is set."""

    def __init__(self) -> None:
        self.status: int | None = None
        self.signals: list[int] = []
        self.process = SimpleNamespace(pid=os.getpid(), poll=lambda: self.status)

    def read(self, *_: Any, **__: Any) -> Ready:
        return Ready("unix:/proxy")

    def watch(self, *_: Any) -> None: ...
    def wait_until_up(self) -> None: ...
    def leave(self) -> None: ...
    def send_signal(self, number: int) -> None:
        self.signals.append(number)


class Client:
    """The processes of a client whose proxy is up. `proxy_ended` is called when it has ended."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.proxy = Proxy()
        watched: list[Callable[[], None]] = []
        monkeypatch.setattr(processes, "EngineProcess", lambda *_, **__: Proxy())
        monkeypatch.setattr(processes, "start_proxy", lambda *_: self.proxy)
        monkeypatch.setattr(processes, "watch_in_thread", lambda pid, then: watched.append(then))
        self.processes = ClientProcesses(ClusterChoice("", "", ClusterSettings()))
        self.processes.end_compilations()
        assert (self.processes.state, self.proxy.signals) == (ProxyState.STARTING, [])
        self.processes.wait_until_up()
        (self.proxy_ended,) = watched


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Client:
    return Client(monkeypatch)


def test_a_killed_proxy_is_reported_once(client: Client, capsys: pytest.CaptureFixture[str]) -> None:
    client.processes.end_compilations()
    assert len(client.proxy.signals) == 1
    client.proxy.status = -signal.SIGKILL
    client.proxy_ended()
    assert client.processes.state is ProxyState.LOST
    client.processes.close()
    client.processes.end_compilations()
    assert capsys.readouterr().err.count("the proxy of this process has ended") == 1
    assert client.processes.state is ProxyState.ENDED
    assert len(client.proxy.signals) == 1


def test_a_proxy_that_was_killed_before_its_client_ends_is_reported_then(
    client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    client.proxy.status = -signal.SIGKILL
    client.processes.leave()
    assert capsys.readouterr().err.count("the proxy of this process has ended") == 1


@pytest.mark.parametrize("ends_late", [True, False])
def test_an_expected_end_of_the_proxy_is_not_reported(
    client: Client, capsys: pytest.CaptureFixture[str], ends_late: bool
) -> None:
    client.processes.leave()
    assert client.processes.state is ProxyState.ENDING
    client.proxy.status = 0
    client.proxy_ended()
    assert client.processes.transfer_directory.exists() is True, "the next client may use it"
    if not ends_late:
        client.processes.close()
        assert client.processes.state is ProxyState.ENDED
    assert capsys.readouterr().err == ""
    client.processes.close()


def test_the_proxy_changes_its_state_only_by_the_transitions_of_the_table() -> None:
    def make(state: ProxyState) -> ClientProcesses:
        made = ClientProcesses.__new__(ClientProcesses)
        made.state = state
        return made

    check_table(make, ProxyState, TRANSITIONS)
