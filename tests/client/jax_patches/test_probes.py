"""Tests that JAX uses the functions that Atoll's patches replace in the expected way, with one probe per patch.

A probe runs code of a typical script on stock JAX, records the calls of the functions that the patch replaces, and
checks their arguments and results. A patch's self-test omits these checks, because they would delay the start of a
script. `make matrix` runs it with each supported version of JAX.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import inspect
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import custom_partitioning as jax_custom_partitioning
from jax._src import pjit, stages, xla_bridge
from jax._src.interpreters import mlir, pxla
from jax._src.lib import xla_client
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from atoll.client.jax_patches import (
    PATCHES,
    compile_pipeline,
    compile_time_callbacks,
    host_callbacks,
    newer_operations,
)
from atoll.client.jax_patches.compile_pipeline import CompilePass, CompileRequest
from atoll.client.jax_patches.meshes_over_islands import ATTRIBUTE, REFUSAL
from atoll.client.jax_patches.patch import Patch, Replacement
from atoll.host_services.calls.callback_operations import callback_index
from atoll.protocol.callbacks import PROGRAM_OPTION, Inspect, Partition, Value
from atoll.protocol.translation.xla_objects import sharding_to_bytes

COMPILE = "jax._src.compiler.backend_compile_and_load"
FAST_PATH = "jax._src.pjit._get_fastpath_data"
PUT = "jaxlib.xla_client.batched_device_put"


class Calls:
    """The calls of the recorded functions, by target: (arguments, named arguments, result)."""

    def __init__(self) -> None:
        self.of: dict[str, list[tuple[tuple[Any, ...], dict[str, Any], Any]]] = defaultdict(list)
        self.targets: set[str] = set()
        self.instead: dict[str, Callable[..., Any]] = {}  # functions to call in place of the recorded ones
        self.directory = Path()

    def arguments(self, target: str) -> list[tuple[Any, ...]]:
        return [arguments for arguments, _, _ in self.of[target]]

    def recording(self, target: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
            def recorded(*arguments: Any, **named: Any) -> Any:
                self.targets.add(target)
                self.of[target].append((arguments, named, None))
                result = self.instead.get(target, original)(*arguments, **named)
                self.of[target][-1] = arguments, named, result
                return result

            return recorded

        return wrap


@contextlib.contextmanager
def replaced(change: Replacement) -> Iterator[None]:
    """Change JAX until the end of the block."""
    holders = [change._resolve(), *(sys.modules[each] for each in change.copies if each in sys.modules)]
    before = [(holder, holder.__dict__.get(change.name, getattr(holder, change.name))) for holder in holders]
    dataclasses.replace(change, copies=()).apply()
    for holder in holders[1:]:
        setattr(holder, change.name, getattr(holders[0], change.name))
    try:
        yield
    finally:
        for holder, original in before:
            setattr(holder, change.name, original)


def replacement_of(change: Any) -> Replacement:
    found = compile_pipeline._REPLACEMENT if isinstance(change, CompilePass) else change
    assert isinstance(found, Replacement)
    return found


def sharded(*spec: str | None, first: int = 0) -> NamedSharding:
    """Return a sharding over four devices that starts with the device `first`."""
    return NamedSharding(jax.sharding.Mesh(np.array(jax.devices()[first : first + 4]), ("x",)), P(*spec))


def same_type(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


# ---- arrays


def strided_arrays(calls: Calls) -> None:
    """`device_put` passes the user's array with its strides."""
    x = np.arange(6.0)[::-1]
    assert jax.device_put(x).tolist() == x.tolist()
    _, _, arrays, devices = calls.arguments(PUT)[0][:4]
    assert [each.strides for each in arrays] == [x.strides]
    assert [each.client for each in devices] == [jax.devices()[0].client]


