"""A process that runs somebody's code beside others': what it may see, and how much it may use.

Where the system lets it, the process has namespaces of its own: it can name no process but its own children (and so
neither signal nor trace one), and finds its folder, and what is hidden from it, empty. Elsewhere it is an ordinary
process of its user with limits.

`isolate` is called in the new process, first of all: namespaces are for processes of one thread.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

_NEW_MOUNTS, _NEW_IPC, _NEW_USER, _NEW_PIDS = 0x00020000, 0x08000000, 0x10000000, 0x20000000
_BIND, _RECURSIVE, _PRIVATE, _NO_SUID, _NO_DEVICES, _NO_EXEC = 4096, 16384, 1 << 18, 2, 4, 8
_SET_DEATH_SIGNAL, _NO_NEW_PRIVILEGES = 1, 38
_CAPABILITY_VERSION = 0x20080522
_MOST_PROCESSES = 4096  # and threads
_SHARED_MEMORY = Path("/dev/shm")

_libc = ctypes.CDLL(None, use_errno=True)


def isolate(folder: Path, shared: Path, memory_bytes: int, hidden: Sequence[Path] = ()) -> bool:
    """Isolates this process. It does not see the `hidden` folders and sockets, but for the folder `shared` inside of
    one; `folder`, which may lie in that, is its own.

    Returns whether it has namespaces; then this is another process than before, a child that ends with it.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory_bytes:
        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    has_namespaces = _works(lambda: _enter(folder, shared, hidden))
    if has_namespaces:
        _enter(folder, shared, hidden)
        _end_with(os.fork())
        _mount_processes()
        _set_up_death()
        resource.setrlimit(resource.RLIMIT_NPROC, (_MOST_PROCESSES, _MOST_PROCESSES))
        _drop_capabilities()
    else:
        _set_up_death()
    _call("prctl", _NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    return has_namespaces


def _works(enter: Callable[[], None]) -> bool:
    """Whether all of it is allowed here: tried in a child, since nothing of it can be undone."""
    child = os.fork()
    if child == 0:
        try:
            enter()
            inner = os.fork()
            if inner == 0:
                _mount_processes()
                os._exit(0)
            os._exit(os.waitstatus_to_exitcode(os.waitpid(inner, 0)[1]) & 0xFF)
        except BaseException:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def _enter(folder: Path, shared: Path, hidden: Sequence[Path]) -> None:
    user, group = os.getuid(), os.getgid()
    _call("unshare", _NEW_USER | _NEW_MOUNTS | _NEW_PIDS | _NEW_IPC)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    _mount("none", Path("/"), "", _RECURSIVE | _PRIVATE)
    kept = os.open(shared, os.O_PATH)
    for each in hidden:
        if each in shared.parents:
            _cover(each)
            shared.mkdir(parents=True)
            _mount(f"/proc/self/fd/{kept}", shared, "", _BIND)
        elif each.is_dir():
            _cover(each)
        elif each.exists():
            _mount("/dev/null", each, "", _BIND)
    os.close(kept)
    if _SHARED_MEMORY.is_dir() and _SHARED_MEMORY not in shared.parents:  # where clients put what they send
        _cover(_SHARED_MEMORY)
    _cover(folder)


def _cover(folder: Path) -> None:
    """The folder is empty for this process from now on, and what it writes there is nobody else's."""
    _mount("tmpfs", folder, "tmpfs", _NO_SUID | _NO_DEVICES, "mode=0700")


def _mount_processes() -> None:
    _mount("proc", Path("/proc"), "proc", _NO_SUID | _NO_DEVICES | _NO_EXEC)


def _set_up_death(by: signal.Signals = signal.SIGKILL) -> None:
    """The process that started this one ends: so does this one, whatever it does, or it gets another signal."""
    _call("prctl", _SET_DEATH_SIGNAL, by, 0, 0, 0)


def _end_with(child: int) -> None:
    """In the parent: waits for the child, and ends as it does. Returns in the child.

    On SIGTERM, and when the process that started this one ends, it ends the child. The child can do nothing about that:
    it does not see this process.
    """
    if child == 0:
        return
    signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGKILL))
    _set_up_death(signal.SIGTERM)
    os.closerange(0, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status < 0:
        if status != -signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status & 0xFF)


def _drop_capabilities() -> None:
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    _call("capset", header, (ctypes.c_uint32 * 6)())


def _mount(source: str, target: Path, kind: str, flags: int, data: str = "") -> None:
    _call("mount", source.encode(), str(target).encode(), kind.encode() or None, flags, data.encode() or None)


def _call(name: str, *arguments: object) -> None:
    if getattr(_libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
