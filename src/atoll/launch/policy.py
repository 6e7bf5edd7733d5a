"""The seam for scheduling policies: which of an island's ready nodes is committed next.

A policy decides fairness; it cannot break the order. Sessions' own lines, the commit order over all islands, and the
bounds of what is in flight are the scheduler's, whatever a policy returns.

A new policy is one file in `atoll.launch.policies`, and one line in the table there. `first_come` is the simplest
example, `fair` the default.
"""

from __future__ import annotations

from typing import Any, Protocol

from atoll.state.queued_nodes import Gang, QueuedNode
from atoll.state.tenants import Tenant


class Policy(Protocol):
    """Chooses among the ready nodes of one island.

    The scheduler makes one policy for each island, and is the only one that calls it, from the controller's one thread.
    All methods are pure: no I/O, clock, or randomness, no iteration over unordered sets, so that the event log replays;
    and they return at once, since they are on the path of each gang. They raise nothing.

    To subclass it is to inherit `commit`, `charge`, `compiled` and `forget`, which do nothing here.
    """

    def add(self, node: QueuedNode[Any]) -> None:
        """The node is ready: it heads the lines of its session on all of its islands, and waits for no bytes.

        A node with gangs on several islands is added to the policy of each. It may be added a second time, after an
        island was paused: the scheduler skips the copy that `take` returns later.
        """

    def take(self) -> QueuedNode[Any] | None:
        """Remove and return the node to commit next on this island, or None.

        The scheduler calls this when the island can take a node, so as late as possible. A node that another island has
        committed meanwhile, or that was dropped, may be returned: the scheduler skips it and calls again. A policy must
        return each node that was added, sooner or later: one that keeps a node back keeps back its session on all of
        its islands.
        """

    def commit(self, gang: Gang[Any]) -> None:
        """The gang is committed, by this policy or by that of another island of its node.

        It is expected to keep `gang.devices` devices busy for `gang.estimate` nanoseconds.
        """

    def charge(self, gang: Gang[Any], nanoseconds: int) -> None:
        """The gang has ended on all of its hosts here, and took so much: nanoseconds, summed over devices.

        Called once for each gang that was committed, with 0 where it did not run. `gang.node.session` is who pays, of
        the tenant `gang.node.tenant`.
        """

    def compiled(self, session: int, tenant: Tenant, nanoseconds: int) -> None:
        """The island's CPUs, which are its devices, have compiled for the session for so long."""

    def forget(self, session: int) -> None:
        """The session has ended: nothing more of it is added, committed or charged, and what is kept of it must go.

        Its nodes that were added and not taken are dropped ones from now on.
        """
