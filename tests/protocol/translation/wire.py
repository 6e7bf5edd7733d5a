"""Hand-made messages of the IFRT protocol."""

from __future__ import annotations

from typing import Any

from atoll.protocol.ifrt import compile_pb2, executables_pb2, values_pb2, xla_pb2


def wire(name: str, message: Any) -> Any:
    return values_pb2.Sharding(
        serialized_sharding={"type_name": f"xla::ifrt::{name}", "data": message.SerializeToString()}
    )


def shape(*dims: int) -> Any:
    return values_pb2.Shape(dims=dims)


Op = xla_pb2.OpSharding


def compile_request(**build: Any) -> Any:
    options = compile_pb2.XlaCompileOptions(compile_options={"executable_build_options": build})
    request = executables_pb2.Compile()
    request.program.type_name = "xla::ifrt::XlaProgram"
    request.program.data = b"module"
    request.compile_options.data = options.SerializeToString()
    return request
