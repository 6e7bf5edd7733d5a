"""The libraries of a host: permissions, limits, and programs that wait for a library."""

from __future__ import annotations

import hashlib
import queue
import threading
from collections.abc import Sequence

import pytest

from atoll.devices.compilers.compiler_messages import RenamedTarget
from atoll.errors import Code, Status, StatusError
from atoll.protocol.messages import Compile, LibraryTarget
from atoll.worker.host_libraries import MAX_PER_SESSION, HostLibraries
from tests.waiting import until


class Loader:
    """Loads anything but b"bad"."""

    def __init__(self) -> None:
        self.loaded: list[tuple[bytes, str]] = []

    def load(self, content: bytes, tenant: str) -> None:
        if content == b"bad":
            raise StatusError(Code.INVALID_ARGUMENT, "it is bad")
        self.loaded.append((content, tenant))

    def register(self, targets: Sequence[LibraryTarget], tenant: str) -> tuple[RenamedTarget, ...]:
        return tuple(RenamedTarget(each.name, f"{tenant}.{each.name}") for each in targets)


def compile_(session: int = 1, tenant: str = "", native_code: bool = True) -> Compile:
    return Compile("f", session, 1, (((0, 0),),), tenant=tenant, native_code=native_code)


def target(content: bytes, name: str = "scale") -> LibraryTarget:
    return LibraryTarget(name, hashlib.sha256(content).hexdigest(), (("execute", 16),))


def test_a_tenant_without_the_permission_loads_nothing_and_registers_nothing() -> None:
    loader = Loader()
    libraries = HostLibraries(loader)
    message = compile_(tenant="eve", native_code=False)
    for attempt in (
        lambda: libraries.load(message, b"library"),
        lambda: libraries.register(message, [target(b"library")]),
        lambda: libraries.when_loaded(message, [target(b"library")], lambda status: None),
    ):
        with pytest.raises(StatusError, match=r"PERMISSION_DENIED: the tenant eve .*`native_code = true`"):
            attempt()
    assert loader.loaded == []


def test_devices_without_native_code_refuse_libraries() -> None:
    with pytest.raises(StatusError, match="UNIMPLEMENTED: these devices run no native code"):
        HostLibraries(None).load(compile_(), b"library")


def test_a_program_waits_for_all_of_its_libraries() -> None:
    libraries = HostLibraries(Loader())
    outcomes: list[Status] = []
    targets = [target(b"one"), target(b"two", "other")]
    libraries.when_loaded(compile_(), targets, outcomes.append)
    libraries.load(compile_(), b"two")
    assert outcomes == []
    libraries.load(compile_(), b"one")
    assert outcomes == [Status()]
    libraries.when_loaded(compile_(session=2), targets, outcomes.append)
    assert outcomes == [Status()] * 2


def test_libraries_of_another_tenant_do_not_count() -> None:
    libraries = HostLibraries(Loader())
    outcomes: list[Status] = []
    libraries.load(compile_(tenant="ana"), b"library")
    libraries.when_loaded(compile_(tenant="eve"), [target(b"library")], outcomes.append)
    assert outcomes == []


def test_a_library_that_cannot_be_loaded_fails_what_waits_for_it() -> None:
    libraries = HostLibraries(Loader())
    outcomes: list[Status] = []
    libraries.when_loaded(compile_(), [target(b"bad"), target(b"good", "other")], outcomes.append)
    with pytest.raises(StatusError, match="it is bad"):
        libraries.load(compile_(), b"bad")
    libraries.load(compile_(), b"good")
    assert [str(each) for each in outcomes] == ["INVALID_ARGUMENT: it is bad"]


def test_a_library_that_never_arrives_is_named_at_the_deadline() -> None:
    outcomes: queue.SimpleQueue[Status] = queue.SimpleQueue()
    wanted = target(b"missing")
    libraries = HostLibraries(Loader(), wait_seconds=0.0)
    libraries.when_loaded(compile_(), [wanted], outcomes.put)
    status = outcomes.get(timeout=60)
    assert status.code == Code.DEADLINE_EXCEEDED
    assert wanted.library[:12] in status.message


def test_programs_whose_libraries_have_arrived_leave_no_thread() -> None:
    before, libraries = threading.active_count(), HostLibraries(Loader())
    outcomes: list[Status] = []
    for _ in range(3):
        libraries.when_loaded(compile_(), [target(b"library")], outcomes.append)
    libraries.load(compile_(), b"library")
    assert outcomes == [Status()] * 3
    until(lambda: threading.active_count() <= before)


def test_the_libraries_of_a_session_are_bounded() -> None:
    libraries = HostLibraries(Loader())
    for number in range(MAX_PER_SESSION):
        libraries.load(compile_(), b"%d" % number)
    libraries.load(compile_(), b"0")
    with pytest.raises(StatusError, match=f"more than {MAX_PER_SESSION} FFI libraries"):
        libraries.load(compile_(), b"another")
    libraries.load(compile_(session=2), b"another")
    libraries.close(1)
    libraries.load(compile_(), b"another")
