"""A session: one client's stream of requests, each answered once.

A request that makes arrays is answered at once: the client has numbered the results itself, and a failure is told by
whatever uses them. Requests are taken in order; what waits for the cluster answers later, by itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import msgspec

from atoll.errors import OK, Code, Status, StatusError, invalid, not_found, status_of
from atoll.ir.program import (
    DeviceToHost,
    HostBuffer,
    HostToDevice,
    Mapping,
    Program,
    Rearrange,
    Transfer,
    single,
)
from atoll.ir.types import ArraySpec, Replicated, Sharding, nbytes
from atoll.proxy import codec, executables
from atoll.proxy.arrays import ArrayRecord, Arrays, Memory, Origin
from atoll.proxy.devices import cost_attributes, init_reply
from atoll.proxy.executables import Executable, compile_job
from atoll.proxy.host_buffers import HostBuffers, Stored
from atoll.proxy.link import Link
from atoll.proxy.protos import arrays_pb2, session_pb2, values_pb2
from atoll.transport import messages as m
from atoll.transport.messages import FunctionInfo

_log = logging.getLogger(__name__)

# Handles that the server mints start far above the client's.
SERVER_HANDLES = 1 << 62
# Programs of transfers and the like that stay registered; jitted functions keep theirs for as long as they live.
MAX_PROGRAMS = 4096
USER_CONTEXT_PAYLOAD = "type.googleapis.com/ifrt.UserContext"

Responder = Callable[[Any], None]


class Session:
    """Answers a client's requests. `send(bytes)` carries responses; `pause` and `resume` its flow."""

    def __init__(
        self,
        link: Link,
        send: Callable[[bytes], None],
        pause: Callable[[], None],
        resume: Callable[[], None],
        number: int,
    ) -> None:
        self.link = link
        self.number = number
        self.arrays = Arrays()
        self.buffers = HostBuffers()
        self.executables: dict[int, Executable] = {}
        self._send = send
        self._pause = pause
        self._resume = resume
        self._paused = False
        self._in_flight = 0
        self._next_handle = SERVER_HANDLES
        self._futures: dict[int, asyncio.Future[Status]] = {}
        self._programs: OrderedDict[Any, int] = OrderedDict()
        self._layouts: dict[Any, bytes] = {}
        self._sequence = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self.default_kinds = tuple(device.info.default_memory for device in link.welcome.devices)
        link.on_retired = self._retired

    # ---- requests and responses

    def on_request(self, data: bytes | memoryview) -> None:
        """Handles one request. Raises INVALID_ARGUMENT for bytes that are none: the stream then ends."""
        request = codec.parse(session_pb2.Request, data if isinstance(data, bytes) else bytes(data))
        kind = request.WhichOneof("kind")
        handler = _HANDLERS.get(kind)
        op = request.meta.op_id
        context = request.meta.user_context_id
        try:
            if handler is None:
                raise StatusError(Code.UNIMPLEMENTED, f"unknown request (fields {_unknown(request)})")
            handler(self, getattr(request, kind), op, context)
        except Exception as error:
            if not isinstance(error, StatusError):
                _log.exception("handling %s failed", kind)
            self._fail(op, context, status_of(error), kind)

    def _response(self, op: int) -> Any:
        response = session_pb2.Response()
        response.meta.op_id = op
        return response

    def _reply(self, response: Any, ended_context: int = 0) -> None:
        meta = response.meta
        meta.seq_num = self._sequence
        self._sequence += 1
        if ended_context:
            meta.destroyed_user_context_ids.append(ended_context)
        if self.arrays.ended_origins:
            meta.destroyed_user_context_ids.extend(self.arrays.ended_origins)
            self.arrays.ended_origins.clear()
        self._send(response.SerializeToString())

    def _fail(self, op: int, context: int, status: Status, kind: str | None = None) -> None:
        response = self._response(op)
        if context and USER_CONTEXT_PAYLOAD not in status.payloads:
            payloads = {**status.payloads, USER_CONTEXT_PAYLOAD: str(context).encode()}
            status = Status(status.code, status.message, payloads)
        if context:  # told with the next answer that is none but an error: the client reads it there alone
            self.arrays.ended_origins.append(context)
        response.meta.status.CopyFrom(codec.status_to(status))
        _log.info("%s fails: %s", kind, status)
        self._send(response.SerializeToString())

    def _later(self, op: int, context: int, work: Coroutine[Any, Any, Any]) -> None:
        """Answers when `work` is done, with the response it returns or the error it raises."""

        async def run() -> None:
            try:
                self._reply(await work, context)
            except Exception as error:
                if not isinstance(error, StatusError):
                    _log.exception("a request failed")
                self._fail(op, context, status_of(error))

        task = self.link.loop.create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        """The client is gone."""
        for task in self._tasks:
            task.cancel()
        self.buffers.close()
        self.link.close()

    # ---- making arrays

    def _mint(self) -> int:
        self._next_handle += 1
        return self._next_handle - 1

    def _handles(self, given: Sequence[int], count: int) -> list[int]:
        """The client's handles for results, or fresh ones."""
        if not given:
            return [self._mint() for _ in range(count)]
        if len(given) != count:
            raise invalid(f"{len(given)} handles for {count} results")
        for handle in given:
            if handle == 0 or handle >= SERVER_HANDLES or handle in self.arrays.records:
                raise invalid(f"{handle} is no handle for a new array")
        return list(given)

    def _define(
        self,
        handles: Sequence[int],
        specs: Sequence[ArraySpec | None],
        context: int,
        memories: Sequence[Memory] | None = None,
        error: Status | None = None,
    ) -> None:
        origin = Origin(context, len(handles)) if context and handles else None
        for i, handle in enumerate(handles):
            memory = memories[i] if memories is not None else Memory()
            self.arrays.records[handle] = ArrayRecord(specs[i], memory, origin, error)

    def _undefined(self, given: Sequence[int], context: int, error: StatusError) -> None:
        """The request failed: the handles that the client chose stand for its error from now on."""
        status = error.status
        if context:
            status = Status(
                status.code, status.message, {**status.payloads, USER_CONTEXT_PAYLOAD: str(context).encode()}
            )
        fresh = [h for h in given if 0 < h < SERVER_HANDLES and h not in self.arrays.records]
        self._define(fresh, [None] * len(fresh), 0, error=status)

    def _program(self, key: Any, build: Callable[[], Program]) -> int:
        """The number of a registered program; `build` is asked only for one that is not."""
        number = self._programs.get(key)
        if number is not None:
            self._programs.move_to_end(key)
            return number
        number = self._programs[key] = self.link.number()
        self.link.send(m.RegisterProgram(number, build()))
        while len(self._programs) > MAX_PROGRAMS:
            _, oldest = self._programs.popitem(last=False)
            self.link.send(m.ReleaseProgram(oldest))
        return number

    def _launch(
        self, program: int, arguments: Sequence[int], results: Sequence[int], feeds: Sequence[int] = ()
    ) -> None:
        self._in_flight += 1
        self.link.send(m.Launch(program, tuple(arguments), tuple(results), tuple(feeds)))
        if self._in_flight >= self.link.welcome.launch_window and not self._paused:
            self._paused = True
            self._pause()

    def _retired(self, count: int) -> None:
        self._in_flight -= count
        if self._paused and self._in_flight <= self.link.welcome.launch_window // 2:
            self._paused = False
            self._resume()

    def _made(self, name: str, op: int, handles: list[int], one: bool = False) -> None:
        response = self._response(op)
        reply = getattr(response, name)
        reply.SetInParent()
        if one:
            reply.array = handles[0]
        else:
            reply.arrays.extend(handles)
        self._reply(response)

    # ---- the session itself

    def _init(self, request: Any, op: int, context: int) -> None:
        response = self._response(op)
        response.init.CopyFrom(init_reply(self.link.welcome, self.number))
        self._reply(response, context)

    def _check_future(self, request: Any, op: int, context: int) -> None:
        future = self._futures.pop(request.future, None)
        if future is None:
            raise not_found(f"unknown future handle {request.future}")

        async def work() -> Any:
            (await future).raise_if_error()
            response = self._response(op)
            response.check_future.SetInParent()
            return response

        self._later(op, context, work())

    def _future(self, status: Status | None = None) -> int:
        handle = self._mint()
        future = self._futures[handle] = self.link.loop.create_future()
        if status is not None:
            future.set_result(status)
        return handle

    def _check_value_ready(self, request: Any, op: int, context: int) -> None:
        handles = list(request.values)
        for handle in handles:
            self.arrays.get(handle)

        def ready(status: Status) -> None:
            if not status.ok:
                self._fail(op, context, status, "check_value_ready")
                return
            response = self._response(op)
            response.check_value_ready.SetInParent()
            self._reply(response, context)

        if handles:
            self.link.wait(handles, ready)
        else:
            ready(OK)

    def _get_default_device_assignment(self, request: Any, op: int, context: int) -> None:
        rows = executables.default_assignment(
            request.num_replicas, request.num_partitions, len(self.link.welcome.devices)
        )
        response = self._response(op)
        proto = response.get_default_device_assignment.device_assignment
        proto.replica_count, proto.computation_count = len(rows), len(rows[0])
        for partition in range(len(rows[0])):
            proto.computation_devices.add(replica_device_ids=[row[partition] for row in rows])
        self._reply(response, context)

    def _get_default_layout(self, request: Any, op: int, context: int) -> None:
        dtype, dims, device = codec.dtype_from(request.dtype), tuple(request.dims), request.device_id
        codec.shape_from(values_pb2.Shape(dims=dims))
        self.link.hosts_of([device])
        kind = self.link.welcome.devices[device].info.kind
        key = (dtype, dims, kind, request.memory_kind)

        async def work() -> Any:
            if key not in self._layouts:
                ordinal = self.link.welcome.devices[device].info.ordinal
                payload = msgspec.msgpack.encode((dtype, dims, ordinal))
                self._layouts[key] = await self.link.inquire("layout", device, payload=payload)
            response = self._response(op)
            response.get_default_layout.serialized_pjrt_layout = self._layouts[key]
            return response

        self._later(op, context, work())

    # ---- arrays from and to the client

    def _make_array(self, request: Any, op: int, context: int) -> None:
        given = [request.array] if request.HasField("array") else []
        try:
            shape = codec.shape_from(request.shape)
            layout = codec.layout_from(request.layout) if request.HasField("layout") else None
            spec = ArraySpec(
                codec.dtype_from(request.dtype), shape, codec.sharding_from(request.sharding, shape), layout
            )
            handles = self._handles(given, 1)
            strides = codec.strides_from(request)
            self._put([spec], handles, [[(request.host_buffer, shape, strides, None)]], context)
        except StatusError as error:
            self._undefined(given, context, error)
            self.buffers.consume(request.host_buffer, Stored.drop)
            raise
        self._made("make_array_from_host_buffer", op, handles, one=True)

    def _make_arrays(self, request: Any, op: int, context: int) -> None:
        given = list(request.arrays)
        try:
            specs = [codec.spec_from(each.array_spec) for each in request.specs]
            for i, each in enumerate(request.specs):
                if each.array_spec.HasField("layout") and each.array_spec.layout:
                    specs[i] = msgspec.structs.replace(specs[i], layout=_layout_of(each.array_spec.layout))
            handles = self._handles(given, len(specs))
            sources = []
            for each in request.specs:
                if len(each.addressable_shard_indices) != len(each.host_buffers):
                    raise invalid("as many host buffers as lists of shards are needed")
                sources.append(
                    [
                        (
                            buffer.host_buffer,
                            codec.shape_from(buffer.shape),
                            codec.strides_from(buffer),
                            tuple(indices.indices),
                        )
                        for indices, buffer in zip(each.addressable_shard_indices, each.host_buffers, strict=True)
                    ]
                )
            self._put(specs, handles, sources, context)
        except StatusError as error:
            self._undefined(given, context, error)
            for each in request.specs:
                for buffer in each.host_buffers:
                    self.buffers.consume(buffer.host_buffer, Stored.drop)
            raise
        self._made("make_arrays_from_host_buffer_shards", op, handles)

    def _put(
        self,
        specs: Sequence[ArraySpec],
        handles: Sequence[int],
        sources: Sequence[list[tuple[int, tuple[int, ...], tuple[int, ...] | None, tuple[int, ...] | None]]],
        context: int,
    ) -> None:
        """Launches one transfer for each array; its buffers go to the hosts when they come."""
        for spec, handle, buffers in zip(specs, handles, sources, strict=True):
            hosts = self.link.hosts_of(spec.sharding.devices)
            if spec.dtype in ("token", "opaque"):
                raise StatusError(Code.UNIMPLEMENTED, f"arrays of dtype {spec.dtype} cannot be made from data")
            node = HostToDevice(
                tuple(
                    HostBuffer(i, shape, strides, positions)
                    for i, (_, shape, strides, positions) in enumerate(buffers)
                ),
                (spec,),
            )
            key = ("put", node)
            program = self._program(key, lambda node=node: single("device_put", (), node, feeds=len(node.buffers)))
            feeds = []
            for buffer_handle, _, _, _ in buffers:
                feed = self.link.number()
                feeds.append(feed)
                self.buffers.consume(
                    buffer_handle,
                    lambda stored, feed=feed, hosts=hosts, dtype=spec.dtype: self._upload(stored, feed, hosts, dtype),
                )
            self._launch(program, (), (handle,), feeds)
            self._define([handle], [spec], context)

    def _upload(self, stored: Stored, feed: int, hosts: Sequence[int], dtype: str) -> None:
        if stored.descriptor >= 0:
            self.link.upload_file(hosts, feed, stored.nbytes, stored.descriptor)
            return
        contents = stored.contents
        if dtype == "string":
            texts = codec.parse(values_pb2.StringArrayContents, b"".join(bytes(part) for part in contents))
            contents = [msgspec.msgpack.encode(list(texts.strings))]
        self.link.upload(hosts, feed, contents)

    def _copy_to_host_buffer(self, request: Any, op: int, context: int) -> None:
        handle, buffer = request.array, request.host_buffer
        spec = self.arrays.spec(handle)
        node = DeviceToHost((0,), 0, codec.strides_from(request))
        program = self._program(("get", spec, node), lambda: single("copy to host", (spec,), node, feeds=1))
        feed = self.link.number()
        completion = self._mint()
        answered = False

        def arrived(content: Any, status: Status, done: Callable[[], None]) -> None:
            nonlocal answered
            if answered:
                done()
                return
            answered = True
            if spec.dtype == "string":
                texts = msgspec.msgpack.decode(bytes(content), type=list[bytes])
                content = values_pb2.StringArrayContents(strings=texts).SerializeToString()
            self.buffers.put(buffer, Stored([content], memoryview(content).nbytes, done=done))
            response = self._response(op)
            response.copy_to_host_buffer.SetInParent()
            self._reply(response, context)

        def ended(status: Status) -> None:
            nonlocal answered
            if not status.ok and not answered:
                answered = True
                self.link.forget(feed)
                self._fail(op, context, status, "copy_to_host_buffer")

        self.link.expect(feed, arrived)
        self._launch(program, (handle,), (completion,), (feed,))
        self.link.wait((completion,), ended)
        self.link.send(m.Release((completion,)))

    def _make_error_arrays(self, request: Any, op: int, context: int) -> None:
        specs = [codec.spec_from(each) for each in request.specs]
        handles = self._handles(list(request.arrays), len(specs))
        status = codec.status_from(request.error)
        self.link.send(m.MakeError(tuple(handles), status))
        self._define(handles, specs, context)
        self._made("make_error_arrays", op, handles)

    # ---- arrays from arrays

    def _rearrange(
        self,
        name: str,
        inputs: Sequence[int],
        specs: Sequence[ArraySpec],
        mappings: Sequence[Mapping],
        handles: list[int],
        context: int,
        *,
        donate: bool = False,
        bitcast: bool = False,
    ) -> None:
        sources = tuple(self.arrays.spec(handle) for handle in inputs)
        node = Rearrange(tuple(range(len(sources))), tuple(specs), tuple(mappings), donate, bitcast)
        program = self._program((name, sources, node), lambda: single(name, sources, node))
        memories = [self.arrays.get(handle).memory for handle in inputs]
        parents: list[tuple[Memory, ...]] = [
            tuple(memories[mapping.input] for mapping in mappings if mapping.output == i)
            for i in range(len(specs))
        ]
        self._launch(program, inputs, handles)
        if donate:
            for memory in memories:
                memory.delete()
            self._define(handles, specs, context)
        else:
            self._define(handles, specs, context, [Memory(each) for each in parents])

    def _assemble(self, request: Any, op: int, context: int) -> None:
        given = [request.result] if request.result else []
        try:
            inputs = list(request.arrays)
            shape = codec.shape_from(request.shape)
            sharding = codec.sharding_from(request.sharding, shape)
            dtype = (
                codec.dtype_from(request.dtype) if request.HasField("dtype") else self.arrays.spec(inputs[0]).dtype
            )
            handles = self._handles(given, 1)
            mappings = []
            position = 0
            for i, handle in enumerate(inputs):
                count = len(self.arrays.spec(handle).sharding.devices)
                mappings.append(Mapping(i, 0, (0, count, 1), (position, position + count, 1)))
                position += count
            self._rearrange(
                "assemble",
                inputs,
                [ArraySpec(dtype, shape, sharding)],
                mappings,
                handles,
                context,
                donate=request.copy_semantics == arrays_pb2.DONATE_INPUT,
            )
        except StatusError as error:
            self._undefined(given, context, error)
            raise
        self._made("assemble_array_from_single_device_arrays", op, handles, one=True)

    def _disassemble(self, request: Any, op: int, context: int) -> None:
        given = list(request.results)
        try:
            spec = self.arrays.spec(request.array)
            count = len(spec.sharding.devices)
            handles = self._handles(given, count)
            specs = [_shard_spec(spec, i) for i in range(count)]
            mappings = [Mapping(0, i, (i, i + 1, 1), (0, 1, 1)) for i in range(count)]
            self._rearrange("disassemble", [request.array], specs, mappings, handles, context)
        except StatusError as error:
            self._undefined(given, context, error)
            raise
        self._made("disassemble_into_single_device_arrays", op, handles)

    def _fully_replicated_shard(self, request: Any, op: int, context: int) -> None:
        given = [request.result] if request.result else []
        try:
            spec = self.arrays.spec(request.array)
            handles = self._handles(given, 1)
            mapping = Mapping(0, 0, (0, 1, 1), (0, 1, 1))
            self._rearrange(
                "take one shard", [request.array], [_shard_spec(spec, 0)], [mapping], handles, context
            )
        except StatusError as error:
            self._undefined(given, context, error)
            raise
        self._made("fully_replicated_shard", op, handles, one=True)

    def _remap(self, request: Any, op: int, context: int) -> None:
        given = list(request.results)
        try:
            inputs = list(request.arrays)
            specs = [codec.spec_from(each) for each in request.plan.output_specs]
            handles = self._handles(given, len(specs))
            mappings = []
            for each in request.plan.mappings:
                columns = (
                    each.from_start, each.from_end, each.from_step, each.to_start, each.to_end, each.to_step
                )  # fmt: skip
                if len({len(column) for column in columns}) != 1:
                    raise invalid("a remap plan's intervals do not agree")
                for a, b, c, d, e, f in zip(*columns, strict=True):
                    mappings.append(Mapping(each.in_array, each.out_array, (a, b, c), (d, e, f)))
            self._rearrange(
                "remap",
                inputs,
                specs,
                mappings,
                handles,
                context,
                donate=request.copy_semantics == arrays_pb2.DONATE_INPUT,
            )
        except StatusError as error:
            self._undefined(given, context, error)
            raise
        self._made("remap_arrays", op, handles)

    def _bitcast(self, request: Any, op: int, context: int) -> None:
        given = list(request.results)
        try:
            inputs = list(request.arrays)
            specs = [codec.spec_from(each) for each in request.specs]
            handles = self._handles(given, len(specs))
            for i, (handle, spec) in enumerate(zip(inputs, specs, strict=True)):
                source = self.arrays.spec(handle)
                if nbytes(source) != nbytes(spec) or source.sharding.devices != spec.sharding.devices:
                    raise invalid("a bitcast keeps the devices and the number of bytes")
                count = len(spec.sharding.devices)
                mapping = Mapping(0, 0, (0, count, 1), (0, count, 1))
                self._rearrange(
                    "bitcast",
                    [handle],
                    [spec],
                    [mapping],
                    handles[i : i + 1],
                    context if i == 0 else 0,
                    donate=request.copy_semantics == arrays_pb2.DONATE_INPUT,
                    bitcast=True,
                )
        except StatusError as error:
            self._undefined(given, context, error)
            raise
        self._made("bitcast_arrays", op, handles)

    def _copy_arrays(self, request: Any, op: int, context: int) -> None:
        given = list(request.results)
        try:
            inputs = list(request.arrays)
            handles = self._handles(given, len(inputs))
            sources = [self.arrays.spec(handle) for handle in inputs]
            targets = []
            for source in sources:
                devices = tuple(request.device_ids) or source.sharding.devices
                if len(devices) != len(source.sharding.devices):
                    raise invalid(f"an array on {len(source.sharding.devices)} devices cannot be copied to {len(devices)}")
                kind = request.memory_kind if request.HasField("memory_kind") else source.sharding.memory_kind
                sharding = Sharding(devices, source.sharding.tiling, kind)
                targets.append(msgspec.structs.replace(source, sharding=sharding))
            self._transfer("device_put", inputs, sources, targets, handles, request.copy_semantics, context, False)
        except StatusError as error:
            self._undefined(given, context, error)
            raise
        self._made("copy_arrays", op, handles)

    def _reshard(self, request: Any, op: int, context: int) -> None:
        given = list(request.results)
        try:
            inputs = list(request.arrays)
            handles = self._handles(given, len(inputs))
            sources = [self.arrays.spec(handle) for handle in inputs]
            targets = [codec.spec_from(each) for each in request.specs]
            if len(targets) != len(inputs):
                raise invalid(f"{len(targets)} shardings for {len(inputs)} arrays")
            self._transfer("reshard", inputs, sources, targets, handles, request.copy_semantics, context, True)
        except StatusError as error:
            self._undefined(given, context, error)
            raise
        self._made("reshard_arrays", op, handles)

    def _transfer(
        self,
        name: str,
        inputs: list[int],
        sources: list[ArraySpec],
        targets: list[ArraySpec],
        handles: list[int],
        semantics: int,
        context: int,
        reshard: bool,
    ) -> None:
        donate = semantics == arrays_pb2.DONATE_INPUT
        self.link.hosts_of([d for target in targets for d in target.sharding.devices])
        node = Transfer(tuple(range(len(inputs))), tuple(targets), donate, reshard)
        arguments = tuple(sources)
        program = self._program((name, arguments, node), lambda: single(name, arguments, node))
        self._launch(program, inputs, handles)
        if donate:
            for handle in inputs:
                self.arrays.get(handle).memory.delete()
        self._define(handles, targets, context)

    # ---- the ends of arrays

    def _delete_array(self, request: Any, op: int, context: int) -> None:
        status = OK
        alive = []
        for handle in request.arrays:
            record = self.arrays.records.get(handle)
            if record is None or record.error is not None:
                status = Status(Code.NOT_FOUND, f"unknown array handle {handle}") if record is None else record.error or OK
                continue
            record.memory.delete()
            alive.append(handle)
        if alive:
            self.link.send(m.Release(tuple(alive), delete=True))
        response = self._response(op)
        response.delete_array.deletion_future_handle = self._future(status)
        self._reply(response, context)

    def _is_array_deleted(self, request: Any, op: int, context: int) -> None:
        record = self.arrays.get(request.array)
        response = self._response(op)
        response.is_array_deleted.deleted = record.memory.is_deleted
        self._reply(response, context)

    def _destruct_array(self, request: Any, op: int, context: int) -> None:
        handles = list(request.arrays)
        missing = []
        known = []
        for handle in handles:
            record = self.arrays.remove(handle)
            if record is None:
                missing.append(handle)
            elif record.error is None:
                known.append(handle)
        if known:
            self.link.send(m.Release(tuple(known)))
        if missing:
            raise not_found(f"unknown array handles {missing[:10]}")
        response = self._response(op)
        response.destruct_array.SetInParent()
        self._reply(response, context)

    # ---- executables

    def _compile(self, request: Any, op: int, context: int) -> None:
        job = compile_job(request, len(self.link.welcome.devices))

        async def work() -> Any:
            feed = self.link.number()
            self.link.upload(self.link.hosts_of(job.devices), feed, [job.source])
            number, encoded = await self.link.register_function(job.content, feed, job.assignment)
            info = msgspec.msgpack.decode(encoded, type=FunctionInfo)
            handle = self._mint()
            kind = self.default_kinds[job.devices[0]]
            executable = Executable(number, info, job.devices, kind)
            self.executables[handle] = executable
            response = self._response(op)
            response.compile.CopyFrom(executable.compile_reply(handle, self._future(OK)))
            return response

        self._later(op, context, work())

    def _executable(self, handle: int) -> Executable:
        executable = self.executables.get(handle)
        if executable is None:
            raise not_found(f"unknown executable handle {handle}")
        return executable

    def _executable_metadata(self, request: Any, op: int, context: int) -> None:
        response = self._response(op)
        response.executable_metadata.CopyFrom(self._executable(request.executable).metadata_reply())
        self._reply(response, context)

    def _executable_mpmd_metadata(self, request: Any, op: int, context: int) -> None:
        self._executable(request.executable)
        response = self._response(op)
        error = codec.status_to(executables.MPMD_ERROR)
        response.executable_mpmd_metadata.mpmd_compiled_memory_stats_error.CopyFrom(error)
        self._reply(response, context)

    def _executable_mpmd_cost_analysis(self, request: Any, op: int, context: int) -> None:
        self._executable(request.executable)
        response = self._response(op)
        response.executable_mpmd_cost_analysis.status.CopyFrom(codec.status_to(executables.MPMD_ERROR))
        self._reply(response, context)

    def _executable_cost_analysis(self, request: Any, op: int, context: int) -> None:
        executable = self._executable(request.executable)

        async def work() -> Any:
            response = self._response(op)
            try:
                payload = await self.link.inquire("cost", executable.devices[0], executable.function)
                response.executable_cost_analysis.attributes.SetInParent()
                cost_attributes(payload, response.executable_cost_analysis)
            except StatusError as error:
                response.executable_cost_analysis.status.CopyFrom(codec.status_to(error.status))
            return response

        self._later(op, context, work())

    def _executable_program_text(self, request: Any, op: int, context: int) -> None:
        executable = self._executable(request.executable)

        async def work() -> Any:
            response = self._response(op)
            try:
                text = await self.link.inquire("text", executable.devices[0], executable.function)
                response.executable_program_text.human_readable_program_text = text.decode()
            except StatusError as error:
                response.executable_program_text.status.CopyFrom(codec.status_to(error.status))
            return response

        self._later(op, context, work())

    def _executable_delete(self, request: Any, op: int, context: int) -> None:
        self._executable(request.executable)
        response = self._response(op)
        unsupported = Status(Code.UNIMPLEMENTED, "executables are destructed, not deleted")
        response.executable_delete.future = self._future(unsupported)
        self._reply(response, context)

    def _executable_is_deleted(self, request: Any, op: int, context: int) -> None:
        self._executable(request.executable)
        response = self._response(op)
        response.executable_is_deleted.is_deleted = False
        self._reply(response, context)

    def _executable_destruct(self, request: Any, op: int, context: int) -> None:
        executable = self._executable(request.executable)
        del self.executables[request.executable]
        for program in executable.programs.values():
            self.link.send(m.ReleaseProgram(program))
        self.link.send(m.ReleaseFunction(executable.function))
        response = self._response(op)
        response.executable_destruct.SetInParent()
        self._reply(response, context)

    def _execute(self, request: Any, op: int, context: int) -> None:
        given = list(request.results)
        records = self.arrays.records
        status_handle = 0
        try:
            executable = self._executable(request.executable)
            arguments = list(request.arguments)
            if len(arguments) != len(executable.info.parameters):
                raise invalid(
                    f"{executable.info.name} takes {len(executable.info.parameters)} arguments, got {len(arguments)}"
                )
            memories = []
            for handle in arguments:
                record = records.get(handle)
                if record is None or record.error is not None:
                    record = self.arrays.get(handle)
                memories.append(record.memory)
            options = request.options
            if request.device_ids and tuple(request.device_ids) != executable.devices:
                raise invalid("an executable runs on the devices that it was compiled for")
            fill_status = options.fill_status
            preserved: frozenset[int] = frozenset()
            if options.non_donatable_input_indices and executable.donated:
                preserved = executable.donated & frozenset(options.non_donatable_input_indices)
            program = executable.programs.get((preserved, fill_status))
            if program is None:
                program = executable.programs[(preserved, fill_status)] = self.link.number()
                self.link.send(m.RegisterProgram(program, executable.program(preserved, fill_status)))
            handles = self._handles(given, len(executable.outputs))
            results = handles
            if fill_status:
                status_handle = request.status_handle or self._mint()
                completion = self._mint()
                results = [*handles, completion]
                future = self._futures[status_handle] = self.link.loop.create_future()
            self._launch(program, arguments, results)
            if fill_status:
                self.link.wait((completion,), future.set_result)
                self.link.send(m.Release((completion,)))
            for i in executable.donated:
                if i not in preserved:
                    memories[i].delete()
            self._define(handles, executable.outputs, context)
        except StatusError as error:
            self._undefined(given, context, error)
            if request.status_handle:
                self._futures[request.status_handle] = future = self.link.loop.create_future()
                future.set_result(error.status)
            raise
        response = self._response(op)
        reply = response.execute
        reply.SetInParent()
        if status_handle:
            reply.status_handle = status_handle
        if not given:
            reply.outputs.extend(executable.output_replies(handles))
        self._reply(response, 0 if handles else context)

    def _fetch_execute_result(self, request: Any, op: int, context: int) -> None:
        future = self._futures.pop(request.status_handle, None)
        if future is None:
            raise not_found(f"unknown status handle {request.status_handle}")

        async def work() -> Any:
            (await future).raise_if_error()
            response = self._response(op)
            response.fetch_execute_result.SetInParent()
            return response

        self._later(op, context, work())

    def _host_callback(self, request: Any, op: int, context: int) -> None:
        raise StatusError(Code.UNIMPLEMENTED, executables.CALLBACK_ADVICE)