def other_clients(calls: Calls) -> None:
    """Copies between devices and of uncommitted arguments use the replaced functions, and no fast path."""
    first, second = jax.devices()[:2]
    moved = jax.device_put(jax.device_put(jnp.arange(4.0), first), second)
    assert (moved.device, moved.tolist()) == (second, [0, 1, 2, 3])
    assert calls.arguments(PUT)[-1][2][0].device is first
    x = jax.device_put(np.arange(4.0), sharded("x"))
    target = sharded("x", first=4)
    calls.of.clear()
    assert jax.device_put(x, target).tolist() == [0, 1, 2, 3]
    ((arrays, devices, shardings, semantics),) = calls.arguments(
        "jaxlib.xla_client.batched_copy_array_to_devices_with_sharding"
    )
    assert [each.sharding for each in arrays] == [x.sharding]
    assert list(devices[0]) == jax.devices()[4:8]
    assert shardings == [target]
    assert len(semantics) == 1

    added = jax.jit(lambda x: x + 1, in_shardings=sharded())(jnp.arange(4.0))
    assert added.tolist() == [1, 2, 3, 4]
    assert any(isinstance(each, jax.Array) for arguments in calls.arguments(PUT) for each in arguments[2])

    calls.instead[FAST_PATH] = lambda *arguments, **named: None
    function, x = jax.jit(lambda x: x * 3), jnp.arange(3.0)
    function(x)  # traces
    calls.of.clear()
    assert [function(x).tolist() for _ in range(3)] == [[0, 3, 6]] * 3
    assert len(calls.of[FAST_PATH]) == 3
    del calls.instead[FAST_PATH]
    function = jax.jit(lambda x: x * 4)
    function(x)
    calls_before = len(calls.of[FAST_PATH])
    arguments, _, data = calls.of[FAST_PATH][-1]
    assert [function(x).tolist() for _ in range(3)] == [[0, 4, 8]] * 3
    assert len(calls.of[FAST_PATH]) == calls_before  # these calls use the fast path
    assert arguments[2][0] is x
    assert data.xla_executable.client is first.client
    assert list(data.const_args) == []

    compiled = jax.jit(lambda x: x * 5).lower(x).compile()
    assert compiled(x).tolist() == [0, 5, 10]
    _, fun, cache_miss = calls.arguments("jaxlib._jax.pjit")[-1][:3]
    assert fun is None
    outputs, data, _ = cache_miss(x)
    assert outputs.tolist() == [0, 5, 10]
    assert data.xla_executable.client is first.client


def resharding(calls: Calls) -> None:
    """Arrays whose parts change are passed as a whole, with the indices of the new parts."""
    name = "jax._src.array.shard_sharded_device_array_slow_path"
    x = jax.device_put(np.arange(16.0).reshape(4, 4), sharded("x"))
    target = sharded(None, "x")
    assert jax.device_put(x, target).tolist() == x.tolist()
    (((given, devices, indices, sharding), _, result),) = calls.of[name]
    assert given is x
    assert list(devices) == jax.devices()[:4]
    assert list(map(str, indices)) == list(map(str, target.devices_indices_map(x.shape).values()))
    assert sharding == target
    assert result.sharding == target

    whole = jax.device_put(x, jax.devices()[0])
    calls.of.pop("jax._src.array.shard_device_array", None)
    assert jax.device_put(whole, target).tolist() == x.tolist()
    (((given, *_, sharding), _, result),) = calls.of["jax._src.array.shard_device_array"]
    assert given is whole
    assert (sharding, result.sharding) == (target, target)


def resharding_of_trees(calls: Calls) -> None:
    from jax._src.interpreters import pxla

    name = "jax._src.array._array_shard_arg"
    assert pxla.shard_arg_handlers[type(jnp.zeros(()))].__name__ == "_array_shard_arg"
    xs = [jax.device_put(np.arange(16.0).reshape(4, 4) + i, sharded("x")) for i in range(3)]
    target = sharded(None, "x")
    with pytest.MonkeyPatch.context() as patch:  # the patch itself changes the function that is in this table
        patch.setitem(pxla.shard_arg_handlers, type(xs[0]), sys.modules["jax._src.array"]._array_shard_arg)
        made = jax.device_put(xs, target)
    assert [each.tolist() for each in made] == [each.tolist() for each in xs]
    (((given, shardings, layouts, copies), _, results),) = calls.of[name]
    assert [*map(id, given)] == [*map(id, xs)]
    assert (shardings, layouts, len(copies)) == ([target] * 3, [None] * 3, 3)
    assert [each.sharding for each in results] == [target] * 3


def dlpack(calls: Calls) -> None:
    """Consumers and JAX itself use these methods."""
    x = jnp.arange(4.0)
    assert np.from_dlpack(x).tolist() == [0, 1, 2, 3]
    assert jnp.from_dlpack(x).tolist() == [0, 1, 2, 3]
    calls.of.pop("jaxlib._jax.dlpack_managed_tensor_to_buffer")
    assert jnp.from_dlpack(np.arange(3.0)).tolist() == [0, 1, 2]
    assert not hasattr(x, "__cuda_array_interface__")
    (_, _, device), *_ = calls.of["jaxlib._jax.ArrayImpl.__dlpack_device__"]
    assert int(device[0]) == 1
    (((tensor, device, *_), _, array),) = calls.of["jaxlib._jax.dlpack_managed_tensor_to_buffer"]
    assert type(tensor).__name__ == "PyCapsule"
    assert device is jax.devices()[0]
    assert array.tolist() == [0, 1, 2]


def buffers(calls: Calls) -> None:
    """The type's slot and NumPy use these methods, with these flags. NumPy ignores the slot's errors."""
    x = jnp.arange(4.0)
    assert memoryview(x).tobytes() == np.arange(4, dtype=x.dtype).tobytes()
    assert np.asarray(x).tolist() == [0, 1, 2, 3]
    for array, flags in calls.arguments("jaxlib._jax.ArrayImpl.__buffer__"):
        assert array is x
        assert isinstance(flags, int)
    assert np.asarray(jnp.arange(2, dtype=jnp.bfloat16)).tolist() == [0, 1]


