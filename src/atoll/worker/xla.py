"""All of jaxlib's private interface that a worker uses, in one place, checked when a worker starts.

Nothing else in the worker touches `jax._src` or `jaxlib._jax`. Traps that this module keeps shut (jaxlib 0.10.2):
a deleted buffer, a wrong count, shape or device order given to an executable over two or more devices ends the
process, so `Executable.execute` must only be called with what `worker.executor` has checked; more than 32
executions in flight can deadlock XLA's thread pool, which the controller's window prevents. (A larger pool, by
NPROC, would too, but results then differ from stock JAX's in their last bits: XLA cuts matrix products by the
number of threads.)

A local array is kept *stacked*: one jax array over the local devices whose first dimension counts the shards.
Executables look at the shards alone, so a worker needs to know nothing of how the client laid an array out
globally.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import array as jax_array
from jax._src import compiler, monitoring
from jax._src.interpreters import mlir
from jax._src.layout import Format, Layout
from jax._src.lib import _jax, lapack
from jax._src.lib import xla_client as xc
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from atoll.errors import invalid, unimplemented
from atoll.ir.plan import LocalArray
from atoll.transport.messages import DeviceInfo, FunctionInfo, OutputInfo

# Custom calls that run Python of the client's process: their pointers mean nothing here.
_CALLBACK_TARGETS = (
    b"xla_ffi_python_cpu_callback",
    b"xla_ffi_partitioned_python_cpu_callback",
    b"xla_python_cpu_callback",
    b"xla_ffi_python_gpu_callback",
    b"xla_ffi_partitioned_python_gpu_callback",
    b"xla_python_gpu_callback",
)
CALLBACK_ADVICE = (
    "this program calls back into the client's Python (jax.pure_callback, io_callback or debug.print/callback), which "
    "jaxlib's IFRT proxy client cannot serve; return the values and use them outside of jit, or run that part on a "
    "local CPU device (JAX_PLATFORMS=atoll,cpu and jax.default_device(jax.local_devices(backend='cpu')[0]))"
)

_cache_hit = threading.local()


def _note_event(event: str, **_: Any) -> None:
    if event == "/jax/compilation_cache/cache_hits":
        _cache_hit.seen = True


class Executable:
    """A compiled function, loaded on this host's part of its devices."""

    def __init__(self, loaded: Any, devices: tuple[Any, ...], ordinals: tuple[int, ...]) -> None:
        self._loaded = loaded
        module = loaded.hlo_modules()[0]
        program = xc.XlaComputation(module.as_serialized_hlo_module_proto()).program_shape()
        result = program.result_shape()
        outputs = list(result.tuple_shapes()) if result.is_tuple() else [result]
        self.ordinals = ordinals
        self.parameters = tuple(_dtype_and_shape(shape) for shape in program.parameter_shapes())
        self.outputs = tuple(_dtype_and_shape(shape) for shape in outputs)
        self.parameter_layouts = _unusual(loaded.get_parameter_layouts, self.parameters, devices[0])
        self.output_layouts = _unusual(loaded.get_output_layouts, self.outputs, devices[0])
        kinds = loaded.get_output_memory_kinds()
        default = devices[0].default_memory().kind
        self.output_memory_kinds = tuple(kinds[0]) if kinds else (default,) * len(self.outputs)
        self.donated = _donated_inputs(module.to_string())
        self._handlers = [
            _stacked_handler(dtype, shape, devices, "" if kind == default else kind)
            for (dtype, shape), kind in zip(self.outputs, self.output_memory_kinds, strict=True)
        ]

    def execute(self, arguments: list[Any], sequence: int) -> tuple[list[Any], Any]:
        """Enqueues one run; returns the outputs, not ready yet, and the run's completion token.

        The caller has checked count, dtypes, shapes and devices of the arguments, and that none is deleted.
        """
        results = self._loaded.execute_sharded(
            arguments, with_tokens=True, launch_id=sequence & 0x7FFFFFFF
        )
        return results.consume_with_handlers(self._handlers), results.consume_token()

    def info(self) -> FunctionInfo:
        loaded = self._loaded
        stats = loaded.get_compiled_memory_stats()
        parameter_shardings = loaded.get_parameter_shardings()
        output_shardings = loaded.get_output_shardings()
        layouts = _layouts(loaded.get_output_layouts) or (b"",) * len(self.outputs)
        return FunctionInfo(
            name=loaded.hlo_modules()[0].name,
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
                    self.output_memory_kinds[i],
                    layouts[i],
                )
                for i, (dtype, shape) in enumerate(self.outputs)
            ),
            donated=self.donated,
            memory_stats={name: int(getattr(stats, name)) for name in _MEMORY_STATS if hasattr(stats, name)},
            generated_code_bytes=int(loaded.size_of_generated_code_in_bytes()),
            parameters=self.parameters,
        )

    def cost_analysis(self) -> dict[str, float]:
        costs: dict[str, float] = self._loaded.cost_analysis()
        return costs

    def text(self) -> str:
        return "\n\n".join(module.to_string() for module in self._loaded.hlo_modules())


