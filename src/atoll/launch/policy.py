"""The interface of scheduling policies, which choose the ready node that an island commits next.

A policy decides fairness and cannot break the order: the scheduler keeps the lines of sessions, the commit order across
islands, and the bounds of work in flight, regardless of what a policy returns.

A new policy is one file in `atoll.launch.policies`, with the struct of its state (`atoll.state.object_dumps`), and one
line in the table there. `first_come` is the simplest example, `fair` the default. docs/contribute/policy.md lists the
other files to change.
"""

from __future__ import annotations

from typing import Any, Protocol

from atoll.state.queued_nodes import Gang, QueuedNode
from atoll.state.tenants import Tenant


class Policy(Protocol):
    """Chooses among the ready nodes of one island.

    The scheduler makes one policy per island. Only the scheduler calls it, from the controller's single thread. All
    methods are pure, so that the event log replays: no I/O, clock, randomness, or iteration over unordered sets. They
    return at once, since each gang passes through them, and they raise no exceptions.

    A subclass inherits `discard`, `commit`, `charge`, `compiled`, `tenant_changed` and `forget`, which do nothing here.
    Islands that are used together share a policy if it has `is_like` and `copy` (`launch.island_lines`).
    """

    def add(self, node: QueuedNode[Any]) -> None:
        """Add a ready node, which is at the head of its session's lines on all of its islands and lacks nothing.

        A node with gangs on several islands is added to the policy of each island. It may be added again, for
        example after an island restarted; the scheduler skips the copy that `take` returns later.
        """

    def take(self) -> QueuedNode[Any] | None:
        """Remove and return the node to commit next on this island, or None.

        The scheduler calls this when the island can take a node, as late as possible. The node may have been committed
        by another island meanwhile, or dropped: the scheduler then skips it and calls again. Each node that was added
        must be returned at some time, since a node that is not returned blocks its session on all of its islands.
        """

    def discard(self, node: QueuedNode[Any]) -> None:
        """Handle that a node of a joint gang is committed. `take` need not return it any more."""

    def commit(self, gang: Gang[Any]) -> None:
        """Handle that a gang was committed, by this policy or that of another island of its node.

        It is expected to keep `gang.devices` devices busy for `gang.estimate` nanoseconds.
        """

    def charge(self, gang: Gang[Any], nanoseconds: int) -> None:
        """Charge a gang that has ended to its session, `gang.node.session`, and tenant, `gang.node.tenant`.

        Called once per committed gang.

        Args:
          gang: the gang, which has ended on all of its hosts.
          nanoseconds: the time that it took, summed over devices; 0 if it did not run.
        """

    def compiled(self, session: int, tenant: Tenant, nanoseconds: int) -> None:
        """Charge a compilation to the session. It ran on the island's CPUs, which are also its devices."""

    def tenant_changed(self, tenant: Tenant) -> None:
        """Apply changed settings of a tenant, whose nodes may have been added."""

    def forget(self, session: int) -> None:
        """Forget a session that has ended. None of its gangs is added, committed or charged later.

        Its nodes that were added and not taken have been dropped.
        """

    def is_like(self, other: Policy) -> bool:
        """Return whether the policy of another island has equal state. Both islands have nothing to do.

        A policy that inherits this method is never shared.
        """
        return False

    def copy(self) -> Policy:
        """Return a policy with equal state, which changes separately. Nodes and tenants are not copied."""
        raise NotImplementedError
