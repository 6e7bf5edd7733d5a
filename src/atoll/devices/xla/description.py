"""Reads the properties of an executable that a worker needs besides the executable itself."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax._src.lib import xla_client as xc

from atoll.devices.compilers.compiler_messages import Description
from atoll.devices.xla.collective_groups import communicating_parts
from atoll.protocol.messages import FunctionInfo, OutputInfo
from atoll.transfers.dtypes import numpy_dtype


def describe(loaded: Any, device: Any, shape: tuple[int, int] | None = None) -> Description:
    """Describe an executable that is loaded on `device` and maybe on others.

    Args:
        shape: The number of replicas and of partitions. With it, find out which of the program's devices communicate,
            which takes 2 us per line of the compiled program. Only functions on several islands need that.
    """
    module = loaded.hlo_modules()[0]
    program = xc.XlaComputation(module.as_serialized_hlo_module_proto()).program_shape()
    result = program.result_shape()
    parameters = tuple(_dtype_and_shape(shape) for shape in program.parameter_shapes())
    outputs = tuple(
        _dtype_and_shape(shape) for shape in (list(result.tuple_shapes()) if result.is_tuple() else [result])
    )
    kinds = loaded.get_output_memory_kinds()
    output_kinds = tuple(kinds[0]) if kinds else (device.default_memory().kind,) * len(outputs)
    stats = loaded.get_compiled_memory_stats()
    text = module.to_string()
    parameter_shardings = loaded.get_parameter_shardings()
    output_shardings = loaded.get_output_shardings()
    layouts = _layouts(loaded.get_output_layouts) or (b"",) * len(outputs)
    info = FunctionInfo(
        name=module.name,
        fingerprint=loaded.fingerprint or b"",
        parameter_shardings=None
        if parameter_shardings is None
        else tuple(s.SerializeToString() for s in parameter_shardings),
        parameter_layouts=_layouts(loaded.get_parameter_layouts),
        outputs=tuple(
            OutputInfo(
                dtype,
                shape,
                None if output_shardings is None else output_shardings[i].SerializeToString(),
                output_kinds[i],
                layouts[i],
            )
            for i, (dtype, shape) in enumerate(outputs)
        ),
        donated=_donated_inputs(text),
        memory_stats={name: int(getattr(stats, name)) for name in _MEMORY_STATS if hasattr(stats, name)},
        generated_code_bytes=int(loaded.size_of_generated_code_in_bytes()),
        parameters=parameters,
    )
    return Description(
        info,
        _unusual(loaded.get_parameter_layouts, parameters, device),
        _unusual(loaded.get_output_layouts, outputs, device),
        int(stats.temp_size_in_bytes),
        None if shape is None else communicating_parts(text, *shape),
    )


_MEMORY_STATS = (
    "peak_memory_in_bytes",
    "peak_unpadded_heap_bytes",
    "indefinite_allocations",
    "total_allocation_bytes",
    *(
        f"{memory}{name}_size_in_bytes"
        for memory in ("", "host_")
        for name in ("generated_code", "argument", "output", "alias", "temp")
    ),
)


def _dtype_and_shape(shape: Any) -> tuple[str, tuple[int, ...]]:
    if shape.is_token():
        return "token", ()
    return np.dtype(shape.numpy_dtype()).name, tuple(shape.dimensions())


def _layouts(get: Any) -> tuple[bytes, ...]:
    try:
        return tuple(str(layout).encode() for layout in get())
    except jax.errors.JaxRuntimeError:  # XLA has no layouts for a function with tokens
        return ()


def _unusual(
    get: Any, types: tuple[tuple[str, tuple[int, ...]], ...], device: Any
) -> tuple[tuple[int, ...] | None, ...]:
    """Return the arrays' layouts, major to minor; None for the platform's default layout."""
    texts = _layouts(get)
    if len(texts) != len(types):
        return (None,) * len(types)
    unusual: list[tuple[int, ...] | None] = []
    for text, (dtype, shape) in zip(texts, types, strict=True):
        if len(shape) < 2:
            unusual.append(None)
            continue
        order = _major_to_minor(text.decode())
        default = _major_to_minor(str(device.client.get_default_layout(numpy_dtype(dtype), shape, device)))
        unusual.append(None if order == default else order)
    return tuple(unusual)


def _major_to_minor(text: str) -> tuple[int, ...]:
    """Parse XLA's text of a layout, such as {1,0:T(8,128)}."""
    order = text.strip("{}").partition(":")[0]
    return tuple(int(part) for part in reversed(order.split(",")) if part)


def _donated_inputs(text: str) -> tuple[int, ...]:
    """Return the parameters whose memory the outputs overwrite, from the header of the module's text.

    A parameter that the caller donates, but that matches no output, is not donated.
    """
    header = text[: text.find("\n")]
    start = header.find("input_output_alias=")
    if start < 0:
        return ()
    depth, position = 0, header.index("{", start)
    end = position
    while True:
        depth += (header[end] == "{") - (header[end] == "}")
        if depth == 0:
            break
        end += 1
    chunks = header[position + 1 : end].split("(")[1:]
    return tuple(sorted({int(chunk.split(",")[0]) for chunk in chunks}))