_MEMORY_STATS = (
    "generated_code_size_in_bytes",
    "argument_size_in_bytes",
    "output_size_in_bytes",
    "alias_size_in_bytes",
    "temp_size_in_bytes",
    "peak_memory_in_bytes",
    "host_generated_code_size_in_bytes",
    "host_argument_size_in_bytes",
    "host_output_size_in_bytes",
    "host_alias_size_in_bytes",
    "host_temp_size_in_bytes",
)


class Backend:
    """This host's devices, and what can be done with arrays on them."""

    def __init__(self) -> None:
        self.devices: tuple[Any, ...] = tuple(jax.local_devices())
        self.client = self.devices[0].client
        self.platform: str = self.client.platform
        self.platform_version: str = self.client.platform_version
        monitoring.register_event_listener(_note_event)
        lapack._lapack.initialize()  # the custom calls of linear algebra, in programs lowered elsewhere
        self.defaults = tuple(device.default_memory().kind for device in self.devices)

    def describe(self) -> tuple[DeviceInfo, ...]:
        return tuple(
            DeviceInfo(
                ordinal,
                device.device_kind,
                device.platform,
                tuple(memory.kind for memory in device.addressable_memories()),
                device.default_memory().kind,
                tuple(getattr(device, "coords", None) or (ordinal, 0, 0)),
                int(getattr(device, "core_on_chip", None) or 0),
                int(device.local_hardware_id if device.local_hardware_id is not None else ordinal),
                int((device.memory_stats() or {}).get("bytes_limit", 0)),
            )
            for ordinal, device in enumerate(self.devices)
        )

    # ---- compiled functions

    def compile(
        self, program: bytes, options: bytes, assignment: tuple[tuple[tuple[int, int], ...], ...]
    ) -> tuple[Executable, bool, float]:
        """Compiles a portable StableHLO artifact for `assignment[replica][partition]` = (host, ordinal).

        Returns the executable, whether it came out of the persistent cache, and the seconds it took. Raises what
        XLA raises, with the text that stock JAX shows.
        """
        if any(target in program for target in _CALLBACK_TARGETS):
            raise unimplemented(CALLBACK_ADVICE)
        started = time.monotonic()
        parsed = xc.CompileOptions.ParseFromString(options)
        grid = np.array([[self.devices[ordinal] for _, ordinal in row] for row in assignment], dtype=object)
        ids = np.array([[device.id for device in row] for row in grid], dtype=np.int32)
        parsed.device_assignment = xc.DeviceAssignment.create(ids)
        parsed.compile_portable_executable = False
        flat = tuple(grid.flatten())
        context = mlir.make_ir_context()
        with context:
            module = _jax.mlir.deserialize_portable_artifact(program, context)
            _cache_hit.seen = False
            loaded = compiler.compile_or_get_cached(
                self.client, module, grid, parsed, [], xc.DeviceList(flat)
            )
        # Executables take and give shards in the order of the assignment.
        ordinals = tuple(ordinal for row in assignment for _, ordinal in row)
        return (
            Executable(loaded, flat, ordinals),
            bool(_cache_hit.seen),
            time.monotonic() - started,
        )

    # ---- arrays

    def put(self, array: LocalArray, contents: Sequence[np.ndarray[Any, Any]]) -> Any:
        """One stacked array out of one host array a shard. The host arrays must not change any more."""
        devices = self._devices(array.devices)
        if array.layout is not None and array.layout != tuple(range(len(array.layout))):
            return self.stack(array, self._put_with_layout(array, contents, devices))
        if len(set(array.shard_shapes)) > 1:
            singles = [
                xc.batched_device_put(
                    jax.core.ShapedArray(shape, content.dtype),
                    self._single(device, array.memory_kind),
                    [content],
                    [device],
                    True,
                )
                for shape, content, device in zip(array.shard_shapes, contents, devices, strict=True)
            ]
            return Uneven(tuple(singles))
        shape = array.shard_shapes[0]
        aval, sharding = self._stacked(contents[0].dtype, shape, devices, array.memory_kind)
        return xc.batched_device_put(aval, sharding, list(contents), list(devices), True)

    def _put_with_layout(
        self, array: LocalArray, contents: Sequence[np.ndarray[Any, Any]], devices: tuple[Any, ...]
    ) -> list[Any]:
        assert array.layout is not None
        layout = Layout(array.layout)
        return [
            jax.device_put(content, Format(layout, self._single(device, array.memory_kind)))
            for content, device in zip(contents, devices, strict=True)
        ]

    def stack(self, array: LocalArray, shards: Sequence[Any]) -> Any:
        """One stacked array out of single-device arrays that are already in place; nothing is copied."""
        if len(shards) == 1:
            return shards[0]
        if len(set(array.shard_shapes)) > 1:
            return Uneven(tuple(shards))
        devices = self._devices(array.devices)
        aval, sharding = self._stacked(shards[0].dtype, array.shard_shapes[0], devices, array.memory_kind)
        return jax_array.ArrayImpl(aval, sharding, list(shards), committed=True, _skip_checks=True)

    def move(self, array: Any, target: LocalArray, donate: bool) -> Any:
        """Copies shard by shard to the target's devices and memory."""
        devices = self._devices(target.devices)
        semantics = xc.ArrayCopySemantics.DONATE_INPUT if donate else xc.ArrayCopySemantics.ALWAYS_COPY
        if isinstance(array, Uneven):
            return Uneven(
                tuple(
                    self._copy(shard, (device,), target.memory_kind, semantics)
                    for shard, device in zip(array.shards, devices, strict=True)
                )
            )
        return self._copy(array, devices, target.memory_kind, semantics)

    def copy(self, array: Any) -> Any:
        """A copy in place, for an input that a function would consume but its caller keeps."""
        devices = tuple(shard.device for shard in shards_of(array))
        kind = "" if array.sharding.memory_kind is None else array.sharding.memory_kind
        return self._copy(array, devices, kind, xc.ArrayCopySemantics.ALWAYS_COPY)

    def _copy(self, array: Any, devices: tuple[Any, ...], memory_kind: str, semantics: Any) -> Any:
        shape = shards_of(array)[0].shape
        _, sharding = self._stacked(array.dtype, shape, devices, memory_kind)
        (moved,) = xc.batched_copy_array_to_devices_with_sharding(
            [array], [xc.DeviceList(devices)], [sharding], [semantics]
        )
        return moved

    def bitcast(self, shard: Any, dtype: str, shape: tuple[int, ...]) -> Any:
        """The shard's bytes as another dtype and shape, on its own device."""
        return _bitcast(shard, numpy_dtype(dtype), shape)

    def default_layout(self, dtype: str, shape: tuple[int, ...], ordinal: int) -> str:
        """XLA's text form of the layout that an array gets by default, such as {1,0}."""
        if dtype in ("token", "opaque", "string"):
            return "{" + ",".join(str(i) for i in reversed(range(len(shape)))) + "}"
        return str(self.client.get_default_layout(numpy_dtype(dtype), shape, self.devices[ordinal]))

    # ---- small things

    def _devices(self, ordinals: tuple[int, ...]) -> tuple[Any, ...]:
        return tuple(self.devices[ordinal] for ordinal in ordinals)

    def _single(self, device: Any, memory_kind: str) -> SingleDeviceSharding:
        return SingleDeviceSharding(device, memory_kind=memory_kind or None)

    def _stacked(
        self, dtype: Any, shape: tuple[int, ...], devices: tuple[Any, ...], memory_kind: str
    ) -> tuple[Any, Any]:
        return _stacked_type(dtype, shape, devices, memory_kind)


