"""Tests that Ctrl-C does not divide the steps of a start."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from atoll.client import backend, jax_patches, processes
from atoll.client.deferred_interrupts import deferred_interrupts
from atoll.client.jax_patches.patch import Patch
from atoll.client.processes import ClientProcesses, ClusterChoice
from atoll.cluster.settings import ClusterSettings


def press() -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.fixture(autouse=True)
def _script() -> Iterator[None]:
    """Handle Ctrl-C as Python does in a script."""
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, former)


def test_an_interrupt_takes_effect_at_the_end_of_the_block() -> None:
    done = []

    def work() -> None:
        with deferred_interrupts():
            press()
            done.append("the rest")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["the rest"]
    with pytest.raises(KeyboardInterrupt):
        press()


def test_the_error_of_a_block_is_raised_if_there_was_no_interrupt() -> None:
    with pytest.raises(OSError, match="no such file"), deferred_interrupts():
        raise OSError("no such file")


def test_a_script_that_ignores_interrupts_continues_to_do_so() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with deferred_interrupts():
        press()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_other_threads_change_no_handlers() -> None:
    found = []

    def work() -> None:
        with deferred_interrupts():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [signal.default_int_handler]


class _Interrupted:
    """A change of JAX. Ctrl-C is pressed during the first one."""

    target = "jax.anything"

    def __init__(self, applied: list[_Interrupted]) -> None:
        self._applied = applied

    def difference(self) -> str:
        return ""

    def apply(self) -> None:
        self._applied.append(self)
        if len(self._applied) == 1:
            press()


def test_patches_are_installed_once_although_the_first_start_was_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    applied: list[_Interrupted] = []
    changes = [_Interrupted(applied), _Interrupted(applied)]
    monkeypatch.setattr(jax_patches, "PATCHES", tuple(Patch("a patch", "something", (each,)) for each in changes))
    monkeypatch.setattr(jax_patches, "_installed", None)
    with pytest.raises(KeyboardInterrupt):
        jax_patches.install()
    assert len(jax_patches.install()) == 2
    assert applied == changes


class _Child:
    """A process that starts and ends, while Ctrl-C is pressed."""

    address, start_seconds = "unix:/nowhere", 30.0
    process = SimpleNamespace(pid=os.getpid(), poll=lambda: None)

    def __init__(self, running: list[_Child]) -> None:
        self._running = running
        running.append(self)
        press()

    def end(self) -> None:
        press()
        self._running.remove(self)

    def stop_reading(self) -> None:
        pass


def test_no_process_remains_after_several_interrupts(monkeypatch: pytest.MonkeyPatch) -> None:
    running: list[_Child] = []

    def start(*_: Any, **__: Any) -> _Child:
        return _Child(running)

    monkeypatch.setattr(processes, "EngineProcess", start)
    monkeypatch.setattr(processes, "start_proxy", start)
    monkeypatch.setattr(processes, "register_embedded", lambda *_: None)
    with pytest.raises(KeyboardInterrupt):
        ClientProcesses(ClusterChoice("", "", ClusterSettings()))
    assert not running


def test_an_interrupted_end_of_a_client_ends_its_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = []
    client = SimpleNamespace(live_arrays=lambda: iter(press, None), live_executables=list)
    monkeypatch.setattr(backend, "_client", client)
    monkeypatch.setattr(backend, "_processes", SimpleNamespace(close=lambda: ended.append("all")))
    with pytest.raises(KeyboardInterrupt):
        backend.disconnect()
    assert ended == ["all"]
    assert backend.cluster() is None
