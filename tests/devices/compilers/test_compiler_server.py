"""Tests of compiler processes: if one ends, its compilation fails with that reason, and the next process compiles."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from jax._src.lib import xla_client

from atoll.devices.compilers.compiler_messages import CompiledProgram, CompileProgram, Rejected
from atoll.devices.compilers.compiler_process import CompilerLimits
from atoll.devices.compilers.compiler_server import Asked, CompilerCrashedError, CompilerProcess, CompilerServer, Output
from atoll.errors import Code, StatusError
from tests.devices.compilers import hostile
from tests.file_limits import no_more_files

pytestmark = pytest.mark.slow

COMPILER = "atoll.devices.xla.compiler:XlaCompiler"
SECRET = "a token that no compiler process may have"
GB = 1 << 30
LIMITS = CompilerLimits(8 * GB, 600, 600)


def test_output_that_never_ends_does_not_occupy_the_thread_that_reads_it(capfd: pytest.CaptureFixture[str]) -> None:
    output = Output(os.open("/dev/zero", os.O_RDONLY))
    assert output.read()
    output.close()
    assert 0 < len(capfd.readouterr().err) <= 1 << 16


def request(text: str) -> CompileProgram:
    return CompileProgram(text.encode(), xla_client.CompileOptions().SerializeAsString(), 1, 1, "cpu")


def compiles(process: CompilerProcess) -> bool:
    outcome = process.compile(request(hostile.large(1, 10)), None, "").outcome
    return isinstance(outcome, CompiledProgram) and outcome.executable != b""


def next_compiles(server: CompilerServer) -> bool:
    process = server.take()
    try:
        return compiles(process)
    finally:
        process.close()


def crash(process: CompilerProcess, text: str) -> CompilerCrashedError:
    with pytest.raises(CompilerCrashedError) as caught:
        process.compile(request(text), None, "program 1234")
    return caught.value


def has_ended_within(process: CompilerProcess, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not process.has_ended and time.monotonic() < deadline:
        time.sleep(0.01)
    return process.has_ended


def wait_until_ended(process: CompilerProcess) -> None:
    assert has_ended_within(process, 60.0)


def servers() -> list[psutil.Process]:
    return [each for each in psutil.Process().children() if "atoll.devices.compilers.fork_server" in each.cmdline()]


@pytest.fixture(scope="module")
def server() -> Iterator[CompilerServer]:
    os.environ["ATOLL_TOKEN"] = SECRET
    server = CompilerServer(COMPILER, 2, LIMITS)
    server.prepare()
    yield server
    server.close()
    del os.environ["ATOLL_TOKEN"]


@pytest.fixture
def limited() -> Iterator[Callable[[CompilerLimits], CompilerServer]]:
    """Start a server with its own limits."""
    started: list[CompilerServer] = []

    def start(limits: CompilerLimits) -> CompilerServer:
        started.append(CompilerServer(COMPILER, 1, limits))
        return started[-1]

    yield start
    for server in started:
        server.close()


def test_a_process_compiles_one_program_after_the_other(server: CompilerServer) -> None:
    process = server.take()
    finished = process.compile(request(hostile.large(7, 10)), None, "")
    assert isinstance(finished.outcome, CompiledProgram)
    description = finished.outcome.description
    assert description is not None
    assert description.info.name == "large7"
    assert description.info.parameters == (("float32", (64,)),)
    assert compiles(process)
    assert process.cpu_ticks > 0
    with no_more_files():
        assert process.cpu_ticks == 0, "unknown, so that a repeated number is not taken for a lack of progress"
    process.close()


def test_a_process_that_cannot_be_forked_is_no_crash_and_the_others_continue(server: CompilerServer) -> None:
    process = server.take()
    assert compiles(process)
    (running,) = servers()
    limits = running.rlimit(psutil.RLIMIT_NOFILE)
    used = {int(name) for name in os.listdir(f"/proc/{running.pid}/fd")}
    most = min(set(range(len(used) + 1)) - used)
    running.rlimit(psutil.RLIMIT_NOFILE, (most, limits[1]))  # the kernel then drops the descriptors of a request
    try:
        spare = server.take()  # forked before
        missing = server.take()
        with pytest.raises(StatusError, match="no compiler process can be started on this host: the fork server") as e:
            missing.compile(request(hostile.large(1, 10)), None, "")
        assert e.value.status.code == Code.UNAVAILABLE
        assert compiles(process)
        assert compiles(spare)
    finally:
        running.rlimit(psutil.RLIMIT_NOFILE, limits)
    for each in (process, spare):
        each.close()
    assert next_compiles(server) or next_compiles(server)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (hostile.RECURSION.format(1), ("rec", "SIGSEGV")),
        (hostile.TOP_K.format(3), ("top", "SIGABRT")),
        (hostile.nested_modules(30_000), ("program 1234", "SIGSEGV")),
        (hostile.nested_attributes(100_000), ("program 1234", "SIGSEGV")),
        (hostile.nested_tuples(20_000), ("program 1234", "SIGSEGV")),
        (hostile.nested_tuples(6_000), ("SIGSEGV",)),
    ],
    ids=["recursion", "top k", "modules", "attributes", "tuples", "fewer tuples"],
)
def test_a_module_that_ends_its_process_is_an_error_that_names_the_signal(
    server: CompilerServer, text: str, words: tuple[str, ...]
) -> None:
    process = server.take()
    error = crash(process, text)
    assert error.status.code == Code.INTERNAL
    assert all(word in error.status.message for word in words), error.status.message
    assert process.has_ended
    assert next_compiles(server)


@pytest.mark.skipif(not hostile.DIVIDES_BY_ZERO, reason="this XLA compiles the module")
def test_a_value_that_xla_cannot_compile_is_too_large_and_no_crash(server: CompilerServer) -> None:
    process = server.take()
    with pytest.raises(StatusError) as refused:
        process.compile(request(hostile.HUGE_VALUE), None, "program 1234")
    assert refused.value.status.code == Code.RESOURCE_EXHAUSTED
    assert refused.value.status.message == f"Out of memory allocating {4 << 40} bytes."
    assert process.has_ended
    assert next_compiles(server)


def test_what_is_no_module_is_rejected(server: CompilerServer) -> None:
    process = server.take()
    outcome = process.compile(request("no module"), None, "").outcome
    assert isinstance(outcome, Rejected)
    assert outcome.status.code == Code.INVALID_ARGUMENT
    assert compiles(process)
    process.close()


def test_a_process_has_no_secret_of_its_worker(server: CompilerServer) -> None:
    assert next_compiles(server)
    (own,) = servers()
    for process in (own, *own.children()):
        if process.status() == psutil.STATUS_ZOMBIE:
            continue
        assert SECRET.encode() not in Path(f"/proc/{process.pid}/environ").read_bytes()
        assert SECRET not in " ".join(process.cmdline())
        links = {os.readlink(each.path) for each in os.scandir(f"/proc/{process.pid}/fd")}
        # A spare process may be importing modules. The open files of the installation contain no secrets.
        allowed = ("/dev/", sys.prefix, sys.base_prefix)
        files = {link for link in links if link.startswith("/") and "deleted" not in link}
        assert all(file.startswith(allowed) for file in files), files


def test_a_process_that_is_killed_ends_what_it_compiles(server: CompilerServer) -> None:
    process = server.take()
    assert compiles(process)
    threading.Thread(target=process.kill).start()
    assert "SIGKILL" in crash(process, hostile.large(2, 20_000)).status.message


def test_a_question_that_nobody_answers_is_an_error(server: CompilerServer) -> None:
    process = server.take()
    process.kill()
    wait_until_ended(process)
    with pytest.raises(CompilerCrashedError):
        process.compile(request(hostile.large(3, 10)), Asked(lambda key, question: b"", lambda waits: None), "")


def test_a_server_that_was_killed_is_started_again(limited: Callable[[CompilerLimits], CompilerServer]) -> None:
    before = servers()
    server = limited(LIMITS)
    process = server.take()
    assert compiles(process)
    (own,) = (each for each in servers() if each not in before)
    own.kill()
    wait_until_ended(process)
    crash(process, hostile.large(4, 10))
    assert next_compiles(server)
    assert own not in servers()


@pytest.mark.thorough
def test_a_process_has_not_ended_before_its_server(limited: Callable[[CompilerLimits], CompilerServer]) -> None:
    before = servers()
    server = limited(LIMITS)
    process = server.take()
    assert compiles(process)
    (own,) = (each for each in servers() if each not in before)
    own.suspend()
    server.close()  # the server notices that when it continues
    try:
        assert not has_ended_within(process, 0.5)
    finally:
        own.resume()
    wait_until_ended(process)
    crash(process, hostile.large(4, 10))


def test_memory_is_limited(limited: Callable[[CompilerLimits], CompilerServer]) -> None:
    server = limited(CompilerLimits(GB, 600, 600))
    process = server.take()
    outcome = process.compile(request(hostile.large_constant(6)), None, "").outcome
    assert isinstance(outcome, Rejected)
    assert outcome.status.code == Code.RESOURCE_EXHAUSTED
    assert "1.0 GiB" in outcome.status.message
    assert "ATOLL_COMPILER_MEMORY" in outcome.status.message
    process.close()
    assert next_compiles(server)


def compile_ever_larger(process: CompilerProcess, chains: int) -> None:
    """Compile larger and larger programs, until this machine needs longer than the process may take."""
    while True:
        process.compile(request(hostile.wide(5, chains)), None, "program 1234")
        chains *= 2


def test_cpu_time_is_limited(limited: Callable[[CompilerLimits], CompilerServer]) -> None:
    server = limited(CompilerLimits(8 * GB, 1, 600))
    with pytest.raises(CompilerCrashedError) as caught:
        compile_ever_larger(server.take(), 150)  # few, so that the text is parsed long before the limit
    error = caught.value
    assert error.status.code == Code.RESOURCE_EXHAUSTED
    assert "wide5 (-:2) cannot be compiled" in error.status.message
    assert "1 s of CPU time" in error.status.message
    assert next_compiles(server)


def test_the_output_of_a_process_looks_like_no_record_of_the_log(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    readable, writable = os.pipe()
    output = Output(readable)
    os.write(writable, b"\x1b[2J\n2026-01-01 00:00:00,000 atoll engine[1] ERROR x: all is lost\nand")
    assert output.read()
    os.close(writable)
    assert not output.read()
    output.close()
    assert capfdbinary.readouterr().err.splitlines() == [
        rb"  compiler: \x1b[2J",
        b"  compiler: 2026-01-01 00:00:00,000 atoll engine[1] ERROR x: all is lost",
        b"  compiler: and",
    ]
    assert output.text().endswith("all is lost\nand"), "errors quote it unescaped"
