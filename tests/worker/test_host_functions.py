"""Tests of a session's own programs on a host, and of those of other sessions."""

from __future__ import annotations

import hashlib
import json
from typing import Any, cast

import msgspec
import pytest

from atoll.devices.null.model import MODELS
from atoll.devices.null.null_backend import Collectives, NullBackend
from atoll.devices.null.null_program import NullProgram
from atoll.engines.null_hosts.null_host import AtOnce
from atoll.errors import MAX_TEXT, OK, Code, StatusError
from atoll.host_services.profiles.xspace import Others
from atoll.protocol.messages import (
    CloseWorld,
    Compile,
    CompileReport,
    CompileStage,
    DeviceMemory,
    Query,
    QueryKind,
    WorkerQuery,
)
from atoll.transfers.inbox import Inbox
from atoll.wire.framing import MAX_FRAME
from atoll.worker import host_functions, query_answers
from atoll.worker.compile_results import MAX_INFO_BYTES, MAX_TITLE
from atoll.worker.compilers import Compilers
from atoll.worker.function_records import Pending
from atoll.worker.host_functions import HostFunctions
from atoll.worker.query_answers import ANSWERS, QueryAnswers
from atoll.worker.store import TypeKeys
from tests.devices.null.test_sim_events import HandClock

ALICE, BOB = 1, 2


class Host:
    def __init__(self, pool: Any = None, compilers: Compilers | None = None, **options: Any) -> None:
        self.inbox = Inbox(lambda session, feed: None)
        self.backend = backend = NullBackend(0, 1, MODELS["instant"], HandClock(), Collectives())
        self.compiled: list[Any] = []
        self.functions = HostFunctions(
            backend,
            self.inbox,
            TypeKeys(),
            report=self.compiled.append,
            pool=pool or AtOnce(),
            compilers=compilers,
            **options,
        )

    def compile(self, session: int, program: str, name: str) -> None:
        """Compile a program for a session. The cluster knows it by this name."""
        self.inbox.put(session, len(self.compiled), NullProgram(program, 0.0, (), ()).source())
        self.functions.compile(Compile(name, session, len(self.compiled), (((0, 0),),)))
        assert self.compiled[-1].status.ok
        self.functions.records.validate()


@pytest.fixture
def host() -> Host:
    return Host()


def test_a_program_is_of_all_who_have_compiled_it(host: Host) -> None:
    host.compile(ALICE, "step", "a")
    host.compile(BOB, "recipe", "b")
    assert host.functions.programs.others(ALICE) == Others({"recipe"}, set())
    host.compile(ALICE, "recipe", "b")
    assert host.functions.programs.others(ALICE) == Others(set(), set())
    assert host.functions.programs.others(BOB) == Others({"step"}, set())


def test_a_function_has_its_name_also_where_it_was_compiled_before(host: Host) -> None:
    host.compile(ALICE, "step", "a")
    host.functions.drop("a")  # it stays for a while
    host.compile(BOB, "step", "a")
    assert [(each.name, each.cached) for each in host.compiled] == [("step", False), ("step", True)]


def test_two_programs_of_one_name_are_ambiguous(host: Host) -> None:
    host.compile(ALICE, "step", "a")
    host.compile(BOB, "step", "b")
    assert host.functions.programs.others(ALICE) == Others(set(), {"step"})


def test_what_is_gone_was_others_unless_one_still_has_it(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_functions, "IDLE_FUNCTIONS", 0)
    host.compile(BOB, "recipe", "b")
    host.functions.programs.close(BOB)
    host.functions.drop("b")
    assert host.functions.programs.others(ALICE) == Others({"recipe"}, set())


def test_a_program_that_does_not_have_the_hash_it_came_under_is_not_compiled(host: Host) -> None:
    source = NullProgram("step", 0.0, (), ()).source()
    for number, (content, is_right) in enumerate(((hashlib.sha256(source).hexdigest(), True), ("0" * 64, False))):
        host.inbox.put(ALICE, number, source)
        host.functions.compile(Compile(f"name {number}", ALICE, number, (((0, 0),),), content))
        assert host.compiled[-1].status.ok is is_right
    assert "does not have the hash it states" in host.compiled[-1].status.message