def addresses(calls: Calls) -> None:
    x = jnp.arange(4.0)
    assert x.unsafe_buffer_pointer() == x.unsafe_buffer_pointer() != 0


def memory_statistics(calls: Calls) -> None:
    jax.devices()[0].memory_stats()
    ((device,),) = calls.arguments("jaxlib._jax.Device.memory_stats")
    assert device is jax.devices()[0]


def hardware_numbers(calls: Calls) -> None:
    device = jax.devices()[0]
    assert device.local_hardware_id == 0
    assert calls.arguments("jaxlib._jax.Device.local_hardware_id") == [(device,)]


def hosts_of_devices(calls: Calls) -> None:
    device = jax.devices()[0]
    assert device.task_id == device.process_index
    assert calls.arguments("jaxlib._jax.Device.task_id") == [(device,)]


def devices_by_platform(calls: Calls) -> None:
    for lookup in (jax.devices, jax.device_count, jax.local_device_count):
        for arguments, named in (((), {}), (("cpu",), {}), ((), {"backend": "cpu"})):
            lookup(*arguments, **named)  # type: ignore[arg-type]
        assert [(each[0], each[1]) for each in calls.of[f"jax._src.xla_bridge.{lookup.__name__}"][-3:]] == [
            ((), {}),
            (("cpu",), {}),
            ((), {"backend": "cpu"}),
        ]
    # `local_devices` passes its argument to `devices`, which recognizes it by name and file. JAX caches the results.
    jax.local_devices.cache_clear()  # type: ignore[attr-defined]
    before = len(calls.of["jax._src.xla_bridge.devices"])
    assert jax.devices() == jax.local_devices(backend="cpu")
    # Remaining threads of other tests, such as those of libraries, may also look for devices.
    assert ("cpu",) in calls.arguments("jax._src.xla_bridge.devices")[before:]
    assert jax.local_devices.__wrapped__.__name__ == "local_devices"  # type: ignore[attr-defined]


def meshes_over_islands(calls: Calls) -> None:
    """`make_mesh` asks each device for its slice, and refuses devices of several slices."""
    jax.make_mesh((2, 1), ("x", "y"), devices=jax.devices()[:2])
    assert (jax.devices()[0], ATTRIBUTE) in calls.arguments("jaxlib._jax.Device.__getattr__")
    slices = [SimpleNamespace(slice_index=each, id=each, platform="cpu", device_kind="cpu") for each in range(2)]
    with pytest.raises(ValueError, match=REFUSAL):
        jax.make_mesh((2,), ("x",), devices=slices)


def reads_of_trees(calls: Calls) -> None:
    arrays = [jnp.arange(4.0), jnp.float32(1)]
    assert [each.tolist() for each in jax.device_get(arrays)] == [[0, 1, 2, 3], 1]
    ((given,),) = calls.arguments("jax._src.api.device_get")
    assert given is arrays
    x = jnp.arange(2) + 1
    assert x._npy_value is None
    x._npy_value = np.arange(5, 7, dtype=x.dtype)
    assert x.tolist() == [5, 6], "JAX takes the value that is set"


def direct_reads(calls: Calls) -> None:
    x = jnp.arange(4.0) + 1
    x.copy_to_host_async()
    assert calls.arguments("jaxlib._jax.ArrayImpl.copy_to_host_async") == [(x,)]
    assert x.tolist() == [1, 2, 3, 4]
    assert any(array is x for (array,) in calls.arguments("jaxlib._jax.ArrayImpl._value"))
    x.attribute = 1  # type: ignore[attr-defined]
    y = jnp.arange(2) + 1
    y._npy_value = np.arange(5, 7, dtype=y.dtype)
    assert y.tolist() == [5, 6], "JAX takes the value that is set"


def direct_reads_of_several_arrays(calls: Calls) -> None:
    arrays = [jnp.arange(2.0) + i for i in range(3)]
    assert [each.tolist() for each in jax.device_get(arrays)] == [[0, 1], [1, 2], [2, 3]]
    ((given,),) = calls.arguments("jaxlib._jax.batched_copy_to_host_async")
    assert list(given) == arrays


def reads_of_elements(calls: Calls) -> None:
    """A loop divides the array into elements, 100 at a time, and reads the value of each."""
    x = jnp.arange(150.0) + 1
    elements = list(x)
    assert [each.shape for (each,) in calls.arguments("jaxlib._jax.ArrayImpl._unstack")] == [(100,), (50,)]
    assert [len(made) for _, _, made in calls.of["jaxlib._jax.ArrayImpl._unstack"]] == [100, 50]
    first = calls.of["jaxlib._jax.ArrayImpl._unstack"][0][2][0]
    assert first is elements[0]
    assert weakref.ref(first)() is first
    first.attribute = 1
    first._npy_value = np.array(5, x.dtype)
    assert [float(each) for each in elements] == [5, *range(2, 151)]
    assert [id(each) for (each,) in calls.arguments("jaxlib._jax.ArrayImpl._value")[-150:]] == [*map(id, elements)]


