"""How a controller is started."""

from __future__ import annotations

import contextlib
import os

import msgspec

from atoll.cluster.settings import ClusterSettings
from atoll.errors import ClusterError

# What it says by `ready_fd`: that it listens, with its journal begun where it has one; and that all hosts have joined.
RUNS, READY = b"runs\n", b"ready\n"
# Whether a standby follows it, which goes on where this one ends; and that it is one, and follows another controller.
FOLLOWED, ALONE, FOLLOWS = b"followed\n", b"alone\n", b"follows\n"
# A bug ends it: the rest of the line says which.
FAILED = b"failed "
# A tenant is charged for that bug, and suspended if there are more: the restart does not count.
CHARGED = b"charged\n"
# The status with which it ends where another controller has taken over.
SUPERSEDED = 3


def report(descriptor: int, what: bytes) -> None:
    """To who has started this process."""
    if descriptor >= 0:
        with contextlib.suppress(OSError):  # it is not there any more
            os.write(descriptor, what)


class ControllerFailedError(ClusterError):
    """A bug has ended this controller."""


class SupersededError(ClusterError):
    """Another controller of the same cluster has taken over from this one."""


class ControllerOptions(msgspec.Struct, frozen=True):
    """How to start a controller. `parent` is the process that it must not outlive."""

    listen: str
    settings: ClusterSettings
    parent: int
    ready_fd: int = -1
    directory: str = ""  # of the cluster, with its authority: for an address with TLS
    usage_file: str = ""  # where usage is kept; "": in memory
    cache_directory: str = ""  # of compiled programs and duration estimates; "": none
    journal: str = ""  # the directory of its journal; "": it has none
    restarts: bool = False  # it goes on with what is in that
    standby: str = ""  # the address of the controller that it follows until that one is gone; "": it begins by itself
    advertise: str = ""  # by which a standby is reached; "": where it listens
