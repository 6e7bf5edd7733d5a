"""Trees of transfers: from which copy each reader of a version gets its arrays.

The published arrays are at the root, and each copy that a reader has received feeds later readers. A source feeds at
most two readers, so the publisher sends each byte at most twice, and twice as many readers can receive at each level of
the tree. If each source has fed two readers, further readers wait in the order of their requests until a copy is
complete. They do not wait if no copy is on its way, or if none was completed for a long time: then the source that has
fed the fewest readers feeds one more.

Pure. The arrays of a version that are read together have a tree for each tenant of readers, so no reader waits for
readers of other tenants.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from atoll.named_arrays.copy_rules import Islands

# Readers that a source feeds.
MOST_FED = 2
# Copies of readers that are sources. Others can become sources again only if these end.
MOST_COPIES = 256


@dataclass(eq=False)
class TransferTree:
    """The readers of some arrays of a version, by the numbers of their reads.

    A source is the number of a read that was completed, or -1, -2, ... for the first, second, ... copy in the vault.

    Attributes:
      waiting: the reads that have no source, in the order of their requests.
      running: the reads that receive, with their sources.
      copies: the islands of the copies that completed reads have received.
      fed: the number of readers on other islands that each source feeds or has fed.
      changed: the time at which a read was started or ended, or was added when no other one was there.
    """

    waiting: dict[int, None] = field(default_factory=dict)
    running: dict[int, int] = field(default_factory=dict)
    copies: dict[int, Islands] = field(default_factory=dict)
    fed: dict[int, int] = field(default_factory=dict)
    changed: float = 0.0

    @property
    def is_idle(self) -> bool:
        """Return whether no read waits or receives."""
        return not (self.waiting or self.running)

    def add(self, now: float, read: int, islands: Islands, originals: Sequence[Islands]) -> None:
        """Add a read. It waits behind the others unless it has a source on its own islands."""
        if self.is_idle:
            self.changed = now
        is_near = any(its <= islands for its in (*originals, *self.copies.values()))
        self.waiting = {read: None} | self.waiting if is_near else self.waiting | {read: None}

    def choose(self, islands: Islands, originals: Sequence[Islands], is_late: bool) -> int | None:
        """Return the source for a reader on these islands, or None if it has to wait or if there is no source.

        Args:
          islands: the islands of the reader. A source on these islands is the best one, since it sends nothing.
          originals: the islands of the copies in the vault.
          is_late: whether the reader has waited for so long that a source may feed more than two readers.
        """
        sources = {-1 - number: its for number, its in enumerate(originals)} | self.copies
        best = min((each for each, its in sources.items() if its <= islands), key=self._load, default=None)
        if best is not None:
            return best
        best = min(sources, key=self._load, default=None)
        if best is None or (self.fed.get(best, 0) >= MOST_FED and self.running and not is_late):
            return None
        return best

    def _load(self, source: int) -> tuple[int, bool]:
        """Return a key that is smaller for sources that have fed fewer readers, and for copies of readers."""
        return self.fed.get(source, 0), source < 0

    def start(self, now: float, read: int, source: int, is_near: bool) -> None:
        """Let a source feed a read that waits. `is_near` is whether the source is on the islands of the reader."""
        del self.waiting[read]
        self.running[read] = source
        self.changed = now
        if not is_near:
            self.fed[source] = self.fed.get(source, 0) + 1

    def complete(self, now: float, read: int, islands: Islands) -> int | None:
        """Handle that a read has received its copy. Return the copy that is no source any more, or None."""
        del self.running[read]
        self.changed = now
        self.copies[read] = islands
        if len(self.copies) <= MOST_COPIES:
            return None
        most_fed = max(self.copies, key=lambda each: self.fed.get(each, 0))
        self.drop(most_fed)
        return most_fed

    def wait_again(self, now: float, read: int) -> None:
        """Handle that a read was interrupted. It needs another source, and has the place of its request."""
        del self.running[read]
        self.changed = now
        self.waiting = dict.fromkeys(sorted([read, *self.waiting]))

    def forget(self, now: float, read: int) -> None:
        """Handle that a read has failed, or that its session has ended."""
        self.waiting.pop(read, None)
        if self.running.pop(read, None) is not None:
            self.changed = now

    def drop(self, copy: int) -> None:
        """Handle that the copy of a reader does not exist any more."""
        del self.copies[copy]
        self.fed.pop(copy, None)
