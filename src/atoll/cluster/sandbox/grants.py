"""The files, devices and amounts that a sandboxed process is granted."""

from __future__ import annotations

import os
from enum import StrEnum

import msgspec

# The processes and threads of a sandbox.
MOST_PROCESSES = 4096
# Directories that no grant may name: the sandbox has its own.
_OWN = ("/proc", "/sys", "/dev")


class View(StrEnum):
    """Which files a sandboxed process sees."""

    GRANTED = "granted"  # the interpreter, and the directories that the sandbox lists
    USER = "user"  # all files of the user that runs the process, except those that the sandbox hides


class Sandbox(msgspec.Struct, frozen=True):
    """Grants for one sandboxed process. The defaults grant only the interpreter.

    `scratch` is a directory of the process's own. In the sandbox it is empty, writable, in memory, and at most
    `scratch_bytes` large together with /tmp and /dev/shm, which are the process's own as well. Without a scratch
    directory the process can write nowhere.

    `shared` is a directory that the process shares with those that have the same `identity`; it may contain `scratch`.
    `read` and `write` are directories that the process may read, or also write. They must exist as they are named: a
    path with a symbolic link in it is refused, since whoever can write beside the link could exchange it.
    `hidden` are directories and files that it never sees, whatever else it may read.

    Processes with the same `identity` have the same user ID, on systems that allow a separate user ID.
    `devices` are device files that it may use, such as /dev/nvidia0.
    """

    view: View = View.GRANTED
    scratch: str = ""
    scratch_bytes: int = 0
    shared: str = ""
    read: tuple[str, ...] = ()
    write: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    network: bool = False
    memory_bytes: int = 0  # 0: no limit
    processes: int = MOST_PROCESSES
    identity: int = 0

    @property
    def private(self) -> tuple[str, ...]:
        """Paths of which no more is seen than the sandbox says."""
        return tuple(each for each in (self.scratch, self.shared, *self.hidden) if each)

    def refusal(self, path: str, writing: bool) -> str:
        """Return why the process cannot keep data at `path`, or read it from there, and which setting grants that.

        Return "" if `path` is granted.
        """
        granted = self.write if writing else (*self.write, *self.read)
        if self.view is View.USER or any(f"{path}/".startswith(f"{each}/") for each in granted):
            return ""
        verb = "write" if writing else "read"
        return (
            f"{path} is in no directory that Python of this tenant may {verb} on the hosts. The cluster's operator "
            f"grants one with `{verb} = [...]` in the file of tenants, or with `atoll up --python-{verb} DIR`"
        )


class PythonRules(msgspec.Struct, frozen=True):
    """Rules for the Python processes of one session. The controller makes them.

    If files are confined and the host has no mechanism for that, the host refuses to start a process, unless
    `insecure`.
    """

    view: View = View.USER
    read: tuple[str, ...] = ()
    write: tuple[str, ...] = ()
    network: bool = True
    insecure: bool = False


# Without tenants.
USER_RULES = PythonRules()
USER_VIEW = Sandbox(View.USER)


def check_grant(path: str) -> str:
    """Return `path` if a tenant may be granted it. Raises ValueError."""
    if not os.path.isabs(path) or os.path.normpath(path) != path or "\0" in path:
        raise ValueError(f"{path[:200]!r} is not an absolute path without '.', '..' and a slash at its end")
    if path == "/" or any(path == own or path.startswith(f"{own}/") for own in _OWN):
        raise ValueError(f"{path[:200]!r} cannot be granted: name a directory of data")
    return path
