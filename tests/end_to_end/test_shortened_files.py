"""Test of a client that shortens the file of a large transfer after its proxy accepted it: the workers survive."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from atoll.errors import Code
from atoll.protocol.ifrt import arrays_pb2, session_pb2, transport_pb2, values_pb2
from tests.end_to_end.raw_client import RawClient, on_device
from tests.end_to_end.standing_cluster import StandingCluster

ELEMENTS = 4 << 20


def test_a_file_that_is_shortened_ends_no_worker(cluster: StandingCluster, module_directory: Path) -> None:
    shared = module_directory / "shared"
    shared.mkdir()
    cluster.start_proxy(module_directory / "proxy.sock", shared)
    workers = {name: process.pid for name, process in cluster.processes().items()}
    with contextlib.closing(RawClient(f"unix:{module_directory}/proxy.sock")) as client:
        client.open()
        for handle in range(1, 4):
            descriptor = os.open(shared / f"lt_{handle}", os.O_CREAT | os.O_RDWR, 0o600)
            os.write(descriptor, bytes(4 * ELEMENTS))
            metadata = transport_pb2.HostBufferStoreMetadata(
                session_id=client.session_id, handle=handle, buffer_size=4 * ELEMENTS
            )
            taken = client.unary("HostBufferReadFromDisk", transport_pb2.HostBufferReadFromDisk(metadata=metadata))
            assert taken == (0, "")
            put = arrays_pb2.MakeArrayFromHostBuffer(
                dtype=values_pb2.DType(kind=values_pb2.DType.KIND_F32),
                shape={"dims": (ELEMENTS,)},
                sharding=on_device(0),
                host_buffer=handle,
                array=handle,
            )
            assert client.status(lambda into, put=put: into.make_array_from_host_buffer.CopyFrom(put)) == (0, "")
            if handle > 1:  # the first is shortened while it may be read, and the others when their arrays are made
                ready = session_pb2.CheckValueReady(values=[handle])
                assert client.status(lambda into, ready=ready: into.check_value_ready.CopyFrom(ready)) == (0, "")
            os.ftruncate(descriptor, 0)
            os.close(descriptor)
            code, message = client.status(lambda into, handle=handle: into.copy_to_host_buffer.MergeFrom(read(handle)))
            assert code in ((0,) if handle > 1 else (0, Code.DATA_LOSS)), message
    assert {name: process.pid for name, process in cluster.processes().items()} == workers


def read(array: int) -> arrays_pb2.CopyToHostBuffer:
    return arrays_pb2.CopyToHostBuffer(array=array, host_buffer=100 + array)
