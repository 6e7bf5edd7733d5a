"""Delay packets on a machine's link, in user space.

`bed` runs this script with NAME MILLISECONDS, or with `offloads` 0 or 1 on a machine.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import heapq
import os
import select
import socket
import struct
import subprocess
import sys
import time

_SIOCETHTOOL = 0x8946
_SET_OFFLOADS = (0x1F, 0x24, 0x17)  # TSO, GSO, TX checksums
_TUNSETIFF, _TAP = 0x400454CA, 0x1002  # IFF_TAP | IFF_NO_PI
_OUTGOING = 4  # PACKET_OUTGOING: a packet of this process
_AT_ONCE = 64


def set_offloads(on: bool) -> None:
    """Enable or disable the offloads of eth0."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for what in _SET_OFFLOADS:
            value = array.array("I", [what, int(on)])
            with contextlib.suppress(OSError):
                fcntl.ioctl(sock, _SIOCETHTOOL, struct.pack("16sP", b"eth0", value.buffer_info()[0]))


def relay(port: str, milliseconds: float) -> None:
    """Forward packets between a machine's end of its link and the bridge, on which a tap replaces the link."""
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", f"{port}d".encode(), _TAP))
    subprocess.run(["ip", "link", "set", f"{port}d", "master", "bridge0", "up"], check=True)
    wire = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
    wire.bind((port, 0))
    wire.setblocking(False)
    print("up", flush=True)
    # Time at which a packet is due, its number, and whether it goes to the tap.
    line: list[tuple[float, int, bool, bytes]] = []
    number = 0
    poller = select.poll()
    poller.register(tap, select.POLLIN)
    poller.register(wire, select.POLLIN)
    while True:
        now = time.monotonic()
        while line and line[0][0] <= now:
            _, _, to_tap, frame = heapq.heappop(line)
            with contextlib.suppress(OSError):
                if to_tap:
                    os.write(tap, frame)
                else:
                    wire.send(frame)
        poller.poll(max(0.0, (line[0][0] - now) * 1000) if line else None)
        due = time.monotonic() + milliseconds / 1000
        for _ in range(_AT_ONCE):
            before = number
            with contextlib.suppress(BlockingIOError):
                frame, sender = wire.recvfrom(65536)
                number += 1
                if sender[2] != _OUTGOING:
                    heapq.heappush(line, (due, number, True, frame))
            with contextlib.suppress(BlockingIOError):
                frame = os.read(tap, 65536)
                number += 1
                heapq.heappush(line, (due, number, False, frame))
            if number == before:
                break


if __name__ == "__main__":
    if sys.argv[1] == "offloads":
        set_offloads(sys.argv[2] == "1")
    else:
        relay(sys.argv[1], float(sys.argv[2]))
