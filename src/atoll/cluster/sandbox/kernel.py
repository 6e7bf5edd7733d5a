"""Calls of the Linux kernel that the standard library lacks."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from contextlib import suppress
from pathlib import Path

NEW_MOUNTS, NEW_UTS, NEW_IPC = 0x00020000, 0x04000000, 0x08000000
NEW_USER, NEW_PIDS, NEW_NETWORK = 0x10000000, 0x20000000, 0x40000000
READ_ONLY, NO_SUID, NO_DEVICES, NO_EXEC = 1, 2, 4, 8
REMOUNT, BIND, RECURSIVE, PRIVATE = 32, 4096, 16384, 1 << 18
DETACH = 2
SET_DEATH_SIGNAL, SET_DUMPABLE, NO_NEW_PRIVILEGES = 1, 4, 38

_CAPABILITY_VERSION, _DROP_BOUND = 0x20080522, 24
_EMPTY_PATH, _AT_RECURSIVE, _NO_FOLLOW = 0x1000, 0x8000, 0x100
_OPEN_TREE_CLONE, _OPEN_TREE_CLOEXEC = 1, os.O_CLOEXEC
_MOVE_FROM_EMPTY_PATH = 4
_ID_MAPPED = 0x100000
_NO_SYMLINKS = 4
# Numbers of all 64-bit architectures, except for pivot_root.
_OPEN_TREE, _MOVE_MOUNT, _OPENAT2, _MOUNT_SETATTR = 428, 429, 437, 442
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def call(name: str, *arguments: object) -> int:
    """Call a function of libc. Raise OSError if it returns a negative number."""
    return _checked(name, getattr(_libc, name)(*arguments))


def system_call(name: str, number: int, *arguments: object) -> int:
    """Make a system call. Raise an OSError that names it if it fails."""
    long_arguments = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
    return _checked(name, _libc.syscall(ctypes.c_long(number), *long_arguments))


def _checked(name: str, result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    try:
        call("mount", source.encode(), target.encode(), kind.encode() or None, flags, data.encode() or None)
    except OSError as error:
        raise OSError(error.errno, f"cannot mount {kind or source} at {target}: {error.strerror}") from None


def detach(target: str) -> None:
    call("umount2", target.encode(), DETACH)


def pivot_root(old: str) -> None:
    """Make the working directory, which must be a mount, the root; the old root is then at `old` in it."""
    system_call("pivot_root", _PIVOT_ROOT[platform.machine()], ctypes.c_char_p(b"."), ctypes.c_char_p(old.encode()))


def restrict(target: str, flags: int) -> None:
    """Add restrictions, such as READ_ONLY, to a mount and to all mounts below it."""
    try:
        _set_attributes(-100, target, _AT_RECURSIVE, flags)
    except OSError:  # before Linux 5.12
        for each in mounts_below(target):
            mount("none", each, "", REMOUNT | BIND | flags | _flags(each))


def mounts_below(target: str) -> list[str]:
    """Return the mount at `target` and those below it, the outer ones first."""
    points = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    decoded = {point.encode().decode("unicode_escape").encode("latin-1").decode() for point in points}
    return sorted(each for each in decoded if each == target or each.startswith(target.rstrip("/") + "/"))


def _flags(target: str) -> int:
    """Return the flags of a mount. A user namespace may not clear them."""
    flags = os.statvfs(target).f_flag
    return flags & (READ_ONLY | NO_SUID | NO_DEVICES | NO_EXEC | os.ST_NOATIME | os.ST_NODIRATIME | os.ST_RELATIME)


def _set_attributes(directory: int, path: str, at: int, flags: int, users: int = 0) -> None:
    attributes = struct.pack("QQQQ", flags, 0, 0, users)
    system_call(
        "mount_setattr",
        _MOUNT_SETATTR,
        directory,
        ctypes.c_char_p(path.encode()),
        at,
        ctypes.c_char_p(attributes),
        len(attributes),
    )


def open_without_links(path: str) -> int:
    """Open a path without access to the contents. Raise OSError if the path has a symbolic link in it."""
    how = struct.pack("QQQ", os.O_PATH | os.O_CLOEXEC, 0, _NO_SYMLINKS)
    try:
        return system_call("openat2", _OPENAT2, -100, ctypes.c_char_p(path.encode()), ctypes.c_char_p(how), len(how))
    except OSError as error:
        if error.errno != 38:  # ENOSYS: before Linux 5.6
            raise
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    if os.readlink(f"/proc/self/fd/{descriptor}") != path:
        os.close(descriptor)
        raise OSError(40, os.strerror(40))  # ELOOP
    return descriptor


def mapped_tree(directory: int, flags: int, users: int) -> int:
    """Return a detached copy of a directory's mounts, with owners mapped by the user namespace `users`.

    Raise OSError if the file system cannot map owners.
    """
    at = _EMPTY_PATH | _AT_RECURSIVE
    opening = at | _OPEN_TREE_CLONE | _OPEN_TREE_CLOEXEC
    tree = system_call("open_tree", _OPEN_TREE, directory, ctypes.c_char_p(b""), opening)
    try:
        _set_attributes(tree, "", at, flags | _ID_MAPPED, users)
    except OSError:
        os.close(tree)
        raise
    return tree


def attach(tree: int, target: str) -> None:
    empty, place = ctypes.c_char_p(b""), ctypes.c_char_p(target.encode())
    system_call("move_mount", _MOVE_MOUNT, tree, empty, -100, place, _MOVE_FROM_EMPTY_PATH)


def drop_capabilities() -> None:
    """Drop all capabilities. Together with `no_new_privileges` this is irrevocable."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    call("capset", header, (ctypes.c_uint32 * 6)())


def bound_capabilities() -> None:
    """Keep this process and its children from gaining capabilities, as far as permitted."""
    for number in range(64):
        if _libc.prctl(_DROP_BOUND, number, 0, 0, 0) < 0:
            break


def no_new_privileges() -> None:
    call("prctl", NO_NEW_PRIVILEGES, 1, 0, 0, 0)


def end_with_parent(by: int) -> None:
    """Send this process the signal `by` when the process that started it ends."""
    call("prctl", SET_DEATH_SIGNAL, by, 0, 0, 0)


def set_dumpable() -> None:
    """Let this process see itself in /proc after a change of its user."""
    call("prctl", SET_DUMPABLE, 1, 0, 0, 0)


def start_loopback() -> None:
    """Enable the loopback interface of a new network namespace, so that 127.0.0.1 exists."""
    import fcntl
    import socket

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock, suppress(OSError):
        request = fcntl.ioctl(sock, _SIOCGIFFLAGS, struct.pack("16sH14x", b"lo", 0))
        flags = struct.unpack("16sH14x", request)[1]
        fcntl.ioctl(sock, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags | _IFF_UP))
