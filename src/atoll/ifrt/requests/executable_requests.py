"""Requests to compile, inspect, run and release executables. Running one is the hot path of a session."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from msgspec.structs import replace

from atoll.decodable import decodable
from atoll.errors import OK, Code, Kind, Status, StatusError, invalid, unimplemented
from atoll.executables.compile_requests import CompileJob, compile_job, plugin_payload
from atoll.executables.compiled_executables import Executable, LostExecutable
from atoll.executables.loaded_executable import LoadedExecutable
from atoll.executables.lost_devices import replace_islands
from atoll.executables.mpmd_executables import compile_mpmd
from atoll.executables.mpmd_requests import IFRT_IR_PROGRAM, mpmd_request
from atoll.executables.program_executables import (
    DeferringExecutable,
    PuttingExecutable,
    ReadingExecutable,
    SmallWritingExecutable,
    WritingExecutable,
)
from atoll.executables.python_functions import CUSTOM_CALL_PROGRAM, python_function
from atoll.ifrt.ifrt_session import IfrtSession
from atoll.ifrt.pending_request import Handler, PendingRequest
from atoll.ifrt.requests.contents_requests import put_contents, put_small_contents, send_contents, write_contents
from atoll.ifrt.requests.plugin_requests import handle_plugin_program, load_python
from atoll.protocol.callbacks import CALLBACK_ADVICE
from atoll.protocol.ifrt import compile_pb2
from atoll.protocol.messages import FunctionInfo
from atoll.protocol.translation import codec

_NOTHING_PRESERVED: frozenset[int] = frozenset()
_MAX_PROGRAMS = 64  # of one executable
# Executables that make arrays of contents. Called with the session, the executable, the results' handles and the stack.
_MAKERS: dict[type[LoadedExecutable], Callable[..., None]] = {
    PuttingExecutable: put_contents,
    SmallWritingExecutable: put_small_contents,
    WritingExecutable: write_contents,
}


def _compile(pending: PendingRequest, request: Any) -> None:
    session = pending.session
    if handle_plugin_program(pending, plugin_payload(request.program)):
        return
    if request.program.type_name == CUSTOM_CALL_PROGRAM:
        program = codec.parse(compile_pb2.CustomCallProgram, request.program.data)
        load_python(pending, python_function(program, session.cluster))
        return
    if request.program.type_name == IFRT_IR_PROGRAM:
        mpmd = mpmd_request(request, len(session.cluster.welcome.devices))
        pending.reply_compiled_later(compile_mpmd(mpmd, session.cluster))
        return

    async def work() -> LoadedExecutable:
        welcome = session.cluster.welcome
        job = compile_job(request, len(welcome.devices), welcome.session)
        try:
            number, info = await _register(session, job)
        except StatusError as error:
            if error.status.details.kind is not Kind.ISLAND:
                raise
            # Islands restart, so do not wait to compile.
            known = session.compiled.get(job.content) or await _compile_elsewhere(session, job, error.status)
            if known is None:
                raise
            return LostExecutable(known, job, error.status)
        return Executable(number, info, job)

    pending.reply_compiled_later(work())


async def _register(session: IfrtSession, job: CompileJob) -> tuple[int, FunctionInfo]:
    """Compile on the job's devices. Return the function's number and its description. Raise StatusError."""
    await session.libraries.load(job.targets, job.devices)
    number, encoded = await session.cluster.register_function(job.source, job.content, job.assignment)
    info = msgspec.msgpack.decode(encoded, type=decodable(FunctionInfo))
    session.remember_compiled(job.content, info)
    return number, info


async def _compile_elsewhere(session: IfrtSession, job: CompileJob, loss: Status) -> FunctionInfo | None:
    """Compile a function for lost devices on other islands. Return its description, or None if no island can."""
    lost: set[int] = set()
    islands = set(loss.details.islands)
    while not islands <= lost:
        lost |= islands
        assignment = replace_islands(job.assignment, session.cluster.welcome.devices, lost)
        if assignment is None:
            return None
        try:
            number, info = await _register(session, replace(job, assignment=assignment))
        except StatusError as error:
            if error.status.details.kind is not Kind.ISLAND:
                raise
            islands = set(error.status.details.islands)
            continue
        session.cluster.retain_functions((number,))
        session.cluster.drop_functions((number,))
        return info
    return None


def _metadata(pending: PendingRequest, request: Any) -> None:
    response = pending.response()
    response.executable_metadata.CopyFrom(pending.session.loaded(request.executable).metadata_reply())
    pending.reply(response)


def _mpmd_metadata(pending: PendingRequest, request: Any) -> None:
    response = pending.response()
    reply = response.executable_mpmd_metadata
    try:
        pending.session.executable(request.executable).mpmd_metadata(reply)
    except StatusError as error:
        reply.mpmd_compiled_memory_stats_error.CopyFrom(codec.status_to(error.status))
    pending.reply(response)


def _mpmd_cost_analysis(pending: PendingRequest, request: Any) -> None:
    response = pending.response()
    reply = response.executable_mpmd_cost_analysis
    executable = pending.session.executable(request.executable)
    _inquire(pending, response, reply, executable.mpmd_cost(pending.session.cluster, reply))


def _cost_analysis(pending: PendingRequest, request: Any) -> None:
    response = pending.response()
    reply = response.executable_cost_analysis
    executable = pending.session.executable(request.executable)
    _inquire(pending, response, reply, executable.cost(pending.session.cluster, reply))


def _program_text(pending: PendingRequest, request: Any) -> None:
    response = pending.response()
    reply = response.executable_program_text
    executable = pending.session.executable(request.executable)

    async def fill() -> None:
        reply.human_readable_program_text = await executable.text(pending.session.cluster)

    _inquire(pending, response, reply, fill())


def _inquire(pending: PendingRequest, response: Any, reply: Any, fill: Coroutine[Any, Any, None]) -> None:
    """Answer when `fill` has filled `reply`, which has a `status` field for its failure."""

    async def work() -> Any:
        try:
            await fill
        except StatusError as error:
            reply.status.CopyFrom(codec.status_to(error.status))
        return response

    pending.reply_later(work())


def _delete(pending: PendingRequest, request: Any) -> None:
    pending.session.loaded(request.executable)
    response = pending.response()
    unsupported = Status(Code.UNIMPLEMENTED, "executables are destructed, not deleted")
    response.executable_delete.future = pending.session.add_future(unsupported)
    pending.reply(response)


def _is_deleted(pending: PendingRequest, request: Any) -> None:
    pending.session.loaded(request.executable)
    response = pending.response()
    response.executable_is_deleted.is_deleted = False
    pending.reply(response)


def _destruct(pending: PendingRequest, request: Any) -> None:
    pending.session.unload(request.executable)
    response = pending.response()
    response.executable_destruct.SetInParent()
    pending.reply(response)


def _execute(pending: PendingRequest, request: Any) -> None:
    session = pending.session
    given = list(request.results)
    try:
        handles, status_handle, executable = _run(pending, request, given)
    except StatusError as error:
        pending.set_error(given, error)
        if request.status_handle:
            session.add_future(error.status, request.status_handle)
        raise
    response = pending.response()
    reply = response.execute
    reply.SetInParent()
    if status_handle:
        reply.status_handle = status_handle
    if not given:
        reply.outputs.extend(executable.output_replies(handles))
    is_read = type(executable) is ReadingExecutable  # whose contents are the answer
    session.responses.send(response, 0 if handles else pending.context, may_wait=is_read)


def _run(pending: PendingRequest, request: Any, given: list[int]) -> tuple[list[int], int, LoadedExecutable]:
    """Run an executable. Return the handles of the results and of the future of its status (or 0), and the executable.

    Raise StatusError if the request is refused. Most runs are launches of a program that was registered at an earlier
    run with the same options.
    """
    session = pending.session
    executable = session.executable(request.executable)
    arguments = executable.gather(session.staged, list(request.arguments))
    if arguments is not None and type(executable) is ReadingExecutable:
        send_contents(session, executable.next_number(), arguments)
        arguments = None
    if arguments is None:
        return session.handles(given, 0), 0, executable
    if request.device_ids and tuple(request.device_ids) != executable.devices:
        raise invalid("an executable can run only on the devices that it was compiled for")
    records = session.arrays.get_all(arguments)
    executable.check(records)
    options = request.options
    handles = session.handles(given, len(executable.outputs))
    if type(executable) is DeferringExecutable:
        session.deferred.add(executable, arguments[0], handles, pending.context)
        return handles, _resolved_future(session, request, OK), executable
    make = _MAKERS.get(type(executable))
    if make is not None:
        make(session, executable, handles, pending.context)
        return handles, _resolved_future(session, request, OK), executable
    if not executable.loss.ok:
        pending.define_failed(handles, executable.loss)
        return handles, _resolved_future(session, request, executable.loss), executable
    ended = executable.run_on_host(session.cluster, handles, pending.context, options.launch_id)
    if ended is not None:
        session.define(handles, executable.outputs, pending.context)
        status_handle = session.add_future(handle=request.status_handle) if options.fill_status else 0
        session.spawn(_resolve(ended, session.resolver(status_handle) if status_handle else lambda status: None))
        return handles, status_handle, executable
    preserved = _NOTHING_PRESERVED
    if options.non_donatable_input_indices and executable.donated:
        preserved = executable.donated & frozenset(options.non_donatable_input_indices)
    key = (preserved, options.fill_status, options.execution_stream_id if executable.has_streams else 0)
    registered = executable.programs.get(key)
    if registered is None:
        registered = _register_program(session, executable, key)
    program, completions = registered
    status_handle = 0
    if options.fill_status:
        status_handle = session.add_future(handle=request.status_handle)
        completed = [session.cluster.mint() for _ in range(completions)]
        session.launch(program, arguments, (*handles, *completed), traceback_id=pending.context)
        session.cluster.wait(executable.awaited(handles, completed), session.resolver(status_handle))
        session.cluster.release(completed)
    else:
        session.launch(program, arguments, handles, traceback_id=pending.context)
    for position in executable.donated:
        if position not in preserved:
            records[position].memory.delete()
    if deleted := [arguments[position] for position in executable.deleted if position not in preserved]:
        session.cluster.release(deleted, delete=True)
    session.define(handles, executable.outputs, pending.context)
    return handles, status_handle, executable


def _resolved_future(session: IfrtSession, request: Any, status: Status) -> int:
    """Return the handle of the future of a run that has this status at once; 0 if the client wants no future."""
    return session.add_future(status, request.status_handle) if request.options.fill_status else 0


def _register_program(
    session: IfrtSession, executable: LoadedExecutable, key: tuple[frozenset[int], bool, int]
) -> tuple[int, int]:
    """Register the program of an executable for these options. Return its number, and how many completions it has."""
    definition = executable.program(*key)
    completions = len(definition.results) - len(executable.outputs)
    registered = executable.programs[key] = session.cluster.register_program(definition), completions
    if len(executable.programs) > _MAX_PROGRAMS:  # each thread of the client has a stream
        session.cluster.release_program(executable.programs.pop(next(iter(executable.programs)))[0])
    return registered


async def _resolve(run: Coroutine[Any, Any, None], resolve: Callable[[Status], None]) -> None:
    try:
        await run
    except StatusError as error:
        resolve(error.status)
    else:
        resolve(OK)


def _fetch_execute_result(pending: PendingRequest, request: Any) -> None:
    pending.reply_outcome("fetch_execute_result", request.status_handle)


def _host_callback(pending: PendingRequest, request: Any) -> None:
    raise unimplemented(CALLBACK_ADVICE)


HANDLERS: dict[str, Handler] = {
    "compile": _compile,
    "executable_metadata": _metadata,
    "executable_mpmd_metadata": _mpmd_metadata,
    "executable_mpmd_cost_analysis": _mpmd_cost_analysis,
    "executable_cost_analysis": _cost_analysis,
    "executable_program_text": _program_text,
    "executable_delete": _delete,
    "executable_is_deleted": _is_deleted,
    "executable_destruct": _destruct,
    "execute": _execute,
    "fetch_execute_result": _fetch_execute_result,
    "host_callback_poll": _host_callback,
    "host_callback_return": _host_callback,
}
