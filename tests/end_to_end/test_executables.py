"""Tests of compiled functions on Atoll: their properties, their errors, and how often they are compiled.

Each function without `test_` in its name runs twice: here on stock JAX, and in a child on Atoll.
"""

from __future__ import annotations

import json
import re
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.lib import xla_client
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from atoll.operate.operator_requests import request_report
from atoll.wire.address import Address
from tests.end_to_end.remote_python import RemotePython, StartPython
from tests.end_to_end.same import assert_same
from tests.end_to_end.standing_cluster import StartCluster


def compiled_step() -> Any:
    """Return a compiled function with two sharded arguments, one of which is donated, and two results."""
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"))
    rows, columns = NamedSharding(mesh, P("x", "y")), NamedSharding(mesh, P(None, "y"))
    step = jax.jit(
        lambda a, b: (a * 2, (a @ b.T).sum()),
        in_shardings=(rows, columns),
        out_shardings=(rows, NamedSharding(mesh, P())),
        donate_argnums=0,
    )
    return step.lower(jax.ShapeDtypeStruct((8, 4), jnp.float32), jax.ShapeDtypeStruct((4, 4), jnp.float32)).compile()


def text() -> str:
    """Return the program's text without the tables of stack frames, which contain the caller."""
    return without_frames(compiled_step().as_text())


def without_frames(text: str) -> str:
    lines = re.sub(r", metadata={[^}]*}", "", text).splitlines()
    return "\n".join(line for line in lines if not re.match(r"[0-9]+ |$", line))


def test_the_text_is_that_of_stock_jax(same_as_stock: Any) -> None:
    same_as_stock(text)


def modules() -> list[tuple[str, list[str]]]:
    """Return the name of each module and the lines of its text in alphabetical order.

    The order of a module's computations is that of their creation, or that of the parsed text.
    """
    found = compiled_step().runtime_executable().hlo_modules()
    return [(module.name, sorted(without_frames(module.to_string()).splitlines())) for module in found]


def test_the_modules_are_those_of_stock_jax(same_as_stock: Any) -> None:
    same_as_stock(modules)


def cost() -> dict[str, float]:
    return dict(sorted(compiled_step().cost_analysis().items()))


def test_the_cost_is_that_of_stock_jax(same_as_stock: Any) -> None:
    same_as_stock(cost)


def memory() -> dict[str, int]:
    analysis = compiled_step().memory_analysis()
    names = [name for name in sorted(dir(analysis)) if name[0] != "_" and isinstance(getattr(analysis, name), int)]
    return {name: getattr(analysis, name) for name in names}


def test_the_memory_needs_are_those_of_stock_jax(same_as_stock: Any) -> None:
    same_as_stock(memory)


def placements() -> Any:
    compiled = compiled_step()
    arguments, _ = compiled.input_shardings
    formats, _ = compiled.input_formats
    return (
        [(str(each.spec), dict(each.mesh.shape)) for each in (*arguments, *compiled.output_shardings)],
        [str(each.layout) for each in (*formats, *compiled.output_formats)],
        [each.memory_kind for each in compiled.output_shardings],
    )


def test_shardings_and_layouts_are_those_of_stock_jax(same_as_stock: Any) -> None:
    same_as_stock(placements)


def fingerprints() -> Any:
    first = compiled_step().runtime_executable().fingerprint
    other = jax.jit(lambda x: x + 1).lower(1.0).compile().runtime_executable().fingerprint
    again = compiled_step().runtime_executable().fingerprint
    return first, other, again


def test_a_fingerprint_is_that_of_the_program(atoll_python: RemotePython) -> None:
    first, other, again = atoll_python.call(fingerprints)
    assert first
    assert first == again != other


def donations() -> Any:
    whole, row, unused = jnp.ones((4, 4)), jnp.ones((4,)), jnp.ones((2,), jnp.int8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        out = jax.jit(lambda a, b, c: a + b, donate_argnums=(0, 1, 2))(whole, row, unused)
    return [a.is_deleted() for a in (whole, row, unused)], np.array(out), [str(w.message) for w in caught]


def test_what_is_donated_but_cannot_be_used_is_kept_as_in_stock_jax(same_as_stock: Any) -> None:
    same_as_stock(donations)


def exported() -> Any:
    from jax import export

    whole = export.export(jax.jit(lambda x: jnp.sin(x) * 2))(jax.ShapeDtypeStruct((8,), jnp.float32))
    return np.array(jax.jit(whole.call)(np.arange(8, dtype=np.float32))), whole.platforms, whole.nr_devices


def test_functions_are_exported_and_called_again(same_as_stock: Any) -> None:
    same_as_stock(exported)


def cached_with_callbacks() -> Any:
    """Call functions that differ only in the Python function that they call back, with JAX's persistent cache."""
    from jax.experimental.compilation_cache import compilation_cache

    events: list[str] = []
    jax.monitoring.register_event_listener(lambda event, **_: events.append(event.rpartition("/")[2]))
    settings = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in settings}
    x, found = jnp.ones(3), []
    with tempfile.TemporaryDirectory() as directory, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for name, value in zip(settings, (directory, 0), strict=True):
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        for function in (np.sin, np.cos):
            jax.clear_caches()
            events.clear()
            result = jax.jit(lambda x, f=function: jax.pure_callback(f, x, x) * 2)(x)  # type: ignore[misc]
            found.append((np.array(result), [each for each in events if each in ("cache_hits", "cache_misses")]))
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
    return found, [str(each.message) for each in caught]


