"""Grants of files, devices and resources to a sandboxed process."""

from __future__ import annotations

import os
from enum import StrEnum

import msgspec

MAX_PROCESSES = 4096  # processes and threads of a sandbox
_OWN = ("/proc", "/sys", "/dev")  # not grantable, since the sandbox has its own


class View(StrEnum):
    """The files that a sandboxed process sees."""

    GRANTED = "granted"  # those of the interpreter, and granted directories
    USER = "user"  # all files of the user that runs the process, except hidden ones


class Sandbox(msgspec.Struct, frozen=True):
    """The grants of one sandboxed process. The defaults grant only the interpreter.

    Attributes:
        scratch: Private writable directory, empty at first. It is in memory, at most `scratch_bytes` large together
            with the private /tmp and /dev/shm. Without it, the process cannot write anywhere.
        shared: Directory that processes with the same `identity` share; it may contain `scratch`.
        read, write: Directories that the process may read, or read and write. Paths with symbolic links are refused,
            since another user who can write to the link's directory could replace the link.
        hidden: Directories and files that the process never sees, even inside granted directories.
        devices: Device files that the process may use, such as /dev/nvidia0.
        memory_bytes: Limit of the process's memory; 0 for none.
        identity: Processes with the same identity have the same user ID, on systems that allow a separate user ID.
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
    memory_bytes: int = 0
    processes: int = MAX_PROCESSES
    identity: int = 0

    @property
    def private(self) -> tuple[str, ...]:
        """Return the paths that the process sees only as far as the sandbox says."""
        return tuple(each for each in (self.scratch, self.shared, *self.hidden) if each)

    def refusal(self, path: str, writing: bool) -> str:
        """Return why the process cannot write to `path`, or read it, and which setting grants that; "" if granted."""
        granted = self.write if writing else (*self.write, *self.read)
        if self.view is View.USER or any(f"{path}/".startswith(f"{each}/") for each in granted):
            return ""
        verb = "write" if writing else "read"
        return (
            f"{path} is in no directory that Python of this tenant may {verb} on the hosts. The cluster's operator "
            f"can grant one with `{verb} = [...]` in the file of tenants, or with `atoll up --python-{verb} DIR`"
        )


class PythonRules(msgspec.Struct, frozen=True):
    """Rules of the controller for the Python processes of a session.

    If files are confined and a host has no mechanism for that, it refuses to start a process, unless `insecure`.
    """

    view: View = View.USER  # files that they see: only granted ones, or those of the cluster's user
    read: tuple[str, ...] = ()  # directories that they may read
    write: tuple[str, ...] = ()  # directories that they may read and write
    network: bool = True  # whether they may use the network
    insecure: bool = False  # whether they start on hosts that cannot confine them (`--insecure-sandbox`)


# Used without tenants.
USER_RULES = PythonRules()
USER_VIEW = Sandbox(View.USER)


def check_grant(path: str) -> str:
    """Return `path` if it can be granted to a tenant. Raise ValueError if not."""
    if not os.path.isabs(path) or os.path.normpath(path) != path or "\0" in path:
        raise ValueError(f"{path[:200]!r} is not an absolute path without '.', '..' and a slash at the end")
    if path == "/" or any(path == own or path.startswith(f"{own}/") for own in _OWN):
        raise ValueError(f"{path[:200]!r} cannot be granted: name a directory of data")
    return path
