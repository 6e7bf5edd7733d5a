"""Contents of arrays for Atoll's plug-in: many small arrays in one request, and reads of single arrays in parts.

IFRT needs several requests for each array.
"""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from typing import Any

from atoll.errors import Code, Status, StatusError, invalid
from atoll.executables.loaded_executable import ImmediateReply, LoadedExecutable
from atoll.executables.program_executables import PuttingExecutable, SmallWritingExecutable, WritingExecutable
from atoll.executables.session_arrays import ArrayRecord
from atoll.host_services.calls.call_messages import ReadWanted
from atoll.ifrt.ifrt_session import IfrtSession
from atoll.ifrt.requests.grouped_reads import HostRead, assemble, divide, is_whole
from atoll.ir.program import DeviceToHost, HostBuffer, HostToDevice, Program, single
from atoll.ir.types import ArraySpec, contents_nbytes, nbytes
from atoll.quantities import counted
from atoll.session.downloads import DirectDownload, Download

_SMALL_BYTES = 16 << 10  # of an array that a host sends at once


def read_staged(session: IfrtSession, count: int) -> Coroutine[Any, Any, ImmediateReply]:
    """Launch the read of the session's staged arrays, which are then no longer staged. Return the wait for the answer.

    Raise INVALID_ARGUMENT if not `count` arrays are staged, RESOURCE_EXHAUSTED if their contents are too large for one
    answer, and UNIMPLEMENTED if only the client knows the positions of an array's shards.
    """
    handles = tuple(session.staged)
    session.staged.clear()
    if count and len(handles) != count:
        raise invalid(f"a question is about the contents of {counted(count, 'array')}, but {len(handles)} are staged")
    handles = handles[:count]
    specs = tuple(session.arrays.spec(handle) for handle in handles)
    if any(spec.dtype == "string" for spec in specs):
        raise invalid("the contents of strings have no fixed size")
    cluster = session.cluster
    reads = divide(specs, lambda device: cluster.hosts_of((device,))[0])
    downloads = [Download(cluster.number(), read.devices, read.nbytes, cluster.make_future) for read in reads]
    if handles:
        key = ("get all", specs, tuple([read.devices for read in reads]))
        program = cluster.programs.number(key, lambda: _program(specs, reads))
        completions = tuple(cluster.mint() for _ in reads)
        feeds = tuple(download.feed for download in downloads)
        session.launch(program, handles, completions, feeds, wait=cluster.expect(*downloads))
    return _answer(specs, reads, downloads)


def _program(specs: tuple[ArraySpec, ...], reads: Sequence[HostRead]) -> Program:
    """Return a program that reads arrays, with one feed for each host."""
    nodes = tuple(_read(specs, feed, read) for feed, read in enumerate(reads))
    return Program("copy to host", specs, nodes, tuple(range(len(specs), len(specs) + len(reads))), len(reads))


def _read(specs: Sequence[ArraySpec], feed: int, read: HostRead) -> DeviceToHost:
    if all(is_whole(specs[number]) for number in read.arrays):
        return DeviceToHost(read.arrays, feed, None)
    return DeviceToHost(read.arrays, feed, None, (), tuple([part.position for part in read.parts]))


def _program_of_one(spec: ArraySpec) -> Program:
    """Return a program that reads one array, in row-major order."""
    return single("copy to host", (spec,), DeviceToHost((0,), 0, None), feeds=1)


def send_contents(session: IfrtSession, feed: int, arguments: Sequence[int]) -> None:
    """Read one array, whose contents hosts send to the client's process as `feed`.

    A small array that is known to be ready, or that was launched a while ago, is requested from its host, without the
    controller. If the host cannot send it, and for other arrays, launch the read.

    The client learns there if the read fails. Raise INVALID_ARGUMENT if there is another number of arguments, or if the
    client does not receive contents.
    """
    if len(arguments) != 1:
        raise invalid(f"a reading has one argument, but {len(arguments)} were passed")
    handle = arguments[0]
    relay = session.client_relay()
    cluster = session.cluster

    def launch() -> None:
        try:
            spec = session.arrays.spec(handle)
            if spec.dtype == "string":
                raise invalid("the contents of strings have no fixed size")
            program = cluster.programs.number(("get", spec), lambda: _program_of_one(spec))
        except StatusError as error:
            on_fail(error.status)
            return
        wait = cluster.expect(DirectDownload(feed, spec.sharding.devices, on_fail, relay.is_local))
        session.launch(program, (handle,), (cluster.mint(),), (feed,), wait=wait)

    def on_fail(status: Status) -> None:
        relay.cannot_read((feed,), status)

    def launch_later() -> None:
        if is_early:
            session.early_reads.missed()
        if session.is_held_back:  # then the client reads the array as JAX does
            relay.cannot_read((feed,))
        else:
            launch()

    record = session.arrays.records.get(handle)
    device = -1 if record is None else _whole_on(record)
    is_early = record is not None and not record.ready
    if record is not None and device >= 0 and is_early and not session.early_reads.may_try(record.made_at):
        device = -1
    wanted = ReadWanted(feed, handle, has_ended=not is_early)
    if device < 0 or not relay.read_directly(device, wanted, launch_later):
        launch()


