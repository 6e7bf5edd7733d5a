"""Versions with many arrays, and many versions, are taken over and freed in steps."""

from __future__ import annotations

from typing import Any

from atoll.controller.named_arrays.vaults import _MAX_FREED
from atoll.ir.program import Mapping, Rearrange, single
from atoll.protocol import events as e
from atoll.protocol import messages as m
from atoll.telemetry.consistency import contradictions
from tests.controller.dumps import check_dump
from tests.controller.play import BROKEN, on, runs
from tests.controller.publishing_play import Trainer
from tests.work_counts import instructions_of

COUNT = 2 * _MAX_FREED + 50


def launched(play: Trainer, count: int) -> tuple[tuple[int, ...], int]:
    """Launch a program that makes views of array 10. Return their handles, and the sequence number of the run."""
    whole = (0, 1, 1)
    views = Rearrange((0,), (on(0),) * count, tuple(Mapping(0, i, whole, whole) for i in range(count)))
    play.send(m.RegisterProgram(9, single("publish", (on(0),), views)))
    handles = tuple(range(1000, 1000 + count))
    (run,) = runs(play.send(m.Launch(9, (10,), handles, ())))
    return handles, run.sequence


def publication(play: Trainer, handles: tuple[int, ...], name: str = "policy") -> m.Publish:
    return m.Publish(play.request(), name, 2, handles, tuple(map(str, handles)))


def with_version() -> Trainer:
    """A version with many arrays is complete. The session has released the array of which these are views."""
    play = Trainer()
    handles, sequence = launched(play, COUNT)
    play.done(sequence)
    play.send(publication(play, handles))
    assert len(play.vault.directory.entries) == COUNT
    play.send(m.Release((10,)))
    return play


def freed(play: Trainer, session: Any) -> list[int]:
    """Have the controller flush until it has no work. Return how many arrays of a session each flush has freed."""
    found = []
    while True:
        before = len(session.directory.entries)
        play.event(e.Flush(play.now))
        found.append(before - len(session.directory.entries))
        assert contradictions(play.controller) == []
        check_dump(play.controller)
        if not play.controller.has_work:
            return found


def test_the_arrays_of_a_removed_version_are_freed_over_several_flushes():
    play = with_version()
    play.controller.published.remove("trainer", "policy")
    assert freed(play, play.vault) == [_MAX_FREED, _MAX_FREED, 50]
    assert play.controller.ledger.total == 0
    sent = [action.message for action in play.actions if isinstance(getattr(action, "message", None), m.Free)]
    assert sum(len(each.handles) for each in sent if each.session == play.vault.number) == COUNT


def test_the_arrays_of_a_lost_version_are_freed_over_several_flushes():
    play = with_version()
    play.lose(0, "its connection broke")
    assert max(freed(play, play.vault)) == _MAX_FREED
    assert play.vault.directory.entries == {}
    assert play.controller.ledger.total == 0


def test_the_arrays_of_a_version_that_fails_are_freed_over_several_flushes():
    play = Trainer()
    handles, sequence = launched(play, COUNT)
    play.proxy(play.session, publication(play, handles))
    play.flush()
    play.worker(0, m.Failed(sequence, BROKEN))
    session = play.controller.sessions[play.session]
    play.event(e.Flush(play.now))
    assert max(freed(play, session)) == _MAX_FREED
    assert list(session.directory.entries) == [10]
    assert session.publishing == 0


def test_a_vault_may_be_closed_while_its_arrays_are_freed():
    play = with_version()
    play.controller.published.remove("trainer", "policy")
    play.event(e.Flush(play.now))
    play.close(play.session)
    play.operator(m.RemoveTenant("trainer"))
    play.flush()
    assert play.controller.vaults.by_tenant == {}
    assert play.controller.ledger.total == 0
    assert contradictions(play.controller) == []


def waiting(sessions: int) -> Trainer:
    """Each of these sessions has a version of many arrays that are not ready."""
    play = Trainer()
    for _ in range(sessions):
        play.session = play.open(token="trainer").number
        play.with_put(2)
        handles = tuple(range(100, 130))
        for handle in handles:
            play.proxy(play.session, m.Launch(2, (), (handle,), (handle,)))
        (reply,) = play.send(publication(play, handles, f"policy-{play.session}"))
        assert reply.status.ok, reply.status
    play.outbox()
    return play


def test_the_work_of_a_turn_does_not_grow_with_the_versions_that_are_not_complete():
    few, many = waiting(2), waiting(20)

    def work(play: Trainer) -> int:
        return instructions_of(lambda: play.controller.handle(e.Flush(play.now)))

    assert work(many) < work(few) + 100


def test_a_version_is_complete_in_the_turn_in_which_its_last_array_is_ready():
    play = waiting(3)
    handles = tuple(range(100, 130))
    play.report(0, m.FeedsArrived(play.session, handles))
    names = play.controller.published.names
    while play.controller.launches.in_flight:
        play.worker(0, m.Done(tuple((each, 0, 1) for each in play.controller.launches.in_flight)))
        play.event(e.Flush(play.now))
    assert (len(names.pending), names.names["trainer", f"policy-{play.session}"].failure) == (2, None)