def test_programs_with_callbacks_are_cached_as_in_stock_jax(same_as_stock: Any) -> None:
    same_as_stock(cached_with_callbacks)


def loaded_without_its_callbacks() -> tuple[str, str]:
    x = jnp.ones(3)
    compiled = jax.jit(lambda x: jax.pure_callback(np.sin, x, x)).lower(x).compile().runtime_executable()
    devices = compiled.local_devices()
    lists = xla_client.DeviceList(tuple(devices))
    return error_of(lambda: devices[0].client.deserialize_executable(compiled.serialize(), lists))


def test_an_executable_with_callbacks_cannot_be_loaded_without_them(atoll_python: RemotePython) -> None:
    kind, text = atoll_python.call(loaded_without_its_callbacks)
    assert (kind, "compile the function in this process" in text) == ("BackendError", True), text


# ---- errors


def error_of(function: Callable[[], Any]) -> tuple[str, str]:
    try:
        function()
    except Exception as error:
        # The client adds the number of the request's stack to the server's text.
        return type(error).__name__, re.sub(r" \[type\.googleapis\.com/ifrt\.UserContext='\d+'\]", "", str(error))
    raise AssertionError("nothing was raised")


def unknown_custom_call() -> Any:
    call = jax.ffi.ffi_call("no_such_target", jax.ShapeDtypeStruct((4,), jnp.float32))
    return error_of(lambda: jax.jit(call)(jnp.ones(4, jnp.float32)))


def impossible_sharding() -> Any:
    mesh = Mesh(np.array(jax.devices()[:4]), ("x",))
    array = jax.device_put(np.ones(8), NamedSharding(mesh, P("x")))
    return error_of(lambda: jax.jit(lambda x: x, compiler_options={"xla_no_such_option": True})(array))


def wrong_arguments() -> Any:
    compiled = compiled_step()
    good = jnp.ones((8, 4), jnp.float32)
    device = jax.device_put(np.ones(3), jax.devices()[1])
    return [
        error_of(lambda: compiled(good)),
        error_of(lambda: compiled(good, jnp.ones((4, 4), jnp.int32))),
        error_of(lambda: compiled(good, jnp.ones((4, 5), jnp.float32))),
        error_of(lambda: device + jax.device_put(np.ones(3), jax.devices()[2])),
    ]


@pytest.mark.parametrize("failure", [unknown_custom_call, impossible_sharding, wrong_arguments])
def test_what_cannot_be_compiled_or_called_fails_as_in_stock_jax(same_as_stock: Any, failure: Any) -> None:
    same_as_stock(failure)


# ---- number of compilations

STEPS = (lambda x: x.sum(), lambda x: x * 3, lambda x: x[::-1])


def several_functions() -> Any:
    mesh = Mesh(np.array(jax.devices()[:4]), ("x",))
    value = jax.device_put(np.arange(8.0), NamedSharding(mesh, P("x")))
    return [np.array(jax.jit(step)(value)) for step in STEPS]


def compilations(python: RemotePython) -> dict[str, int]:
    """Return the number of compilations by the child's embedded cluster."""
    (socket,) = python.directory.glob("atoll-client-*/cluster/controller.sock")
    counts: dict[str, int] = json.loads(request_report(Address(path=str(socket)), ""))["functions"]
    return counts


def test_a_second_run_compiles_nothing(start_python: StartPython, tmp_path: Path) -> None:
    counts = []
    for _ in range(2):
        python = start_python(ATOLL_CACHE_DIR=str(tmp_path))
        assert_same(python.call(several_functions), several_functions())
        counts.append(compilations(python))
        python.close()
    first, second = counts
    assert first["compiled"] >= len(STEPS)
    assert (second["compiled"], second["cached"]) == (0, first["compiled"] + first["cached"])


def test_a_program_that_two_sessions_send_is_compiled_once(
    start_python: StartPython, start_cluster: StartCluster
) -> None:
    cluster = start_cluster({"ATOLL_CACHE_DIR": ""})
    pythons = [start_python(ATOLL_ADDRESS=cluster.address) for _ in range(2)]
    for python in pythons:
        python.begin(several_functions)
    one, other = (python.finish() for python in pythons)
    assert_same(one, other)
    report = cluster.report()
    held = [session["functions"] for session in report["sessions"]]
    assert held[0] == held[1] >= len(STEPS)
    assert report["functions"]["compiled"] == held[0]
    for python in pythons:
        python.close()
