"""Reads and checks compile requests: the program, its options, callbacks and devices."""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec

from atoll.decodable import decodable
from atoll.errors import invalid, unimplemented
from atoll.protocol.callbacks import (
    CALLBACK_ADVICE,
    CALLBACKS_OPTION,
    CHANNELS_OPTION,
    COMPILE_CALLS_OPTION,
    PROGRAM_OPTION,
)
from atoll.protocol.ffi_libraries import TARGETS_OPTION, read_targets
from atoll.protocol.ifrt import compile_pb2
from atoll.protocol.messages import FunctionSource, HostChannels, LibraryTarget
from atoll.protocol.translation import codec
from atoll.quantities import counted

XLA_PROGRAM = "xla::ifrt::XlaProgram"
PLUGIN_PROGRAM = "xla::ifrt::PluginProgram"
_MAX_CALLBACKS = 1 << 16  # per program
_PLUGIN_PREFIX = b"__serialized_plugin_program "


class CompileJob(msgspec.Struct, frozen=True):
    """A compile request that was checked."""

    source: bytes  # a FunctionSource
    content: str  # hash of `source`, which does not depend on the devices
    assignment: tuple[tuple[int, ...], ...]
    callbacks: tuple[int, ...] = ()
    targets: tuple[LibraryTarget, ...] = ()  # of the client's libraries

    @property
    def devices(self) -> tuple[int, ...]:
        return tuple(device for partitions in self.assignment for device in partitions)


def plugin_payload(program: Any) -> bytes:
    """Return the payload of a plugin program; empty for other kinds of programs."""
    return program.data.removeprefix(_PLUGIN_PREFIX).lstrip() if program.type_name == PLUGIN_PROGRAM else b""


def compile_job(request: Any, device_count: int, session: int = 0) -> CompileJob:
    """Read a Compile request of the cluster's `session`. Raises INVALID_ARGUMENT or UNIMPLEMENTED."""
    kind = request.program.type_name
    if kind == PLUGIN_PROGRAM:
        text = plugin_payload(request.program).decode(errors="replace")
        raise invalid(f"unknown plugin program {text[:200]!r}: this server runs XLA programs")
    if kind != XLA_PROGRAM:
        raise unimplemented(f"programs of kind {kind[:100]!r} are not supported; this server runs XLA programs")
    if request.host_callbacks:
        raise unimplemented(CALLBACK_ADVICE)
    options = codec.parse(compile_pb2.XlaCompileOptions, request.compile_options.data).compile_options
    build = options.executable_build_options
    replicas, partitions = max(1, build.num_replicas), max(1, build.num_partitions)
    if build.HasField("device_assignment"):
        assignment = _assignment(build.device_assignment)
    else:
        assignment = default_assignment(replicas, partitions, device_count)
    if (len(assignment), len(assignment[0])) != (replicas, partitions):
        raise invalid(
            f"the device assignment is for {counted(len(assignment), 'replica')} of "
            f"{counted(len(assignment[0]), 'partition')}, but the program has {replicas} of {partitions}"
        )
    check_devices([device for row in assignment for device in row], device_count)
    build.ClearField("device_assignment")
    overrides = options.env_option_overrides
    program = _program(request, overrides)
    callbacks = _callbacks(overrides)
    channels = _channels(overrides, len(callbacks))
    compile_calls, keys = _compile_calls(overrides)
    callbacks += compile_calls
    targets = read_targets(overrides.pop(TARGETS_OPTION).string_field) if TARGETS_OPTION in overrides else ()
    source = FunctionSource(
        program,
        options.SerializeToString(deterministic=True),
        session if callbacks else 0,
        callbacks,
        keys=keys,
        channels=channels,
        targets=targets,
    )
    return compile_job_of(source, assignment)


def compile_job_of(source: FunctionSource, assignment: tuple[tuple[int, ...], ...]) -> CompileJob:
    """Return the job that compiles `source` for devices by [replica][partition]."""
    encoded = msgspec.msgpack.encode(source)
    return CompileJob(encoded, hashlib.sha256(encoded).hexdigest(), assignment, source.callbacks, source.targets)


