"""No broad `except` only logs: each one is listed here with what it does with the exception.

A bug that is only logged leaves another process waiting for ever (`docs/design/failures.md`, "Bugs"). A handler
whose last statement raises again is not listed.
"""

from __future__ import annotations

import ast
import functools
from collections import Counter
from enum import Enum
from pathlib import Path

import pytest

import atoll
from tests.prose import dotted, nodes_of

pytestmark = pytest.mark.together("sources")

ROOT = Path(atoll.__file__).parent
_BROAD = {"Exception", "BaseException"}
_LOGS = {"_log", "logging", "traceback"}


class Does(Enum):
    """Effects of handlers."""

    ENDS_PROCESS = "ends the process, with the exception as its reason"
    ENDS_CONNECTION = "ends the connection, or the process of a session, that it is about, with a reason"
    REPORTS = "reports it to the session, command or machine concerned"
    STATUS = "becomes the status of the operation"
    KEEPS = "is kept for the caller, which raises or reports it"
    BEST_EFFORT = "is dropped: what is ended here ends with its process in any case, and nobody waits for it"


TABLE: dict[tuple[str, str], Does] = {
    **dict.fromkeys(
        (
            ("cluster/processes/bugs.py", "BugTrap._report"),
            ("cluster/processes/bugs.py", "run_as_thread"),
            ("cluster/sandbox/file_system.py", "_user_namespace"),
            ("cluster/sandbox/isolation.py", "_why_not"),
            ("controller_process/shell.py", "ControllerShell._flush"),
            ("controller_process/shell.py", "ControllerShell._handle"),
            ("devices/compilers/fork_server.py", "ForkServer._become_compiler"),
            ("engines/null_hosts/null_hosts_main.py", "main"),
            ("grpc/call.py", "Call._report_closed"),
            ("journal/snapshots.py", "start_snapshot"),
            ("worker/worker_main.py", "main"),
        ),
        Does.ENDS_PROCESS,
    ),
    **dict.fromkeys(
        (
            ("host_services/calls/direct_channels.py", "DirectChannels._receive"),
            ("client/jax_patches/client_channel.py", "ClientChannel._call"),
            ("client/jax_patches/profiler.py", "_warning"),
            ("host_services/python/python_process.py", "PythonProcess._guarded"),
            ("host_services/python/python_process.py", "PythonProcess._serve"),
            ("peers/listener.py", "Listener._run"),
            ("launch/lowerings.py", "Lowerings.proceed"),
            ("peers/listener.py", "Listener._start"),
            ("transfers/streams.py", "StreamEngine.run_stream"),
            ("grpc/http2/http2_connection.py", "Http2Connection.buffer_updated"),
            ("wire/connection.py", "Connection.buffer_updated"),
            ("worker/host_links.py", "_Link._send"),
            ("worker/host_links.py", "_Link._send_piece"),
        ),
        Does.ENDS_CONNECTION,
    ),
    **dict.fromkeys(
        (
            ("cluster/usage/keeper.py", "Keeper.report.answer"),
            ("elastic/compile_ahead.py", "CompilationAhead._compile"),
            ("engines/ray/ray_placement.py", "RayPlacement._host_ended"),
            ("engines/ray/ray_placement.py", "RayPlacement._run"),
            ("operate/command/command_line.py", "main"),
        ),
        Does.REPORTS,
    ),
    **dict.fromkeys(
        (
            ("devices/compilers/compiler_process.py", "serve"),
            ("grpc/call.py", "Call.start"),
            ("grpc/message_reader.py", "MessageReader._deliver"),
            ("grpc/message_reader.py", "MessageReader._deliver_end"),
            ("grpc/message_reader.py", "MessageReader.filled"),
            ("host_services/profiles/profile_recorder.py", "ProfileRecorder._handle.run"),
            ("host_services/python/program/python_runner.py", "Runner._call"),
            ("host_services/python/program/python_runner.py", "Runner._load"),
            ("host_services/python/program/stored_arrays.py", "_Waits.result"),
            ("host_services/python/python_sessions.py", "PythonSessions._send"),
            ("host_services/python/python_sessions.py", "PythonSessions._wanted.send"),
            ("ifrt/pending_request.py", "PendingRequest._answer"),
            ("ifrt/requests/__init__.py", "handle_request"),
            ("ifrt/buffer_service.py", "unary.method.on_message"),
            ("worker/spill_store.py", "SpillStore._copy"),
            ("worker/spill_store.py", "SpillStore._task.run"),
            ("worker/spill_store.py", "SpillStore.spill"),
            ("worker/future_arrays.py", "ClientRunThreads.start.run"),
            ("worker/joint_runs.py", "JointRuns._error_of"),
            ("worker/completions.py", "wait_for"),
            ("worker/client_reads.py", "ClientReads.send.send_later"),
            ("worker/completion_reporter.py", "CompletionReporter._try_read"),
            ("worker/completion_reporter.py", "CompletionReporter._read"),
            ("worker/host_functions.py", "HostFunctions.working"),
            ("worker/host_worlds.py", "HostWorlds._join"),
            ("worker/message_handler.py", "MessageHandler._answer"),
            ("worker/plan_executor.py", "PlanExecutor._advance"),
            ("worker/plan_executor.py", "PlanExecutor._end_futures"),
        ),
        Does.STATUS,
    ),
    **dict.fromkeys(
        (
            ("data.py", "BatchIterator.__next__"),
            ("data.py", "BatchIterator._read_ahead"),
            ("devices/xla/compiler.py", "XlaCompiler._rehearse.load"),
            ("devices/xla/xla_compile_calls.py", "CompileCalls.infer"),
            ("devices/xla/xla_compile_calls.py", "CompileCalls.propagate"),
            ("devices/xla/xla_compile_calls.py", "_transforming.transform"),
            ("elastic/replica.py", "_Generation._copy"),
            ("engines/null_hosts/null_host.py", "AtOnce.submit"),
            ("client/background_threads.py", "CompilingThreads._run_next"),
            ("client/interruptible_wait.py", "_Wait.run"),
            ("client/jax_patches/compiling_thread.py", "_Outcome.run"),
            ("client/jax_patches/redirection.py", "_redirect_native.entry"),
            ("client/jax_patches/other_clients.py", "_through_the_host.one"),
            ("worker/grouped_sends.py", "SendGroup.read"),
            ("worker/grouped_sends.py", "SendGroup.read.flush"),
            ("worker/joint_runs.py", "_wait"),
            ("worker/read_threads.py", "ReadThreads._run"),
            ("worker/step_runner.py", "_wait_for"),
        ),
        Does.KEEPS,
    ),
    **dict.fromkeys(
        (
            ("engines/ray/actors.py", "EngineActor._end_later.end"),
            ("engines/ray/ray_cluster.py", "_end"),
            ("engines/ray/ray_placement.py", "RayPlacement._end_actor"),
            ("client/jax_patches/profiler.py", "_ClusterProfilerSession._drop"),
            ("host_services/profiles/profile_recorder.py", "ProfileRecorder._drop"),
            ("host_services/profiles/profile_recorder.py", "ProfileRecorder._watch"),
        ),
        Does.BEST_EFFORT,
    ),
}


