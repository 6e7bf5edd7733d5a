"""Read the protobuf schemas in the installed jaxlib as plain tables.

jaxlib's shared library contains the serialized FileDescriptorProto of every .proto file compiled into it. Their
positions and lengths are not recorded. Each begins with its own file name, and the numbers of its fields increase, so
it is found by the name and ends before the first number that decreases.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import jaxlib
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FeatureSet,
    FieldDescriptorProto,
    FileDescriptorProto,
)
from google.protobuf.message import DecodeError

VERSION = tuple(int(part) for part in jaxlib.__version__.split(".")[:3] if part.isdigit())

_TYPES = {number: name.removeprefix("TYPE_").lower() for name, number in FieldDescriptorProto.Type.items()}
_VARINT, _BYTES = 0, 2
_UNPACKED = {
    FieldDescriptorProto.TYPE_STRING,
    FieldDescriptorProto.TYPE_BYTES,
    FieldDescriptorProto.TYPE_MESSAGE,
}
_WIRE_TYPES = {
    number: _BYTES if each.type in _UNPACKED else _VARINT
    for number, each in FileDescriptorProto.DESCRIPTOR.fields_by_number.items()
}


@dataclass(frozen=True)
class Field:
    """Properties of a field that affect the wire format.

    `type_name` is the full name of its message or enum, or empty.
    """

    name: str
    type: str
    type_name: str
    repeated: bool
    packed: bool
    presence: bool  # an unset field differs from one with the default value
    oneof: frozenset[int]  # numbers of the fields in the same oneof, including this one's


@dataclass
class Schema:
    """Messages and enums by their full names, and methods of services by theirs."""

    messages: dict[str, dict[int, Field]] = field(default_factory=dict)
    enums: dict[str, dict[int, str]] = field(default_factory=dict)
    map_entries: set[str] = field(default_factory=set)
    # Request, whether it is a stream, reply, whether it is a stream.
    methods: dict[str, tuple[str, bool, str, bool]] = field(default_factory=dict)

    @classmethod
    def of(cls, files: Iterable[FileDescriptorProto]) -> Schema:
        schema = cls()
        for file in files:
            schema._add_enums(file.package, file.enum_type)
            for message in file.message_type:
                schema._add_message(file.package, message, file.syntax)
            for service in file.service:
                for method in service.method:
                    schema.methods[f"{file.package}.{service.name}/{method.name}"] = (
                        method.input_type.removeprefix("."),
                        method.client_streaming,
                        method.output_type.removeprefix("."),
                        method.server_streaming,
                    )
        return schema

    def _add_enums(self, scope: str, enums: Iterable[EnumDescriptorProto]) -> None:
        for enum in enums:
            self.enums[f"{scope}.{enum.name}"] = {value.number: value.name for value in enum.value}

    def _add_message(self, scope: str, message: DescriptorProto, syntax: str) -> None:
        name = f"{scope}.{message.name}"
        self.messages[name] = {each.number: _field(message, each, syntax) for each in message.field}
        if message.options.map_entry:
            self.map_entries.add(name)
        self._add_enums(name, message.enum_type)
        for nested in message.nested_type:
            self._add_message(name, nested, syntax)


@functools.cache
def installed() -> Schema:
    """Return the schema of the jaxlib that this interpreter imports."""
    (library,) = Path(jaxlib.__file__).parent.glob("libjax_common.*")
    with open(library, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as image:
        found = {each.name: each for each in _descriptors(image)}
    return Schema.of(found.values())


def _descriptors(image: mmap.mmap) -> Iterator[FileDescriptorProto]:
    suffix = b".proto\x12"  # the end of a name, then the tag of the package
    longest = 127  # of a name: its length takes one byte
    at = image.find(suffix)
    while at >= 0:
        name_end = at + len(suffix) - 1
        for start in range(name_end - 3, name_end - longest - 3, -1):
            if image[start] == 0x0A and image[start + 1] == name_end - start - 2:
                # Other data may look like a name.
                with contextlib.suppress(DecodeError):
                    yield FileDescriptorProto.FromString(image[start : _end(image, start)])
                break
        at = image.find(suffix, name_end)


def _end(image: mmap.mmap, start: int) -> int:
    position, previous = start, 0
    while True:
        tag, after = _varint(image, position)
        number, wire_type = tag >> 3, tag & 7
        once = number in (1, 2)
        if number < previous or (once and number == previous) or _WIRE_TYPES.get(number) != wire_type:
            return position
        value, after = _varint(image, after)
        position = after + value if wire_type == _BYTES else after
        previous = number


def _varint(image: mmap.mmap, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = image[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7


def _field(message: DescriptorProto, each: FieldDescriptorProto, syntax: str) -> Field:
    """Read a field, with the defaults of proto3 and edition 2023, which differ in the presence of scalars."""
    repeated = each.label == FieldDescriptorProto.LABEL_REPEATED
    in_oneof = each.HasField("oneof_index") and not each.proto3_optional
    packable = repeated and each.type not in _UNPACKED
    explicit = syntax != "proto3" and each.options.features.field_presence != FeatureSet.IMPLICIT
    is_message = each.type == FieldDescriptorProto.TYPE_MESSAGE
    return Field(
        name=each.name,
        type=_TYPES[each.type],
        type_name=each.type_name.removeprefix("."),
        repeated=repeated,
        packed=packable and (each.options.packed or not each.options.HasField("packed")),
        presence=not repeated and (explicit or is_message or each.HasField("oneof_index")),
        oneof=frozenset(
            other.number
            for other in message.field
            if in_oneof and other.HasField("oneof_index") and other.oneof_index == each.oneof_index
        ),
    )
