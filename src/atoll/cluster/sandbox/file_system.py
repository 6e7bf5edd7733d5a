"""The files that a sandboxed process sees, as mounts in its mount namespace.

For `View.GRANTED`, the process gets a new root with mounts of the interpreter, the system and the granted directories.
The old root is then removed from the namespace, so no path leads out. For `View.USER` the root stays, and mounts cover
the hidden files.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from atoll.cluster.directories import home_directory
from atoll.cluster.environment_variables import LIBRARY_PATH
from atoll.cluster.sandbox import kernel
from atoll.cluster.sandbox.grants import Sandbox, View

_OLD = "/.old"
_PRIVATE = "/.private"
_MAX_LINKS = 40
_DEVICES = ("null", "zero", "full", "random", "urandom")
_DEVICE_LINKS = {"fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1"} | {
    "stderr": "/proc/self/fd/2"
}
_PROC_READ_ONLY = ("sys", "irq", "bus", "fs", "sysrq-trigger")  # parts of /proc that change the machine
_PROC_HIDDEN = ("kcore", "keys", "timer_list")  # parts of /proc with the kernel's memory and keys
_SAFE = kernel.NO_SUID | kernel.NO_DEVICES
_DIRECTORY_FILES = 1 << 20  # inodes of the private file system


class GrantError(Exception):
    """A granted directory has a symbolic link in its path, or cannot be opened."""


Trees = Mapping[str, int]  # descriptors of detached mounts, by the granted directory


def map_grants(sandbox: Sandbox, user: int) -> Trees:
    """Copy the mounts of the granted directories, and map the owner of each to the user and group `user`.

    So `user` has the rights of the owner there, and nowhere else. Call this as root before entering namespaces. Leave
    out directories that do not exist. Raise OSError if a file system cannot map owners, and GrantError.
    """
    users: dict[tuple[int, int], int] = {}
    trees = {}
    try:
        for path in (*sandbox.read, *sandbox.write):
            directory = _open(path, path)
            if directory is not None:
                trees[path] = _mapped(directory, 0 if path in sandbox.write else kernel.READ_ONLY, user, users)
                os.close(directory)
    finally:
        for each in users.values():
            os.close(each)
    return trees


def _open(path: str, name: str) -> int | None:
    """Open a granted directory; return None if it does not exist. `name` is the path in the grant."""
    try:
        return kernel.open_without_links(path)
    except FileNotFoundError:
        print(f"the granted directory {name} does not exist on this host", file=sys.stderr)
        return None
    except OSError as error:
        raise GrantError(
            f"cannot grant {name}: {error.strerror}. Name the directory by a path without symbolic links"
        ) from None


def _mapped(directory: int, flags: int, user: int, users: dict[tuple[int, int], int]) -> int:
    status = os.stat(directory)
    owner = (status.st_uid, status.st_gid)
    if owner not in users:
        users[owner] = _user_namespace(owner, user)
    return kernel.mapped_tree(directory, flags | _SAFE, users[owner])


def _user_namespace(owner: tuple[int, int], user: int) -> int:
    """Return a user namespace that maps `owner`, (user, group), to `user`."""
    ready, done = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        with suppress(BaseException):
            kernel.call("unshare", kernel.NEW_USER)
            os.write(ready[1], b"1")
            os.close(done[1])
            os.read(done[0], 1)
        os._exit(0)
    try:
        os.close(ready[1])
        if not os.read(ready[0], 1):
            raise OSError(1, "user namespaces are not allowed")
        for kind, number in zip(("uid", "gid"), owner, strict=True):
            Path(f"/proc/{child}/{kind}_map").write_text(f"{number} {user} 1")
        return os.open(f"/proc/{child}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        for each in (ready[0], *done):
            os.close(each)
        os.waitpid(child, 0)


def build(sandbox: Sandbox, trees: Trees, user: int | None) -> None:
    """Give this process the file system of the sandbox. `user` will be its user and group, None for the present ones.

    Call this in new namespaces for mounts and processes, in a process that is in the latter.
    """
    kernel.mount("none", "/", "", kernel.RECURSIVE | kernel.PRIVATE)
    if sandbox.view is View.USER:
        _cover_root(sandbox)
    else:
        _new_root(sandbox, trees, user)


# ---- View.USER


def _cover_root(sandbox: Sandbox) -> None:
    shared = os.open(sandbox.shared, os.O_PATH | os.O_CLOEXEC) if sandbox.shared else None
    _hide(sandbox.hidden)
    if shared is not None:
        os.makedirs(sandbox.shared, exist_ok=True)
        kernel.mount(f"/proc/self/fd/{shared}", sandbox.shared, "", kernel.BIND)
        os.close(shared)
    if os.path.isdir("/dev/shm") and not sandbox.shared.startswith("/dev/shm/"):  # it has the data that clients send
        _temporary("/dev/shm", sandbox)
    if sandbox.scratch:
        os.makedirs(sandbox.scratch, exist_ok=True)
        _temporary(sandbox.scratch, sandbox)
    _mount_proc(read_only=False)


def _hide(paths: Iterable[str]) -> None:
    for path in paths:
        if os.path.isdir(path):
            kernel.mount("tmpfs", path, "tmpfs", _SAFE, "mode=0755,size=1m")
        elif os.path.exists(path):
            kernel.mount("/dev/null", path, "", kernel.BIND)


def _temporary(place: str, sandbox: Sandbox) -> None:
    kernel.mount("tmpfs", place, "tmpfs", _SAFE, f"mode=0700,{_size(sandbox)}")


def _size(sandbox: Sandbox) -> str:
    return f"nr_inodes={_DIRECTORY_FILES}" + (f",size={sandbox.scratch_bytes}" if sandbox.scratch_bytes else "")


# ---- View.GRANTED


def _new_root(sandbox: Sandbox, trees: Trees, user: int | None) -> None:
    paths = [*system_paths(), *interpreter_paths(sandbox.private)]  # before the root changes
    kernel.mount("tmpfs", "/tmp", "tmpfs", _SAFE, "mode=0755,size=1m")
    os.chdir("/tmp")
    os.mkdir(_OLD[1:])
    kernel.pivot_root(_OLD[1:])
    os.chdir("/")
    _mount_proc(read_only=True)  # a process could raise its priority there
    root = _Root()
    _make_private(sandbox, user)
    for path in paths:
        root.show(path)
    _make_devices(sandbox)
    for path in sorted({*sandbox.read, *sandbox.write}):
        _grant(path, 0 if path in sandbox.write else kernel.READ_ONLY, trees.get(path))
    _hide(sandbox.hidden)
    if sandbox.shared:
        os.makedirs(sandbox.shared, exist_ok=True)
        kernel.mount(_OLD + sandbox.shared, sandbox.shared, "", kernel.BIND)
        kernel.restrict(sandbox.shared, _SAFE)
    if sandbox.scratch:
        os.makedirs(sandbox.scratch, exist_ok=True)
        kernel.mount(f"{_PRIVATE}/scratch", sandbox.scratch, "", kernel.BIND)
    _write_settings(sandbox, user)
    if os.path.isdir(_PRIVATE):
        kernel.detach(_PRIVATE)
        os.rmdir(_PRIVATE)
    kernel.detach(_OLD)
    os.rmdir(_OLD)
    kernel.mount("none", "/", "", kernel.REMOUNT | kernel.BIND | kernel.READ_ONLY | _SAFE)


class _Root:
    """The parts of the old root that the new root shows, at the same paths."""

    def __init__(self) -> None:
        self._shown: list[str] = []

    def show(self, path: str) -> None:
        """Show `path`, read-only, and the symbolic links on the way there. Do nothing if it does not exist."""
        here = self._follow(path)
        if here is None or any(f"{here}/".startswith(f"{each}/") for each in self._shown):
            return
        if os.path.isdir(_OLD + here):
            os.makedirs(here, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(here), exist_ok=True)
            Path(here).touch()
        kernel.mount(_OLD + here, here, "", kernel.BIND | kernel.RECURSIVE)
        kernel.restrict(here, kernel.READ_ONLY | _SAFE)
        self._shown.append(here)

    def _follow(self, path: str) -> str | None:
        """Make the symbolic links of a path and their directories. Return the path's target, None if it has none."""
        parts, here, links = deque(path.split("/")), "", 0
        while parts:
            part = parts.popleft()
            if part in ("", "."):
                continue
            if part == "..":
                here = os.path.dirname(here) if here else ""
                continue
            there = f"{here}/{part}"
            if not os.path.islink(_OLD + there):
                here = there
                continue
            links += 1
            target = os.readlink(_OLD + there)
            if links > _MAX_LINKS:
                return None
            if not os.path.lexists(there):
                os.makedirs(here or "/", exist_ok=True)
                os.symlink(target, there)
            parts.extendleft(reversed(target.split("/")))
            if target.startswith("/"):
                here = ""
        return here if here and os.path.exists(_OLD + here) else None


