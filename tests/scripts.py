"""Environment, start and result of scripts that tests run.

Unlike `tests.conftest`, this module does not change the environment of a process that imports it. Children import test
modules, so those import this one.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from tests.forked_process import Popen


@dataclass(frozen=True)
class ScriptResult:
    """Result of a script."""

    returncode: int
    stdout: str
    stderr: str

    def check(self) -> Self:
        """Return the result itself, after failing the test if the script failed."""
        assert self.returncode == 0, f"status {self.returncode}\n{self.stdout}\n{self.stderr}"
        return self


RunScript = Callable[..., ScriptResult]


def script_environment(runtime: Path, program_cache: Path, islands: str = "1x1x4") -> dict[str, str]:
    """Return a user's environment, without this process's JAX settings, and with all temporary files in `runtime`."""
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("JAX_", "IFRT_PROXY_")) and name != "NPROC"
    }
    env.update(
        JAX_PLATFORMS="atoll",
        ATOLL_ISLANDS=islands,
        ATOLL_CACHE_DIR=str(program_cache),
        XDG_RUNTIME_DIR=str(runtime),
        TMPDIR=str(runtime),
    )
    return env


def start_process(command: Sequence[str], environment: dict[str, str], directory: Path) -> subprocess.Popen[str]:
    """Start a command in `directory`, in a new process group, with pipes for its output."""
    return Popen(
        command,
        env=environment,
        cwd=directory,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
