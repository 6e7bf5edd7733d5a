"""Tests of arrays that move between Atoll, the user's process and other libraries in it, by JAX's own rules.

`JAX_PLATFORMS` is `atoll`, but the local CPU is available nevertheless. Functions without `test_` in their names run in
the child.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import serialize_executable
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from tests.end_to_end.remote_python import RemotePython, StartPython
from tests.end_to_end.script_process import StartScript


@pytest.fixture(scope="module")
def python(start_python: StartPython) -> RemotePython:
    return start_python(JAX_PLATFORMS="atoll", JAX_NUM_CPU_DEVICES="2")


def here(number: int = 0) -> Any:
    return jax.local_devices(backend="cpu")[number]


def there(number: int = 0) -> Any:
    return jax.devices("atoll")[number]


def place(array: Any) -> str:
    """Return the place of an array, such as "here 0": the backend and the device."""
    (device,) = array.devices()
    return f"{'here' if device in jax.local_devices(backend='cpu') else 'there'} {device.id}"


def both(function: Callable[..., Any], *arguments: Any, times: int = 3) -> tuple[str, list[float]]:
    """Return the place and the value of a function's result, which must be the same for later calls, since JAX handles
    them differently.
    """
    results = [function(*arguments) for _ in range(times)]
    (where,) = {place(each) for each in results}
    (value,) = {tuple(np.asarray(each).ravel().tolist()) for each in results}
    return where, list(value)


# ---- transfers in both directions


def there_and_back(dtype: str) -> list[Any]:
    array = jnp.arange(6).reshape(2, 3).astype(dtype)
    local = jax.device_put(array, here(1))
    back = jax.device_put(local, there(3))
    return [place(local), place(back), bool((np.asarray(back) == np.asarray(array)).all()), str(back.dtype)]


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "int4", "bool", "complex64", "float8_e4m3fn"])
def test_arrays_go_to_local_devices_and_back(python: RemotePython, dtype: str) -> None:
    assert python.call(there_and_back, dtype) == ["here 1", "there 3", True, dtype]


def keys_there_and_back() -> list[Any]:
    key = jax.random.key(7)
    local = jax.device_put(key, here())
    back = jax.device_put(local, there(2))
    drawn = [np.asarray(jax.random.normal(each, (3,))) for each in (key, local, back)]
    return [place(local), place(back), np.array_equal(drawn[0], drawn[1]), np.array_equal(drawn[0], drawn[2])]


def test_typed_keys_go_to_local_devices_and_back(python: RemotePython) -> None:
    assert python.call(keys_there_and_back) == ["here 0", "there 2", True, True]


def sharded_there_and_back() -> list[Any]:
    values = np.arange(16.0).reshape(4, 4)
    far = NamedSharding(Mesh(np.array(jax.devices("atoll")), "x"), P("x"))
    near = NamedSharding(Mesh(np.array(jax.local_devices(backend="cpu")), "x"), P(None, "x"))
    array = jax.device_put(values, far)
    one, local = jax.device_put(array, here()), jax.device_put(array, near)
    back = jax.device_put(local, far)
    return [
        place(one),
        local.sharding == near,
        back.sharding == far,
        *(np.array_equal(x, values) for x in (one, local, back)),
    ]


def test_sharded_arrays_go_to_other_shardings_of_local_devices(python: RemotePython) -> None:
    assert python.call(sharded_there_and_back) == ["here 0", True, True, True, True, True]


# ---- calls


def add(x: Any, y: Any) -> Any:
    return x + 2 * y


def calls_here(how: str) -> Any:
    far, near = jnp.arange(3.0), jax.device_put(np.ones(3), here())
    assert not far.committed
    return both(jax.jit(add) if how == "jit" else add, far, near)


def calls_there(how: str) -> Any:
    with jax.default_device(here()):
        near = jnp.arange(3.0)
    assert not near.committed
    far = jax.device_put(np.ones(3), there(2))
    return both(jax.jit(add) if how == "jit" else add, near, far)


@pytest.mark.parametrize("how", ["jit", "eager"])
def test_uncommitted_arrays_go_where_committed_ones_are(python: RemotePython, how: str) -> None:
    assert python.call(calls_here, how) == ("here 0", [2.0, 3.0, 4.0])
    assert python.call(calls_there, how) == ("there 2", [2.0, 3.0, 4.0])


def calls_of_the_default_device() -> Any:
    far = jnp.arange(3.0)
    function = jax.jit(lambda x: x * 3)
    with jax.default_device(here(1)):
        near = both(function, far)
    return near, both(function, far)


def test_the_default_device_draws_uncommitted_arrays(python: RemotePython) -> None:
    assert python.call(calls_of_the_default_device) == (("here 1", [0.0, 3.0, 6.0]), ("there 0", [0.0, 3.0, 6.0]))


def key_calls() -> Any:
    key, near = jax.random.key(1), jax.device_put(np.float64(2), here())
    return both(jax.jit(lambda key, x: jax.random.bits(key, (2,)) * 0 + x), key, near)


def test_keys_go_where_committed_arrays_are(python: RemotePython) -> None:
    assert python.call(key_calls) == ("here 0", [2.0, 2.0])


def committed_calls(compiled: bool) -> str:
    far, near = jax.device_put(np.ones(3), there()), jax.device_put(np.ones(3), here())
    function: Any = jax.jit(add)
    if compiled:
        function = function.lower(near, near).compile()
    try:
        function(far, near)
    except ValueError as error:
        return str(error)
    return ""


def test_arrays_committed_to_both_are_refused_as_jax_does(python: RemotePython) -> None:
    assert "incompatible devices" in python.call(committed_calls, False)
    assert "disagree with the shardings" in python.call(committed_calls, True)


def compiled_calls() -> Any:
    def compiled(device: Any) -> Any:
        shape = jax.ShapeDtypeStruct((3,), np.float64, sharding=SingleDeviceSharding(device))
        return jax.jit(lambda x: x * 2).lower(shape).compile()

    far = jnp.arange(3.0)
    with jax.default_device(here()):
        near = jnp.arange(3.0)
    to_near, to_far = compiled(here(1)), compiled(there(1))
    return [both(to_near, far), both(to_near, near), both(to_far, near), both(to_far, far), both(to_near, far)]


def test_compiled_functions_take_uncommitted_arrays_of_the_other_side(python: RemotePython) -> None:
    near, far = ("here 1", [0.0, 2.0, 4.0]), ("there 1", [0.0, 2.0, 4.0])
    assert python.call(compiled_calls) == [near, near, far, far, near]


def guarded() -> str:
    far, near = jnp.arange(3.0), jax.device_put(np.ones(3), here())
    with jax.transfer_guard("disallow"):
        jax.device_put(far, here())
        try:
            jnp.add(far, near)
        except Exception as error:
            return str(error)
    return ""


def test_transfer_guards_hold_between_the_two(python: RemotePython) -> None:
    assert "Disallowed device-to-device transfer" in python.call(guarded)


# ---- other libraries


def exported() -> Any:
    x = jnp.arange(3.0) + 1
    np.asarray(x)
    far = jax.device_put(x, there(1))
    with jax.transfer_guard_host_to_device("disallow_explicit"):  # reads the array, and sends nothing to a device
        taken = np.from_dlpack(far)
    local = jax.dlpack.from_dlpack(x, device=here())
    return taken.tolist(), place(local), [int(part) for part in x.__dlpack_device__()]


def test_arrays_are_exported_by_dlpack(python: RemotePython) -> None:
    assert python.call(exported) == ([1.0, 2.0, 3.0], "here 0", [1, 0])


def written() -> Any:
    x = jnp.arange(3.0) + 1
    capsule = np.from_dlpack(x)
    writable = np.ctypeslib.as_array((np.ctypeslib.ctypes.c_double * 3).from_address(capsule.ctypes.data))
    writable[:] = 9
    return capsule.tolist(), np.asarray(x).tolist(), (x + 0).tolist()


def test_what_the_consumer_of_an_export_writes_changes_no_array(python: RemotePython) -> None:
    assert python.call(written) == ([9.0] * 3, [1.0, 2.0, 3.0], [1.0, 2.0, 3.0])


def uncopied() -> list[str]:
    found = []
    for take in (lambda: np.from_dlpack(jnp.ones(3), copy=False), lambda: np.from_dlpack(sharded())):
        try:
            take()
        except BufferError as error:
            found.append(str(error))
    return found


def sharded() -> Any:
    return jax.device_put(np.arange(8.0), NamedSharding(Mesh(np.array(jax.devices("atoll")), "x"), P("x")))


def test_exports_without_a_copy_and_of_sharded_arrays_are_buffer_errors(python: RemotePython) -> None:
    copied, several = python.call(uncopied)
    assert "in the memory of another process" in copied
    assert "on a singular device" in several


def imported() -> Any:
    values = np.arange(3.0)
    x = jnp.from_dlpack(values)
    values[:] = 7
    on_far, on_near = jnp.from_dlpack(values, device=there(1)), jnp.from_dlpack(values, device=here())
    again = jnp.from_dlpack(jax.device_put(x, there(2)))
    local = jnp.from_dlpack(jax.device_put(values, here()))
    return [
        place(x),
        x.tolist(),
        place(on_far),
        place(on_near),
        place(again),
        place(local),
        x.committed,
        hasattr(x, "__cuda_array_interface__"),
        jnp.from_dlpack(jnp.asarray(2.0)).weak_type,
    ]


def to_torch_and_back() -> tuple[list[float], list[float]]:
    import torch  # type: ignore[import-not-found, unused-ignore]

    tensor = torch.from_dlpack(jnp.arange(3.0))
    return tensor.tolist(), jnp.from_dlpack(tensor + 1).tolist()


def test_arrays_go_to_torch_and_back_by_dlpack(python: RemotePython) -> None:
    pytest.importorskip("torch")
    assert python.call(to_torch_and_back) == ([0.0, 1.0, 2.0], [1.0, 2.0, 3.0])


def test_imports_are_copies_on_the_default_device_and_local_arrays_stay_local(python: RemotePython) -> None:
    assert python.call(imported) == ["there 0", [0.0, 1.0, 2.0], "there 1", "here 0", "there 2", "here 0", *[False] * 3]


# ---- questions of JAX


def cost_before_compilation() -> float:
    return float(jax.jit(lambda a: a @ a).lower(jnp.ones((4, 4))).cost_analysis()["flops"])


def test_the_cost_of_a_program_is_known_before_it_is_compiled(python: RemotePython) -> None:
    assert python.call(cost_before_compilation) == cost_before_compilation()


def memory() -> Any:
    device = there(1)
    before = device.memory_stats()["bytes_in_use"]
    x = jax.block_until_ready(jax.device_put(np.zeros(1 << 20, np.uint8), device))
    held = device.memory_stats()
    del x
    return held["bytes_in_use"] - before, device.memory_stats()["bytes_in_use"] - before, held["peak_bytes_in_use"]


def test_devices_say_how_much_of_their_memory_is_in_use(python: RemotePython) -> None:
    held, after, peak = python.call(memory)
    assert (held, after) == (1 << 20, 0)
    assert peak >= 1 << 20


def serialized() -> Any:
    sharding = NamedSharding(Mesh(np.array(jax.devices("atoll")), "x"), P("x"))
    lowered = jax.jit(lambda x: (x * 2, x.sum()), in_shardings=sharding).lower(jax.ShapeDtypeStruct((8,), np.float64))
    one = jax.jit(lambda x: x * 3).lower(
        jax.ShapeDtypeStruct((2,), np.float64, sharding=SingleDeviceSharding(there(2)))
    )
    return [serialize_executable.serialize(each.compile()) for each in (lowered, one)]


def loaded(forms: Any) -> Any:
    whole, one = (serialize_executable.deserialize_and_load(*form) for form in forms)
    doubled, total = whole(np.arange(8.0))
    tripled = one(np.ones(2))
    return doubled.tolist(), len(doubled.devices()), float(total), place(tripled), tripled.tolist()


def test_serialized_executables_run_in_another_process_on_another_cluster(
    python: RemotePython, atoll_python: RemotePython
) -> None:
    expected = ([2.0 * i for i in range(8)], 4, 28.0, "there 2", [3.0, 3.0])
    forms = python.call(serialized)
    assert python.call(loaded, forms) == expected
    assert atoll_python.call(loaded, forms) == expected


def loaded_elsewhere(forms: Any) -> list[str]:
    errors = []
    for form in (forms[0], (b"", *forms[0][1:])):
        try:
            serialize_executable.deserialize_and_load(*form, execution_devices=jax.devices("atoll")[:2])
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
    return errors


def test_an_executable_for_devices_that_are_not_there_says_which(python: RemotePython) -> None:
    first, _ = python.call(loaded_elsewhere, python.call(serialized))
    assert "compiled for devices [0, 1, 2, 3], and cannot be loaded for devices [0, 1]" in first


def hits(directory: str) -> list[tuple[float, dict[str, int]]]:
    from jax._src import compilation_cache, monitoring

    counted = {"hits": 0, "misses": 0}

    def count(event: str, **_: Any) -> None:
        for name in counted:
            counted[name] += event == f"/jax/compilation_cache/cache_{name}"

    jax.config.update("jax_compilation_cache_dir", directory)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    compilation_cache.reset_cache()
    monitoring.register_event_listener(count)
    found = []
    try:
        for device in (there(), there(), there(1)):
            jax.clear_caches()
            compiled = jax.jit(lambda x: jnp.cos(x) * 11).lower(
                jax.ShapeDtypeStruct((2,), np.float64, sharding=SingleDeviceSharding(device))
            )
            value = float(np.asarray(compiled.compile()(np.zeros(2)))[0])
            found.append((value, dict(counted)))
    finally:
        monitoring.unregister_event_listener(count)
        jax.config.update("jax_compilation_cache_dir", None)
        compilation_cache.reset_cache()
    return found


def test_jaxs_own_cache_counts_hits_and_misses(python: RemotePython, tmp_path: Path) -> None:
    (first, missed), (again, hit), (elsewhere, _) = python.call(hits, str(tmp_path))
    assert first == again == elsewhere == 11.0
    assert missed == {"hits": 0, "misses": 1}
    assert hit == {"hits": 1, "misses": 1}


def transfer_server() -> str:
    from jax.experimental import transfer

    try:
        transfer.start_transfer_server(there().client)
    except Exception as error:
        return str(error)
    return ""


def addresses() -> list[bool | str]:
    x = jnp.arange(1000.0)
    key = jax.random.key(0)
    copy, donated = jnp.array(x), jnp.arange(1000.0)
    address, same, other = x.unsafe_buffer_pointer(), x.unsafe_buffer_pointer(), copy.unsafe_buffer_pointer()
    before = donated.unsafe_buffer_pointer()
    after = jax.jit(lambda x: x + 1, donate_argnums=0)(donated).unsafe_buffer_pointer()
    with jax.transfer_guard("disallow"):
        of_key = key.unsafe_buffer_pointer() == jax.random.key_data(key).unsafe_buffer_pointer()
    jax.config.update("jax_no_tracing", True)
    jax.config.update("jax_no_execution", True)
    try:
        without_computations = x.unsafe_buffer_pointer()
    finally:
        jax.config.update("jax_no_tracing", False)
        jax.config.update("jax_no_execution", False)
    try:
        donated.unsafe_buffer_pointer()
    except jax.errors.JaxRuntimeError as error:
        gone = str(error)
    sharded = jax.device_put(x, NamedSharding(Mesh(jax.devices("atoll")[:2], "x"), P("x")))
    parts = [each.data.unsafe_buffer_pointer() for each in sharded.addressable_shards]
    try:
        sharded.unsafe_buffer_pointer()
    except jax.errors.JaxRuntimeError as error:
        several = str(error)
    return [
        address > 0,
        address == same,
        address != other,
        before == after,
        of_key,
        address == without_computations,
        len(set(parts)) == 2,
        gone,
        several,
    ]


def test_arrays_have_addresses_that_are_equal_where_their_memory_is(python: RemotePython) -> None:
    *facts, gone, several = python.call(addresses)
    assert facts == [True] * 7
    assert "called on deleted or donated buffer" in gone
    assert "only for unsharded arrays" in several


def reused(size: int) -> list[bool]:
    """Return whether a donated array gave its memory to the result, for arrays that are put in all ways."""
    add_one, found = jax.jit(lambda x: x + 1, donate_argnums=0), []
    for number in range(8):  # later arrays of a type are put in another way than the first ones
        content = np.full(size, number, np.float32)
        for x in (jax.device_put(content), jnp.array(content.tolist(), jnp.float32)):
            before = x.unsafe_buffer_pointer()
            found.append(add_one(x).unsafe_buffer_pointer() == before)
    return found


@pytest.mark.parametrize("size", [1, 16384])
def test_small_arrays_of_the_host_give_their_memory_to_a_result(python: RemotePython, size: int) -> None:
    assert all(python.call(reused, size))


def put_everywhere(size: int) -> list[bool]:
    mesh, found = Mesh(np.array(jax.devices("atoll")[:2]), "x"), []
    for number in range(6):
        for spec in (P(), P("x")):
            content = np.full(size, number, np.float32)
            x = jax.device_put(content, NamedSharding(mesh, spec))
            found.append(np.array_equal(x, content))
    return found


@pytest.mark.parametrize("size", [0, 2, 64, 16384])
def test_small_arrays_of_the_host_are_on_several_devices(python: RemotePython, size: int) -> None:
    assert all(python.call(put_everywhere, size))


def test_a_transfer_server_on_atoll_is_refused_with_advice(python: RemotePython) -> None:
    assert "jax.device_put, which copies arrays between all hosts" in python.call(transfer_server)


# ---- beginnings and ends


def test_an_exit_handler_that_is_older_than_jax_can_compute(start_script: StartScript) -> None:
    script = start_script(
        """
        import atexit

        def last():
            print(np.asarray(x).tolist(), (x + 1).tolist(), double(x).tolist())

        atexit.register(last)
        import jax, jax.numpy as jnp, numpy as np

        x = jnp.arange(3.0)
        double = jax.jit(lambda x: x * 2)
        double(x)
        """,
        is_executed=True,
    )
    assert script.line() == "[0.0, 1.0, 2.0] [1.0, 2.0, 3.0] [0.0, 2.0, 4.0]"
    assert script.process.wait(300) == 0
    assert script.errors() == ""


def test_jax_can_be_used_first_in_an_exit_handler(start_script: StartScript) -> None:
    script = start_script(
        """
        import atexit
        import jax, jax.numpy as jnp, numpy as np

        def last():
            print(float((jax.device_put(np.ones(1 << 20, np.float32)) + jnp.arange(2.0)[1]).sum()))
            try:
                print(jax.jit(lambda x: jax.pure_callback(np.sin, x, x))(0.0))
            except Exception as error:
                print("refused" if "Run a function with a callback before the script ends" in str(error) else error)

        atexit.register(last)
        """,
        is_executed=True,
    )
    assert script.line() == "2097152.0"
    # Python 3.11 and 3.13 can still start threads there.
    assert script.line() == ("refused" if sys.version_info[:2] == (3, 12) else "0.0")
    assert script.process.wait(300) == 0
    assert script.errors() == ""


def test_a_callback_of_an_exit_handler_sends_large_arrays_and_waits_for_them(start_script: StartScript) -> None:
    script = start_script(
        """
        import atexit
        import jax, jax.numpy as jnp, numpy as np

        large = np.arange(8 << 20, dtype=np.float32)

        def call(x):
            sent = [jax.device_put(large + i, jax.devices()[0]) for i in range(4)]
            return np.float32(sum(int(np.asarray(each)[1]) for each in sent) + x)

        function = jax.jit(lambda x: jax.pure_callback(call, jax.ShapeDtypeStruct((), x.dtype), x))
        atexit.register(lambda: print(function(jnp.float32(1))))
        for _ in range(5):
            np.asarray(jnp.ones(3 << 20) + 1)
        """,
        is_executed=True,
    )
    assert script.line() == "11.0"
    assert script.process.wait(300) == 0
    assert script.errors() == ""


def test_an_exit_handler_sends_large_arrays_after_the_script_has_read_some(start_script: StartScript) -> None:
    script = start_script(
        """
        import atexit
        import jax, jax.numpy as jnp, numpy as np

        large = np.arange(8 << 20, dtype=np.float32)

        def last():
            sent = [jax.device_put(large + i) for i in range(4)]
            print([int(np.asarray(each)[1]) for each in sent])

        atexit.register(last)
        for _ in range(5):
            np.asarray(jnp.ones(3 << 20) + 1)
        """,
        is_executed=True,
    )
    assert script.line() == "[1, 2, 3, 4]"
    assert script.process.wait(300) == 0
    assert script.errors() == ""


def test_an_exit_handler_calls_the_script_back_long_after_the_last_call(start_script: StartScript) -> None:
    script = start_script(
        """
        import atexit, time
        import jax, jax.numpy as jnp, numpy as np
        from atoll.client.jax_patches.host_callbacks import CLIENT_CHANNEL

        CLIENT_CHANNEL._threads._idle_seconds = 0.01
        double = jax.jit(lambda x: jax.pure_callback(lambda y: 2 * y, x, x))
        double(1.0).block_until_ready()

        def last():
            time.sleep(0.5)
            print(double(2.0))

        atexit.register(last)
        """,
        is_executed=True,
    )
    assert script.line() == "4.0"
    assert script.process.wait(300) == 0
    assert script.errors() == ""


def test_one_of_several_processes_of_a_distributed_jax_is_told(start_script: StartScript) -> None:
    script = start_script(
        """
        import jax
        from jax._src import distributed

        distributed.global_state.num_processes = 2  # as jax.distributed.initialize leaves it
        try:
            jax.devices()
        except RuntimeError as error:
            print(error)
        """
    )
    assert "with Atoll one process uses the devices of all hosts" in script.line()
