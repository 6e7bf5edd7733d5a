"""The connections of collectives that gloo runs for a world, which close in a way that gloo reports.

Gloo has no way to end a collective from outside. It reports the end of a connection to the devices that use it, but not
always:

- If a connection ends while a message has been sent or received in part, gloo forgets the message, and its device waits
  forever. The same holds for a message that gloo cannot write, since the other host has closed the connection. So
  connections are closed for reading only, between two messages, and they remain open for the other host until it has
  closed them as well.
- Devices connect to each other in turn. If one fails meanwhile, another one waits for it for 30 s. So connections are
  closed only after all devices have connected.

Gloo has one thread per world, which waits for all connections with epoll. Linux shows its set of descriptors.
"""

from __future__ import annotations

import array
import fcntl
import os
import re
import socket
import struct
import termios
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from select import EPOLLONESHOT, EPOLLOUT

# A line about a descriptor in the set of an epoll descriptor, in /proc/self/fdinfo.
_FIELDS = re.compile(r"tfd:\s*(\d+) events:\s*([0-9a-f]+) .*\bino:([0-9a-f]+)")
# A connection is between two messages if nothing has arrived for this time. Linux measures it in steps of 4 ms.
_IDLE_MILLISECONDS = 8
# In `struct tcp_info`: the time since data arrived, in ms.
_TCP_INFO_BYTES = 104
_LAST_DATA_RECEIVED = struct.Struct("52xI")
_DRAIN_BYTES = 1 << 20


@dataclass
class _Connection:
    """A copy of one of gloo's sockets, which keeps the connection open after gloo has closed its own."""

    socket: socket.socket
    is_shut: bool = False


class GlooConnections:
    """The connections of one world's collectives. `epolls` are the descriptors that gloo's thread waits for."""

    def __init__(self, epolls: Iterable[int]) -> None:
        # Copies keep their sets, while the numbers of gloo's own may be in use again after its end.
        self._epolls = tuple(map(os.dup, epolls))
        self._connections: dict[int, _Connection] = {}  # by inode
        self._watched: dict[int, int] = {}  # the events that gloo waits for, by inode

    def examine(self) -> bool:
        """Find new connections. Return whether devices are connecting: there are new or unfinished connections.

        If Linux does not show gloo's sets now, nothing changes, and devices may be connecting.
        """
        try:
            registered = list(self._registered())
        except OSError:
            return True
        before, self._watched = self._watched, {}
        for descriptor, inode, events in registered:
            if inode not in self._connections:
                copy = _copy(descriptor, inode)
                if copy is None:
                    continue
                if copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    copy.close()
                    continue
                self._connections[inode] = _Connection(copy)
            self._watched[inode] = events
        return not self._watched.keys() <= before.keys() or any(each & EPOLLONESHOT for each in self._watched.values())

    def shut(self, is_patient: bool) -> None:
        """Close connections for reading; with `is_patient`, only those that are between two messages."""
        for inode, each in self._connections.items():
            if inode not in self._watched:
                _drain(each.socket)
            elif not each.is_shut and not (is_patient and _is_in_message(each.socket, self._watched[inode])):
                with suppress(OSError):  # not connected yet
                    each.socket.shutdown(socket.SHUT_RD)
                    each.is_shut = True

    def release(self) -> None:
        """Close the copies of gloo's descriptors."""
        for each in self._connections.values():
            each.socket.close()
        for epoll in self._epolls:
            os.close(epoll)
        self._connections, self._epolls = {}, ()

    def _registered(self) -> Iterator[tuple[int, int, int]]:
        """Yield the descriptors in gloo's sets, with their inodes and the events that gloo waits for. Raise OSError."""
        for epoll in self._epolls:
            with open(f"/proc/self/fdinfo/{epoll}") as file:
                for fields in map(_FIELDS.match, file):
                    if fields is not None:
                        yield int(fields[1]), int(fields[3], 16), int(fields[2], 16)


def _copy(descriptor: int, inode: int) -> socket.socket | None:
    """Return a copy of a socket; None if gloo has closed it meanwhile, or if it is no socket."""
    with suppress(OSError):
        copy = os.dup(descriptor)
        if os.fstat(copy).st_ino == inode:
            with suppress(OSError):
                return socket.socket(fileno=copy)
        os.close(copy)
    return None


def _is_in_message(connection: socket.socket, events: int) -> bool:
    """Return whether a message may have been sent or received in part.

    Gloo waits until it can write if it has sent a message in part.
    """
    if events & EPOLLOUT:
        return True
    unread = array.array("i", [0])
    try:
        fcntl.ioctl(connection, termios.FIONREAD, unread)
        information = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        (milliseconds,) = _LAST_DATA_RECEIVED.unpack_from(information)
    except (OSError, struct.error):
        return False
    return unread[0] > 0 or milliseconds < _IDLE_MILLISECONDS


def _drain(connection: socket.socket) -> None:
    """Read what arrives on a connection that gloo has closed, so that the other host can send its message."""
    with suppress(OSError):
        while connection.recv(_DRAIN_BYTES, socket.MSG_DONTWAIT):
            pass