class _Finder(ast.NodeVisitor):
    """Finds broad handlers, and `suppress(Exception)`, by the function that they are in."""

    def __init__(self) -> None:
        self.found: list[tuple[str, ast.AST]] = []
        self._names: list[str] = []

    def _enter(self, node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._names.append(node.name)
        self.generic_visit(node)
        self._names.pop()

    visit_ClassDef = visit_FunctionDef = visit_AsyncFunctionDef = _enter

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        if node.type is None or _is_broad(node.type):
            self.found.append((".".join(self._names), node))
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else dotted(node.func)
        if name == "suppress" and any(map(_is_broad, node.args)):
            self.found.append((".".join(self._names), node))
        self.generic_visit(node)


def _is_broad(kind: ast.expr) -> bool:
    return any(isinstance(each, ast.Name) and each.id in _BROAD for each in ast.walk(kind))


def raises_again(node: ast.AST) -> bool:
    return isinstance(node, ast.ExceptHandler) and isinstance(node.body[-1], ast.Raise)


def only_logs(node: ast.AST) -> bool:
    """Whether nothing but a log has the exception."""
    return isinstance(node, ast.ExceptHandler) and all(map(_is_log, node.body))


def _is_log(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        return ast.unparse(statement.value.func).partition(".")[0] in _LOGS
    if isinstance(statement, ast.Return):
        return statement.value is None or isinstance(statement.value, ast.Constant)
    return isinstance(statement, ast.Pass | ast.Continue | ast.Break) or (
        isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    )


def handlers(tree: ast.AST) -> list[tuple[str, ast.AST]]:
    finder = _Finder()
    finder.visit(tree)
    return [(name, node) for name, node in finder.found if not raises_again(node)]


@functools.cache
def all_handlers() -> list[tuple[str, str, ast.AST]]:
    return [
        (str(path.relative_to(ROOT)), name, node)
        for path in sorted(ROOT.rglob("*.py"))
        for name, node in handlers(nodes_of(path)[0])
    ]


def test_each_broad_handler_is_listed_and_each_entry_is_there():
    found = Counter((path, name) for path, name, _ in all_handlers())
    assert set(found) - set(TABLE) == set(), "add an entry that says what becomes of the exception"
    assert set(TABLE) - set(found) == set(), "remove the entry: there is no such handler any more"


def test_none_only_logs():
    found = {(path, name) for path, name, node in all_handlers() if only_logs(node)}
    assert found == {("cluster/processes/bugs.py", "BugTrap._report")}, "its process ends anyway"


def test_work_on_a_pool_has_somebody_who_looks_at_its_future():
    """An exception in work whose future is dropped would be lost: `cluster.processes.bugs.start_in` is for that."""
    dropped = []
    for path in sorted(ROOT.rglob("*.py")):
        for node in nodes_of(path):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
                called = node.value.func
                if isinstance(called, ast.Attribute) and called.attr in ("submit", "run_in_executor"):
                    dropped.append(f"{path.relative_to(ROOT)}: {ast.unparse(called)}")
    assert sorted(dropped) == sorted(NOT_POOLS)


# Methods that are called `submit` and are no pool's, or work that handles all of its exceptions.
NOT_POOLS = [
    "cluster/processes/bugs.py: pool.submit",
    "host_services/calls/client_calls.py: self._notifying.submit",
    "host_services/python/program/python_runner.py: self._loads.submit",
    "host_services/python/program/python_runner.py: stream.submit",
    "host_services/python/program/python_runner.py: stream.submit",
    "worker/host_functions.py: self._asking.submit",
    "web/cluster_page.py: dialog.submit",
    "web/sessions_page.py: dialog.submit",
    "worker/message_handler.py: self._recorder.submit",
]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("_log.exception('it failed')", True),
        ("pass", True),
        ("_log.error('x')\n        return None", True),
        ("_log.error('x')\n        self.fail(error)", False),
        ("os._exit(1)", False),
    ],
)
def test_what_only_logs(body, expected):
    ((name, node),) = handlers(
        ast.parse(f"class A:\n  def f(self):\n    try:\n        g()\n    except Exception:\n        {body}\n")
    )
    assert (name, only_logs(node)) == ("A.f", expected)
    assert not handlers(ast.parse("try:\n    g()\nexcept Exception:\n    done()\n    raise\n"))
    suppressed = handlers(ast.parse("def f():\n  with contextlib.suppress(Exception):\n    g()\n"))
    assert [name for name, _ in suppressed] == ["f"]
