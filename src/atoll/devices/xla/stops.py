"""Stops runs that are in a loop. XLA cannot stop a run, so programs call this module from their loops.

`loop_checks` inserts these checks. A check passes the loop's condition through unchanged. While no run is to be
stopped, it costs a few machine instructions; otherwise, it looks up the calling run, and ends it with an error. XLA
runs the loops of GPUs on the host, which reads the condition of each iteration, so checks run on the host.

A run on several devices must end on all of them at the same time, or a device could wait for another in a collective
forever. While all devices of the run are in a check, none is in a collective. A GPU has completed the earlier
iterations by then.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
import struct
import threading
import time
from dataclasses import dataclass
from functools import cache

import jax

from atoll.devices.xla import xla_custom_calls

TARGET = "atoll_loop_check"
# The names under which XLA registers custom calls, by platform.
XLA_PLATFORMS = {"cpu": "cpu", "cuda": "CUDA", "rocm": "ROCM"}
# A request to stop a run is valid for this time, since the run may still wait for its devices. The controller repeats
# the request.
STOP_SECONDS = 5.0
# A device waits for this time in a check for the run's other devices, which may wait for it in a collective.
_MEET_SECONDS = 0.5
_LAUNCH_IDS = 0x7FFFFFFF
_PAGE = mmap.PAGESIZE


@dataclass
class _Stop:
    """A run that must end. `here` of its devices are in a check."""

    until: float
    text: str
    devices: int  # of this process on which the run has not ended, or more
    here: int = 0
    ends: bool = False


class Stops:
    """The runs that must end on this process's devices: see `stops_here`."""

    def __init__(self, platform: str) -> None:
        self._devices = jax.local_device_count()
        self._runs: dict[int, _Stop] = {}  # by launch ID
        self._changed = threading.Condition()
        check = xla_custom_calls.address_of(self._check)
        self._code = _machine_code(check)
        address = check if self._code is None else self._code.address
        xla_custom_calls.register_address(TARGET, address, XLA_PLATFORMS[platform])

    def stop(self, sequence: int, text: str, devices: int = 0) -> None:
        """End the run of this sequence number if it reaches a check within `STOP_SECONDS`.

        `devices` is the number of devices of this process on which it has not ended, or 0 if that is unknown.
        """
        with self._changed:
            self._forget()
            until = time.monotonic() + STOP_SECONDS
            count = devices or self._devices
            stop = self._runs.setdefault(launch_id(sequence), _Stop(until, text, count))
            stop.until, stop.devices = until, count
            self._enable_checks(True)

    def _forget(self) -> None:
        now = time.monotonic()
        self._runs = {run: each for run, each in self._runs.items() if each.until > now or each.here}

    def _enable_checks(self, enabled: bool) -> None:
        if self._code is not None:
            self._code.flag[0] = enabled

    def _check(self, frame: xla_custom_calls.CallFrame) -> int | None:
        """Return an error for a run that must end. Several of XLA's threads call this."""
        devices = ctypes.c_int32.from_address(frame.attributes.values[0].contents.value).value
        with self._changed:
            if self._runs:
                self._forget()
                self._enable_checks(bool(self._runs))
            stop = self._runs.get(xla_custom_calls.run_id(frame))
            if stop is not None and self._meet(stop, min(devices, stop.devices)):
                return xla_custom_calls.error(frame, stop.text)
        return None

    def _meet(self, stop: _Stop, devices: int) -> bool:
        """Wait until all devices of a run are in a check. Return False if that takes too long."""
        stop.here += 1
        if stop.here >= devices:
            stop.ends = True
            self._changed.notify_all()
        self._changed.wait_for(lambda: stop.ends, _MEET_SECONDS)
        stop.here -= 1
        return stop.ends


@cache
def stops_here(platform: str) -> Stops | None:
    """Return the only `Stops` of this process; None for a platform whose devices run loops without the host.

    XLA keeps the first function that is registered for a target.
    """
    return Stops(platform) if platform in XLA_PLATFORMS else None


def launch_id(sequence: int) -> int:
    """Return the number under which XLA knows the run."""
    return sequence & _LAUNCH_IDS


class _Code:
    """One page of machine code, and a second page with the flag that the code reads."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 2 * _PAGE)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.flag = (ctypes.c_int * 1).from_buffer(self._memory, _PAGE)

    def write(self, code: bytes) -> bool:
        """Write the code and make it executable. Return False if the system does not permit that."""
        self._memory[: len(code)] = code
        protect = ctypes.CDLL(None, use_errno=True).mprotect
        protect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        return int(protect(self.address, _PAGE, mmap.PROT_READ | mmap.PROT_EXEC)) == 0


def _machine_code(check: int) -> _Code | None:
    """Return code that calls `check` only if the flag is set; None on a machine other than x86-64."""
    if platform.machine() != "x86_64":
        return None
    code = _Code()
    return code if code.write(_assembled(code.address + _PAGE, check)) else None


def _assembled(flag: int, check: int) -> bytes:
    """Return the machine code. `rdi` points to the frame: see `xla_custom_calls.CallFrame` for the offsets."""
    jump = "jne check"
    lines: list[bytes | str] = [
        *(b"\x48\x83\x7f\x08\x00", jump),  # cmp qword [rdi + 8], 0: the extension
        *(bytes((0x83, 0x7F, 0x20, xla_custom_calls.EXECUTE)), jump),  # cmp dword [rdi + 32], EXECUTE: the stage
        b"\x48\xb8" + struct.pack("<Q", flag),  # mov rax, flag
        *(b"\x83\x38\x00", jump),  # cmp dword [rax], 0
        b"\x31\xc0\xc3",  # xor eax, eax; ret
    ]
    length = sum(2 if line == jump else len(line) for line in lines)
    code = b""
    for line in lines:
        code += bytes((0x75, length - len(code) - 2)) if isinstance(line, str) else line
    return code + b"\x48\xb8" + struct.pack("<Q", check) + b"\xff\xe0"  # check: mov rax, check; jmp rax
