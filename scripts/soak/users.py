"""The processes of the soak's users: started, watched for progress, replaced when they were killed."""

from __future__ import annotations

import os
import selectors
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from scripts.soak.client import WRONG
from tests.machines.machine_clock import MachineClock

ROOT = Path(__file__).resolve().parents[2]
# Starts a client: its number, its module and what that takes, where it writes errors. Returns the process and machine.
Start = Callable[[int, Sequence[str], IO[str]], tuple[subprocess.Popen[str], str]]
RANDOM_WORK, TRAINING = "scripts.soak.client", "scripts.soak.training"
# For a user's next step after a fault is over: what had to be compiled again. In seconds of a `MachineClock`.
SILENCE_SECONDS = 90.0
# If a user has said nothing for this long, no further fault is injected. Each restart of an island makes the user
# compile again, so faults that follow one another could keep it from its next step. A hang does not end without faults.
SPARED_SECONDS = 30.0


class SoakError(Exception):
    """Something happened that must not: a wrong result, a hang, an error that nobody caused, something left behind."""


class HangError(SoakError):
    """A user has said nothing for too long after the last fault."""

    def __init__(self, user: UserProcess) -> None:
        silence = time.monotonic() - user.heard
        text = f"nothing for {silence:.0f} s, of which more than {SILENCE_SECONDS:.0f} s count since the last fault"
        super().__init__(f"{user.errors.name} ({user.module}) hangs: {text}")
        self.user = user


@dataclass
class UserProcess:
    """One client, which runs a `module`. `doomed` is set by whoever kills it, or its proxy.

    `heard` is when it has said something last, and `since` the later one of this and the end of the last fault, by the
    clock of `Users`.
    """

    process: subprocess.Popen[str]
    errors: IO[str]
    module: str = RANDOM_WORK
    machine: str = ""
    doomed: str = ""
    since: float = 0.0
    heard: float = field(default_factory=time.monotonic)
    steps: Counter[str] = field(default_factory=Counter)


class Users:
    """Keeps `count` clients at work for `seconds`, and so many trainings.

    `start(number, arguments, errors)` starts one, and returns its process and machine.
    """

    def __init__(
        self,
        count: int,
        trainings: int,
        seconds: float,
        seed: int,
        start: Start,
        logs: Path,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._clock = MachineClock().seconds if clock is None else clock
        self._is_fault_under_way = False
        self.longest = 0.0  # seconds for which a user has said nothing
        self._end = time.monotonic() + seconds
        self._start_process = start
        self._logs = logs
        self._seed = seed
        self._selector = selectors.DefaultSelector()
        self._dooms: list[tuple[str, Callable[[UserProcess], bool]]] = []
        self.alive: list[UserProcess] = []
        self.ended: list[UserProcess] = []
        for module in [RANDOM_WORK] * count + [TRAINING] * trainings:
            self._start(module)

    def _start(self, module: str) -> None:
        self._seed += 1
        left = max(1.0, self._end - time.monotonic())
        errors = open(self._logs / f"user-{self._seed}", "w+")  # noqa: SIM115
        process, machine = self._start_process(self._seed, (module, str(self._seed), f"{left:.1f}"), errors)
        user = UserProcess(process, errors, module, machine, since=self._clock())
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        self._selector.register(process.stdout, selectors.EVENT_READ, user)
        self.alive.append(user)
        for kind, holds in self._dooms:
            _doom(user, kind, holds)

    def doom(self, kind: str, holds: Callable[[UserProcess], bool]) -> None:
        """Those for whom it `holds` may fail, rightly; so may those that start until the fault is `over`."""
        self._dooms.append((kind, holds))
        for user in self.alive:
            _doom(user, kind, holds)

    def over(self) -> None:
        """Note that the fault is over: users that start from now on must succeed."""
        self._dooms.clear()

    def watch(self, seconds: float) -> None:
        """Reads what they say for so long. Raises SoakError for what must not happen."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0 and self.alive:
            for key, _ in self._selector.select(min(left, 1.0)):
                self._hear(key.data)
            now = self._clock()
            for user in self.alive:
                if now - user.since > SILENCE_SECONDS and not self._is_fault_under_way:
                    raise HangError(user)

    @contextmanager
    def fault(self) -> Iterator[None]:
        """Note that a fault is under way, and then that it is over, and that users may make progress again."""
        self._is_fault_under_way = True
        try:
            yield
        finally:
            self._is_fault_under_way = False
            now = self._clock()
            for user in self.alive:
                user.since = now

    @property
    def are_spared(self) -> bool:
        """Whether a user has said nothing for so long that no fault is to be injected."""
        now = time.monotonic()
        return any(now - user.heard > SPARED_SECONDS for user in self.alive)

    def _hear(self, user: UserProcess) -> None:
        assert user.process.stdout is not None
        text = user.process.stdout.read()
        if text:
            now = time.monotonic()
            self.longest = max(self.longest, now - user.heard)
            user.heard, user.since = now, self._clock()
            user.steps.update(line.split()[0] for line in text.splitlines() if line)
            return
        self._selector.unregister(user.process.stdout)
        user.process.stdout.close()
        status = user.process.wait()
        self.alive.remove(user)
        self.ended.append(user)
        if status == WRONG:
            raise SoakError(f"a wrong result\n{tail(user)}")
        if status and not user.doomed:
            raise SoakError(f"{user.errors.name} ended with status {status}, untouched\n{tail(user)}")
        user.errors.close()
        if time.monotonic() < self._end - 1:
            self._start(user.module)

    def kill(self) -> None:
        """Ends all that are left."""
        for user in self.alive:
            user.process.kill()
            user.process.wait()

    def steps(self) -> Counter[str]:
        total: Counter[str] = Counter()
        for user in (*self.alive, *self.ended):
            total.update(user.steps)
        return total


def _doom(user: UserProcess, kind: str, holds: Callable[[UserProcess], bool]) -> None:
    if holds(user):
        user.doomed = user.doomed or kind


def tail(user: UserProcess, size: int = 4000) -> str:
    user.errors.seek(0)
    return user.errors.read()[-size:]
