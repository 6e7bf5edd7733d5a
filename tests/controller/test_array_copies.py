"""Tests of copies of published arrays: replicas, drained islands, and islands that fail."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import msgspec
import pytest

from atoll.controller.named_arrays.array_copies import _MAX_LOOKED
from atoll.errors import Code
from atoll.ir.program import Mapping, Rearrange, single
from atoll.ir.types import Sharding
from atoll.named_arrays.version_records import Version
from atoll.named_arrays.version_states import VersionState
from atoll.protocol import messages as m
from tests.controller.dumps import check_dump
from tests.controller.play import BROKEN, on, runs
from tests.controller.publishing_play import Trainer


class Copying(Trainer):
    """Trainer that publishes a version, which the controller copies to other islands."""

    @property
    def version(self) -> Version:
        (version,) = self.controller.published.names.versions()
        return version

    def replicate(self, replicas: int = 2) -> list[tuple[int, m.Run]]:
        """Publish array 10 with replicas, and complete it. Return the runs that copy it."""
        view, sequence = self.view()
        (reply,) = self.send(m.Publish(self.request(), "policy", 2, (view,), ("w",), replicas=replicas))
        assert reply.status.ok, reply.status
        self.worker(0, m.Done(((sequence, 0, 1),)))
        return self.runs()

    def runs(self) -> list[tuple[int, m.Run]]:
        """Return the runs since the last call, with their hosts."""
        return [(to[1], each) for to, each in self.sent() if isinstance(each, m.Run)]

    def end(self, runs: list[tuple[int, m.Run]]) -> list[tuple[int, m.Run]]:
        """Let the hosts complete these runs. Return the next runs."""
        for host, run in runs:
            self.worker(host, m.Done(((run.sequence, 0, 1),)))
        return self.runs()

    def leave(self) -> None:
        """End all sessions."""
        for session in list(self.controller.connections.sessions):
            self.close(session)
        self.flush()

    def fill(self, *devices: int) -> None:
        """Let another session fill these devices of host 1."""
        before, self.session = self.session, self.open(token="eve").number
        for device in devices:
            self.with_put(device, device)
            self.report(1, m.FeedsArrived(self.session, (device,)))
            (run,) = runs(self.send(m.Launch(device, (), (device,), (device,))))
            self.done(run.sequence, host=1)
        self.session = before

    def drain(self, island: int = 0) -> list[tuple[int, m.Run]]:
        """Drain an island as an operator, and let the sessions leave it. Return the runs that follow."""
        self.operator(m.DrainRequest(island))
        sent = self.sent()
        for (_, number), each in sent:
            if isinstance(each, m.Quiesce):
                self.proxy(number, m.Quiesced(each.migration))
        return [(to[1], each) for to, each in sent if isinstance(each, m.Run)] + self.runs()

    def replies(self) -> list[m.OperationReply]:
        """Let a second pass. Return the replies to the operator."""
        self.tick(self.now + 1.0)
        return [each for each in self.outbox() if isinstance(each, m.OperationReply)]

    def ended_islands(self) -> list[int]:
        self.tick(self.now + 1.0)
        return [each.island for each in self.outbox() if isinstance(each, m.EndIsland)]


def test_a_replica_is_copied_to_another_island() -> None:
    play = Copying()
    runs = play.replicate()
    assert {host for host, _ in runs} == {0, 1}
    assert {run.session for _, run in runs} == {play.vault.number}
    play.end(runs)
    assert play.controller.published.copies.is_on(1)
    assert (play.version.held, play.version.copies) == ([1], {0: (2,)})
    assert play.version.device_numbers == (0, 2)


def test_a_version_without_replicas_is_not_copied() -> None:
    play = Copying()
    assert play.replicate(1) == []


def test_replicas_count_against_the_memory_of_the_publisher() -> None:
    play = Copying()
    play.end(play.replicate())
    play.leave()
    memory = play.controller.tenants.by_name["trainer"].memory
    assert memory is not None
    assert memory.total == 2 * 8


def test_a_replica_takes_the_place_of_an_array_that_is_lost() -> None:
    play = Copying()
    play.end(play.replicate())
    reader = play.open(token="reader").number
    opened = play.opened(reader)
    play.lose(0, "it burnt")
    play.flush()
    assert play.version.state is VersionState.COMPLETE
    assert (play.version.held, play.version.copies) == ([2], {})
    play.proxy(reader, m.ReadVersion(opened.reader, 0, (on(3),), (7,)))
    sent = play.sent()
    assert m.ShareBuffers(play.vault.number, reader, ((2, 3 << 60),)) in [each for _, each in sent]
    assert {to for to, each in sent if isinstance(each, m.Run)} == {("host", 1)}


def test_a_lost_replica_is_copied_again_when_its_island_restarts() -> None:
    play = Copying()
    play.end(play.replicate())
    play.lose(1, "it burnt")
    play.flush()
    assert (play.version.held, play.version.copies) == ([1], {})
    assert "no other island with" in play.version.problem
    play.join_again(1)
    play.tick(play.now + 1.0)
    play.end(play.runs())
    assert len(play.version.copies[0]) == 1
    assert play.version.problem == ""


def test_a_version_whose_copies_are_all_lost_is_lost() -> None:
    play = Copying()
    play.end(play.replicate())
    play.lose(0, "it burnt")
    play.lose(1, "it burnt")
    play.flush()
    assert play.version.state is VersionState.LOST
    assert play.vault.directory.entries == {}


def test_a_version_that_is_freed_while_it_is_copied_leaves_nothing() -> None:
    play = Copying()
    runs = play.replicate()
    play.ask(play.connect("operator", token="trainer"), m.RemoveArraysRequest("policy", 1))
    play.end(runs)
    assert play.vault.directory.entries == {}
    play.leave()
    assert not any(play.controller.ledger.used.values())


def test_a_copy_that_fails_is_named_and_tried_again() -> None:
    play = Copying()
    for host, run in play.replicate():
        play.worker(host, m.Failed(run.sequence, BROKEN))
    play.flush()
    assert "division by zero" in play.version.problem
    assert list(play.vault.directory.entries) == [1]
    play.tick(play.now + 11.0)
    play.end(play.runs())
    assert len(play.version.copies[0]) == 1


def test_a_copy_is_not_made_where_it_does_not_fit() -> None:
    play = Copying(device_memory=12)
    play.fill(2, 3)
    assert play.replicate() == []
    assert "its arrays need 8 B on device 0 of host 1" in play.version.problem


def test_the_copies_of_one_tenant_do_not_delay_those_of_another() -> None:
    play = Copying()
    whole, count = (0, 1, 1), 6
    mappings = tuple(Mapping(0, output, whole, whole) for output in range(count))
    sequences = []
    for session in (play.session, play.open(token="reader").number):
        play.session = session
        play.array(11)
        play.send(m.RegisterProgram(6, single("publish", (on(0),), Rearrange((0,), (on(0),) * count, mappings))))
        views = tuple(range(200, 200 + count))
        sequences += [run.sequence for run in runs(play.send(m.Launch(6, (11,), views, ())))]
        for view in views:
            play.send(m.Publish(view, f"policy-{view}", 2, (view,), ("w",), replicas=2))
    play.done(*sequences)
    copies = play.controller.published.copies
    assert Counter(tenant for tenant, _, _ in copies.running) == {"trainer": 4, "reader": 4}


def test_an_array_without_devices_cannot_be_published() -> None:
    play = Copying()
    nothing = msgspec.structs.replace(on(0), sharding=Sharding(()))
    play.send(m.RegisterProgram(6, single("nothing", (), Rearrange((), (nothing,), ()))))
    play.send(m.Launch(6, (), (50,), ()))
    replies = play.send(m.Publish(1, "policy", 2, (50,), ("w",), replicas=2))
    assert [each.status.code for each in replies if isinstance(each, m.Published)] in ([Code.INVALID_ARGUMENT], [])
    assert list(play.controller.published.names.versions()) == []


@pytest.mark.parametrize(("replicas", "code"), [(0, Code.INVALID_ARGUMENT), (3, Code.INVALID_ARGUMENT)])
def test_a_number_of_replicas_that_no_cluster_or_not_this_one_can_have_is_refused(replicas: int, code: Code) -> None:
    play = Copying()
    view, _ = play.view()
    (reply,) = [
        each
        for each in play.send(m.Publish(1, "policy", 2, (view,), ("w",), replicas=replicas))
        if isinstance(each, m.Published)
    ]
    assert reply.status.code == code


# ---- drains


def test_a_drained_island_ends_when_its_published_arrays_are_on_another_one() -> None:
    play = Copying()
    play.complete()
    play.leave()
    runs = play.drain()
    assert {host for host, _ in runs} == {0, 1}
    assert play.ended_islands() == []
    play.end(runs)
    assert play.version.device_numbers == (2,)
    assert list(play.vault.directory.entries) == [2]
    assert play.ended_islands() == [0]
    assert play.version.state is VersionState.COMPLETE
    reader = play.open(token="reader").number
    assert play.opened(reader).version == 1


def test_a_pinned_version_that_was_replaced_moves_as_well() -> None:
    play = Copying()
    play.complete(keep=1)
    reader = play.open(token="reader").number
    pinned = play.opened(reader)
    play.complete(keep=1)
    play.close(play.session)
    runs = play.drain()
    while runs:
        runs = play.end(runs)
    versions = sorted(play.controller.published.names.versions(), key=lambda each: each.number)
    assert [(each.number, each.device_numbers) for each in versions] == [(1, (2,)), (2, (2,))]
    play.proxy(reader, m.ReadVersion(pinned.reader, 0, (on(3),), (7,)))
    assert {host for host, _ in play.runs()} == {1}


def test_an_island_with_a_replica_is_drained_although_there_is_no_other_one_for_it() -> None:
    play = Copying()
    play.end(play.replicate())
    play.leave()
    assert play.drain(1) == []
    assert play.ended_islands() == [1]
    assert play.version.device_numbers == (0,)
    assert "no other island with" in play.version.problem


def test_a_drain_waits_for_a_read_from_the_island() -> None:
    play = Copying()
    play.complete()
    play.leave()
    copies = play.drain()
    reader = play.open(token="reader").number
    play.flush()
    opened = play.opened(reader)
    play.proxy(reader, m.ReadVersion(opened.reader, 0, (on(0),), (7,)))
    reads = play.runs()
    play.end(copies)
    assert play.version.device_numbers == (2,)
    assert play.ended_islands() == []
    play.end(reads)
    assert play.ended_islands() == [0]


def test_a_drain_is_refused_while_published_arrays_fit_on_no_other_island() -> None:
    play = Copying(device_memory=12)
    play.complete()
    play.fill(2, 3)
    play.close(play.session)
    assert play.drain() == []
    (reply,) = play.replies()
    assert reply.status.code == Code.FAILED_PRECONDITION
    assert "island 0 is in use: version 1 of trainer/policy: its arrays need 8 B" in reply.status.message
    assert play.version.state is VersionState.COMPLETE
    assert play.controller.published.copies.leaving == set()


def test_the_loss_of_an_island_that_is_drained_ends_the_drain() -> None:
    play = Copying("3x1x2")
    play.complete()
    play.leave()
    play.drain()
    play.lose(0, "it burnt")
    (reply,) = play.replies()
    assert "the island was lost meanwhile" in reply.status.message
    assert play.version.state is VersionState.LOST


# ---- versions that are lost while they are being copied


def lost_while_copied(play: Copying) -> list[tuple[int, m.Run]]:
    """Publish arrays on islands 0 and 1 with replicas, and open the version. Return the runs that copy array 1."""
    play.with_put(3, 2)
    play.report(1, m.FeedsArrived(play.session, (10_011,)))
    (run,) = runs(play.send(m.Launch(3, (), (11,), (10_011,))))
    play.done(run.sequence, host=1)
    view = Rearrange((0,), (on(2),), (Mapping(0, 0, (0, 1, 1), (0, 1, 1)),))
    play.send(m.RegisterProgram(6, single("publish", (on(2),), view)))
    first, sequence = play.view()
    (run,) = runs(play.send(m.Launch(6, (11,), (300,), ())))
    play.send(m.Publish(play.request(), "policy", 1, (first, 300), ("a", "b"), replicas=2))
    play.worker(0, m.Done(((sequence, 0, 1),)))
    play.worker(1, m.Done(((run.sequence, 0, 1),)))
    copies = play.runs()
    play.opened(play.open(token="reader").number)
    return [(host, run) for host, run in copies if host != 0]


def test_a_copy_of_a_version_that_was_replaced_and_then_lost_is_freed() -> None:
    play = Copying("4x1x2", device_memory=1000)
    copies, version = lost_while_copied(play), play.version
    play.complete(keep=1)
    assert version.state is VersionState.RETIRED
    play.lose(0, "it burnt")
    play.end(copies)
    assert version.error is not None
    assert (version.copies, version.devices) == ({}, {})
    assert play.vault.directory.entries == {}


def test_a_copy_of_a_version_that_was_lost_and_then_removed_is_freed() -> None:
    play = Copying("4x1x2", device_memory=1000)
    copies, version = lost_while_copied(play), play.version
    play.lose(0, "it burnt")
    play.flush()
    assert version.state is VersionState.LOST
    play.ask(play.connect("operator", token="trainer"), m.RemoveArraysRequest("policy", 1))
    assert version.state is VersionState.RETIRED
    play.end(copies)
    assert (version.copies, version.devices) == ({}, {})
    assert play.vault.directory.entries == {}


def test_a_version_that_was_replaced_and_then_lost_is_not_examined() -> None:
    play = Copying("4x1x2", device_memory=1000)
    copies, version = lost_while_copied(play), play.version
    play.complete(keep=1)
    play.lose(0, "it burnt")
    play.end(copies)
    play.controller.published.copies.examine(version)
    play.flush()
    assert play.runs() == []
    assert version.problem == ""


def test_arrays_that_are_freed_already_can_be_replaced() -> None:
    play = Copying()
    play.complete()
    version = play.version
    play.opened(play.open(token="reader").number)
    play.lose(0, "it burnt")
    play.flush()
    play.controller.vaults.keep_copies(version, {0: [2]})
    assert (version.held, version.devices) == ([2], {})


# ---- more copies than needed


def test_a_copy_that_ends_after_its_drain_was_refused_is_freed() -> None:
    play = Copying()
    play.complete()
    play.leave()
    copies = play.drain()
    play.tick(play.now + 1.0)
    play.tick(play.now + 310.0)
    assert play.controller.published.copies.leaving == set()
    play.end(copies)
    assert (play.version.held, play.version.copies) == ([1], {})
    assert list(play.vault.directory.entries) == [1]


def test_a_tenant_that_has_yet_to_read_a_copy_that_is_freed_is_charged_for_its_memory() -> None:
    play = Copying("3x1x2")
    play.end(play.replicate())
    play.leave()
    reader = play.open(token="reader").number
    opened = play.opened(reader)
    play.keep_busy(0, 1)
    play.proxy(reader, m.ReadVersion(opened.reader, 0, (on(4),), (7,)))
    assert not any(host == 0 for host, _ in play.runs()), "island 0 is full"
    trainer, guest = (play.controller.tenants.by_name[name].memory for name in ("trainer", "reader"))
    assert trainer is not None
    assert guest is not None
    assert (trainer.total, guest.total) == (2 * 8, 8), "the memory of the result is reserved"
    play.controller.vaults.keep_copies(play.version, {0: play.version.copies[0]})
    assert (trainer.total, guest.total) == (8, 2 * 8)


# ---- the cost of one step


class Crowded(Copying):
    """Trainer on several islands that counts the transfers that are lowered to copy arrays."""

    def __init__(self, topology: str = "8x1x2", memory: int = 4) -> None:
        super().__init__(topology, device_memory=10_000)
        self.lowered = 0
        self.memory = memory  # free bytes on each device of the other islands
        copies = self.controller.published.copies
        ledger, make = self.controller.launches.reservations.ledger, copies._internal.make
        free = ledger.free

        def count(*arguments: Any) -> int:
            self.lowered += 1
            return make(*arguments)

        copies._internal.make = count
        ledger.free = lambda device: self.memory if device[0] else free(device)

    def pass_seconds(self, seconds: float) -> bool:
        """Let time pass. Return whether the version was examined."""
        examined: list[object] = []
        copies = self.controller.published.copies
        examine = copies._examine
        copies._examine = lambda *arguments: examined.append(arguments) or examine(*arguments)
        self.tick(self.now + seconds)
        self.flush()
        copies._examine = examine
        return bool(examined)


def test_no_transfer_is_lowered_to_an_island_without_memory() -> None:
    play = Crowded()
    assert play.replicate() == []
    assert "its arrays need 8 B on device" in play.version.problem
    assert play.lowered == 0


def test_few_transfers_are_lowered_for_arrays_whose_scratch_memory_does_not_fit() -> None:
    play = Crowded(memory=1000)
    ledger = play.controller.launches.reservations.ledger
    ledger.lacking = lambda *wanted, **_: wanted[0][0][0] if play.lowered else None
    assert play.replicate() == []
    assert play.lowered == 2


def test_the_time_between_attempts_to_make_a_copy_doubles_until_an_island_is_ready() -> None:
    play = Crowded()
    play.replicate()
    assert play.pass_seconds(11.0)
    assert not play.pass_seconds(11.0)
    assert play.pass_seconds(11.0)
    assert not play.pass_seconds(35.0)
    play.lose(7, "it burnt")
    play.join_again(7)
    assert play.pass_seconds(1.0)
    assert play.pass_seconds(11.0)


def test_freed_memory_starts_the_next_attempt_to_make_a_copy() -> None:
    play = Crowded()
    play.replicate()
    for seconds in (11.0, 21.0, 41.0):
        assert play.pass_seconds(seconds)
    assert not play.pass_seconds(1.0)
    play.memory = 8
    assert play.pass_seconds(1.0)
    assert play.lowered == 1


def test_each_second_few_versions_are_looked_at_for_freed_memory_and_all_in_turn() -> None:
    play = Crowded()
    play.replicate()
    copies = play.controller.published.copies
    assert set(copies._awaited[play.version.key].values()) == {8}
    others = [("trainer", "other", number) for number in range(3 * _MAX_LOOKED)]
    copies._retries.update(dict.fromkeys(others, math.inf))
    copies._awaited.update({key: {(1, 0): 8} for key in others})
    play.memory = 8
    for seconds in range(1, 5):
        play.tick(play.now + 1.0)
        left = sum(key in copies._awaited for key in others)
        assert left >= len(others) - seconds * _MAX_LOOKED
    assert not copies._awaited


def test_arrays_on_many_islands_are_examined_in_several_steps() -> None:
    play = Copying("8x1x2", device_memory=1000)
    handles = []
    for island in range(8):
        play.with_put(1000 + island, 2 * island)
        play.report(island, m.FeedsArrived(play.session, (20_000 + island,)))
        (run,) = runs(play.send(m.Launch(1000 + island, (), (3000 + island,), (20_000 + island,))))
        play.done(run.sequence, host=island)
        handles.append(3000 + island)
    play.send(m.Publish(1, "policy", 2, tuple(handles), tuple(map(str, handles)), replicas=2))
    copies = play.controller.published.copies
    assert [(len(run.results), run.following) for run in copies.running.values()] == [(4, 4)]
    play.end(play.runs())


def test_a_version_that_is_being_copied_is_not_examined_again_for_each_look_at_a_drain() -> None:
    play = Copying()
    play.complete()
    play.leave()
    play.drain()
    play.tick(play.now + 1.0)
    assert [run.following for run in play.controller.published.copies.running.values()] == [1]


def test_the_refusal_of_a_drain_names_few_of_many_versions() -> None:
    play = Copying(device_memory=200)
    for number in range(10):
        play.complete(f"policy-{number}")
    play.leave()
    play.controller.launches.reservations.ledger.free = lambda device: 0
    play.drain()
    for _ in range(10):
        play.flush()
    (reply,) = play.replies()
    assert reply.status.message.count("its arrays need 8 B") == 8
    assert "and 2 more versions" in reply.status.message


def test_versions_on_an_island_are_found_without_a_look_at_those_elsewhere() -> None:
    play = Copying("4x1x2", device_memory=1000)
    play.end(play.replicate())
    names, copies = play.controller.published.names, play.controller.published.copies
    names.versions = lambda: pytest.fail("all versions are visited")
    assert [copies.is_on(island) for island in range(4)] == [True, True, False, False]
    assert copies.island_lost(2) == []
    assert copies.obstacles(3) == []


def test_the_versions_on_an_island_are_known_again_after_a_restart_of_the_controller() -> None:
    play = Copying()
    play.end(play.replicate())
    controller = check_dump(play.controller)
    controller.named_arrays.validate()
    assert [controller.published.copies.is_on(island) for island in range(2)] == [True, True]