def _make_private(sandbox: Sandbox, user: int | None) -> None:
    """Mount the private file system in memory, with the process's scratch directory, /tmp and /dev/shm."""
    os.mkdir("/tmp")
    os.mkdir("/dev")
    if not sandbox.scratch:
        return
    os.mkdir(_PRIVATE)
    kernel.mount("tmpfs", _PRIVATE, "tmpfs", _SAFE, f"mode=0755,{_size(sandbox)}")
    for name in ("scratch", "tmp", "shm"):
        os.mkdir(f"{_PRIVATE}/{name}", 0o700)
        if user is not None:
            os.chown(f"{_PRIVATE}/{name}", user, user)
    kernel.mount(f"{_PRIVATE}/tmp", "/tmp", "", kernel.BIND)
    os.mkdir("/dev/shm")
    kernel.mount(f"{_PRIVATE}/shm", "/dev/shm", "", kernel.BIND)


def _make_devices(sandbox: Sandbox) -> None:
    for path in (*(f"/dev/{name}" for name in _DEVICES), *sandbox.devices):
        if os.path.exists(_OLD + path):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            Path(path).touch()
            kernel.mount(_OLD + path, path, "", kernel.BIND)
            kernel.restrict(path, kernel.NO_SUID | kernel.NO_EXEC)
    for name, target in _DEVICE_LINKS.items():
        os.symlink(target, f"/dev/{name}")