@pytest.mark.parametrize("scratch", [1 << 62, -1])
def test_a_function_that_needs_more_memory_than_can_be_is_not_compiled(host: Host, scratch: int) -> None:
    host.inbox.put(ALICE, 0, NullProgram("step", 0.0, (), (), scratch_bytes=scratch).source())
    host.functions.compile(Compile("a", ALICE, 0, (((0, 0),),)))
    (report,) = host.compiled
    assert (report.status.code, report.scratch_bytes) == (Code.RESOURCE_EXHAUSTED, 0)
    assert f"out of memory: step needs {scratch} bytes" in report.status.message


def test_a_function_whose_output_is_larger_than_can_be_is_not_compiled(host: Host) -> None:
    outputs = (("float32", (1 << 60,)),)
    host.inbox.put(ALICE, 0, NullProgram("step", 0.0, (), outputs).source())
    host.functions.compile(Compile("a", ALICE, 0, (((0, 0),),)))
    assert host.compiled[0].status.code == Code.RESOURCE_EXHAUSTED


class Later:
    """A pool that runs its work when `run` is called."""

    def __init__(self) -> None:
        self.work: list[Any] = []

    def submit(self, work: Any, *arguments: Any) -> None:
        self.work.append(lambda: work(*arguments))

    def run(self) -> None:
        while self.work:
            self.work.pop(0)()


def test_a_host_reports_what_it_does_about_a_compilation() -> None:
    later = Later()
    host = Host(later)
    host.inbox.put(ALICE, 0, NullProgram("step", 0.0, (), ()).source())
    host.functions.compile(Compile("a", ALICE, 0, (((0, 0),),)))
    assert host.functions.stages_of(["a", "b"]) == (
        CompileReport("a", CompileStage.QUEUED),
        CompileReport("b", CompileStage.UNKNOWN),
    )
    later.run()
    assert len(host.compiled) == 1
    assert host.functions.stages_of(["a"]) == (CompileReport("a", CompileStage.UNKNOWN),), "nothing is left to do"


class Ending:
    """An entry of a compilation that ends when the entry has been read once."""

    stage = CompileStage.COMPILING
    may_ask = False

    def __init__(self, compilation: Any) -> None:
        self._compilation = compilation

    @property
    def in_compiler(self) -> Any:
        compilation, self._compilation = self._compilation, None
        return compilation


def test_a_compilation_may_end_while_its_host_reports_about_it() -> None:
    compilers = Compilers(cast(Any, None))
    compilation = compilers.submit("ana", 1.0, ALICE, False, lambda each: None)
    functions = Host(compilers=compilers).functions
    functions.records.compile("a", cast(Any, Ending(compilation)))
    assert functions.stages_of(["a"]) == (CompileReport("a", CompileStage.COMPILING),)


def test_the_cpu_time_of_a_worker_is_the_progress_of_what_it_compiles_itself_unless_that_waits_for_its_client() -> None:
    seconds = 1234.0
    functions = Host(cpu_seconds=lambda: seconds).functions
    functions.records.compile("a", Pending(CompileStage.COMPILING))
    functions.records.compile("b", Pending(CompileStage.COMPILING, may_ask=True))
    functions.records.compile("c", Pending(CompileStage.QUEUED))
    asked = ["a", "b", "c"]
    before = functions.stages_of(asked)
    assert [each.progress for each in before[1:]] == [-1, -1]
    seconds += 5.0
    assert functions.stages_of(asked) == before, "it also answers pings"
    seconds += 5.0
    assert functions.stages_of(asked)[0] != before[0]
    assert functions.stages_of(asked)[1:] == before[1:]


def test_a_worker_answers_each_kind_of_query_but_profiles_which_take_long(host: Host) -> None:
    assert set(ANSWERS) | {QueryKind.PROFILE} == set(QueryKind)
    host.compile(ALICE, "step", "a")
    answers = QueryAnswers(host.backend, host.functions)
    assert answers.answer(WorkerQuery(ALICE, 1, QueryKind.COST, "a", b"")).startswith(b"{")
    memory = msgspec.msgpack.encode(DeviceMemory(0, {"bytes_limit": 7}))
    assert json.loads(answers.answer(WorkerQuery(ALICE, 2, QueryKind.MEMORY, "", memory)))["bytes_limit"] == 7
    with pytest.raises(StatusError, match="compiled function b is not on this host"):
        answers.answer(WorkerQuery(ALICE, 3, QueryKind.COST, "b", b""))