class Uneven:
    """Local shards of different shapes: they can be moved and fetched, not computed with."""

    def __init__(self, shards: tuple[Any, ...]) -> None:
        self.shards = shards

    @property
    def dtype(self) -> Any:
        return self.shards[0].dtype

    @property
    def nbytes(self) -> int:
        return sum(shard.nbytes for shard in self.shards)

    def is_deleted(self) -> bool:
        return any(shard.is_deleted() for shard in self.shards)

    def is_ready(self) -> bool:
        return all(shard.is_ready() for shard in self.shards)

    def delete(self) -> None:
        for shard in self.shards:
            shard.delete()

    def block_until_ready(self) -> None:
        for shard in self.shards:
            shard.block_until_ready()


def shards_of(array: Any) -> Sequence[Any]:
    """The single-device arrays of a stacked one, in order; they share its memory."""
    if isinstance(array, Uneven):
        return array.shards
    shards: Sequence[Any] = array._arrays
    return shards


@lru_cache(maxsize=4096)
def _stacked_type(dtype: Any, shape: tuple[int, ...], devices: tuple[Any, ...], memory_kind: str) -> tuple[Any, Any]:
    kind = memory_kind or None
    if len(devices) == 1:
        return jax.core.ShapedArray(shape, dtype), SingleDeviceSharding(devices[0], memory_kind=kind)
    mesh = Mesh(np.array(devices, dtype=object), ("shard",))
    if not shape:
        return jax.core.ShapedArray(shape, dtype), NamedSharding(mesh, PartitionSpec(), memory_kind=kind)
    stacked = (len(devices) * shape[0], *shape[1:])
    return jax.core.ShapedArray(stacked, dtype), NamedSharding(mesh, PartitionSpec("shard"), memory_kind=kind)


