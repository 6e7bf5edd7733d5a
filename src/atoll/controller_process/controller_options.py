"""The options of a controller process, and what it reports to its parent."""

from __future__ import annotations

import contextlib
import os

import msgspec

from atoll.cluster.settings import ClusterSettings
from atoll.errors import ClusterError

# Reported to `ready_fd`: the controller listens and has begun its journal, if any; all hosts have joined.
RUNS, READY = b"runs\n", b"ready\n"
# A standby follows this controller and continues when it ends. The rest of the line is the standby's address.
FOLLOWED = b"followed "
# No standby follows this controller; this process is such a standby itself.
ALONE, FOLLOWS = b"alone\n", b"follows\n"
# A bug ends the controller. The rest of the line describes it.
FAILED = b"failed "
# The bug is charged to a tenant, which is suspended if there are more. The restart does not count.
CHARGED = b"charged\n"
# The rest of the line says why this controller cannot run.
CANNOT = b"cannot "
# Exit statuses: another controller has taken over; no other start of this version can continue from the journal.
SUPERSEDED, CANNOT_RESTART = 3, 4


def report(descriptor: int, what: bytes) -> None:
    """Report to the process that started this one."""
    if descriptor >= 0:
        with contextlib.suppress(OSError):  # that process has ended
            os.write(descriptor, what)


class ControllerFailedError(ClusterError):
    """A bug has ended this controller."""


class ControllerOptions(msgspec.Struct, frozen=True):
    """How to start a controller. It ends with the process `parent`."""

    listen: str
    settings: ClusterSettings
    parent: int
    ready_fd: int = -1
    directory: str = ""  # of the cluster, with its certificate authority; for an address with TLS
    usage_file: str = ""  # "": usage is kept in memory
    cache_directory: str = ""  # of compiled programs and duration estimates; "": none
    journal: str = ""  # directory of the journal; "": none
    restarts: bool = False  # continue from the journal
    continues: bool = False  # if only the engine ends, leave the journal, from which another engine can continue
    standby: str = ""  # address of the controller to follow until it is lost; "": begin a cluster
    advertise: str = ""  # address at which peers reach a standby; "": the address that it listens on
    lease: str = ""  # address of an external lease: see `leadership.lease_address`; "": the hosts decide
    lease_holder: str = ""  # the name in the lease; a controller that is started again has the same one