def _grant(path: str, flags: int, tree: int | None) -> None:
    """Mount a granted directory, from its detached mount or from the old root."""
    place = _open(_OLD + path, path) if tree is None else tree
    if place is None:
        return
    if os.path.isdir(f"/proc/self/fd/{place}"):
        os.makedirs(path, exist_ok=True)
    elif not os.path.exists(path):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        Path(path).touch()
    if tree is None:
        kernel.mount(f"/proc/self/fd/{place}", path, "", kernel.BIND | kernel.RECURSIVE)
    else:
        kernel.attach(tree, path)
    kernel.restrict(path, flags | _SAFE)
    os.close(place)


def _write_settings(sandbox: Sandbox, user: int | None) -> None:
    """Write the names of the users and groups that the process may see, since it does not see those of the system."""
    number = os.getuid() if user is None else user
    group = os.getgid() if user is None else user
    home = sandbox.scratch or "/"
    users = {0: f"root:x:0:0::{home}:/bin/sh", 65534: "nobody:x:65534:65534::/:/bin/false"}
    groups = {0: "root:x:0:", 65534: "nogroup:x:65534:"}
    users.setdefault(number, f"atoll:x:{number}:{group}::{home}:/bin/sh")
    groups.setdefault(group, f"atoll:x:{group}:")
    os.makedirs("/etc", exist_ok=True)
    Path("/etc/passwd").write_text("\n".join(users.values()) + "\n")
    Path("/etc/group").write_text("\n".join(groups.values()) + "\n")


def _mount_proc(read_only: bool) -> None:
    os.makedirs("/proc", exist_ok=True)
    kernel.mount("proc", "/proc", "proc", _SAFE | kernel.NO_EXEC)
    for name in _PROC_READ_ONLY:
        with suppress(FileNotFoundError):
            kernel.mount(f"/proc/{name}", f"/proc/{name}", "", kernel.BIND | kernel.RECURSIVE)
            kernel.restrict(f"/proc/{name}", kernel.READ_ONLY | _SAFE | kernel.NO_EXEC)
    null = f"{_OLD}/dev/null" if os.path.exists(_OLD) else "/dev/null"
    for name in _PROC_HIDDEN:
        if os.path.exists(f"/proc/{name}"):
            kernel.mount(null, f"/proc/{name}", "", kernel.BIND)
    if read_only:
        kernel.restrict("/proc", kernel.READ_ONLY | _SAFE | kernel.NO_EXEC)


# ---- paths of the interpreter and the system

# Some systems have in /nix or /gnu what others have in /usr.
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store", "/gnu/store")
_SETTINGS = (
    *("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "nsswitch.conf", "resolv.conf", "hosts", "host.conf", "gai.conf"),
    *("protocols", "services", "localtime", "timezone", "mime.types", "alternatives", "ssl/certs", "ssl/openssl.cnf"),
    *("ca-certificates", "pki/tls/certs", "pki/tls/cert.pem", "pki/ca-trust/extracted", "crypto-policies"),
)
_MACHINE = ("/sys/devices/system/cpu", "/sys/devices/system/node")
_OF_PROCESSES = ("cpuinfo", "meminfo", "stat", "loadavg", "uptime", "version", "filesystems", "sys", "self")


def system_paths() -> Iterator[str]:
    """Yield the programs, libraries, data and settings of the system that a process needs. Some may not exist."""
    yield from _SYSTEM
    yield from (f"/etc/{name}" for name in _SETTINGS)
    yield from _MACHINE


def proc_paths() -> Iterator[str]:
    """Yield files with information about the machine and the process, for a process without a private /proc."""
    yield from (f"/proc/{name}" for name in _OF_PROCESSES)


def interpreter_paths(private: Iterable[str]) -> list[str]:
    """Return the directories and files of this interpreter and of its imports. They may be symbolic links.

    Leave out a directory that contains one of the `private` paths or the user's home directory, even if modules are
    imported from it.
    """
    kept_out = [f"{os.path.realpath(each)}/" for each in (str(home_directory()), *private)]
    named: tuple[str, ...] = (
        sys.executable,
        sys.prefix,
        sys.exec_prefix,
        sys.base_prefix,
        *sys.path,
        *_editable(),
        *_libraries(),
    )
    found = dict.fromkeys(os.path.abspath(each) for each in named if each and os.path.exists(each))
    return [each for each in found if not _contains(os.path.realpath(each), kept_out)]


def _contains(directory: str, paths: Iterable[str]) -> bool:
    prefix = directory.rstrip("/") + "/"
    return any(path.startswith(prefix) for path in paths)


def _editable() -> list[str]:
    """Return the editable packages that setuptools installed with a finder instead of an entry in sys.path."""
    finders = [module for name, module in list(sys.modules.items()) if name.startswith("__editable__")]
    return [str(path) for finder in finders for path in getattr(finder, "MAPPING", {}).values()]


def _libraries() -> list[str]:
    return [each for each in LIBRARY_PATH.text().split(":") if os.path.isabs(each)]
