"""Set the command line and the environment that `/proc` shows for this process, as `execve` would.

A forked process shows those of its parent. Tests use both to find processes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from pathlib import Path

# From <linux/prctl.h>.
_PR_SET_MM = 35
_PR_SET_MM_MAP = 14


class _Map(ctypes.Structure):
    """`struct prctl_mm_map`."""

    _fields_ = [
        *(
            (name, ctypes.c_uint64)
            for name in (
                "start_code",
                "end_code",
                "start_data",
                "end_data",
                "start_brk",
                "brk",
                "start_stack",
                "arg_start",
                "arg_end",
                "env_start",
                "env_end",
                "auxv",
            )
        ),
        ("auxv_size", ctypes.c_uint32),
        ("exe_fd", ctypes.c_uint32),
    ]


_libc = ctypes.CDLL(None, use_errno=True)
_libc.sbrk.restype = ctypes.c_void_p
_libc.prctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong]
_shown: ctypes.Array[ctypes.c_char] | None = None  # the memory that the kernel reads


def show(arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """Show these in `/proc/self/cmdline` and `/proc/self/environ`. Raise OSError if the kernel does not allow it."""
    global _shown
    command = b"".join(each.encode(errors="surrogateescape") + b"\0" for each in arguments)
    variables = b"".join(
        f"{name}={value}".encode(errors="surrogateescape") + b"\0" for name, value in environment.items()
    )
    memory = ctypes.create_string_buffer(command + variables)
    start = ctypes.addressof(memory)
    # Numbered from the first field after the name in parentheses, which is the third field in `proc_pid_stat(5)`.
    fields = [0, 0, 0, *Path("/proc/self/stat").read_text().rpartition(")")[2].split()]
    number = [int(each) if str(each).lstrip("-").isdigit() else 0 for each in fields]
    layout = _Map(
        start_code=number[26],
        end_code=number[27],
        start_data=number[45],
        end_data=number[46],
        start_brk=number[47],
        brk=_libc.sbrk(0),
        start_stack=number[28],
        arg_start=start,
        arg_end=start + len(command),
        env_start=start + len(command),
        env_end=start + len(command) + len(variables),
        exe_fd=0xFFFFFFFF,
    )
    if _libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, ctypes.addressof(layout), ctypes.sizeof(layout), 0):
        error = ctypes.get_errno()
        raise OSError(error, "PR_SET_MM_MAP failed")
    _shown = memory
