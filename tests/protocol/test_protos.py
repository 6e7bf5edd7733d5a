"""Compare Atoll's .proto files with the schemas in the installed jaxlib.

Names are not sent, so Atoll's messages are paired with jaxlib's by position. The tables below pair the roots. Two
fields with the same number pair their messages or enums.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from jax._src.lib import xla_client

import atoll.protocol.ifrt
from atoll.protocol.ifrt import compile_pb2, xla_pb2
from tests.protocol.jaxlib_descriptors import VERSION, Field, Schema
from tests.protocol.jaxlib_descriptors import installed as theirs

PROTOS = Path(atoll.protocol.ifrt.__file__).parent
PACKAGE = "atoll.ifrt."
SERVICE = "xla.ifrt.proxy.GrpcIfrtService/"

# Method: request, whether it is a stream, reply, whether it is a stream.
METHODS = {
    "GetVersion": ("GetVersion", False, "GetVersionReply", False),
    "IfrtSession": ("Request", True, "Response", True),
    "HostBufferStore": ("HostBufferStore", True, "HostBufferStoreReply", False),
    "HostBufferLookup": ("HostBufferLookup", False, "HostBufferLookupReply", True),
    "HostBufferDelete": ("HostBufferDelete", False, "HostBufferDeleteReply", False),
    "HostBufferReadFromDisk": ("HostBufferReadFromDisk", False, "HostBufferReadFromDiskReply", False),
}

# Messages that are sent as bytes inside others or in headers, so that no field refers to them.
EMBEDDED = {
    "SessionMetadata": "xla.ifrt.proxy.GrpcIfrtSessionMetadata",
    "StringArrayContents": "xla.ifrt.proto.StringArrayContents",
    "SingleDeviceSharding": "xla.ifrt.SingleDeviceShardingProto",
    "HloSharding": "xla.ifrt.HloShardingProto",
    "ConcreteEvenSharding": "xla.ifrt.ConcreteEvenShardingProto",
    "ConcreteSharding": "xla.ifrt.ConcreteShardingProto",
    "OpaqueSharding": "xla.ifrt.OpaqueShardingProto",
    "ShardingParamSharding": "xla.ifrt.ShardingParamShardingProto",
    "PjRtLayout": "xla.ifrt.PjRtLayoutProto",
    "CompactLayout": "xla.ifrt.CompactLayoutProto",
    "XlaCompileOptions": "xla.ifrt.XlaCompileOptionsProto",
    "CustomCallProgram": "xla.ifrt.CustomCallProgramProto",
    "IfrtIrProgram": "xla.ifrt.IfrtIrProgramProto",
    "IfrtIrCompileOptions": "xla.ifrt.IfrtIrCompileOptionsProto",
    "CustomCallCompileOptions": "xla.ifrt.CustomCallCompileOptionsProto",
    "HostCallback": "xla.ifrt.XlaHostCallbackProto",
    "PyHostCallback": "jax.PyHostCallbackProto",
    "ObjectStoreDump": "ifrt_proxy_contrib_pathways.ObjectStoreDumpProto",
}

# Declarations that not every jaxlib has: the first version with one, and the first version without it.
ALWAYS, NEVER = (0,), (99,)
LIFETIMES = {
    "CustomCallCompileOptions": ((0, 11), NEVER),
    "DType.Kind.KIND_F6E2M3FN": ((0, 11), NEVER),
    "DType.Kind.KIND_F6E3M2FN": ((0, 11), NEVER),
    "IfrtIrCompileOptions.outputs_bundle_slice_sizes": ((0, 11), NEVER),
    "NamedSharding.ReductionOp": ((0, 11), NEVER),
    "NamedSharding.reduction_op": ((0, 11), NEVER),
    "ShardingParam": (ALWAYS, (0, 12)),
    "ShardingParamSharding": (ALWAYS, (0, 12)),
    "XlaCompileOptions.outputs_bundle_slice_sizes": ((0, 11), NEVER),
    "XlaCompileOptions.version_number": ((0, 11), NEVER),
}

# Messages of which Atoll only declares the fields that it reads or replaces.
PARTIAL = {"CompileOptions", "DebugOptions", "ExecutableBuildOptions", "OpMetadata"}

# Fields and enum values that Atoll omits, by their names in jaxlib, with the reasons. Those of a newer jaxlib than the
# supported ones may be listed here until they are needed.
LEFT_OUT = {
    "tensorflow.error.Code.DO_NOT_USE_RESERVED_FOR_FUTURE_EXPANSION_USE_DEFAULT_IN_SWITCH_INSTEAD_": "its name says it",
}


def in_jaxlib(name: str) -> bool:
    first, gone = LIFETIMES.get(name, (ALWAYS, NEVER))
    return first <= VERSION < gone


def short(name: str) -> str:
    return name.removeprefix(PACKAGE)


@functools.cache
def ours() -> Schema:
    names = [f"atoll.protocol.ifrt.{path.stem}_pb2" for path in PROTOS.glob("*.proto")]
    files = [importlib.import_module(name).DESCRIPTOR.serialized_pb for name in names]
    return Schema.of(FileDescriptorProto.FromString(file) for file in files)


def roots() -> Iterator[tuple[str, str]]:
    for method, (request, _, reply, _) in METHODS.items():
        their_request, _, their_reply, _ = theirs().methods[SERVICE + method]
        yield request, their_request
        yield reply, their_reply
    yield from ((mine, other) for mine, other in EMBEDDED.items() if in_jaxlib(mine))


@functools.cache
def pairs() -> dict[str, set[str]]:
    """Return Atoll's messages and enums, each with those of jaxlib that are the types of the same fields."""
    found: dict[str, set[str]] = {}
    waiting = [(PACKAGE + mine, other) for mine, other in roots()]
    while waiting:
        mine, other = waiting.pop()
        if other in found.setdefault(mine, set()):
            continue
        found[mine].add(other)
        there = theirs().messages.get(other, {})
        for number, field in ours().messages.get(mine, {}).items():
            if field.type_name and number in there and there[number].type == field.type:
                waiting.append((field.type_name, there[number].type_name))
    return found


