"""Executables: compiled, asked about, run, dropped. Running one is the hot path of a session."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from atoll.errors import OK, Code, Status, StatusError, invalid, unimplemented
from atoll.proxy import codec, slices
from atoll.proxy.devices import cost_attributes
from atoll.proxy.executables import CALLBACK_ADVICE, MPMD_ERROR, Executable, compile_job
from atoll.proxy.session import Exchange, Handler
from atoll.transport import messages as m
from atoll.transport.messages import FunctionInfo

_NOTHING_KEPT: frozenset[int] = frozenset()


def _compile(exchange: Exchange, request: Any) -> None:
    session = exchange.session
    slice_wish = slices.payload_of(request)
    if slice_wish is not None:
        slices.add(exchange, slice_wish)
        return

    async def work() -> Any:
        job = compile_job(request, len(session.link.welcome.devices))
        number, encoded = await session.link.register_function(job.source, job.content, job.assignment)
        handle = session.mint()
        executable = Executable(number, msgspec.msgpack.decode(encoded, type=FunctionInfo), job.devices)
        session.executables[handle] = executable
        response = exchange.response()
        response.compile.CopyFrom(executable.compile_reply(handle, session.add_future(OK)))
        return response

    # JAX raises this error from the very call that it belongs to: it reads as in stock JAX without its place.
    exchange.later(work(), placed=False)


def _metadata(exchange: Exchange, request: Any) -> None:
    response = exchange.response()
    response.executable_metadata.CopyFrom(exchange.session.executable(request.executable).metadata_reply())
    exchange.reply(response)


def _mpmd_metadata(exchange: Exchange, request: Any) -> None:
    exchange.session.executable(request.executable)
    response = exchange.response()
    reply = response.executable_mpmd_metadata
    reply.mpmd_compiled_memory_stats_error.CopyFrom(codec.status_to(MPMD_ERROR))
    exchange.reply(response)


def _mpmd_cost_analysis(exchange: Exchange, request: Any) -> None:
    exchange.session.executable(request.executable)
    response = exchange.response()
    response.executable_mpmd_cost_analysis.status.CopyFrom(codec.status_to(MPMD_ERROR))
    exchange.reply(response)


def _cost_analysis(exchange: Exchange, request: Any) -> None:
    _inquire(exchange, request, "executable_cost_analysis", "cost", cost_attributes)


def _program_text(exchange: Exchange, request: Any) -> None:
    def fill(text: bytes, reply: Any) -> None:
        reply.human_readable_program_text = text.decode()

    _inquire(exchange, request, "executable_program_text", "text", fill)


def _inquire(
    exchange: Exchange, request: Any, kind: str, what: str, fill: Callable[[bytes, Any], None]
) -> None:
    """Asks a worker that holds the executable; both kinds of reply have a `status` of their own for a failure."""
    executable = exchange.session.executable(request.executable)

    async def work() -> Any:
        response = exchange.response()
        reply = getattr(response, kind)
        try:
            fill(await exchange.session.link.inquire(what, executable.devices[0], executable.function), reply)
        except StatusError as error:
            reply.status.CopyFrom(codec.status_to(error.status))
        return response

    exchange.later(work())


def _delete(exchange: Exchange, request: Any) -> None:
    exchange.session.executable(request.executable)
    response = exchange.response()
    unsupported = Status(Code.UNIMPLEMENTED, "executables are destructed, not deleted")
    response.executable_delete.future = exchange.session.add_future(unsupported)
    exchange.reply(response)


def _is_deleted(exchange: Exchange, request: Any) -> None:
    exchange.session.executable(request.executable)
    response = exchange.response()
    response.executable_is_deleted.is_deleted = False
    exchange.reply(response)


def _destruct(exchange: Exchange, request: Any) -> None:
    session = exchange.session
    executable = session.executable(request.executable)
    del session.executables[request.executable]
    for program in executable.programs.values():
        session.link.send(m.ReleaseProgram(program))
    if isinstance(executable, slices.SliceExecutable):
        session.link.send(m.ReleaseSlice(executable.slice))
    else:
        session.link.release_function(executable.function)
    response = exchange.response()
    response.executable_destruct.SetInParent()
    exchange.reply(response)


def _execute(exchange: Exchange, request: Any) -> None:
    session = exchange.session
    given = list(request.results)
    try:
        handles, status_handle, executable = _run(exchange, request, given)
    except StatusError as error:
        exchange.undefined(given, error)
        if request.status_handle:
            session.add_future(error.status, request.status_handle)
        raise
    response = exchange.response()
    reply = response.execute
    reply.SetInParent()
    if status_handle:
        reply.status_handle = status_handle
    if not given:
        reply.outputs.extend(executable.output_replies(handles))
    session.send(response, 0 if handles else exchange.context)


def _run(exchange: Exchange, request: Any, given: list[int]) -> tuple[list[int], int, Executable]:
    session = exchange.session
    executable = session.executable(request.executable)
    arguments = list(request.arguments)
    if len(arguments) != len(executable.info.parameters):
        raise invalid(
            f"{executable.info.name} takes {len(executable.info.parameters)} arguments, got {len(arguments)}"
        )
    if request.device_ids and tuple(request.device_ids) != executable.devices:
        raise invalid("an executable runs on the devices that it was compiled for")
    records = [session.arrays.get(handle) for handle in arguments]
    options = request.options
    preserved = _NOTHING_KEPT
    if options.non_donatable_input_indices and executable.donated:
        preserved = executable.donated & frozenset(options.non_donatable_input_indices)
    key = (preserved, options.fill_status)
    program = executable.programs.get(key)
    if program is None:
        program = executable.programs[key] = session.link.number()
        session.link.send(m.RegisterProgram(program, executable.program(*key)))
    handles = session.handles(given, len(executable.outputs))
    status_handle = 0
    if options.fill_status:
        status_handle = session.add_future(handle=request.status_handle)
        completion = session.mint()
        session.launch(program, arguments, (*handles, completion), context=exchange.context)
        session.link.wait((completion,), session.resolver(status_handle))
        session.link.send(m.Release((completion,)))
    else:
        session.launch(program, arguments, handles, context=exchange.context)
    for position in executable.donated:
        if position not in preserved:
            records[position].memory.delete()
    session.define(handles, executable.outputs, exchange.context)
    return handles, status_handle, executable


def _fetch_execute_result(exchange: Exchange, request: Any) -> None:
    exchange.outcome("fetch_execute_result", request.status_handle)


def _host_callback(exchange: Exchange, request: Any) -> None:
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
