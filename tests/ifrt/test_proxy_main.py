"""Tests of the start and the end of a proxy process."""

from __future__ import annotations

import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.cluster.processes.child import Child
from atoll.ifrt import proxy_main
from atoll.ifrt.proxy_options import ProxyOptions, start_proxy
from tests.file_limits import no_more_files

END_SECONDS = 30.0  # half of a proxy's patience


@pytest.fixture
def client() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def proxy(client: subprocess.Popen[bytes], short_directory: Path) -> Iterator[Child]:
    """Start the proxy of a client, and wait until it has dialed its controller, which never answers."""
    directory = short_directory / "proxy"
    directory.mkdir()
    listen, controller = f"unix:{directory}/proxy.sock", f"unix:{short_directory}/controller.sock"
    options = ProxyOptions(listen, controller, client.pid, client=client.pid, directory=str(directory))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(short_directory / "controller.sock"))
        listener.listen()
        listener.settimeout(60.0)
        child = start_proxy(options, {})
        connection, _ = listener.accept()
        yield child
        child.end()
        connection.close()


def test_a_proxy_that_waits_for_its_controller_ends_with_its_client(
    client: subprocess.Popen[bytes], proxy: Child, short_directory: Path
) -> None:
    client.kill()
    client.wait()
    proxy.process.wait(END_SECONDS)
    assert not (short_directory / "proxy").exists()


def test_a_proxy_that_waits_for_its_controller_ends_when_it_is_told_to(proxy: Child) -> None:
    proxy.process.send_signal(signal.SIGTERM)
    proxy.process.wait(END_SECONDS)


def test_the_client_learns_of_losses_also_from_a_proxy_with_too_many_open_files(tmp_path: Path) -> None:
    losses = tmp_path / "losses"
    losses.touch()
    with no_more_files():
        proxy_main._note(str(losses))
        proxy_main._note(str(losses))
    assert losses.stat().st_size == 2
    losses.unlink()
    proxy_main._note(str(losses))
    assert not losses.exists(), "the client has ended"
