"""Tests of the simulated machines: what they share, how their links behave, and that they leave nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.machines.bed import Machines
from tests.machines.plugin import machines, make_machines  # noqa: F401

ROOT = Path(__file__).resolve().parents[2]


def output(bed: Machines, name: str, *command: str, timeout: float = 20.0) -> str:
    process = bed.popen(name, command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    printed, _ = process.communicate(timeout=timeout)
    return printed.strip()


def reaches(bed: Machines, sender: str, receiver: str, seconds: float = 1.0) -> bool:
    """Return whether packets reach a port without a listener: the connection is refused at once, or there is
    no reply.
    """
    code = f"import socket; s = socket.socket(); s.settimeout({seconds}); print(s.connect_ex(('{receiver}', 9)))"
    return output(bed, sender, sys.executable, "-S", "-c", code) == "111"  # ECONNREFUSED


def until(holds: Callable[[], bool], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def test_machines_have_names_addresses_directories_and_pids_of_their_own(machines: Machines) -> None:  # noqa: F811
    assert output(machines, "m1", "hostname") == "m1"
    output(machines, "m1", "touch", "/tmp/mine", "/dev/shm/mine")
    assert output(machines, "m1", "ls", "/tmp", "/dev/shm").count("mine") == 2
    assert "mine" not in output(machines, "m2", "ls", "/tmp", "/dev/shm")
    pids = output(machines, "m1", "sh", "-c", "ls -d /proc/[0-9]*").splitlines()
    assert len(pids) < 6  # its first process, and those of this command
    assert reaches(machines, "m0", "m1")
    assert not reaches(machines, "m0", "8.8.8.8", 0.3)  # there is no route to the outside


def test_a_plug_is_pulled_and_put_back(machines: Machines) -> None:  # noqa: F811
    machines.cut("m1")
    assert "NO-CARRIER" in output(machines, "m1", "ip", "link", "show", "eth0")
    assert not reaches(machines, "m0", "m1", 0.3)
    assert reaches(machines, "m0", "m2")
    machines.join("m1")
    assert until(lambda: reaches(machines, "m0", "m1"))


def test_packets_are_lost_silently_one_way_and_one_pair_at_a_time(machines: Machines) -> None:  # noqa: F811
    listen = "import socket, sys; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.bind(('', 5000)); "
    heard = listen + "s.settimeout(float(sys.argv[1])); print('ready', flush=True); print(s.recv(9).decode())"
    machines.drop("m0", "m1")
    for sender, receiver, arrives in (("m0", "m1", False), ("m1", "m0", True), ("m2", "m1", True)):
        listener = machines.popen(
            receiver,
            [sys.executable, "-S", "-c", heard, "30" if arrives else "1"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert listener.stdout is not None
        assert listener.stdout.readline() == "ready\n"
        send = f"import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'hello', ('{receiver}', 5000))"
        output(machines, sender, sys.executable, "-S", "-c", send)
        printed, _ = listener.communicate(timeout=60)
        assert (printed == "hello\n") == arrives, (sender, receiver)
    assert not reaches(machines, "m0", "m1", 0.3)
    machines.heal()
    assert reaches(machines, "m0", "m1")


def seconds_to_connect(bed: Machines) -> float:
    code = "import socket, time; t = time.monotonic(); socket.socket().connect_ex(('m1', 9))\n"
    code += "print(time.monotonic() - t)"
    return float(output(bed, "m0", sys.executable, "-S", "-c", code))


def test_a_link_is_delayed_and_is_not_any_more(machines: Machines) -> None:  # noqa: F811
    if not Path("/dev/net/tun").exists():
        pytest.skip("a delay needs /dev/net/tun")
    reaches(machines, "m0", "m1")  # both machines now know each other's addresses
    machines.delay("m1", 60)
    assert seconds_to_connect(machines) > 0.12  # in both directions
    machines.delay("m1", 0)
    assert until(lambda: seconds_to_connect(machines) < 0.12)


def test_a_link_is_limited(machines: Machines) -> None:  # noqa: F811
    machines.limit("m1", "8mbit")
    serve = "import socket; s = socket.create_server(('', 5000)); print('ready', flush=True); c, _ = s.accept()\n"
    serve += "while c.recv(65536): pass"
    server = machines.popen("m1", [sys.executable, "-S", "-c", serve], stdout=subprocess.PIPE)
    assert server.stdout is not None
    assert server.stdout.readline() == "ready\n"
    send = "import socket, time; s = socket.create_connection(('m1', 5000)); t = time.monotonic()\n"
    send += "s.sendall(bytes(2_000_000)); s.shutdown(1); s.recv(1); print(time.monotonic() - t)"
    assert float(output(machines, "m0", sys.executable, "-S", "-c", send)) > 1.0  # 2 MB at 1 MB per second
    server.communicate(timeout=20)


def test_a_machine_that_reboots_loses_its_processes_and_files_and_keeps_its_address(
    machines: Machines,  # noqa: F811
) -> None:
    process = machines.popen("m1", ["sleep", "1000"])
    output(machines, "m1", "touch", "/tmp/mine")
    machines.reboot("m1")
    process.wait(timeout=10)
    assert output(machines, "m1", "ls", "/tmp/mine").startswith("ls: cannot access")
    assert until(lambda: reaches(machines, "m0", "m1"))


def test_who_kills_a_command_on_a_machine_kills_it_there(machines: Machines) -> None:  # noqa: F811
    process = machines.popen("m1", ["sleep", "1234"])
    pid = machines.pid_of(process)
    assert until(lambda: Path(f"/proc/{pid}/comm").read_text() == "sleep\n")
    process.kill()
    process.wait()
    assert until(lambda: not Path(f"/proc/{pid}").exists())


def test_nothing_is_left_of_machines_whose_maker_is_killed(make_machines: Callable[..., Machines]) -> None:  # noqa: F811
    code = "import sys, time; from tests.machines.bed import Machines; bed = Machines(2)\n"
    code += "p = bed.popen('m1', ['sleep', '4321']); print(bed.pid_of(p), *bed._pids.values(), flush=True)\n"
    code += "time.sleep(1000)"
    maker = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert maker.stdout is not None
    pids = maker.stdout.readline().split()
    assert len(pids) == 4
    assert all(Path(f"/proc/{pid}").exists() for pid in pids)
    os.kill(maker.pid, signal.SIGKILL)
    maker.communicate()
    assert until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
