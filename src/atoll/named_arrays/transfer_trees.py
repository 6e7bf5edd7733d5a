"""Trees of transfers: from which copy each reader of a version gets its arrays.

The published arrays are at the root, and each copy that a reader has received feeds later readers. A source feeds at
most two readers, so the publisher sends each byte at most twice, and twice as many readers can receive at each level of
the tree. If each source has fed two readers, the others wait until one of these has received its copy.

A reader may stall, and then its copy never comes. So if no transfer begins or ends for `patience` seconds, one waiting
reader gets its arrays from the source that has fed the fewest, although that source has fed two. If this does not help,
two more get them `patience` seconds later, then four, and so on up to `1 << MAX_ROUNDS`. Readers that stall thus
delay the others by the logarithm of their number.

Pure. The arrays of a version that are read together have a tree for each tenant of readers, so no reader waits for
readers of other tenants.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from atoll.named_arrays.copy_rules import Islands

# Readers that a source feeds.
MAX_FED = 2
# Copies of readers that are sources. Others can become sources again only if these end.
MAX_COPIES = 256
# Times that transfers stall after which the number of further reads does not double any more.
MAX_ROUNDS = 12

_Turns = dict[int, dict[int, None]]  # reads by session; the first session has the next turn


class TransferTree(msgspec.Struct, eq=False):
    """The readers of some arrays of a version, by the numbers of their reads.

    A source is the number of a read that was completed, or -1, -2, ... for the first, second, ... copy in the vault.

    Attributes:
      patience: the seconds after which transfers have stalled if none begins or ends.
      sessions: the sessions of all reads that wait or receive.
      reads_of: the number of these reads, by session.
      waiting: the reads that have no source. Each is also in one of the next four attributes.
      interrupted: reads that need another source. They precede the next ones.
      line: reads that need a source on other islands, one per session.
      others: further reads of these sessions. They follow those of `line`, and their sessions take turns.
      near: reads that had a source on the islands of the reader when they were added. The sessions take turns.
      running: the reads that receive, with their sources.
      beside: those of them whose source is on their own islands.
      copies: the islands of the copies that completed reads have received.
      fed: the number of readers on other islands that each source feeds or has fed.
      changed: the time at which a read of other islands was started or ended, or was added when no other was there.
      stalled: the time at which the transfers last stalled.
      rounds: how often this has let further reads start since a read of other islands was completed, at most
        `MAX_ROUNDS`.
      extra: the number of reads that may start from sources that have fed two readers.
      due: the sessions for which the caller will try to start a read of this tree.
    """

    patience: float = 0.0
    sessions: dict[int, int] = msgspec.field(default_factory=dict)
    reads_of: dict[int, int] = msgspec.field(default_factory=dict)
    waiting: dict[int, None] = msgspec.field(default_factory=dict)
    interrupted: dict[int, None] = msgspec.field(default_factory=dict)
    line: dict[int, None] = msgspec.field(default_factory=dict)
    others: _Turns = msgspec.field(default_factory=dict)
    near: _Turns = msgspec.field(default_factory=dict)
    running: dict[int, int] = msgspec.field(default_factory=dict)
    beside: set[int] = msgspec.field(default_factory=set)
    copies: dict[int, Islands] = msgspec.field(default_factory=dict)
    fed: dict[int, int] = msgspec.field(default_factory=dict)
    changed: float = 0.0
    stalled: float = 0.0
    rounds: int = 0
    extra: int = 0
    due: set[int] = msgspec.field(default_factory=set)

    @property
    def is_idle(self) -> bool:
        """Return whether no read waits or receives."""
        return not self.sessions

    def is_late(self, now: float) -> bool:
        """Return whether no transfer has begun or ended for so long that it has to be assumed that they stall."""
        return now - max(self.changed, self.stalled) > self.patience

    def heads(self) -> list[int]:
        """Return the reads that are next: one that needs a source on other islands, and one that probably does not."""
        first = self.interrupted or self.line
        return ([next(iter(first))] if first else _next(self.others)) + _next(self.near)

    def add(self, now: float, read: int, session: int, islands: Islands, originals: Sequence[Islands]) -> None:
        """Add a read of a session. Reads that have a source on their own islands do not wait behind the others."""
        if self.is_idle:
            self.changed = now
        is_near = any(its <= islands for its in (*originals, *self.copies.values()))
        if is_near:
            self.near.setdefault(session, {})[read] = None
        elif session in self.reads_of:
            self.others.setdefault(session, {})[read] = None
        else:
            self.line[read] = None
        self.waiting[read] = None
        self.sessions[read] = session
        self.reads_of[session] = self.reads_of.get(session, 0) + 1

    def choose(self, islands: Islands, originals: Sequence[Islands]) -> int | None:
        """Return the source for a reader on these islands, or None if it has to wait or if there is no source.

        Args:
          islands: the islands of the reader. A source on these islands is the best one, since it sends nothing.
          originals: the islands of the copies in the vault.
        """
        sources = {-1 - number: its for number, its in enumerate(originals)} | self.copies
        best = min((each for each, its in sources.items() if its <= islands), key=self._load, default=None)
        if best is not None:
            return best
        best = min(sources, key=self._load, default=None)
        if best is None or (self.fed.get(best, 0) >= MAX_FED and self.running and not self.extra):
            return None
        return best

    def _load(self, source: int) -> tuple[int, bool]:
        """Return a key that is smaller for sources that have fed fewer readers, and for copies of readers."""
        return self.fed.get(source, 0), source < 0

    def start(self, now: float, read: int, source: int, is_near: bool) -> None:
        """Let a source feed a read that waits. `is_near` is whether the source is on the islands of the reader."""
        self._leave(read)
        self.running[read] = source
        if is_near:
            self.beside.add(read)
            return
        self.changed = now
        if self.fed.get(source, 0) >= MAX_FED and self.extra:
            self.extra -= 1
        self.fed[source] = self.fed.get(source, 0) + 1

    def _leave(self, read: int) -> None:
        """Remove a read that waits. Its session gets its next turn after the others."""
        session = self.sessions[read]
        del self.waiting[read]
        self.interrupted.pop(read, None)
        self.line.pop(read, None)
        for turns in (self.others, self.near):
            if read in turns.get(session, ()):
                reads = turns.pop(session)
                del reads[read]
                if reads:
                    turns[session] = reads

    def stall(self, now: float) -> None:
        """Handle that `is_late`: let further reads start, twice as many as the last time.

        If not as many reads as the last time have started, there is no source, and more would not start either.
        """
        self.stalled = now
        if self.running and not self.extra:
            self.extra = 1 << self.rounds
            self.rounds = min(self.rounds + 1, MAX_ROUNDS)

    def complete(self, now: float, read: int, islands: Islands) -> int | None:
        """Handle that a read has received its copy. Return the copy that is no source any more, or None."""
        if read not in self.beside:
            self.rounds = self.extra = 0
        self._stop(now, read)
        self._end(read)
        self.copies[read] = islands
        if len(self.copies) <= MAX_COPIES:
            return None
        max_fed = max(self.copies, key=lambda each: self.fed.get(each, 0))
        self.drop(max_fed)
        return max_fed

    def _stop(self, now: float, read: int) -> None:
        del self.running[read]
        if read in self.beside:
            self.beside.remove(read)
        else:
            self.changed = now

    def _end(self, read: int) -> None:
        session = self.sessions.pop(read)
        self.reads_of[session] -= 1
        if not self.reads_of[session]:
            del self.reads_of[session]

    def wait_again(self, now: float, read: int) -> None:
        """Handle that a read was interrupted. It needs another source, before reads that have had none."""
        self._stop(now, read)
        self.waiting[read] = None
        self.interrupted[read] = None

    def forget(self, now: float, read: int) -> None:
        """Handle that a read has failed, or that its session has ended."""
        if read in self.waiting:
            self._leave(read)
        else:
            self._stop(now, read)
        self._end(read)

    def drop(self, copy: int) -> None:
        """Handle that the copy of a reader does not exist any more."""
        del self.copies[copy]
        self.fed.pop(copy, None)


def _next(turns: _Turns) -> list[int]:
    return [next(iter(turns[next(iter(turns))]))] if turns else []