def on_the_wire(field: Field, schema: Schema, declared: set[int]) -> dict[str, object]:
    """Return all properties except names, as far as these fields of the message are concerned."""
    return {
        "type": "map" if field.type_name in schema.map_entries else field.type,
        "repeated": field.repeated,
        "packed": field.packed,
        "presence": field.presence,
        "oneof": sorted(field.oneof & declared),
    }


def test_every_method_of_the_service_is_known() -> None:
    there = {
        name.removeprefix(SERVICE): (client_stream, server_stream)
        for name, (_, client_stream, _, server_stream) in theirs().methods.items()
        if name.startswith(SERVICE)
    }
    assert {name: (method[1], method[3]) for name, method in METHODS.items()} == there


@pytest.mark.parametrize("name", sorted({*ours().messages, *ours().enums}))
def test_every_message_and_enum_stands_for_one_of_jaxlib(name: str) -> None:
    if not in_jaxlib(short(name)):
        assert name not in pairs(), f"jaxlib {VERSION} has {short(name)}, against what LIFETIMES says"
        return
    assert name in pairs(), f"nothing in jaxlib leads to {short(name)}: delete it, or name it in EMBEDDED"
    known = {*theirs().messages, *theirs().enums}
    assert pairs()[name] <= known, f"jaxlib {VERSION} has this no more: write its end into LIFETIMES"


@pytest.mark.parametrize("name", sorted(ours().messages))
def test_every_field_travels_as_in_jaxlib(name: str) -> None:
    here = ours().messages[name]
    for other in pairs().get(name, ()):
        there = theirs().messages[other]
        for number, field in here.items():
            label = f"{short(name)}.{field.name}"
            if not in_jaxlib(label):
                continue
            assert number in there, f"{label} = {number}: {other} of jaxlib {VERSION} has no such number"
            what = f"{label} = {number} stands for {other}.{there[number].name}"
            mine = on_the_wire(field, ours(), set(here))
            assert mine == on_the_wire(there[number], theirs(), set(here)), what
            if field.type_name and not field.type_name.startswith(PACKAGE):
                assert field.type_name == there[number].type_name, what