def writes_of_trees(calls: Calls) -> None:
    device = jax.devices()[0]
    values = [np.float32(1), np.float32(2)]
    original, handlers = inspect.unwrap(pxla._shard_np_array), pxla.shard_arg_handlers
    kinds = [kind for kind, handler in handlers.items() if handler is original]  # the function object is redirected
    handlers.update(dict.fromkeys(kinds, pxla._shard_np_array))
    try:
        assert [float(x) for x in jax.device_put(values, device)] == [1, 2]
    finally:
        handlers.update(dict.fromkeys(kinds, original))
    ((arguments, named, made),) = calls.of["jax._src.interpreters.pxla._shard_np_array"]
    xs, shardings, layouts, semantics = arguments
    assert (list(xs), list(layouts), len(semantics), len(made), named) == (values, [None, None], 2, 2, {})
    assert [each._device_assignment for each in shardings] == [(device,), (device,)]


def large_writes(calls: Calls) -> None:
    x, sharding = np.arange(8.0, dtype=np.float32), sharded("x")
    made = jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])
    assert made.tolist() == x.tolist()
    ((arguments, named, _),) = calls.of["jax._src.interpreters.pxla.batched_device_put"]
    aval, given, shards, devices = arguments
    assert (aval.shape, given, [each.shape for each in shards], named) == ((8,), sharding, [(2,)] * len(shards), {})
    assert tuple(devices) == tuple(sharding._device_assignment)
    parts = [each.data for each in made.addressable_shards]
    whole = type(made)(made.aval, sharding, parts, committed=True, _skip_checks=True)
    assert whole.tolist() == x.tolist()


def copies_of_arrays(calls: Calls) -> None:
    x = np.arange(4.0)
    for copy in (jnp.array, jnp.copy):
        before = len(calls.of["jax._src.core.stage_p.impl"])
        assert np.asarray(copy(x)).tolist() == x.tolist()
        assert any(np.shares_memory(given, x) for (given,) in calls.arguments("jax._src.core.stage_p.impl")[before:])


def small_writes(calls: Calls) -> None:
    x, device = np.float32(3), jax.devices()[0]
    given = [
        (jax.device_put(x, device), x),
        (jnp.asarray(np.arange(4, dtype=np.int32)), [0, 1, 2, 3]),
        (jax.device_put(x, sharded()), x),
    ]
    found = calls.of["jax._src.interpreters.pxla.batched_device_put"]
    assert len(found) == len(given)
    for (made, value), (arguments, _, _) in zip(given, found, strict=True):
        aval, sharding, xs, devices = arguments[:4]
        assert made.tolist() == value
        assert (aval.dtype, sharding, list(devices)) == (made.dtype, made.sharding, [*made.sharding._device_assignment])
        assert len(xs) == len(devices)
        assert all(each is xs[0] for each in xs)
        assert isinstance(xs[0], np.ndarray | np.generic)


def arguments_from_the_host(calls: Calls) -> None:
    x = np.arange(4, dtype=np.float32)
    call = jax.jit(lambda x, y: x * y, in_shardings=(sharded(), None))
    for _ in range(2):
        assert call(x, 2.0).tolist() == [0, 2, 4, 6]
    ((arguments, _, data),) = [call for call in calls.of[FAST_PATH] if any(each is x for each in call[0][2])]
    assert arguments[2][0] is x
    assert data.kept_var_bitvec == [True, True]
    assert [*data.in_device_local_layouts, *data.const_args] == [None, None]
    sharded_here = [each for each, _, _ in calls.arguments("jax._src.interpreters.pxla.cc_shard_arg")]
    assert any(each is x for each in sharded_here)
    assert 2.0 in [each for each in sharded_here if each is not x]
    assert jnp.asarray(x).tolist() == [0, 1, 2, 3]
    assert any(np.array_equal(given, x) for (given,) in calls.arguments("jax._src.core.stage_p.impl"))
    marks = [object(), object()]
    given = data._replace(in_device_local_layouts=marks)
    assert given.in_device_local_layouts is marks