def _stacked_handler(dtype: str, shape: tuple[int, ...], devices: tuple[Any, ...], memory_kind: str) -> Any:
    if dtype == "token":
        dtype, shape = "bool", (0,)
    aval, sharding = _stacked_type(numpy_dtype(dtype), shape, devices, memory_kind)
    try:
        return _jax.array_result_handler(aval, sharding, committed=True, _skip_checks=True)
    except TypeError:  # jaxlib >= 0.12 checks nothing to begin with
        return _jax.array_result_handler(aval, sharding, committed=True)


def _bitcast(shard: Any, dtype: Any, shape: tuple[int, ...]) -> Any:
    def reinterpret(x: Any) -> Any:
        wide, narrow = np.dtype(dtype).itemsize, x.dtype.itemsize
        if wide > narrow:
            x = x.reshape(-1, wide // narrow)
        return jax.lax.bitcast_convert_type(x, dtype).reshape(shape)

    return jax.jit(reinterpret, out_shardings=shard.sharding)(shard)


# XLA's names for the dtypes that NumPy has no name for are ml_dtypes' own.
def numpy_dtype(name: str) -> np.dtype[Any]:
    """The NumPy dtype of an IR dtype name; raises INVALID_ARGUMENT for one that no array can have."""
    if name in ("token", "opaque"):
        raise invalid(f"arrays of dtype {name} hold no data")
    if name == "string":
        return np.dtypes.StringDType()
    return np.dtype(getattr(jnp, name, name))


def _dtype_and_shape(shape: Any) -> tuple[str, tuple[int, ...]]:
    if shape.is_token():
        return "token", ()
    return np.dtype(shape.numpy_dtype()).name, tuple(shape.dimensions())


def _layouts(get: Any) -> tuple[bytes, ...]:
    try:
        return tuple(str(layout).encode() for layout in get())
    except jax.errors.JaxRuntimeError:  # XLA tells none where there are tokens among the arrays
        return ()


def _unusual(
    get: Any, types: tuple[tuple[str, tuple[int, ...]], ...], device: Any
) -> tuple[tuple[int, ...] | None, ...]:
    """The arrays' layouts, major to minor; None where it is the platform's default."""
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
    """Of XLA's text of a layout, such as {1,0:T(8,128)}."""
    order = text.strip("{}").partition(":")[0]
    return tuple(int(part) for part in reversed(order.split(",")) if part)


def _donated_inputs(text: str) -> tuple[int, ...]:
    """Which parameters the module writes its outputs over; from the header of XLA's text.

    Parameters that a caller offers but that no output fits stay the caller's.
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


def self_test(backend: Backend) -> None:
    """Runs one tiny program through every private call; raises where this jaxlib no longer offers them."""
    ordinals = tuple(range(min(2, len(backend.devices))))
    array = LocalArray("float32", (len(ordinals),), ((1,),) * len(ordinals), ordinals, ordinals)
    ones = backend.put(array, [np.ones((1,), np.float32)] * len(ordinals))
    shards = shards_of(backend.stack(array, list(shards_of(ones))))
    moved = backend.move(backend.stack(array, list(shards)), array, donate=False)
    _stacked_handler("float32", (1,), tuple(backend.devices[i] for i in ordinals), "")
    if [float(np.asarray(shard)[0]) for shard in shards_of(moved)] != [1.0] * len(ordinals):
        raise RuntimeError(f"jaxlib {jax.lib.__version__} does not do what this worker expects of it")
