"""When the soak calls a user's silence a hang."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

import pytest

from scripts.soak.users import SILENCE_SECONDS, HangError, Users
from tests.machines.machine_clock import USUAL_SHARE, Deadline, MachineClock

SILENT, TALKATIVE = "input()", "while True: print('step', flush=True); input()"


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def seconds(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def make_users(tmp_path: Path, clock: Clock) -> Iterator[Callable[[str], Users]]:
    made: list[Users] = []

    def make(script: str) -> Users:
        def start(number: int, arguments: Sequence[str], errors: IO[str]) -> tuple[subprocess.Popen[str], str]:
            pipe = subprocess.PIPE
            command = [sys.executable, "-S", "-c", script]
            return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors, text=True), ""

        made.append(Users(1, 0, 1000.0, 1, start, tmp_path, clock.seconds))
        return made[-1]

    yield make
    for each in made:
        pipes = [pipe for user in each.alive for pipe in (user.process.stdin, user.process.stdout, user.errors) if pipe]
        each.kill()
        for pipe in pipes:
            pipe.close()


def test_a_user_who_says_nothing_hangs(make_users, clock):
    users = make_users(SILENT)
    users.watch(0.01)
    clock.now += SILENCE_SECONDS + 1
    with pytest.raises(HangError, match="hangs: nothing for"):
        users.watch(0.01)


def test_a_user_is_given_its_time_anew_after_each_fault(make_users, clock):
    users = make_users(SILENT)
    clock.now += SILENCE_SECONDS - 1
    with users.fault():
        clock.now += 2
        users.watch(0.01)
    clock.now += SILENCE_SECONDS - 1
    users.watch(0.01)
    clock.now += 2
    with pytest.raises(HangError):
        users.watch(0.01)


def test_a_user_who_says_something_does_not_hang(make_users, clock):
    users = make_users(TALKATIVE)
    clock.now += SILENCE_SECONDS - 1
    while not users.steps()["step"]:
        users.watch(0.01)
    clock.now += SILENCE_SECONDS - 1
    users.watch(0.01)


def test_faults_are_left_out_while_a_user_says_nothing(make_users):
    users = make_users(TALKATIVE)
    while not users.steps()["step"]:
        users.watch(0.01)
    assert not users.are_spared
    users.alive[0].heard = time.monotonic() - SILENCE_SECONDS
    assert users.are_spared


def test_the_clock_runs_slower_while_threads_get_less_than_their_usual_share(clock):
    shares = [USUAL_SHARE / 4]
    machine = MachineClock(lambda: shares[0], clock.seconds)
    clock.now += 8
    assert machine.seconds() == 2
    shares[0] = 1.0
    for _ in range(20):
        clock.now += 1
        last = machine.seconds()
    clock.now += 1
    assert machine.seconds() == last + 1, "and never faster"


def test_a_deadline_comes_later_while_threads_get_less_than_their_usual_share(clock):
    shares = [USUAL_SHARE / 10]
    deadline = Deadline(60, MachineClock(lambda: shares[0], clock.seconds))
    for _ in range(599):
        clock.now += 1
        assert not deadline.is_over
    clock.now += 2
    assert deadline.is_over
