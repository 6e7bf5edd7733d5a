"""The seccomp filter for system calls of a sandboxed process.

The filter allows everything that a computation needs. It refuses calls that make namespaces and mounts, inspect other
processes, load code into the kernel or change the machine, and calls into parts of the kernel with a history of
exploits.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct

from atoll.cluster.sandbox.kernel import system_call

_SECCOMP = {"x86_64": 317, "aarch64": 277}
_SET_FILTER, _ACTION_AVAILABLE, _ALL_THREADS = 1, 2, 1
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

# Numbers on x86_64 and aarch64; -1 if the architecture does not have the call.
_REFUSED = {
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "unshare": (272, 97),
    "setns": (308, 268),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "open_tree_attr": (467, 467),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "fanotify_init": (300, 262),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "userfaultfd": (323, 282),
    "reboot": (169, 142),
    "acct": (163, 89),
    "syslog": (103, 116),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "vhangup": (153, 58),
    "lookup_dcookie": (212, 18),
    "modify_ldt": (154, -1),
    "iopl": (172, -1),
    "ioperm": (173, -1),
}
# A new session has the default priority: see `processes.priorities`.
_REFUSED_TO_TENANTS = {"setsid": (112, 157)}
# Libraries work without these calls if the kernel reports them as missing.
_ABSENT = {"clone3": (435, 435), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426)} | {
    "io_uring_register": (427, 427)
}
_CLONE, _SOCKET, _IOCTL = (56, 220), (41, 198), (16, 29)
_NEW_NAMESPACES = 0x7E020000
_FAMILIES = (1, 2, 10, 16)  # unix, IPv4, IPv6, netlink
_TERMINAL_INPUT = (0x5412, 0x541C)  # TIOCSTI, TIOCLINUX

# Instructions of BPF: load a word, jump, return.
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCH, _FIRST, _SECOND = 0, 4, 16, 24  # offsets in seccomp_data; of arguments, those of the low half
_X32 = 0x40000000


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def has_filters() -> bool:
    """Return whether this system has filters and its architecture is known here."""
    machine = platform.machine()
    if machine not in _SECCOMP:
        return False
    action = ctypes.c_uint32(_ERRNO)
    try:
        system_call("seccomp", _SECCOMP[machine], _ACTION_AVAILABLE, 0, ctypes.byref(action))
    except OSError:
        return False
    return True


def refuse_system_calls(tenant: bool) -> None:
    """Refuse system calls to this process and its children, and additional ones if it works for a tenant.

    Call this after `no_new_privileges`. Raise OSError on failure.
    """
    machine = platform.machine()
    code = _code(machine, _REFUSED | _REFUSED_TO_TENANTS if tenant else _REFUSED)
    program = _Program(len(code) // 8, code)
    system_call("seccomp", _SECCOMP[machine], _SET_FILTER, _ALL_THREADS, ctypes.byref(program))


def _code(machine: str, not_permitted: dict[str, tuple[int, int]]) -> bytes:
    column = 0 if machine == "x86_64" else 1
    lines: list[tuple[int, int, int, int]] = []

    def refuse(number: int) -> None:
        lines.append((_RETURN, 0, 0, _ERRNO | number))

    def look(offset: int) -> None:
        lines.append((_LOAD, 0, 0, offset))

    look(_ARCH)
    lines.append((_EQUAL, 1, 0, _ARCHITECTURE[machine]))
    refuse(errno.EPERM)  # numbers of another architecture mean other calls
    look(_NUMBER)
    if machine == "x86_64":
        lines.append((_AT_LEAST, 0, 1, _X32))
        refuse(errno.EPERM)
    for table, number in ((not_permitted, errno.EPERM), (_ABSENT, errno.ENOSYS)):
        for each in table.values():
            if each[column] >= 0:
                lines.append((_EQUAL, 0, 1, each[column]))
                refuse(number)
    lines.append((_EQUAL, 0, 4, _CLONE[column]))
    look(_FIRST)
    lines.append((_ANY_BIT, 0, 1, _NEW_NAMESPACES))
    refuse(errno.EPERM)
    lines.append((_RETURN, 0, 0, _ALLOW))
    lines.append((_EQUAL, 0, 3 + len(_FAMILIES), _SOCKET[column]))
    look(_FIRST)
    for left, family in zip(range(len(_FAMILIES), 0, -1), _FAMILIES, strict=True):
        lines.append((_EQUAL, left, 0, family))
    refuse(errno.EAFNOSUPPORT)
    lines.append((_RETURN, 0, 0, _ALLOW))
    lines.append((_EQUAL, 0, 1 + len(_TERMINAL_INPUT), _IOCTL[column]))
    look(_SECOND)
    for left, request in zip(range(len(_TERMINAL_INPUT), 0, -1), _TERMINAL_INPUT, strict=True):
        lines.append((_EQUAL, left, 0, request))
    lines.append((_RETURN, 0, 0, _ALLOW))
    refuse(errno.EPERM)
    return b"".join(struct.pack("HBBI", *line) for line in lines)