@pytest.mark.parametrize("name", sorted(name for name in ours().messages if short(name) not in PARTIAL))
def test_no_field_of_jaxlib_is_missing(name: str) -> None:
    missing = [
        f"{other}.{field.name} = {number}, {'repeated ' * field.repeated}{field.type_name or field.type}"
        for other in sorted(pairs().get(name, ()))
        for number, field in theirs().messages[other].items()
        if number not in ours().messages[name] and f"{other}.{field.name}" not in LEFT_OUT
    ]
    assert not missing, f"{short(name)} lacks what jaxlib {VERSION} has: {'; '.join(missing)}"


@pytest.mark.parametrize("name", sorted(ours().enums))
def test_every_enum_value_means_what_it_means_in_jaxlib(name: str) -> None:
    for other in pairs().get(name, ()):
        there = theirs().enums[other]
        for number, value in ours().enums[name].items():
            label = f"{short(name)}.{value}"
            if not in_jaxlib(label):
                continue
            assert number in there, f"{label} = {number}: {other} of jaxlib {VERSION} has no such number"
            # Atoll may omit a prefix that only repeats the name of the enum.
            assert there[number].endswith(value), f"{label} = {number} is {there[number]} in {other}"


@pytest.mark.parametrize("name", sorted(ours().enums))
def test_no_enum_value_of_jaxlib_is_missing(name: str) -> None:
    missing = [
        f"{other}.{value} = {number}"
        for other in sorted(pairs().get(name, ()))
        for number, value in theirs().enums[other].items()
        if number not in ours().enums[name] and f"{other}.{value}" not in LEFT_OUT
    ]
    assert not missing, f"{short(name)} lacks what jaxlib {VERSION} has: {'; '.join(missing)}"


def test_a_request_and_its_reply_stand_under_the_same_name_and_number() -> None:
    requests, responses = ours().messages[f"{PACKAGE}Request"], ours().messages[f"{PACKAGE}Response"]
    assert requests.keys() == responses.keys()
    for number, field in requests.items():
        if field.name != "meta":
            assert responses[number].name == field.name
            assert responses[number].type_name == f"{field.type_name}Reply"


def test_compile_options_keep_what_we_do_not_declare() -> None:
    sent = xla_client.CompileOptions()
    sent.executable_build_options.debug_options.xla_dump_to = "/dumps"
    sent.executable_build_options.fdo_profile = b"profile"

    options = compile_pb2.CompileOptions.FromString(sent.SerializeAsString())
    assignment = options.executable_build_options.device_assignment
    assignment.replica_count, assignment.computation_count = 1, 2
    assignment.computation_devices.add(replica_device_ids=[7])
    assignment.computation_devices.add(replica_device_ids=[9])
    received = xla_client.CompileOptions.ParseFromString(options.SerializeToString())

    build = received.executable_build_options
    assert build.debug_options.xla_dump_to == "/dumps"
    assert build.fdo_profile == b"profile"
    assert build.device_assignment is not None
    assert build.device_assignment.computation_count() == 2


def test_shardings_that_jaxlib_writes_read_as_ours() -> None:
    written = xla_client.HloSharding.iota_tile((2, 4), reshape_dims=(4, 2), transpose_perm=(1, 0)).to_proto()
    sharding = xla_pb2.OpSharding.FromString(written.SerializeToString())
    assert sharding.type == xla_pb2.OpSharding.OTHER
    assert list(sharding.tile_assignment_dimensions) == [2, 4]
    assert list(sharding.iota_reshape_dims) == [4, 2]
    assert list(sharding.iota_transpose_perm) == [1, 0]


def test_generated_modules_are_up_to_date(tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools", reason="needs grpcio-tools, of the dev extra")
    script = Path(__file__).parents[2] / "scripts" / "generate_protos.py"
    spec = importlib.util.spec_from_file_location("generate_protos", script)
    assert spec is not None
    assert spec.loader is not None
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)

    fresh = {path.name: _descriptor_line(path) for path in generator.generate(tmp_path)}
    committed = {path.name: _descriptor_line(path) for path in PROTOS.glob("*_pb2.py")}
    assert fresh == committed, "run `make protos`"


def _descriptor_line(module: Path) -> str:
    """Return the line with the serialized descriptor. The other lines differ between versions of protoc."""
    (line,) = [line for line in module.read_text().splitlines() if line.startswith("DESCRIPTOR = ")]
    return line
