"""pathwaysutils' persistence: plugin programs in JSON that make hosts write arrays to storage, and read them.

Orbax's `CloudPathwaysArrayHandler` and `pathwaysutils.persistence` send them. Clients name the locations, so only the
session's own Python processes access them, each for the shards of its host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

from atoll.errors import invalid
from atoll.executables.json_requests import beginnings, read_request
from atoll.executables.python_functions import MAX_ARRAYS, PythonExecutable
from atoll.executables.session_arrays import ArrayRecord
from atoll.ir.program import STORAGE_STREAM, Program
from atoll.ir.types import ArraySpec, Sharding, shard_boxes
from atoll.protocol.ifrt import xla_pb2
from atoll.protocol.messages.python_messages import ReadArrays, StoredArray, WriteArrays
from atoll.protocol.translation import codec
from atoll.protocol.translation.shardings import sharding_to, tiling_from
from atoll.quantities import counted
from atoll.session.cluster_session import ClusterSession

_MAX_TEXT_BYTES = 4096

_Size = Annotated[int, msgspec.Meta(ge=0, le=codec.MAX_ELEMENTS)]


class _Devices(msgspec.Struct, frozen=True):
    device_ids: tuple[int, ...]


class _Timeout(msgspec.Struct, frozen=True):
    seconds: _Size = 0
    nanos: _Size = 0


class _Array(msgspec.Struct, frozen=True, kw_only=True):
    """The common fields of both kinds of requests. Bytes are in base64."""

    b64_location: bytes
    b64_name: bytes
    b64_hlo_sharding_string: bytes  # an OpSharding
    devices: _Devices
    timeout: _Timeout

    def stored(self, shape: tuple[int, ...], dtype: str = "") -> StoredArray:
        devices = self.devices.device_ids
        if not devices or len(set(devices)) != len(devices):
            raise invalid("a persistence request needs one or more distinct devices")
        op = codec.parse(xla_pb2.OpSharding, self.b64_hlo_sharding_string)
        sharding = Sharding(devices, tiling_from(op, len(devices), codec.checked_shape(shape)))
        shard_boxes(sharding, shape)
        location, name = _text(self.b64_location), _text(self.b64_name)
        if not location.startswith("/") and "://" not in location:
            raise invalid(f"the location of an array must be an absolute path or a URL, not {location[:200]!r}")
        return StoredArray(location, name, shape, sharding, dtype)


class _Shape(msgspec.Struct, frozen=True):
    xla_primitive_type_str: str
    dimensions: tuple[_Size, ...]


class _Write(_Array, frozen=True, kw_only=True):
    shape: tuple[_Size, ...]


class _Read(_Array, frozen=True, kw_only=True):
    shape: _Shape


class _Writes(msgspec.Struct, frozen=True):
    write_requests: tuple[_Write, ...] = ()


class _Reads(msgspec.Struct, frozen=True):
    read_requests: tuple[_Read, ...] = ()


class _Request(msgspec.Struct, frozen=True):
    """A request, which has one of these fields."""

    write: _Write | None = msgspec.field(default=None, name="persistenceWriteRequest")
    read: _Read | None = msgspec.field(default=None, name="persistenceReadRequest")
    bulk_persistence_write_request: _Writes = _Writes()
    bulk_persistence_read_request: _Reads = _Reads()

    @property
    def writes(self) -> tuple[_Write, ...]:
        return self.bulk_persistence_write_request.write_requests if self.write is None else (self.write,)

    @property
    def reads(self) -> tuple[_Read, ...]:
        return self.bulk_persistence_read_request.read_requests if self.read is None else (self.read,)


PERSISTENCE_REQUESTS = beginnings(_Request)


def persistence_executable(payload: bytes, cluster: ClusterSession) -> PythonExecutable:
    """Return an executable that writes or reads the arrays of a request. Raises INVALID_ARGUMENT or UNIMPLEMENTED."""
    request = read_request(_Request, payload, "persistence request")
    each_array: tuple[_Array, ...] = (*request.writes, *request.reads)
    if bool(request.writes) == bool(request.reads) or len(each_array) > MAX_ARRAYS:
        raise invalid(
            f"a persistence request must write or read 1 to {MAX_ARRAYS} arrays, "
            f"not write {len(request.writes)} and read {len(request.reads)}"
        )
    if len({frozenset(each.devices.device_ids) for each in each_array}) > 1:
        raise invalid("a persistence request has arrays on different devices: send one request per set of devices")
    seconds = max(each.timeout.seconds + each.timeout.nanos / 1e9 for each in each_array)
    if request.writes:
        stored = tuple(each.stored(each.shape) for each in request.writes)
        return _Writing(WriteArrays("persistence write", stored, seconds), cluster)
    stored = tuple(
        each.stored(each.shape.dimensions, codec.dtype_of_xla(each.shape.xla_primitive_type_str))
        for each in request.reads
    )
    op_shardings = [each.b64_hlo_sharding_string for each in request.reads]
    return _Reading(ReadArrays("persistence read", stored, seconds), op_shardings, cluster)


class _InOrder(PythonExecutable):
    has_streams = False
    runs_apart = True

    def program(self, preserved: frozenset[int], completion: bool, stream: int) -> Program:
        return super().program(preserved, completion, STORAGE_STREAM)


class _Writing(_InOrder):
    """Writes its arguments. The first run determines their dtypes."""

    def __init__(self, source: WriteArrays, cluster: ClusterSession) -> None:
        super().__init__(cluster, source, source.arrays[0].sharding.devices, (), (), ())
        self._stored = source.arrays

    def check(self, arguments: Sequence[ArrayRecord]) -> None:
        if not self.inputs:
            dtypes = [record.spec.dtype for record in arguments if record.spec is not None]
            if len(dtypes) != len(self._stored) or len(dtypes) != len(arguments):
                raise invalid(f"a persistence request to write {counted(len(self._stored), 'array')} got {len(dtypes)}")
            stored = zip(dtypes, self._stored, strict=True)
            self.take([ArraySpec(dtype, each.shape, each.sharding) for dtype, each in stored])
        super().check(arguments)


class _Reading(_InOrder):
    """Reads arrays. `op_shardings` are their shardings in XLA's form."""

    def __init__(self, source: ReadArrays, op_shardings: Sequence[bytes], cluster: ClusterSession) -> None:
        outputs = [ArraySpec(each.dtype, each.shape, each.sharding) for each in source.arrays]
        announced = [sharding_to(each.sharding, each.shape, op) for each, op in zip(outputs, op_shardings, strict=True)]
        super().__init__(cluster, source, outputs[0].sharding.devices, (), outputs, announced)


def _text(data: bytes) -> str:
    try:
        text = data.decode()
    except UnicodeDecodeError:
        text = ""
    if not text or "\0" in text or len(data) > _MAX_TEXT_BYTES:
        raise invalid(
            f"locations and names of arrays must have 1 to {_MAX_TEXT_BYTES} bytes in UTF-8, not {data[:200]!r}"
        )
    return text
