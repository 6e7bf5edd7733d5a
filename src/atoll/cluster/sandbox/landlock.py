"""Landlock, by which the kernel restricts the files that a process may open, independently of mounts."""

from __future__ import annotations

import ctypes
import os
import stat
import struct
from collections.abc import Iterable

from atoll.cluster.sandbox.kernel import system_call

_CREATE, _ADD, _RESTRICT = 444, 445, 446
_VERSION = 1
_BENEATH = 1

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIRECTORY = 1, 2, 4, 8
_TRUNCATE, _DEVICE_CONTROL = 1 << 14, 1 << 15
_READ = _EXECUTE | _READ_FILE | _READ_DIRECTORY
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _DEVICE_CONTROL
_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}  # number of rights, by version
_SCOPED = 3  # restrictions of abstract sockets and signals, from version 6 on


def version() -> int:
    """Return the version of this kernel's Landlock; 0 if it is missing or disabled."""
    try:
        return system_call("landlock_create_ruleset", _CREATE, 0, 0, _VERSION)
    except OSError:
        return 0


def restrict_files(read: Iterable[str], write: Iterable[str], devices: Iterable[str] = ()) -> None:
    """Irrevocably restrict this process to read and execute `read`, do everything in `write`, and use `devices`.

    Call this after `no_new_privileges`. Skip paths that do not exist. Raise OSError on failure.
    """
    found = version()
    rights = (1 << _RIGHTS.get(found, 16)) - 1
    fields = [rights, *([0] if found >= 4 else []), *([_SCOPED] if found >= 6 else [])]
    attributes = struct.pack(f"{len(fields)}Q", *fields)
    ruleset = system_call(
        "landlock_create_ruleset", _CREATE, ctypes.c_char_p(attributes), ctypes.c_size_t(len(attributes)), 0
    )
    try:
        for paths, allowed in (
            (read, _READ),
            (write, rights & ~_DEVICE_CONTROL),
            (devices, (_READ_FILE | _WRITE_FILE | _DEVICE_CONTROL)),
        ):
            for path in paths:
                _allow(ruleset, path, allowed & rights)
        system_call("landlock_restrict_self", _RESTRICT, ruleset, 0)
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        if not stat.S_ISDIR(os.fstat(place).st_mode):
            rights &= _OF_FILES
        rule = struct.pack("=Qi", rights, place)
        system_call("landlock_add_rule", _ADD, ruleset, _BENEATH, ctypes.c_char_p(rule), 0)
    finally:
        os.close(place)
