"""Files that a Python interpreter needs: itself, what it imports, and what the system's libraries read."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

# Of the system. /nix and /gnu are where some systems keep what others have in /usr.
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store", "/gnu/store")
_SETTINGS = (
    *("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "nsswitch.conf", "resolv.conf", "hosts", "host.conf", "gai.conf"),
    *("protocols", "services", "localtime", "timezone", "mime.types", "alternatives", "ssl/certs", "ssl/openssl.cnf"),
    *("ca-certificates", "pki/tls/certs", "pki/tls/cert.pem", "pki/ca-trust/extracted", "crypto-policies"),
)
_MACHINE = ("/sys/devices/system/cpu", "/sys/devices/system/node")
_OF_PROCESSES = ("cpuinfo", "meminfo", "stat", "loadavg", "uptime", "version", "filesystems", "sys", "self")


def system_paths() -> Iterator[str]:
    """Programs, libraries and data of the system, and the settings of it that a process reads. Some may not exist."""
    yield from _SYSTEM
    yield from (f"/etc/{name}" for name in _SETTINGS)
    yield from _MACHINE


def proc_paths() -> Iterator[str]:
    """Return files that tell a process about the machine and itself, for a process without a private /proc."""
    yield from (f"/proc/{name}" for name in _OF_PROCESSES)


def interpreter_paths(private: Iterable[str]) -> list[str]:
    """Return this interpreter and all that it imports from: directories and files, which may be symbolic links.

    Leave out a directory that contains one of the `private` paths or the user's home directory, even if modules are
    imported from it.
    """
    kept_out = [f"{os.path.realpath(each)}/" for each in (str(Path.home()), *private)]
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
    """Packages that setuptools has installed in place, by a finder and not by an entry of sys.path."""
    finders = [module for name, module in list(sys.modules.items()) if name.startswith("__editable__")]
    return [str(path) for finder in finders for path in getattr(finder, "MAPPING", {}).values()]


def _libraries() -> list[str]:
    return [each for each in os.environ.get("LD_LIBRARY_PATH", "").split(":") if os.path.isabs(each)]
