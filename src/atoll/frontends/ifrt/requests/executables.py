"""Executables: compiled, asked about, run, dropped. Running one is the hot path of a session."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

import msgspec

from atoll.errors import OK, Code, Status, StatusError, invalid, unimplemented
from atoll.frontends.ifrt import codec, slices
from atoll.frontends.ifrt.executables import (
    MPMD_ERROR,
    Executable,
    Loaded,
    compile_job,
    plugin_payload,
)
from atoll.frontends.ifrt.program_executables import read
from atoll.frontends.ifrt.session import Exchange, Handler
from atoll.ir.submission import is_submission
from atoll.protocol import messages as m
from atoll.protocol.advice import CALLBACK_ADVICE
from atoll.protocol.messages import FunctionInfo

_NOTHING_KEPT: frozenset[int] = frozenset()


def _compile(exchange: Exchange, request: Any) -> None:
    session = exchange.session
    payload = plugin_payload(request.program)
    if slices.is_wish(payload):
        slices.add(exchange, payload)
        return
    if is_submission(payload):
        exchange.reply(_loaded(exchange, read(payload, list(session.executables.values()), session.link)))
        return

    async def work() -> Any:
        job = compile_job(request, len(session.link.welcome.devices))
        number, encoded = await session.link.register_function(job.source, job.content, job.assignment)
        return _loaded(exchange, Executable(number, msgspec.msgpack.decode(encoded, type=FunctionInfo), job))

    # JAX raises this error from the very call that it belongs to: it reads as in stock JAX without its place.
    exchange.later(work(), placed=False)


def _loaded(exchange: Exchange, loaded: Loaded) -> Any:
    session = exchange.session
    response = exchange.response()
    response.compile.CopyFrom(loaded.compile_reply(session.load(loaded), session.add_future(OK)))
    return response


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
    response = exchange.response()
    reply = response.executable_cost_analysis
    executable = exchange.session.executable(request.executable)
    _inquire(exchange, response, reply, executable.cost(exchange.session.link, reply))


def _program_text(exchange: Exchange, request: Any) -> None:
    response = exchange.response()
    reply = response.executable_program_text
    executable = exchange.session.executable(request.executable)

    async def fill() -> None:
        reply.human_readable_program_text = await executable.text(exchange.session.link)

    _inquire(exchange, response, reply, fill())


def _inquire(exchange: Exchange, response: Any, reply: Any, fill: Coroutine[Any, Any, None]) -> None:
    """Answers when `reply` is filled; both kinds of reply have a `status` of their own for a failure."""

    async def work() -> Any:
        try:
            await fill
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
    session.executable(request.executable)
    session.unload(request.executable)
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


def _run(exchange: Exchange, request: Any, given: list[int]) -> tuple[list[int], int, Loaded]:
    session = exchange.session
    executable = session.executable(request.executable)
    arguments = executable.gather(session.staged, list(request.arguments))
    if arguments is None:
        return session.handles(given, 0), 0, executable
    if request.device_ids and tuple(request.device_ids) != executable.devices:
        raise invalid("an executable runs on the devices that it was compiled for")
    records = [session.arrays.get(handle) for handle in arguments]
    executable.check(records)
    options = request.options
    preserved = _NOTHING_KEPT
    if options.non_donatable_input_indices and executable.donated:
        preserved = executable.donated & frozenset(options.non_donatable_input_indices)
    key = (preserved, options.fill_status)
    registered = executable.programs.get(key)
    if registered is None:
        body = executable.program(*key)
        registered = executable.programs[key] = session.link.number(), len(body.results) - len(executable.outputs)
        session.link.send(m.RegisterProgram(registered[0], body))
    program, completions = registered
    handles = session.handles(given, len(executable.outputs))
    status_handle = 0
    if options.fill_status:
        status_handle = session.add_future(handle=request.status_handle)
        ends = [session.mint() for _ in range(completions)]
        session.launch(program, arguments, (*handles, *ends), context=exchange.context, room=executable.room)
        session.link.wait(executable.awaited(handles, ends), session.resolver(status_handle))
        session.link.send(m.Release(tuple(ends)))
    else:
        session.launch(program, arguments, handles, context=exchange.context, room=executable.room)
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
