"""Put this process into a sandbox, and probe the mechanisms of this system for one.

Call `isolate` first in a new process, since only a process with one thread can enter namespaces.
"""

from __future__ import annotations

import functools
import os
import resource
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from atoll.cluster.processes.process_runtime import fork_quietly
from atoll.cluster.sandbox import kernel, landlock, system_calls
from atoll.cluster.sandbox.file_system import Trees, build, interpreter_paths, map_grants, proc_paths, system_paths
from atoll.cluster.sandbox.grants import Sandbox, View
from atoll.cluster.sandbox.mechanisms import Mechanisms, Namespaces

_NAMESPACES = kernel.NEW_MOUNTS | kernel.NEW_PIDS | kernel.NEW_IPC | kernel.NEW_UTS
# User IDs of sandboxes, on a system with all user IDs and in a usual container.
_FIRST_USER, _USERS = 1_900_000_000, 200_000_000
_FIRST_USER_OF_A_CONTAINER, _USERS_OF_A_CONTAINER = 61_184, 4_096


def probe() -> Mechanisms:
    """Try the mechanisms in child processes. They take no locks, so this process may have other threads."""
    missing: dict[str, str] = {}
    own_user = _why_no_own_user()
    namespaces = Namespaces.NONE
    for each in (Namespaces.BY_ROOT, Namespaces.BY_USER):
        reason = _why_not(each, not own_user)
        if not reason:
            namespaces = each
            missing.pop("namespaces", None)  # the reason why the other way does not work
            break
        missing["namespaces"] = reason
    if own_user:
        missing["user"] = own_user
    seccomp, version = system_calls.has_filters(), landlock.version()
    if not seccomp:
        missing["seccomp"] = f"the kernel has no filters for {os.uname().machine}"
    if not version:
        missing["landlock"] = "the kernel does not have it, or it is not among its security modules (`lsm=`)"
    return Mechanisms(namespaces, not own_user and namespaces is Namespaces.BY_ROOT, seccomp, version, missing)


@functools.cache
def mechanisms_here() -> Mechanisms:
    """Return the mechanisms of this machine. Probe them at the first call."""
    return probe()


def isolate(sandbox: Sandbox, mechanisms: Mechanisms | None = None, keep: Sequence[int] = ()) -> Mechanisms:
    """Put this process into the sandbox irrevocably, and return the mechanisms that are in force.

    `mechanisms` is the result of `probe` in another process of this system, None to probe now. With namespaces, the
    function returns in a child process; the calling process and the child end together. Descriptors above 2 are closed
    unless `keep` has them.

    Raise OSError if a mechanism fails that should work here, and GrantError if a directory cannot be granted. The
    process must then end.
    """
    mechanisms = probe() if mechanisms is None else mechanisms
    _close_others(keep)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sandbox.memory_bytes:
        resource.setrlimit(resource.RLIMIT_DATA, (sandbox.memory_bytes, sandbox.memory_bytes))
    user = None
    if mechanisms.namespaces is not Namespaces.NONE:
        trees: Trees = {}
        if mechanisms.own_user and sandbox.view is View.GRANTED:
            # If a file system cannot map owners, do without a separate user: the grants matter more than the user ID.
            with suppress(OSError):
                user = user_of(sandbox.identity)
                trees = {} if user is None else map_grants(sandbox, user)
        _enter(sandbox, mechanisms.namespaces, user)
        _end_with(os.fork())
        kernel.end_with_parent(signal.SIGKILL)
        build(sandbox, trees, user)
        _become(user)
    kernel.end_with_parent(signal.SIGKILL)  # again, since a change of the user resets it
    resource.setrlimit(resource.RLIMIT_NPROC, (sandbox.processes, sandbox.processes))
    kernel.drop_capabilities()
    kernel.no_new_privileges()
    version = 0
    if mechanisms.landlock and sandbox.view is View.GRANTED:
        _restrict_files(sandbox, mechanisms.namespaces)
        version = mechanisms.landlock
    if mechanisms.seccomp:
        system_calls.refuse_system_calls(tenant=sandbox.view is View.GRANTED)
    return msgspec.structs.replace(mechanisms, own_user=user is not None, landlock=version)


def user_of(identity: int) -> int | None:
    """Return the user ID for sandboxes of this identity, None if this system has too few user IDs."""
    for first, count in ((_FIRST_USER, _USERS), (_FIRST_USER_OF_A_CONTAINER, _USERS_OF_A_CONTAINER)):
        if all(_has(kind, first, count) for kind in ("uid", "gid")):
            return first + identity % count
    return None