def check_devices(devices: Sequence[int], device_count: int) -> None:
    """Raise INVALID_ARGUMENT unless the devices are distinct and exist."""
    if len(set(devices)) != len(devices) or not all(0 <= device < device_count for device in devices):
        raise invalid(f"the device assignment {devices} contains a device twice, or a device that does not exist")


def _callbacks(overrides: Any) -> tuple[int, ...]:
    """Return the client's numbers of the callables that the program calls while it runs."""
    if CALLBACKS_OPTION not in overrides:
        return ()
    text = overrides.pop(CALLBACKS_OPTION).string_field
    first, _, count = text.partition("+")
    if not (_is_number(first) and _is_number(count) and 0 < int(count) <= _MAX_CALLBACKS):
        raise invalid(f"invalid numbers of callbacks: {text[:100]!r}")
    return tuple(range(int(first), int(first) + int(count)))


def _channels(overrides: Any, callbacks: int) -> tuple[HostChannels, ...]:
    """Return the channels of each callable, if the program exchanges data with its host by sends and receives."""
    if CHANNELS_OPTION not in overrides:
        return ()
    text = overrides.pop(CHANNELS_OPTION).string_field
    try:
        channels = msgspec.json.decode(text, type=decodable(tuple[HostChannels, ...]))
    except (msgspec.DecodeError, RecursionError):
        channels = ()
    used = [channel for each in channels for channel in (*each.sends, *each.receives)]
    if len(channels) != callbacks or len(set(used)) != len(used) or not all(each.sends for each in channels):
        raise invalid(f"invalid channels of {callbacks} callbacks: {text[:100]!r}")
    return channels


def _compile_calls(overrides: Any) -> tuple[tuple[int, ...], tuple[bytes, ...]]:
    """Return the client's numbers of the callables that XLA calls while compiling, and the program's keys for them."""
    if COMPILE_CALLS_OPTION not in overrides:
        return (), ()
    text = overrides.pop(COMPILE_CALLS_OPTION).string_field
    first, colon, listed = text.partition(":")
    try:
        keys = tuple(bytes.fromhex(key) for key in listed.split(",", _MAX_CALLBACKS))
    except ValueError:
        keys = ()
    if not colon or not _is_number(first) or not 0 < len(set(keys)) == len(keys) <= _MAX_CALLBACKS:
        raise invalid(f"invalid keys of callbacks: {text[:100]!r}")
    return tuple(range(int(first), int(first) + len(keys))), keys


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 16


def _program(request: Any, overrides: Any) -> bytes:
    """Return the program, which the client has put into the request or into an option that XLA does not know."""
    if PROGRAM_OPTION not in overrides:
        return bytes(request.program.data)
    text = overrides.pop(PROGRAM_OPTION).string_field
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise invalid(f"the option {PROGRAM_OPTION} is not a program in base64: {error}") from error


def _assignment(proto: Any) -> tuple[tuple[int, ...], ...]:
    replicas, partitions = proto.replica_count, proto.computation_count
    rows = proto.computation_devices
    agree = len(rows) == partitions and all(len(row.replica_device_ids) == replicas for row in rows)
    if min(replicas, partitions) < 1 or not agree:
        raise invalid(
            f"the device assignment does not have {counted(replicas, 'replica')} of {counted(partitions, 'partition')}"
        )
    return tuple(tuple(int(rows[p].replica_device_ids[r]) for p in range(partitions)) for r in range(replicas))


def default_assignment(replicas: int, partitions: int, device_count: int) -> tuple[tuple[int, ...], ...]:
    """Assign the first devices in order: [replica][partition]."""
    if not 0 < replicas * partitions <= device_count:
        raise invalid(
            f"{counted(replicas, 'replica')} of {counted(partitions, 'partition')} cannot be placed on "
            f"{counted(device_count, 'device')}"
        )
    return tuple(tuple(r * partitions + p for p in range(partitions)) for r in range(replicas))