def _whole_on(record: ArrayRecord) -> int:
    """Return a device that has, or will have, the whole of a small array, or -1 for other arrays."""
    spec = record.spec
    if record.deferred is not None or record.error is not None or spec is None or spec.dtype == "string":
        return -1
    if record.memory.is_deleted:
        return -1
    return spec.sharding.devices[0] if is_whole(spec) and contents_nbytes(spec) <= _SMALL_BYTES else -1


def put_contents(session: IfrtSession, executable: PuttingExecutable, handles: Sequence[int], context: int) -> None:
    """Launch the program that makes the executable's arrays, and send their contents to the host."""
    _make(session, executable, handles, executable.contents, context)


def put_small_contents(
    session: IfrtSession, executable: SmallWritingExecutable, handles: Sequence[int], context: int
) -> None:
    """Launch the program that makes the executable's array of contents that the client has put into a shared slot.

    Raise INVALID_ARGUMENT if the client has not.
    """
    number = executable.next_number()
    contents = session.client_relay().take_small(number, executable.nbytes)
    _make(session, executable, handles, contents, context)


def _make(
    session: IfrtSession, executable: LoadedExecutable, handles: Sequence[int], contents: bytes, context: int
) -> None:
    """Launch the program that makes the outputs of an executable of these contents."""
    cluster, specs = session.cluster, executable.outputs
    program = cluster.programs.number(("put all", specs), lambda: _put_program(specs))
    if len(contents) <= cluster.welcome.most_carried:
        session.launch_with_contents(program, handles, contents, context)
    else:
        feed = cluster.feed()
        cluster.upload(cluster.hosts_of(executable.devices), feed, [contents], feed)
        session.launch(program, (), handles, (feed,), context)
    session.define(handles, specs, context)


def write_contents(session: IfrtSession, executable: WritingExecutable, handles: Sequence[int], context: int) -> None:
    """Launch the program that makes the executable's array, and ask the client's process for the contents.

    Raise INVALID_ARGUMENT if the client has not asked for a channel, and UNAVAILABLE if its channel has ended.
    """
    write = executable.next_number()  # in any case, because the client counts its runs
    relay = session.client_relay()
    if not relay.has_client:  # the session ends if the channel ends after this: see `ClientRelay`
        raise StatusError(Code.UNAVAILABLE, "the connection on which the client sends contents of arrays has ended")
    cluster, specs = session.cluster, executable.outputs
    program = cluster.programs.number(("put all", specs), lambda: _put_program(specs))
    feed = cluster.feed()
    relay.writes.start(write, feed, cluster.hosts_of(executable.devices), executable.nbytes)
    session.launch(program, (), handles, (feed,), context)
    session.define(handles, specs, context)


def _put_program(specs: tuple[ArraySpec, ...]) -> Program:
    shape = specs[0].shape if len(specs) == 1 else (sum(map(nbytes, specs)),)
    node = HostToDevice((HostBuffer(0, shape, None, None),), specs)
    return Program("device_put", (), (node,), tuple(range(len(specs))), 1)


async def _answer(
    specs: Sequence[ArraySpec], reads: Sequence[HostRead], downloads: Sequence[Download]
) -> ImmediateReply:
    try:
        contents = [b"".join([memoryview(part).cast("B") for part in await _parts(each)]) for each in downloads]
    finally:
        for download in downloads:
            download.drop()
    devices = specs[0].sharding.devices[:1] if specs else (0,)
    return ImmediateReply("contents of arrays", devices, assemble(specs, reads, contents) if specs else b"")


async def _parts(download: Download) -> list[Any]:
    """Return all parts of a download. Raise its error."""
    parts: list[Any] = []
    while (part := await download.part(len(parts))) is not None:
        parts.append(part)
    return parts