def _has(kind: str, first: int, count: int) -> bool:
    ranges = [tuple(map(int, line.split())) for line in Path(f"/proc/self/{kind}_map").read_text().splitlines()]
    return any(start <= first and first + count <= start + length for start, _, length in ranges)


def _why_no_own_user() -> str:
    if os.geteuid() != 0:
        return "Atoll does not run as root"
    if user_of(0) is None:
        return "this container has too few user IDs"
    for path in [*interpreter_paths(()), os.path.realpath(sys.executable), msgspec.__file__, __file__]:
        if not os.stat(path).st_mode & 0o004:
            return f"{path} is not readable for other users"
    return ""


def _why_not(namespaces: Namespaces, own_user: bool) -> str:
    """Return why namespaces cannot be made in this way, "" if they can. Try it in a child, since it is irrevocable."""
    if namespaces is Namespaces.BY_ROOT and os.geteuid() != 0:
        return "Atoll does not run as root"
    reading, writing = os.pipe()
    child = fork_quietly()
    if child == 0:
        try:
            sandbox = Sandbox(scratch="/tmp")
            user = user_of(0) if namespaces is Namespaces.BY_ROOT and own_user else None
            _enter(sandbox, namespaces, user)
            inner = fork_quietly()
            if inner == 0:
                build(sandbox, {}, user)
                _become(user)
                os._exit(0)
            os._exit(os.waitstatus_to_exitcode(os.waitpid(inner, 0)[1]) & 0xFF)
        except BaseException as error:
            os.write(writing, str(error).encode()[:1000])
            os._exit(1)
    os.close(writing)
    with open(reading, "rb") as pipe:
        reason = pipe.read().decode(errors="replace")
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return "" if status == 0 else reason or f"the trial ended with status {status}"


def _enter(sandbox: Sandbox, namespaces: Namespaces, user: int | None) -> None:
    flags = _NAMESPACES | (0 if sandbox.network else kernel.NEW_NETWORK)
    if namespaces is Namespaces.BY_ROOT:
        if sandbox.shared and user is not None:
            os.chown(sandbox.shared, user, user)
        kernel.call("unshare", flags)
    else:
        _enter_user_namespace(flags)
    if not sandbox.network:
        kernel.start_loopback()


def _enter_user_namespace(flags: int = 0) -> None:
    user, group = os.getuid(), os.getgid()
    kernel.call("unshare", flags | kernel.NEW_USER)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")


def _become(user: int | None) -> None:
    """Change to the user and group `user`, which then owns standard output and error; None keeps the present ones."""
    kernel.bound_capabilities()
    if user is None:
        return
    for descriptor in (1, 2):
        with suppress(OSError):
            os.fchown(descriptor, user, user)
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    kernel.set_dumpable()


def _restrict_files(sandbox: Sandbox, namespaces: Namespaces) -> None:
    private = [sandbox.scratch, "/tmp", "/dev/shm"] if sandbox.scratch else []
    devices = [f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom")]
    if namespaces is not Namespaces.NONE:
        landlock.restrict_files(["/"], [*private, sandbox.shared, *sandbox.write], [*devices, *sandbox.devices])
        return
    read = [
        *system_paths(),
        *proc_paths(),
        *interpreter_paths(sandbox.private),
        "/etc/passwd",
        "/etc/group",
        *sandbox.read,
    ]
    landlock.restrict_files(
        read, [*filter(None, (sandbox.scratch, sandbox.shared)), *sandbox.write], [*devices, *sandbox.devices]
    )


def _close_others(keep: Sequence[int]) -> None:
    first = 3
    for descriptor in sorted(each for each in keep if each > 2):
        os.closerange(first, descriptor)
        first = descriptor + 1
    os.closerange(first, max(first, resource.getrlimit(resource.RLIMIT_NOFILE)[0]))


def _end_with(child: int) -> None:
    """Return in the child. In the parent, wait for the child and end with the same status.

    The parent also kills the child at SIGTERM and when its own parent ends. The child cannot prevent that, since it
    does not see the parent.
    """
    if child == 0:
        return
    signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGKILL))
    kernel.end_with_parent(signal.SIGTERM)
    os.closerange(0, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status < 0:
        if status != -signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status & 0xFF)
