"""Tests of which process holds a lease, with simulated time and a server in memory."""

from __future__ import annotations

import msgspec
import pytest

from atoll.errors import LeaseError
from atoll.leadership.election import Claim, LeaseState
from atoll.leadership.lease_keeper import RELEASE_SECONDS, LeaseKeeper, LeaseTakenError, release_lease
from atoll.leadership.lease_record import LEASE_SECONDS, RENEW_SECONDS, RETRY_SECONDS, LeaseRecord, StoredRecord
from tests.leadership.lease_in_memory import Clock, LeaseInMemory

STANDBY = "tls://two:7000"


class Scene:
    """Server of the lease, and processes with their own clocks."""

    def __init__(self) -> None:
        self.store = LeaseInMemory()
        self.clock = Clock()

    def keeper(self, holder: str, clock: Clock | None = None) -> LeaseKeeper:
        return LeaseKeeper(self.store, holder, clock=clock or self.clock)

    def controller(self, standby: str = STANDBY) -> LeaseKeeper:
        """Return a controller that holds the lease and has named a standby."""
        keeper = self.keeper("one")
        keeper.acquire(Claim(), sleep=self.clock.sleep)
        keeper.name_standby(standby)
        keeper.step()
        return keeper

    def standby(self, clock: Clock | None = None) -> LeaseKeeper:
        """Return a standby that has lost the controller."""
        keeper = self.keeper("two", clock)
        keeper.claim(Claim(transitions=0, standby=STANDBY))
        keeper.step()
        return keeper

    def run(self, seconds: float, *keepers: LeaseKeeper) -> None:
        """Let time pass, with one step of each keeper per second."""
        for _ in range(int(seconds)):
            self.clock.now += 1
            for each in keepers:
                each.step()


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_the_first_process_acquires_a_lease_that_nobody_has(scene):
    keeper = scene.controller(standby="")
    assert keeper.holds()
    assert (scene.store.record.holder, scene.store.record.transitions) == ("one", 0)


def test_a_holder_that_renews_keeps_the_lease(scene):
    controller, standby = scene.controller(), scene.standby()
    scene.run(10 * LEASE_SECONDS, controller, standby)
    assert controller.holds()
    assert not standby.holds()
    assert standby.state is LeaseState.OBSERVED


@pytest.mark.parametrize(("seconds", "holds"), [(RENEW_SECONDS - 1, True), (RENEW_SECONDS + 1, False)])
def test_a_holder_whose_server_does_not_answer_holds_the_lease_until_the_deadline_of_its_last_renewal(
    scene, seconds, holds
):
    controller = scene.controller()
    scene.store.fails = True
    scene.run(seconds, controller)
    assert controller.holds() is holds


def test_a_holder_that_was_late_holds_the_lease_again_if_nobody_else_has_acquired_it(scene):
    controller = scene.controller()
    scene.store.fails = True
    scene.run(2 * LEASE_SECONDS, controller)
    assert not controller.holds()
    scene.store.fails = False
    controller.step()
    assert controller.holds()
    assert scene.store.record.transitions == 0


def test_a_holder_that_was_frozen_holds_nothing_before_its_thread_has_run(scene):
    controller = scene.controller()
    scene.clock.now += LEASE_SECONDS + 1
    assert not controller.holds()


def test_a_renewal_counts_from_the_time_before_it_is_sent(scene):
    controller = scene.controller()

    def slow() -> None:
        scene.clock.now += RENEW_SECONDS - 1

    scene.store.on_request = slow
    controller.step()
    assert controller.holds()
    scene.clock.now += 1
    assert not controller.holds()


def test_a_standby_counts_from_the_time_at_which_a_reply_arrives(scene):
    scene.controller()

    def slow() -> None:
        scene.clock.now += 3

    scene.store.on_request = slow
    standby = scene.standby()
    scene.store.on_request = lambda: None
    scene.clock.now += LEASE_SECONDS - 1
    standby.step()
    assert standby.state is LeaseState.OBSERVED
    scene.clock.now += 1
    standby.step()
    assert standby.state is LeaseState.HELD


def test_a_standby_acquires_the_lease_of_a_holder_that_does_not_renew_it_and_counts_the_transition(scene):
    controller, standby = scene.controller(), scene.standby()
    scene.run(LEASE_SECONDS - 1, standby)
    assert not standby.holds()
    scene.run(1, standby)
    assert standby.holds()
    assert (scene.store.record.holder, scene.store.record.transitions) == ("two", 1)
    controller.step()
    assert controller.is_lost
    assert not controller.holds()


def test_a_holder_has_stopped_before_a_standby_can_hold_the_lease(scene):
    controller, standby = scene.controller(), scene.standby()
    while not standby.holds():
        assert scene.clock.now < 2000, "the standby never holds the lease"
        stopped = not controller.holds()
        scene.run(1, standby)
    assert stopped