def test_a_worker_sends_no_answer_that_ends_its_connection(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    assert query_answers.MAX_ANSWER_BYTES + MAX_TEXT < MAX_FRAME
    monkeypatch.setattr(query_answers, "MAX_ANSWER_BYTES", 10)
    host.compile(ALICE, "step", "a")
    with pytest.raises(StatusError, match=r"RESOURCE_EXHAUSTED: the answer has [0-9,]+ bytes: at most 10 are allowed"):
        QueryAnswers(host.backend, host.functions).answer(WorkerQuery(ALICE, 1, QueryKind.COST, "a", b""))


def test_a_function_with_a_description_that_ends_the_workers_connection_fails(host: Host) -> None:
    assert MAX_INFO_BYTES + 4 * MAX_TITLE + MAX_TEXT < MAX_FRAME
    host.inbox.put(ALICE, 0, NullProgram("n" * MAX_INFO_BYTES, 0.0, (), ()).source())
    host.functions.compile(Compile("a", ALICE, 0, (((0, 0),),)))
    host.compile(ALICE, "n" * 2 * MAX_TITLE, "b")
    too_large, other = host.compiled
    assert too_large.status.code == Code.RESOURCE_EXHAUSTED
    assert "the description of nnn" in too_large.status.message
    assert (too_large.info, too_large.name) == (b"", "")
    assert other.status.ok
    assert other.name == "n" * MAX_TITLE
    assert host.functions.records.loaded("a") is None


def test_a_query_of_an_unknown_kind_is_not_decoded() -> None:
    query = msgspec.msgpack.encode(Query(1, cast(Any, "price"), 0, -1, b""))
    with pytest.raises(msgspec.ValidationError, match="price"):
        msgspec.msgpack.decode(query, type=Query)


def test_a_host_that_loses_an_outcome_compiles_again_when_asked(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    source = NullProgram("step", 0.0, (), ()).source()
    host.inbox.put(ALICE, 0, source)
    with monkeypatch.context() as lost:
        lost.setattr(HostFunctions, "end", lambda *_: None)
        host.functions.compile(Compile("a", ALICE, 0, (((0, 0),),)))
    assert host.functions.stages_of(["a"]) == (CompileReport("a", CompileStage.UNKNOWN),)
    host.inbox.put(ALICE, 1, source)
    host.functions.compile(Compile("a", ALICE, 1, (((0, 0),),)))
    assert [each.status.ok for each in host.compiled] == [True]


def test_a_host_that_compiles_again_keeps_the_requests_of_other_sessions() -> None:
    later = Later()
    host = Host(later)
    source = NullProgram("step", 0.0, (), ()).source()
    for session in (ALICE, BOB):
        host.inbox.put(session, 0, source)
        host.functions.compile(Compile("a", session, 0, (((0, 0),),)))
    with pytest.MonkeyPatch.context() as lost:
        lost.setattr(HostFunctions, "end", lambda *_: None)
        later.run()
    assert host.functions.stages_of(["a"]) == (CompileReport("a", CompileStage.UNKNOWN),)
    host.inbox.put(ALICE, 1, source)
    host.functions.compile(Compile("a", ALICE, 1, (((0, 0),),)))
    later.run()
    assert [each.status.ok for each in host.compiled] == [True]
    assert host.functions.programs.others(BOB) == Others(set(), set())
    assert not host.inbox.statistics().feeds


def test_the_processes_of_a_closed_world_end_before_its_functions_move(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    placer, order = host.functions.placer, []
    monkeypatch.setattr(placer, "close_world", lambda message: order.append("world") or ["function"])
    monkeypatch.setattr(host.functions.python, "close_world", lambda message: order.append("processes"))
    monkeypatch.setattr(placer, "compile_again", order.append)
    host.functions.close_world(CloseWorld(5, OK))
    assert order == ["world", "processes", "function"]
