"""The report of who holds a device's memory, as jaxlib's client reads it to print it beside its own stacks."""

from __future__ import annotations

import time

import msgspec

from atoll.protocol.ifrt import status_pb2
from atoll.protocol.messages import MEMORY_REPORT, MemoryReport

_DUMP_URL = "type.googleapis.com/ifrt_proxy_contrib_pathways.ObjectStoreDumpProto"


def client_payload(key: str, value: bytes) -> tuple[str, bytes]:
    """A status payload as the client knows it; all but the controller's report are known to it as they are."""
    if key != MEMORY_REPORT:
        return key, value
    report = msgspec.msgpack.decode(value, type=MemoryReport)
    proto = status_pb2.ObjectStoreDump(device=report.device, dump_timestamp_ns=time.time_ns())
    for holder in report.holders:
        stack = proto.dump.per_error_context.add(error_context_id=holder.traceback_id)
        stack.per_creator.add(
            creator=holder.producer,
            ready_obj_count=holder.ready,
            ready_total_size=holder.ready_bytes,
            not_ready_obj_count=holder.unready,
            not_ready_total_size=holder.unready_bytes,
        )
    return _DUMP_URL, proto.SerializeToString()