def test_of_a_holder_and_a_standby_that_write_at_once_one_holds_the_lease(scene):
    controller, standby = scene.controller(), scene.standby()
    scene.run(LEASE_SECONDS - 1, standby)
    scene.clock.now += 1
    read = scene.store.read

    def renewed_after_the_read() -> StoredRecord | None:
        found = read()
        scene.store.read = read
        controller.step()
        return found

    scene.store.read = renewed_after_the_read
    standby.step()
    assert controller.holds()
    assert standby.state is LeaseState.OBSERVED


def test_a_released_lease_is_acquired_at_once(scene):
    controller, standby = scene.controller(), scene.standby()
    controller.close(release=True)
    standby.step()
    assert standby.holds()


def test_the_lease_of_a_cluster_that_has_ended_is_free_for_another_cluster_and_not_for_its_standby(scene):
    controller, standby = scene.controller(), scene.standby()
    controller.name_standby("")
    controller.close(release=True)
    scene.run(2 * LEASE_SECONDS, standby)
    assert not standby.holds()
    another = scene.keeper("three")
    another.acquire(Claim(), sleep=scene.clock.sleep)
    assert another.holds()


def test_a_release_is_tried_again_while_the_server_fails_for_a_moment(scene):
    controller, standby = scene.controller(), scene.standby()
    controller.name_standby("")
    scene.store.fails = True

    def sleep(seconds: float) -> None:
        scene.clock.now += seconds
        scene.store.fails = scene.clock.now < 1002.0

    controller.close(release=True, sleep=sleep)
    assert scene.store.record.holder == scene.store.record.standby == ""
    scene.run(2 * LEASE_SECONDS, standby)
    assert not standby.holds()


def test_a_release_ends_when_the_server_fails_for_long_and_the_lease_expires(scene, caplog):
    controller = scene.controller()
    scene.store.fails = True
    controller.close(release=True, sleep=scene.clock.sleep)
    assert scene.clock.now - 1000.0 < 2 * RELEASE_SECONDS
    assert "cannot release the lease of a test, which expires in 15 s: no server answers" in caplog.text
    scene.store.fails = False
    another = scene.keeper("three")
    another.acquire(Claim(), sleep=scene.clock.sleep)
    assert another.holds()


def test_a_cluster_that_ends_while_its_lease_is_released_names_no_standby_anymore(scene):
    controller, standby = scene.controller(), scene.standby()
    controller.release()
    controller.step()
    assert scene.store.record.standby == STANDBY
    controller.name_standby("")
    controller.close(release=True)
    standby.step()
    assert not standby.holds()


def test_the_lease_of_a_killed_controller_of_a_cluster_that_has_ended_is_not_for_its_standby(scene):
    scene.controller()
    standby = scene.standby()
    release_lease(scene.store, "one", keep_standby=False)
    scene.run(2 * LEASE_SECONDS, standby)
    assert not standby.holds()


def test_the_lease_of_a_process_that_has_ended_can_be_released_in_its_name_only(scene):
    scene.controller()
    standby = scene.standby()
    release_lease(scene.store, "another", keep_standby=True)
    standby.step()
    assert not standby.holds()
    release_lease(scene.store, "one", keep_standby=True)
    standby.step()
    assert standby.holds()


@pytest.mark.parametrize("named", ["", "tls://three:7000"])
def test_a_standby_that_the_holder_has_not_named_never_acquires_the_lease(scene, named):
    controller = scene.controller(named)
    standby = scene.standby()
    controller.close(release=True)
    scene.run(2 * LEASE_SECONDS, standby)
    assert not standby.holds()


def test_a_standby_whose_copy_is_that_of_an_earlier_holder_never_acquires_the_lease(scene):
    controller = scene.controller()
    standby = scene.standby()
    scene.store.stored = msgspec.structs.replace(
        scene.store.stored, record=msgspec.structs.replace(scene.store.record, transitions=1), version="other"
    )
    scene.run(2 * LEASE_SECONDS, standby)
    assert not standby.holds()
    controller.step()
    assert controller.is_lost


def test_a_standby_that_hears_the_controller_again_withdraws_its_claim(scene):
    scene.controller()
    standby = scene.standby()
    assert standby.withdraw()
    scene.run(2 * LEASE_SECONDS, standby)
    assert standby.state is LeaseState.OBSERVED


def test_a_claim_whose_reply_is_lost_cannot_be_withdrawn_and_its_success_is_found(scene):
    scene.controller()
    standby = scene.standby()
    scene.run(LEASE_SECONDS - 1, standby)
    scene.store.loses_replies = True
    scene.run(1, standby)
    assert not standby.withdraw()
    assert not standby.holds()
    scene.store.loses_replies = False
    standby.step()
    assert standby.holds()
    assert scene.store.record.transitions == 1


def test_a_claim_that_a_server_has_applied_and_refuses_when_it_is_repeated_cannot_be_withdrawn(scene):
    scene.controller()
    standby = scene.standby()
    write = scene.store.write

    def applied_twice(record: LeaseRecord, version: str) -> StoredRecord | None:
        write(record, version)
        return write(record, version)

    scene.store.write = applied_twice
    scene.run(LEASE_SECONDS, standby)
    assert scene.store.record.holder == "two"
    assert not standby.withdraw()
    scene.store.write = write
    standby.step()
    assert standby.holds()
    assert scene.store.record.transitions == 1


