"""Tests of the copy from which each reader of a version gets its arrays."""

from __future__ import annotations

from atoll.named_arrays.transfer_trees import MAX_COPIES, MAX_ROUNDS, TransferTree

VAULT = [frozenset({0})]


class Readers:
    """Reads on islands with the same numbers, in order, and a copy on island 0 in the vault."""

    def __init__(self, *reads: int, originals: list[frozenset[int]] | None = None) -> None:
        self.tree = TransferTree()
        self.originals = VAULT if originals is None else originals
        for read in reads:
            self.add(read)

    def add(self, read: int, session: int | None = None, island: int | None = None) -> None:
        """Add a read of a session on an island. By default, no other read uses this session or this island."""
        where = frozenset({read if island is None else island})
        self.tree.add(0.0, read, read if session is None else session, where, self.originals)

    def start(self) -> dict[int, int]:
        """Start the reads that have a source. Return the sources."""
        started: dict[int, int] = {}
        while heads := self.tree.heads():
            read = heads[0]
            source = self.tree.choose(frozenset({read}), self.originals)
            if source is None:
                break
            self.tree.start(0.0, read, source, is_near=False)
            started[read] = source
        return started

    def stall(self) -> dict[int, int]:
        """Let a long time pass in which no transfer starts or ends. Return the sources of the reads that start."""
        self.tree.stall(1.0)
        return self.start()

    def complete(self, *reads: int) -> dict[int, int]:
        for read in reads:
            self.tree.complete(0.0, read, frozenset({read}))
        return self.start()


def test_a_source_feeds_two_readers_and_later_ones_wait_for_these() -> None:
    readers = Readers(1, 2, 3, 4)
    assert readers.start() == {1: -1, 2: -1}
    assert list(readers.tree.waiting) == [3, 4]
    assert readers.complete(2) == {3: 2, 4: 2}


def test_each_source_feeds_two_of_many_readers() -> None:
    readers = Readers(*range(1, 65))
    rounds = 0
    readers.start()
    while readers.tree.running:
        rounds += 1
        readers.complete(*list(readers.tree.running))
    assert len(readers.tree.copies) == 64
    assert rounds == 6
    assert max(readers.tree.fed.values()) == 2


def test_the_source_that_has_fed_the_fewest_readers_is_chosen() -> None:
    readers = Readers(1)
    readers.start()
    readers.complete(1)
    for read, source in ((2, 1), (3, 2), (4, 3)):
        readers.add(read)
        assert readers.start() == {read: source}
        readers.complete(read)


def test_a_reader_waits_for_no_copy_if_none_is_on_its_way() -> None:
    readers = Readers(1, 2, 3)
    readers.start()
    readers.tree.forget(0.0, 1)
    readers.tree.forget(0.0, 2)
    assert readers.start() == {3: -1}


def test_readers_that_have_waited_for_long_get_a_source_that_has_fed_two_readers() -> None:
    readers = Readers(1, 2, 3, 4)
    readers.start()
    assert readers.stall() == {3: -1}
    assert list(readers.tree.waiting) == [4]


def test_each_time_transfers_stall_twice_as_many_readers_start_until_one_has_its_copy() -> None:
    readers = Readers(*range(1, 64))
    readers.start()
    assert [len(readers.stall()) for _ in range(4)] == [1, 2, 4, 8]
    assert readers.complete(17) == {18: 17, 19: 17}
    assert len(readers.stall()) == 1


def test_the_number_of_readers_that_start_when_transfers_stall_is_limited() -> None:
    most = 1 << MAX_ROUNDS
    readers = Readers(*range(1, 5 * most))
    readers.start()
    started = [len(readers.stall()) for _ in range(MAX_ROUNDS + 2)]
    assert started[-3:] == [most // 2, most, most]
    assert readers.tree.rounds == MAX_ROUNDS


def test_stalls_do_not_count_while_no_reader_has_a_source() -> None:
    readers = Readers(1, 2, 3)
    readers.start()
    assert readers.complete(1) == {3: 1}
    readers.tree.drop(1)
    readers.originals = []
    readers.tree.wait_again(0.0, 2)
    assert [readers.stall() for _ in range(80)] == [{}] * 80, "reader 3 receives, and no copy is left"
    assert (readers.tree.rounds, readers.tree.extra) == (1, 1)
    readers.originals = VAULT
    assert readers.start() == {2: -1}


def test_transfers_stall_if_none_begins_or_ends_for_long() -> None:
    readers = Readers(1, 2, 3)
    readers.tree.patience = 2.0
    readers.start()
    assert [readers.tree.is_late(now) for now in (1.0, 2.0, 2.1)] == [False, False, True]
    readers.tree.stall(2.1)
    assert [readers.tree.is_late(now) for now in (4.0, 4.2)] == [False, True]


def test_reads_on_the_islands_of_their_sources_do_not_hide_that_others_stall() -> None:
    readers = Readers(1, 2, 3)
    readers.tree.patience = 2.0
    readers.start()
    for read in range(10, 14):
        readers.add(read, session=10, island=0)
        readers.tree.start(float(read), read, -1, is_near=True)
        readers.tree.complete(float(read), read, frozenset({0}))
    assert readers.tree.is_late(2.1)


def test_the_only_read_of_a_session_precedes_further_reads_of_others_and_these_take_turns() -> None:
    readers = Readers()
    for read, session in ((1, 1), (2, 1), (3, 1), (4, 1), (5, 2), (6, 2), (7, 3)):
        readers.add(read, session)
    readers.start()
    for _ in range(3):
        readers.stall()
    assert list(readers.tree.running) == [1, 5, 7, 2, 6, 3, 4]


def test_a_copy_on_the_islands_of_the_reader_is_used_at_once_by_any_number_of_readers() -> None:
    readers = Readers(1, 2, 3, 4)
    readers.start()
    for read in (5, 6, 7):
        readers.add(read, island=0)
        assert readers.tree.heads() == [3, read]
        assert readers.tree.choose(frozenset({0}), VAULT) == -1
        readers.tree.start(0.0, read, -1, is_near=True)
    assert readers.tree.fed == {-1: 2}


def test_all_copies_in_the_vault_are_sources() -> None:
    readers = Readers(1, 2, 3, 4, 5, originals=[frozenset({0}), frozenset({9})])
    assert readers.start() == {1: -1, 2: -2, 3: -1, 4: -2}


def test_an_interrupted_read_gets_another_source_before_later_reads() -> None:
    readers = Readers(1, 2, 3, 4, 5)
    readers.start()
    readers.complete(1)  # feeds 3 and 4
    readers.tree.drop(1)
    readers.tree.wait_again(0.0, 4)
    readers.tree.wait_again(0.0, 3)
    assert readers.complete(2) == {4: 2, 3: 2}


def test_the_copies_of_readers_are_sources_after_the_loss_of_the_version() -> None:
    readers = Readers(1, 2, 3, originals=[])
    assert readers.tree.choose(frozenset({1}), []) is None
    readers.originals = VAULT
    readers.start()
    readers.originals = []
    assert readers.complete(1) == {3: 1}


def test_the_copies_that_have_fed_the_most_are_no_sources_if_there_are_too_many() -> None:
    readers = Readers(*range(1, MAX_COPIES + 2))
    readers.start()
    while readers.tree.running:
        readers.complete(*list(readers.tree.running))
    assert len(readers.tree.copies) == MAX_COPIES
    assert readers.tree.fed.keys() <= {*readers.tree.copies, -1}