def numbers_in_eager_operations(calls: Calls) -> None:
    x = jnp.float32(7)
    made = [x + 2, 2 + x, x - 2, 2 - x, x * 2, 2 * x, x / 2, 2 / x, x // 2, x % 2]
    assert [float(each) for each in made] == [9, 9, 5, -5, 14, 14, 3.5, np.float32(2) / np.float32(7), 3, 1]
    compared = [x == 2, x != 2, x < 2, x <= 2, x > 2, x >= 2]
    assert [bool(each) for each in compared] == [False, True, False, False, True, True]
    assert all(found == [(x, 2)] for found in map(calls.arguments, calls.of))


def many_threads(calls: Calls) -> None:
    x = jnp.arange(4.0)
    assert x.tolist() == [0, 1, 2, 3]
    assert any(array is x for (array,) in calls.arguments("jaxlib._jax.ArrayImpl._value"))


# ---- executables


def cost_analysis(calls: Calls) -> None:
    assert jax.jit(lambda x: x @ x).lower(jnp.ones((4, 4))).cost_analysis()["flops"] > 0
    (((client, module), _, _),) = calls.of["jaxlib._jax.hlo_module_cost_analysis"]
    assert client is jax.devices()[0].client
    assert type(module).__name__ == "HloModule"


def modules_of_executables(calls: Calls) -> None:
    from jaxlib._hlo import hlo_module_from_text

    compiled = jax.jit(lambda x: x @ x).lower(jnp.ones((4, 4))).compile()
    (module,) = compiled.runtime_executable().hlo_modules()
    ((executable,),) = (arguments for arguments, *_ in calls.of["jaxlib._jax.LoadedExecutable.hlo_modules"])
    assert executable.client is jax.devices()[0].client
    assert executable.get_hlo_text().startswith("HloModule ")
    assert hlo_module_from_text(executable.get_hlo_text()).name == module.name


def serialized_executables(calls: Calls) -> None:
    """`serialize_executable` uses the replaced methods. The persistent cache does if it is enabled."""
    from jax._src import compilation_cache
    from jax.experimental import serialize_executable

    x = jnp.arange(4.0)
    compiled = jax.jit(lambda x: x + 2).lower(x).compile()
    serialized = serialize_executable.serialize(compiled)
    loaded = serialize_executable.deserialize_and_load(*serialized, execution_devices=[x.device])
    assert loaded(x).tolist() == [2, 3, 4, 5]
    client, serialized, *_ = calls.arguments("jaxlib._jax.Client.deserialize_executable")[0]
    assert client is x.device.client
    assert isinstance(serialized, bytes)

    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs", "jax_enable_compilation_cache")
    before = {name: getattr(jax.config, name) for name in names}
    compilation_cache.reset_cache()
    try:
        for name, value in zip(names, (str(calls.directory), 0, True), strict=True):
            jax.config.update(name, value)
        for _ in range(2):
            jax.jit(lambda x: x + 3)(x)
            jax.clear_caches()
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
    assert calls.of["jax._src.compilation_cache.is_cache_used"][-1][::2] == ((x.device.client,), True)
    _, accelerators = calls.arguments("jax._src.cache_key._hash_accelerator_config")[-1]
    assert accelerators.tolist() == [x.device]
    client, executable = calls.arguments("jaxlib._jax.Client.serialize_executable")[-1]
    assert client is x.device.client
    assert executable.client is client
    client, serialized, devices, *_ = calls.arguments("jaxlib._jax.Client.deserialize_executable")[-1]
    assert [each.id for each in devices] == [x.device.id]


def transfer_server(calls: Calls) -> None:
    name = "jaxlib._jax.start_transfer_server"
    calls.instead[name] = lambda *arguments, **named: "server"
    from jax.experimental import transfer

    assert transfer.start_transfer_server(jax.devices()[0].client) == "server"
    assert calls.arguments(name)[0][0] is jax.devices()[0].client


def several_meshes(calls: Calls) -> None:
    """JAX raises this error for arguments on different devices, with the devices in it."""
    first, second = (jax.device_put(jnp.arange(4.0), each) for each in jax.devices()[:2])
    seen: list[Exception] = []
    original = pjit._pjit_call_impl_python.__wrapped__  # type: ignore[attr-defined]

    def noting(*arguments: Any, **params: Any) -> Any:
        try:
            return original(*arguments, **params)
        except stages.DeviceAssignmentMismatchError as error:
            seen.append(error)
            raise

    calls.instead["jax._src.pjit._pjit_call_impl_python"] = noting
    with pytest.raises(ValueError, match="Received incompatible devices for jitted computation"):
        jax.jit(lambda x, y: x + y)(first, second)
    (mismatches,) = seen[-1].args
    assert {device for each in mismatches for device in each.da} == set(jax.devices()[:2])
    arguments, params, _ = calls.of["jax._src.pjit._pjit_call_impl_python"][-1]
    assert arguments[0] is first
    assert params["name"]
    assert len(params["jaxpr"].jaxpr.invars) == 2
    assert [len(params[name]) for name in ("in_shardings", "out_shardings", "donated_invars")] == [2, 1, 2]
    del calls.instead["jax._src.pjit._pjit_call_impl_python"]
    jax.jit(lambda x: x - 1)(first)
    outputs, *rest = calls.of["jax._src.pjit._pjit_call_impl_python"][-1][2]
    assert len(outputs) == 1
    assert len(rest) == 3


# ---- compiling


def newer_operations_(calls: Calls) -> None:
    """A module can be written with the latest StableHLO, and JAX compiles an empty module of the same name."""
    jax.jit(lambda x: x * 7).lower(jnp.ones(3)).compile()
    backend, module, devices, options, given = calls.arguments(COMPILE)[-1]
    request = newer_operations._carried(CompileRequest(backend, module, devices, options, given))
    name = "sym_name"
    assert str(request.module.operation.attributes[name]) == str(module.operation.attributes[name])
    ((option, text),) = request.added
    assert option == PROGRAM_OPTION
    assert text
    before = list(options.env_option_overrides)
    options.env_option_overrides = [*before, ("xla_dump_to", "")]
    assert [name for name, _ in options.env_option_overrides][len(before) :] == ["xla_dump_to"]
    options.env_option_overrides = before
    compiled = backend.compile_and_load(request.module, executable_devices=devices, compile_options=options)
    assert compiled.client is backend


def ffi_libraries(calls: Calls) -> None:
    """JAX registers handlers and types with these functions, and keeps a list of those that XLA does not have yet."""
    libc = ctypes.CDLL(None)
    handler = jax.ffi.pycapsule(ctypes.cast(libc.getpid, ctypes.c_void_p).value)
    jax.ffi.register_ffi_target("probe", handler, platform="probes")
    jax.ffi.register_ffi_target("staged", {"execute": handler}, platform="probes")
    jax.ffi.register_ffi_type("probe", {"type_id": handler}, platform="probes")
    register, register_type = (f"jaxlib.xla_client.register_custom_{kind}" for kind in ("call_target", "type"))
    assert calls.arguments(register) == [
        ("probe", handler, "probes", 1),
        ("staged", {"execute": handler}, "probes", 1),
    ]
    assert [each[:2] for each in calls.arguments(register_type)] == [("probe", {"type_id": handler})]
    assert [each[:3] for each in xla_client._custom_callback.pop("probes")] == [
        ("probe", handler, 1),
        ("staged", {"execute": handler}, 1),
    ]
    assert xla_client._custom_type_id.pop("probes") == [("probe", {"type_id": handler})]
    jax.jit(lambda x: x * 17).lower(jnp.ones(3)).compile()
    known = xla_client.custom_call_targets("Host")
    assert list(known["xla_ffi_python_cpu_callback"]) == ["execute"]
    jax.ffi.register_ffi_target_as_batch_partitionable("probe")
    divide = "jaxlib.xla_client.register_custom_call_as_batch_partitionable"
    assert calls.arguments(divide)[0] == ("probe",)
    listed = [each for each in xla_bridge._plugin_callbacks if each.args and each.args[0] == "lapack_spotrf_ffi"]
    assert [getattr(each.func, "__name__", "") for each in listed] == ["register_custom_call_as_batch_partitionable"]


def host_callbacks_(calls: Calls) -> None:
    """JAX passes callables to the compiler.

    It runs such programs between these two methods, and not on the fast path.
    """
    seen: list[Any] = []

    def look(x: Any) -> None:
        seen.append(np.asarray(x).tolist())

    function = jax.jit(lambda x: (jax.debug.callback(look, x), x + 1)[1])
    assert [function(jnp.arange(2.0)).tolist() for _ in range(2)] == [[1, 2]] * 2
    jax.effects_barrier()
    assert seen == [[0, 1]] * 2
    backend, module, _, _, given = calls.arguments(COMPILE)[-1]
    assert list(map(callable, given)) == [True]
    custom_calls: list[Any] = []
    module.operation.walk(lambda each: (custom_calls.append(each), ir_advance())[1])
    names = ("stablehlo.custom_call",)
    (operation,) = [each for each in custom_calls if each.name in names]
    assert callback_index(operation) == 0
    owner = "jax._src.interpreters.pxla.ExecuteReplicated"
    for target in (f"{owner}._add_tokens_to_inputs", f"{owner}._handle_token_bufs"):
        assert len(calls.of[target]) == 2
        executable = calls.arguments(target)[-1][0]
        assert executable.has_host_callbacks
        assert [each.id for each in executable._local_devices] == [jax.devices()[0].id]
        assert executable.xla_executable.client is backend
    _, _, token = calls.arguments(f"{owner}._handle_token_bufs")[-1]
    token.get_token(0).block_until_ready()
    arguments, _, data = calls.of[FAST_PATH][-1]
    assert isinstance(arguments[0].unsafe_call, pxla.ExecuteReplicated)
    assert data is None
    with jax.numpy_dtype_promotion("strict"):
        assert "strict" in [value for _, value in host_callbacks.settings()]
    with host_callbacks.within(((jax._src.config.numpy_dtype_promotion, "strict"),)):
        assert jax.config.jax_numpy_dtype_promotion == "strict"


def ir_advance() -> Any:
    from jax._src.lib.mlir import ir

    return ir.WalkResult.ADVANCE


def send_and_receive(calls: Calls) -> None:
    """JAX lowers callbacks for TPUs to sends and receives, and its client makes a callable for them."""
    before = mlir.ModuleContext.get_backend
    mlir.ModuleContext.get_backend = lambda context, *others: jax.devices()[0].client  # type: ignore[assignment]
    try:
        function = jax.jit(lambda x: jax.pure_callback(lambda x: x, same_type(x), x))
        function.trace(jnp.ones(3, jnp.float32)).lower(lowering_platforms=("tpu",))
    finally:
        mlir.ModuleContext.get_backend = before  # type: ignore[method-assign]
    name = "jaxlib._jax.Client.make_python_callback_from_host_send_and_recv"
    client, callback, operands, results, sends, receives, *_ = calls.arguments(name)[0]
    assert client is jax.devices()[0].client
    assert callable(callback)
    assert [each.numpy_dtype() for each in (*operands, *results)] == [np.float32] * 2
    assert (len(sends), len(receives)) == (1, 1)


def callbacks_at_compile_time(calls: Calls) -> None:
    """The program contains the keys of the callbacks, and JAX's rules answer for each key."""
    from jax.experimental.custom_partitioning import custom_partitioning

    shown: list[Any] = []

    @custom_partitioning
    def double(x: Any) -> Any:
        return x * 2

    double.def_partition(
        partition=lambda mesh, operands, result: (mesh, lambda x: x * 2, operands[0].sharding, (operands[0].sharding,)),
        sharding_rule="i -> i",
    )

    def function(x: Any) -> Any:
        jax.debug.inspect_array_sharding(x, callback=shown.append)
        return double(x)

    encode = "jaxlib.xla_client.encode_inspect_sharding_callback"
    original = xla_client.encode_inspect_sharding_callback.__wrapped__  # type: ignore[attr-defined]
    calls.instead[encode] = compile_time_callbacks._recording(original)
    rule = jax_custom_partitioning._custom_partitioning_partition
    compile_time_callbacks._known(rule.__wrapped__)  # type: ignore[attr-defined]
    x = jax.device_put(jnp.arange(8.0), sharded("x"))
    lowered = jax.jit(function).lower(x)
    inspection, partitioning = sorted(
        compile_time_callbacks._decisions(lowered.compiler_ir()).values(),
        key=lambda each: "_inspecting" not in str(each),
    )
    tiled = sharding_to_bytes(x.sharding._to_xla_hlo_sharding(1))
    value = Value("f64[8]", tiled)
    answer = partitioning(Partition((value,), value))
    assert (answer.result, answer.operands) == (tiled, (tiled,))
    assert answer.program
    inspection(Inspect(tiled))
    lowered.compile()
    assert [each.num_devices for each in shown] == [4, 4]
    # XLA calls JAX's rules, which it has received before any patch.
    for name in ("propagate_user_sharding", "infer_sharding_from_operands", "partition"):
        calls.targets.add(f"jax._src.custom_partitioning._custom_partitioning_{name}")


def transformations(calls: Calls) -> None:
    """Registering and clearing a transformation uses these functions, with a number for the stage."""
    from jax.extend import xla

    name = "probe of Atoll"
    stage = xla.PipelineStage.PRE_SCHEDULER
    xla.register_hlo_module_transformation(lambda module: None, name=name, stage=stage, platforms="cpu")
    try:
        registered, number, callback = calls.arguments("jaxlib._xla.register_xla_transform")[-1]
        assert (registered, number, callable(callback)) == (name, stage.value, True)
    finally:
        assert xla.clear_hlo_module_transformation(name, stage=stage, platforms="cpu")
    assert calls.arguments("jaxlib._xla.clear_xla_transform")[-1] == (name, stage.value)


def transformations_for_clients(calls: Calls) -> None:
    """JAX registers a transformation with the clients of the transformation's platforms."""
    from jax._src import xla_bridge
    from jax.extend import xla

    stage = xla.PipelineStage.PRE_SCHEDULER
    client = SimpleNamespace(platform="atoll")
    names = [f"jaxlib._xla.{verb}_xla_transform_c_api" for verb in ("register", "clear")]
    calls.instead = {names[0]: lambda *arguments: None, names[1]: lambda *arguments: True}
    hooks: list[Callable[[Any], None]] = []
    before = xla_bridge.register_backend_initialization_hook
    xla_bridge.register_backend_initialization_hook = hooks.append  # type: ignore[assignment]
    xla_bridge._backends["atoll"] = client  # type: ignore[assignment]
    try:
        xla.register_hlo_module_transformation(lambda module: None, name="probe", stage=stage, platforms="atoll")
        hooks[0](client)
        assert xla.clear_hlo_module_transformation("probe", stage=stage, platforms="atoll")
    finally:
        del xla_bridge._backends["atoll"]
        xla_bridge.register_backend_initialization_hook = before
    assert calls.arguments(names[0])[0][:3] == (client, "probe", stage.value)
    assert calls.arguments(names[1])[0] == (client, "probe", stage.value)


def transformations_for_plugins(calls: Calls) -> None:
    """JAX looks up the plug-in of each platform that has a client, and registers with the plug-ins that exist."""
    from jax._src import xla_bridge
    from jax.extend import xla

    stage = xla.PipelineStage.PRE_SCHEDULER
    found = SimpleNamespace()
    names = [f"jaxlib._xla.{verb}_xla_transform_c_api" for verb in ("register", "clear")]
    calls.instead = {
        "jaxlib._jax.get_pjrt_plugin": lambda platform: found,
        names[0]: lambda *arguments: None,
        names[1]: lambda *arguments: True,
    }
    xla_bridge._backends["atoll"] = SimpleNamespace(platform="atoll")  # type: ignore[assignment]
    try:
        xla.register_hlo_module_transformation(lambda module: None, name="probe", stage=stage)
        assert xla.clear_hlo_module_transformation("probe", stage=stage)
    finally:
        del xla_bridge._backends["atoll"]
    assert calls.arguments("jaxlib._jax.get_pjrt_plugin") == [("atoll",)] * 2
    assert calls.arguments(names[0])[0][:3] == (found, "probe", stage.value)
    assert calls.arguments(names[1])[0] == (found, "probe", stage.value)


# ---- other features


def colocated_python(calls: Calls) -> None:
    """The function is pickled before it becomes part of a program."""
    from jax.experimental import colocated_python

    function = colocated_python.colocated_python(lambda x: x + 1)
    with contextlib.suppress(Exception):  # the CPU client does not compile it
        function(jax.device_put(jnp.arange(2.0), jax.devices()[0]))
    name, pickled, devices, *_ = calls.arguments("jaxlib._jax.ifrt_programs.make_colocated_python_program")[0]
    assert isinstance(name, str)
    assert isinstance(pickled, bytes)
    assert devices[0] is jax.devices()[0]


def profiler(calls: Calls) -> None:
    """A trace makes a session, with or without options, and requests its profile."""
    jax.profiler.start_trace(calls.directory)
    jax.profiler.stop_trace()
    ((arguments, named, session),) = calls.of["jaxlib._profiler.ProfilerSession"]
    assert named == {}
    for options in arguments:
        assert isinstance(options.host_tracer_level, int)
        assert dict(options.advanced_configuration or {}) == {}
    assert session.stop
    assert list(calls.directory.glob("plugins/profile/*/*.xplane.pb"))


def exported_profiles(calls: Calls) -> None:
    """A trace exports its session's profile to the log directory."""
    jax.profiler.start_trace(calls.directory)
    jax.profiler.stop_trace()
    (((data, *others), named, _),) = calls.of["jax._src.profiler.export_profile_data"]
    assert getattr(data, "profile_data", data) is not None
    assert str((*others, *named.values())[0]) == str(calls.directory)


PROBES: dict[str, Callable[[Calls], None]] = {
    "strided arrays": strided_arrays,
    "other clients": other_clients,
    "resharding": resharding,
    "dlpack": dlpack,
    "buffers": buffers,
    "addresses": addresses,
    "memory statistics": memory_statistics,
    "hardware numbers": hardware_numbers,
    "cost analysis": cost_analysis,
    "modules of executables": modules_of_executables,
    "serialized executables": serialized_executables,
    "transfer server": transfer_server,
    "newer operations": newer_operations_,
    "FFI libraries": ffi_libraries,
    "host callbacks": host_callbacks_,
    "send and receive": send_and_receive,
    "callbacks at compile time": callbacks_at_compile_time,
    "transformations of modules": transformations,
    "transformations of modules for clients": transformations_for_clients,
    "transformations of modules for plug-ins": transformations_for_plugins,
    "settings of colocated Python": colocated_python,
    "profiler": profiler,
    "exported profiles": exported_profiles,
    "jit over several meshes": several_meshes,
    "many threads": many_threads,
    "reads of trees": reads_of_trees,
    "direct reads": direct_reads,
    "direct reads of several arrays": direct_reads_of_several_arrays,
    "reads of elements": reads_of_elements,
    "writes of trees": writes_of_trees,
    "large writes": large_writes,
    "small writes": small_writes,
    "copies of arrays": copies_of_arrays,
    "resharding of trees": resharding_of_trees,
    "arguments from the host": arguments_from_the_host,
    "numbers in eager operations": numbers_in_eager_operations,
    "hosts of devices": hosts_of_devices,
    "devices by platform": devices_by_platform,
    "meshes over islands": meshes_over_islands,
}


def test_each_patch_has_a_probe() -> None:
    assert set(PROBES) == {patch.name for patch in PATCHES}


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)
def test_jax_uses_what_the_patch_replaces(patch: Patch, tmp_path: Path) -> None:
    if not patch.is_needed(jax.__version_info__):
        pytest.skip("this version of JAX does not need the patch, or Python does not allow it")
    calls = Calls()
    calls.directory = tmp_path
    if patch.name == "transfer server":
        __import__("jax.experimental.transfer")
    with contextlib.ExitStack() as stack:
        for change in map(replacement_of, patch.changes):
            stack.enter_context(replaced(dataclasses.replace(change, wrap=calls.recording(change.target))))
        PROBES[patch.name](calls)
    assert {change.target for change in patch.changes} - calls.targets == set(), "JAX does not call these any more"