def test_a_renewal_whose_reply_is_lost_does_not_count_and_the_next_one_does(scene):
    controller = scene.controller()
    scene.store.loses_replies = True
    scene.run(RENEW_SECONDS, controller)
    assert not controller.holds()
    scene.store.loses_replies = False
    controller.step()
    controller.step()
    assert controller.holds()


def test_a_record_that_somebody_has_removed_is_written_again(scene):
    controller, standby = scene.controller(), scene.standby()
    scene.store.stored = None
    standby.step()
    controller.step()
    controller.step()
    assert controller.holds()
    assert scene.store.record == msgspec.structs.replace(
        LeaseRecord("one", 0, STANDBY), acquired=scene.store.record.acquired, renewed=scene.store.record.renewed
    )


def test_a_controller_that_releases_the_lease_does_not_hold_the_lease_and_its_standby_acquires_it(scene):
    controller, standby = scene.controller(), scene.standby()
    controller.release()
    assert not controller.holds()
    controller.step()
    standby.step()
    assert standby.holds()
    controller.step()
    assert controller.is_lost


def test_a_controller_that_has_released_it_retakes_a_lease_that_nobody_wanted(scene):
    controller = scene.controller()
    controller.release()
    controller.step()
    assert controller.state is LeaseState.RELEASED
    controller.retake()
    assert not controller.holds()
    controller.step()
    assert controller.holds()
    assert scene.store.record.transitions == 0


def test_a_controller_whose_release_had_no_reply_does_not_hold_the_lease_before_it_has_renewed_it(scene):
    controller, standby = scene.controller(), scene.standby()
    controller.release()
    scene.store.loses_replies = True
    controller.step()
    scene.store.loses_replies = False
    standby.step()
    assert standby.holds()
    scene.store.fails = True  # for the controller, which is now cut off
    scene.clock.now += RENEW_SECONDS / 2
    controller.step()
    controller.retake()
    assert not controller.holds()
    scene.store.fails = False
    controller.step()
    assert controller.is_lost


def test_a_controller_whose_release_had_no_reply_retakes_a_lease_that_nobody_wanted(scene):
    controller = scene.controller()
    controller.release()
    scene.store.loses_replies = True
    controller.step()
    scene.store.loses_replies = False
    controller.retake()
    assert not controller.holds()
    controller.step()
    controller.step()
    assert controller.holds()
    assert scene.store.record.holder == "one"


def test_a_controller_that_continues_its_own_lease_after_a_restart_does_not_wait(scene):
    scene.controller()
    again = scene.keeper("one")
    again.acquire(Claim(transitions=0), sleep=scene.clock.sleep)
    assert scene.clock.now == 1000.0
    assert scene.store.record.transitions == 0


def test_a_controller_that_continues_from_a_journal_waits_for_the_lease_of_the_process_that_was_killed(scene):
    scene.controller()
    continued = scene.keeper("three")
    continued.acquire(Claim(transitions=0), sleep=scene.clock.sleep)
    assert LEASE_SECONDS <= scene.clock.now - 1000.0 <= LEASE_SECONDS + 2 * RETRY_SECONDS
    assert scene.store.record.transitions == 1


def test_a_controller_does_not_continue_from_a_journal_that_another_controller_has_left_behind(scene):
    scene.controller()
    standby = scene.standby()
    scene.run(LEASE_SECONDS, standby)
    standby.close(release=True)
    with pytest.raises(LeaseTakenError) as raised:
        scene.keeper("one").acquire(Claim(transitions=0), sleep=scene.clock.sleep)
    assert raised.value.transitions == 1


def test_a_second_cluster_with_the_lease_of_one_that_runs_does_not_start(scene):
    controller = scene.controller()

    def sleep(seconds: float) -> None:
        scene.clock.now += seconds
        controller.step()

    with pytest.raises(LeaseError, match="is held by one, which renews it"):
        scene.keeper("two").acquire(Claim(), sleep=sleep)
    assert controller.holds()


def test_a_start_without_a_server_ends_with_the_reason(scene):
    scene.store.fails = True
    with pytest.raises(LeaseError, match="no server answers"):
        scene.keeper("one").acquire(Claim(), sleep=scene.clock.sleep)


def test_the_transitions_of_a_new_lease_can_be_raised_to_those_of_an_earlier_cluster(scene):
    controller = scene.controller()
    controller.advance(5)
    assert scene.store.record.transitions == controller.transitions == 5
    controller.step()
    assert controller.holds()
    assert scene.store.record.transitions == 5


def test_changes_are_reported_by_the_thread(scene):
    changes: list[LeaseState] = []
    keeper = LeaseKeeper(scene.store, "one", scene.clock)
    keeper.watch(lambda: changes.append(keeper.state))
    keeper.acquire(Claim())
    keeper.start()
    keeper.close(release=True)
    assert changes == [LeaseState.HELD]
    assert scene.store.record.holder == ""