_HANDLERS: dict[str | None, Callable[[Session, Any, int, int], None]] = {
    "init": Session._init,
    "check_future": Session._check_future,
    "check_value_ready": Session._check_value_ready,
    "get_default_device_assignment": Session._get_default_device_assignment,
    "get_default_layout": Session._get_default_layout,
    "make_array_from_host_buffer": Session._make_array,
    "make_arrays_from_host_buffer_shards": Session._make_arrays,
    "make_error_arrays": Session._make_error_arrays,
    "assemble_array_from_single_device_arrays": Session._assemble,
    "disassemble_into_single_device_arrays": Session._disassemble,
    "fully_replicated_shard": Session._fully_replicated_shard,
    "copy_to_host_buffer": Session._copy_to_host_buffer,
    "copy_arrays": Session._copy_arrays,
    "remap_arrays": Session._remap,
    "bitcast_arrays": Session._bitcast,
    "reshard_arrays": Session._reshard,
    "delete_array": Session._delete_array,
    "is_array_deleted": Session._is_array_deleted,
    "destruct_array": Session._destruct_array,
    "compile": Session._compile,
    "executable_metadata": Session._executable_metadata,
    "executable_mpmd_metadata": Session._executable_mpmd_metadata,
    "executable_cost_analysis": Session._executable_cost_analysis,
    "executable_mpmd_cost_analysis": Session._executable_mpmd_cost_analysis,
    "executable_program_text": Session._executable_program_text,
    "execute": Session._execute,
    "fetch_execute_result": Session._fetch_execute_result,
    "executable_delete": Session._executable_delete,
    "executable_is_deleted": Session._executable_is_deleted,
    "executable_destruct": Session._executable_destruct,
    "host_callback_poll": Session._host_callback,
    "host_callback_return": Session._host_callback,
}


def _shard_spec(spec: ArraySpec, position: int) -> ArraySpec:
    """The type of one shard as an array of its own."""
    from atoll.ir.types import shard_shape

    sharding = Sharding((spec.sharding.devices[position],), Replicated(), spec.sharding.memory_kind)
    return ArraySpec(spec.dtype, shard_shape(spec.sharding, spec.shape, position), sharding, spec.layout)


def _layout_of(text: bytes) -> tuple[int, ...]:
    return codec.xla_layout(codec.layout_proto_from_text(text.decode()))


def _unknown(request: Any) -> list[int]:
    from google.protobuf.unknown_fields import UnknownFieldSet

    return [entry.field_number for entry in UnknownFieldSet(request)]
