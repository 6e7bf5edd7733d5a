"""Simulated machines: namespaces on a bridge, with links that can be cut, filtered, limited and delayed.

A machine is a process in separate namespaces for network, mounts (private /tmp, /dev/shm and /etc/hosts), host name,
IPC and pids. Machines therefore cannot share unix sockets, shared memory or pids by accident. They are connected to a
bridge in another network namespace, which has no link to the outside. The namespaces have no names, so they disappear
when their processes end. These processes end with the process that made the machines, in all cases.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

SECONDS = 20.0  # for commands that change the network
_MEMORY = {"tmp": "4g", "shm": "2g"}
_RELAY = Path(__file__).with_name("relay.py")

# A machine makes its directories in its namespaces, prints "up", and then reaps orphaned processes.
_INIT = r"""
set -e
mkdir -p /mnt && mount -t tmpfs -o size=$TMP_SIZE tmpfs /mnt && chmod 1777 /mnt && mkdir /mnt/home
for path in $SHOWN; do
  mkdir -p "/mnt/${path#/tmp/}" && mount --bind "$path" "/mnt/${path#/tmp/}"
  mount -o remount,bind,ro "/mnt/${path#/tmp/}"
done
printf '127.0.0.1 localhost\n%b' "$HOSTS" > /mnt/.hosts
mount --move /mnt /tmp
mount --bind /tmp/.hosts /etc/hosts
mount -t tmpfs -o size=$SHM_SIZE tmpfs /dev/shm && chmod 1777 /dev/shm
hostname "$NAME"
exec "$PYTHON" -S -c 'import os, signal
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
print("up", flush=True)
os.dup2(0, 1)
while True: signal.pause()'
"""


class BedError(Exception):
    """Raised if the kernel refuses a command that is needed for the machines. Contains the command and the reason."""


def run(*command: str, pid: int = 0, check: bool = True) -> str:
    """Run a command, in the network namespace of `pid` if given. Raise BedError if it fails."""
    prefix = ("nsenter", "-t", str(pid), "-n") if pid else ()
    done = subprocess.run([*prefix, *command], capture_output=True, text=True, timeout=SECONDS)
    if check and done.returncode:
        raise BedError(f"{' '.join(command)}: {done.stderr.strip() or f'status {done.returncode}'}")
    return done.stdout


def why_not() -> str:
    """Return why machines cannot be simulated here, or "" if they can."""
    if sys.platform != "linux" or os.geteuid():
        return "machines need root on Linux: they are namespaces"
    try:
        with Machines(1):
            return ""
    except (BedError, OSError) as error:
        return f"machines need namespaces and traffic control, which are refused here: {error}"


class Machines:
    """`count` machines, called m0 and so on, at 10.77.0.1 and so on. They can look up each other's names.

    `shown` contains directories below /tmp that the machines can read. Create, change and close the machines on the
    main thread, because they end with the thread that made them.
    """

    def __init__(self, count: int = 3, shown: Sequence[str] = (), network: str = "10.77.0") -> None:
        self.names = [f"m{number}" for number in range(count)]
        self._network = network
        self._shown = [*shown, *_below_tmp()]
        self._keepers: dict[str, subprocess.Popen[bytes]] = {}
        self._pids: dict[str, int] = {}
        try:
            self._build()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all machines, with all of their processes."""
        for name in list(self._keepers):
            self._kill(name)

    def _build(self) -> None:
        self._keep("switch", ["unshare", "-n", "-f", "--kill-child", "sh", "-c", "echo up; exec sleep infinity >&-"])
        switch = self._pids["switch"]
        run("ip", "link", "add", "name", "bridge0", "type", "bridge", pid=switch)
        run("ip", "link", "set", "bridge0", "up", pid=switch)
        # (sender, receiver) of links that lose packets.
        run("ip", "link", "add", "hole", "type", "veth", "peer", "name", "hole2", pid=switch)
        run("ip", "link", "set", "hole", "up", pid=switch)
        for name in self.names:
            self._start(name)

    # ---- machines

    def address(self, name: str) -> str:
        return f"{self._network}.{self.names.index(name) + 1}"

    def popen(
        self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[str]:
        """Start a command on a machine, in its /tmp. Killing the returned process kills the command."""
        where = ["nsenter", "-t", str(self._pids[name]), "-n", "-m", "-u", "-i", "-p", "--"]
        env = {**(os.environ if environment is None else environment), "HOME": "/tmp/home", "TMPDIR": "/tmp"}
        env.pop("XDG_RUNTIME_DIR", None)
        inner = ["setpriv", "--pdeathsig", "KILL", "sh", "-c", 'cd /tmp && exec "$@"', "sh", *command]
        return subprocess.Popen([*where, *inner], env=env, text=True, **options)

    def pid(self, name: str) -> int:
        """Return the pid of a machine's first process in this pid namespace."""
        return self._pids[name]

    def pid_of(self, process: subprocess.Popen[str]) -> int:
        """Return the pid in this namespace of a process that `popen` has started, for example to stop it."""
        return _child(process.pid)

    def reboot(self, name: str) -> None:
        """Kill all processes of a machine. It restarts without its files, at the same address."""
        self._kill(name)
        run("ip", "link", "del", name, pid=self._pids["switch"], check=False)  # the kernel may keep it for a while
        self._start(name)

    def _start(self, name: str) -> None:
        hosts = "".join(f"{self.address(each)} {each}\\n" for each in self.names)
        env = {**os.environ, "NAME": name, "HOSTS": hosts, "SHOWN": " ".join(self._shown), "PYTHON": sys.executable}
        env |= {"TMP_SIZE": _MEMORY["tmp"], "SHM_SIZE": _MEMORY["shm"]}
        spaces = ["unshare", "-n", "-m", "-u", "-i", "-p", "-f", "--mount-proc", "--kill-child"]
        self._keep(name, [*spaces, "sh", "-c", _INIT], env)
        pid, switch = self._pids[name], self._pids["switch"]
        mac = f"02:00:0a:4d:00:{self.names.index(name) + 1:02x}"  # unchanged by a reboot, like that of a real machine
        pair = ("type", "veth", "peer", "name", "eth0", "address", mac, "netns", str(pid))
        run("ip", "link", "add", name, *pair, pid=switch)
        run("ip", "link", "set", name, "master", "bridge0", "up", pid=switch)
        run("tc", "qdisc", "add", "dev", name, "clsact", pid=switch)
        run("ip", "link", "set", "lo", "up", pid=pid)
        run("ip", "addr", "add", f"{self.address(name)}/24", "dev", "eth0", pid=pid)
        run("ip", "link", "set", "eth0", "up", pid=pid)

    def _keep(
        self,
        name: str,
        command: list[str],
        env: Mapping[str, str] | None = None,
        find: Callable[[int], int] | None = None,
    ) -> None:
        """Start the process that keeps `name` alive. It ends with this process, and prints "up" when it is ready."""
        keeper = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=env,
            start_new_session=True,
        )
        assert keeper.stdout is not None
        assert keeper.stderr is not None
        self._keepers[name] = keeper
        if keeper.stdout.readline() != b"up\n":
            raise BedError(f"{name} does not start: {keeper.stderr.read().decode(errors='replace').strip()}")
        self._pids[name] = (find or _child)(keeper.pid)

    def _kill(self, name: str) -> None:
        keeper = self._keepers.pop(name)
        for pid in {self._pids.pop(name, keeper.pid), keeper.pid}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        keeper.wait()
        for pipe in (keeper.stdout, keeper.stderr):
            assert pipe is not None
            pipe.close()

    # ---- the network

    def cut(self, name: str) -> None:
        """Disconnect the link of a machine. Both sides notice that it is down."""
        run("ip", "link", "set", name, "down", pid=self._pids["switch"])

    def join(self, name: str) -> None:
        """Reconnect the link of a machine."""
        run("ip", "link", "set", name, "up", pid=self._pids["switch"])

    def drop(self, sender: str, receiver: str) -> None:
        """Silently drop all IPv4 packets from one machine to another, until `heal`.

        Not supported together with `delay`.
        """
        match = ("u32", "match", "ip", "dst", f"{self.address(receiver)}/32")
        into = ("action", "mirred", "egress", "redirect", "dev", "hole")
        where = ("dev", sender, "ingress", "protocol", "ip")
        run("tc", "filter", "add", *where, *match, *into, pid=self._pids["switch"])

    def drop_both(self, one: str, other: str) -> None:
        self.drop(one, other)
        self.drop(other, one)

    def heal(self) -> None:
        """Stop dropping packets."""
        for name in self.names:
            run("tc", "filter", "del", "dev", name, "ingress", pid=self._pids["switch"], check=False)

    def limit(self, name: str, rate: str) -> None:
        """Limit the rate from and to a machine, for example to 200mbit. "" removes the limit."""
        for device, pid in ((name, self._pids["switch"]), ("eth0", self._pids[name])):
            run("tc", "qdisc", "del", "dev", device, "root", pid=pid, check=False)
            if rate:
                shape = ("tbf", "rate", rate, "burst", "256k", "latency", "50ms")
                run("tc", "qdisc", "add", "dev", device, "root", *shape, pid=pid)

    def delay(self, name: str, milliseconds: float) -> None:
        """Delay all packets from and to a machine by this time in each direction. 0 removes the delay.

        This also reduces the bandwidth.
        """
        switch, relay = self._pids["switch"], f"relay of {name}"
        if relay in self._keepers:
            self._kill(relay)
            run("ip", "link", "set", name, "master", "bridge0", pid=switch)
        if milliseconds:
            run("ip", "link", "set", name, "nomaster", pid=switch)
            command = ["nsenter", "-t", str(switch), "-n", sys.executable, "-S", str(_RELAY), name, str(milliseconds)]
            self._keep(relay, command, find=lambda pid: pid)
        # The sender's kernel leaves checksums and segmentation to the network card, but a relay forwards the packets
        # that it sees.
        offloads = "0" if any(each.startswith("relay of ") for each in self._keepers) else "1"
        for each in self.names:
            run(sys.executable, "-S", str(_RELAY), "offloads", offloads, pid=self._pids[each])


def _child(pid: int) -> int:
    """Return the only child of a process, as soon as it exists."""
    children = Path(f"/proc/{pid}/task/{pid}/children")
    deadline = time.monotonic() + SECONDS
    while not (found := children.read_text().split()):
        if time.monotonic() > deadline:
            raise BedError(f"process {pid} starts nothing")
        time.sleep(0.001)
    return int(found[0])


def _below_tmp() -> list[str]:
    """Return the directories below /tmp that this project needs."""
    needed = {str(Path(__file__).resolve().parents[2]), sys.prefix, sys.base_prefix}
    return sorted(path for path in needed if path.startswith(f"{tempfile.gettempdir()}/") and path.startswith("/tmp/"))
