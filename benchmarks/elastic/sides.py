"""The two contestants as processes: how each is started, loses a device, and gets it back."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.harness.backends import ROOT

DEVICES = 4
_START_SECONDS = 120.0
_COMMAND = (sys.executable, "-m", "atoll.operate.command")


class Lines:
    """Lines that processes print, in order of arrival."""

    def __init__(self) -> None:
        self.found: list[dict[str, Any]] = []

    def read(self, process: subprocess.Popen[str]) -> None:
        threading.Thread(target=self._read, args=(process,), daemon=True).start()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                self.found.append(json.loads(line))

    def wait_for_steps(self, count: int, process: subprocess.Popen[str]) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while sum(each["what"] == "step" for each in self.found) < count:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the training has not come to step {count}: see standard error")
            time.sleep(0.05)


class AtollSide:
    """A cluster with an agent per island, and a script on it: `module`, which gets `arguments`.

    A device is lost with its agent.
    """

    def __init__(self, *arguments: int, module: str = "benchmarks.elastic.on_atoll") -> None:
        self.lines = Lines()
        self._directory = Path(tempfile.mkdtemp(prefix="atoll-bench-"))
        with socket.create_server(("127.0.0.1", 0)) as server:
            self._address = f"127.0.0.1:{server.getsockname()[1]}"
        self._environment = _environment() | {"XDG_RUNTIME_DIR": str(self._directory), "ATOLL_INSECURE": "1"}
        listen = ("--engine", "hosts", "--islands", f"{DEVICES}x1x1", "--listen", self._address, "--wait", "600")
        up = subprocess.Popen([*_COMMAND, "up", *listen], env=self._environment, stdout=subprocess.DEVNULL)
        self._agents = [self._agent(rank) for rank in range(DEVICES)]
        if up.wait(_START_SECONDS):
            raise RuntimeError("the cluster is not up: see standard error")
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *map(str, arguments)],
            env=self._environment | {"JAX_PLATFORMS": "atoll", "ATOLL_ADDRESS": self._address},
            stdout=subprocess.PIPE,
            text=True,
        )
        self.lines.read(self.process)

    def _agent(self, rank: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [*_COMMAND, "host", "--address", self._address, "--rank", str(rank)], env=self._environment
        )

    def lose(self, device: int) -> None:
        self._agents[device].kill()
        self._agents[device].wait()

    def give_back(self, device: int) -> None:
        self._agents[device] = self._agent(device)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        subprocess.run([*_COMMAND, "down"], env=self._environment, stdout=subprocess.DEVNULL, timeout=60, check=False)
        for each in self._agents:
            each.kill()
            each.wait()
        shutil.rmtree(self._directory, ignore_errors=True)


class StockSide:
    """One process with all devices. When a device is lost, it ends and is restarted with the remaining ones."""

    def __init__(self, megabytes: int) -> None:
        self.lines = Lines()
        self._directory = Path(tempfile.mkdtemp(prefix="atoll-bench-"))
        self._megabytes = megabytes
        self._devices = DEVICES
        self.process = self._start()

    def _start(self) -> subprocess.Popen[str]:
        environment = _environment() | {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES}",
            "NPROC": "16",
        }
        arguments = [str(self._directory), str(self._devices), str(self._megabytes)]
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.elastic.on_stock", *arguments],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.lines.read(process)
        return process

    def lose(self, device: int) -> None:
        self._devices -= 1
        self.process.kill()
        self.process.wait()
        self.process = self._start()

    def give_back(self, device: int) -> None:
        self._devices += 1
        self.process.send_signal(signal.SIGTERM)
        self.process.wait()
        self.process = self._start()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        shutil.rmtree(self._directory, ignore_errors=True)


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "ATOLL_", "XLA_"))}
    directories = (Path(__file__).parent / "site", ROOT / "src", ROOT)
    return kept | {"PYTHONPATH": os.pathsep.join(map(str, directories))}
