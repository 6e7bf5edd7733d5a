"""Reads and checks requests to compile IFRT IR programs, which run functions on several meshes (MPMD)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from atoll.errors import invalid, unimplemented
from atoll.executables.compile_requests import CompileJob, check_devices, compile_job_of
from atoll.ir.outline import Fragment
from atoll.protocol.callbacks import CALLBACK_ADVICE, CALLBACKS_OPTION, COMPILE_CALLS_OPTION
from atoll.protocol.ifrt import compile_pb2
from atoll.protocol.messages import FunctionSource
from atoll.protocol.translation import codec
from atoll.quantities import counted

IFRT_IR_PROGRAM = "xla::ifrt::IfrtIRProgram"
_OPTIONS = "xla::ifrt::IfrtIRCompileOptions"


class MpmdRequest(msgspec.Struct, frozen=True):
    """An IFRT IR program in MLIR bytecode, the devices that it refers to by position, and the fragments' options."""

    program: bytes
    devices: tuple[int, ...]
    options: Mapping[str, Any]

    def outline_job(self) -> CompileJob:
        """Return the job that reads the program's outline, on a host of the program."""
        return compile_job_of(FunctionSource(self.program, b"", fragment=("", "")), ((self.devices[0],),))

    def fragment_job(self, fragment: Fragment) -> CompileJob:
        """Return the job that compiles a fragment, whose devices are the client's. Raise INVALID_ARGUMENT."""
        count = len(fragment.devices)
        options = compile_pb2.CompileOptions()
        if (given := self.options.get(fragment.key)) is not None:
            options.CopyFrom(given)
        build = options.executable_build_options
        if given is None:
            build.num_replicas, build.num_partitions = 1, count
            build.use_spmd_partitioning = build.use_shardy_partitioner = True
        replicas, partitions = max(1, build.num_replicas), max(1, build.num_partitions)
        if replicas * partitions != count:
            raise invalid(
                f"the compile options of {fragment.key} are for {replicas} replicas of {partitions} partitions, "
                f"but its mesh has {counted(count, 'device')}"
            )
        if CALLBACKS_OPTION in options.env_option_overrides or COMPILE_CALLS_OPTION in options.env_option_overrides:
            raise unimplemented(f"{fragment.key} calls its client. {CALLBACK_ADVICE}")
        build.ClearField("device_assignment")
        rows = [fragment.devices[i * partitions : (i + 1) * partitions] for i in range(replicas)]
        source = FunctionSource(
            self.program, options.SerializeToString(deterministic=True), fragment=(fragment.name, fragment.mesh)
        )
        return compile_job_of(source, tuple(rows))


def mpmd_request(request: Any, device_count: int) -> MpmdRequest:
    """Read a Compile request. Raise INVALID_ARGUMENT or UNIMPLEMENTED."""
    program = codec.parse(compile_pb2.IfrtIrProgram, request.program.data)
    if program.ifrt_version or program.atom_programs:
        raise unimplemented("IFRT IR programs in versioned form are not supported; send MLIR bytecode")
    if request.compile_options.type_name != _OPTIONS:
        raise invalid(f"an IFRT IR program needs compile options of kind {_OPTIONS}")
    if request.host_callbacks:
        raise unimplemented(CALLBACK_ADVICE)
    options = codec.parse(compile_pb2.IfrtIrCompileOptions, request.compile_options.data)
    devices = tuple(options.device_ids)
    if not devices:
        raise invalid("the compile options of an IFRT IR program name no devices")
    check_devices(devices, device_count)
    return MpmdRequest(bytes(program.ifrt_program), devices, options.compile_option_overrides)
