"""The private parts of JAX that programs use, under the names of JAX 0.10 to 0.12.

They concern the current trace, the contents of jit calls, and the fast paths of arguments and results. `jax.extend` has
some of them, but it imports Pallas, which adds settings to the key of jit's caches: all functions that were traced
before would be traced again.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax._src import api as _api
from jax._src import api_util, core, dispatch, effects, source_info_util, traceback_util
from jax._src import config as _config
from jax._src import literals as _literals
from jax._src import mesh as _mesh
from jax._src import pjit as _pjit
from jax._src import shard_map as _shard_map
from jax._src.core import Literal as Literal
from jax._src.core import Primitive as Primitive
from jax._src.core import Var as Var
from jax._src.interpreters import ad, batching, mlir, pxla
from jax._src.interpreters import partial_eval as _partial_eval
from jax._src.lib import xla_client
from jax._src.sharding_impls import UNSPECIFIED as UNSPECIFIED
from jax._src.sharding_impls import GSPMDSharding, physical_sharding

from atoll.ir.types import DTYPE_BITS

Trace: Any = core.Trace
Tracer: Any = core.Tracer
jit_p = _pjit.jit_p
device_put_p = dispatch.device_put_p
Array: Any = xla_client.ArrayImpl
# Of an `Array`. They call no Python.
type_of: Callable[[Any], tuple[Any, Any]] = operator.attrgetter("_sharding", "aval")
sharding_of: Callable[[Any], Any] = operator.attrgetter("_sharding")
aval_of: Callable[[Any], Any] = operator.attrgetter("aval")
trace_context: Callable[[], Any] = _config.trace_context
trace_state_clean: Callable[[], bool] = core.trace_state_clean
eager_trace: Any = core.eval_trace
set_current_trace: Any = core.set_current_trace
abstractify: Callable[[Any], Any] = core.shaped_abstractify
default_device: Callable[[], Any] = pxla.get_default_device
needs_check_special: Callable[[], bool] = dispatch.needs_check_special
CopySemantics: Any = xla_client.ArrayCopySemantics  # whether a copy shares or takes over its source's memory

_REUSE = CopySemantics.REUSE_INPUT
_results_hook: Any = _api._post_hook_state  # what JAX's C++ calls with the results of jit calls


def leave_out_of_tracebacks(path: str) -> None:
    """Hide the frames of this file, or of all files in this directory, from the user's tracebacks and source lines."""
    source_info_util.register_exclusion(path)
    traceback_util.register_exclusion(path)


leave_out_of_tracebacks(__file__)


def forbids_computations() -> bool:
    """Return whether the user forbids new traces or runs of computations (jax_no_tracing, jax_no_execution)."""
    return bool(_config.no_tracing.value or _config.no_execution.value)


@contextlib.contextmanager
def own_computation() -> Iterator[None]:
    """Let this thread trace and run a computation that JAX on stock devices does without.

    It is not one of the user's, who may trace another one, or forbid computations or transfers.
    """
    with (
        jax.ensure_compile_time_eval(),
        jax.transfer_guard("allow"),
        _config.no_tracing(False),
        _config.no_execution(False),
    ):
        yield


def line() -> str:
    """Return the innermost line of the user's code on the stack, as `file:line:column (function)`."""
    return str(source_info_util.summarize(source_info_util.current()))


def current_trace() -> Any:
    return core.trace_ctx.trace


Zero: Any = ad.Zero
is_undefined_primal: Callable[[Any], bool] = ad.is_undefined_primal

# The traces for which programs have rules: see `programs.transformations`. Other traces see the calls of the function.
_WITH_RULES = (ad.JVPTrace, ad.LinearizeTrace, _partial_eval.JaxprTrace, batching.BatchTrace)


def is_transforming() -> bool:
    """Return whether the current trace differentiates or batches, rather than traces into one computation (jit)."""
    return isinstance(core.trace_ctx.trace, _WITH_RULES)


def is_eager() -> bool:
    """Return whether operations of this thread run now, rather than being traced or transformed."""
    return bool(core.trace_ctx.is_top_level())


def type_settings() -> tuple[Any, ...]:
    """Return the settings of this thread on which the types of Python numbers depend."""
    return _config.enable_x64.value, _config.explicit_x64_dtypes.value


_TYPED = (_literals.TypedNdArray, *_literals.typed_scalar_types)


def type_of_literal(value: Any) -> Any:
    """Return the type of a host value to which JAX has given one, or None for other values."""
    return value.aval if type(value) in _TYPED else None


def eager_device() -> Any:
    """Return the device on which eager JAX makes arrays of host values now. None if a mesh or check applies to them."""
    if _config.debug_nans.value or _config.debug_infs.value:
        return None
    meshes = _mesh.get_concrete_mesh(), _mesh.get_abstract_mesh(), _mesh.thread_resources.env.physical_mesh
    return pxla.get_default_device() if all([mesh.empty for mesh in meshes]) else None


def number_on(number: float, device: Any) -> Any:
    """Return an uncommitted array of a Python number on a device, with the number's weak type.

    Return None if JAX does not make such an array now, for example on the devices of `jax.set_mesh` instead.
    """
    with jax.default_device(device):
        array = jax.numpy.asarray(number)
    return array if array.devices() == {device} and not array.committed else None


def make_primitive(
    name: str,
    run: Callable[..., Any],
    result_types: Callable[..., Any],
    inline: Callable[..., Any],
    jvp: Callable[..., Any],
    transpose: Callable[..., Any],
    batch: Callable[..., Any],
) -> Any:
    """Return a primitive with several results and these rules. `inline` expresses it with other primitives, for XLA."""
    primitive = core.Primitive(name)
    primitive.multiple_results = True
    primitive.def_impl(run)
    primitive.def_abstract_eval(result_types)
    ad.primitive_jvps[primitive] = jvp
    ad.primitive_transposes[primitive] = transpose
    batching.fancy_primitive_batchers[primitive] = batch
    mlir.register_lowering(primitive, mlir.lower_fun(inline, multiple_results=True))
    return primitive


def run_now(primitive: Any, arguments: Sequence[Any], params: dict[str, Any]) -> Any:
    """Run a primitive without tracers, as eager JAX does."""
    return core.eval_trace.process_primitive(primitive, arguments, params)


def stage_now(value: Any) -> Any:
    """Return the array that eager JAX makes of a host value."""
    return core.eval_trace.stage_value(value)


# Modules with primitives that eager JAX runs as several computations, or that make their own jit call.
_COMPOSED = ("pjit", "ad_checkpoint", "custom_derivatives", "custom_batching")


def run_as_eager_jax(trace: Any, primitive: Any, arguments: Sequence[Any], params: dict[str, Any]) -> Any:
    """Run the primitive under `trace` as the jit calls that eager JAX makes for it."""
    with set_current_trace(trace):
        if getattr(primitive.impl, "__module__", "").rpartition(".")[2] in _COMPOSED:
            return primitive.impl(*arguments, **params)
        return dispatch.apply_primitive(primitive, *arguments, **params)


def run_shard_map(trace: Any, primitive: Any, fun: Any, arguments: Sequence[Any], params: dict[str, Any]) -> Any:
    """Run a shard_map that is outside any jit under `trace`, as one jit call."""
    structures: list[Any] = []

    def shard_map(*xs: Any) -> list[Any]:
        results = primitive.bind(*xs, subfuns=(fun,), **params)
        structures.append(results)
        return list(results)

    with set_current_trace(trace):
        flat = jax.jit(shard_map)(*arguments)
    return structures[-1].update(flat)


# ---- the contents of a jit call


@dataclass(frozen=True)
class Effects:
    """The side effects of a computation. Changes of mutable arrays that the computation creates do not count."""

    some: bool
    ordered: bool  # in the order of launches, with all other ordered effects
    references: bool  # uses mutable arrays from outside

    @classmethod
    def of(cls, jaxpr: Any) -> Effects:
        seen = [each for each in jaxpr.effects if not isinstance(each, core.InternalMutableArrayEffect)]
        ordered = effects.ordered_effects.filter_in(seen)
        lowerable = effects.lowerable_effects.filter_in(seen)
        return cls(bool(seen), bool(ordered), len(lowerable) < len(seen))


def calls_out(primitive: Any, params: dict[str, Any]) -> bool:
    """Return whether an operation has effects for any arguments."""
    if primitive is jit_p:
        return Effects.of(params["jaxpr"]).some
    return primitive.name in ("debug_callback", "debug_print", "io_callback") or bool(params.get("has_side_effect"))


def argument_names(executable: Any, count: int) -> Sequence[str]:
    """Return the paths of the `count` arguments of a compiled function, constants and unused ones included."""
    info = executable._all_args_info
    names = () if info is None else info.debug_info.arg_names or ()
    return names if len(names) == count else ("unknown",) * count


def note_effects(devices: Iterable[Any], results: Any) -> None:
    """Make `jax.effects_barrier` wait for the run with these `results`, which include a token, on `devices`."""
    token = results.consume_token().get_token(0)
    for device in devices:
        dispatch.runtime_tokens.set_output_runtime_token(device, token)


def uses_references(primitive: Any, arguments: Sequence[Any]) -> bool:
    """Return whether a primitive creates or uses mutable arrays (jax.Ref)."""
    return bool(primitive.ref_primitive) or any(isinstance(each, core.Ref) for each in arguments)


def as_function(jaxpr: Any, name: str) -> Callable[..., Any]:
    """Return a function that evaluates the jaxpr. `name` becomes the name of its jit module."""

    def run(*arguments: Any) -> Any:
        before = _results_hook.get_local()
        try:
            return tuple(core.jaxpr_as_fun(jaxpr)(*arguments))
        finally:  # JAX leaves the hook off in this thread, though the user may have set jax_debug_infs for all threads
            _results_hook.set_local(before)

    run.__name__ = run.__qualname__ = name
    return run


# The name scope of a program's function if JAX traces it into one computation.
PROGRAM_SCOPE = "atoll.program"


def has_program(jaxpr: Any) -> bool:
    """Return whether the computation contains a program's function, or JAX evaluates it as part of one."""
    if PROGRAM_SCOPE in str(source_info_util.current_name_stack()):
        return True
    return any(
        PROGRAM_SCOPE in str(eqn.source_info.name_stack) or any(map(has_program, core.jaxprs_in_params(eqn.params)))
        for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns
    )


def only_operation(jaxpr: Any) -> str | None:
    """Return the name of a computation's only operation; None if it has several, or if the operation is a jit call."""
    eqns = getattr(jaxpr, "jaxpr", jaxpr).eqns
    return eqns[0].primitive.name if len(eqns) == 1 and eqns[0].primitive is not jit_p else None


def devices_of(sharding: Any) -> tuple[Any, ...] | None:
    """Return the devices in the sharding's order, or None if the sharding has no devices."""
    if isinstance(sharding, type(UNSPECIFIED)) or sharding is None:
        return None
    if isinstance(getattr(sharding, "mesh", None), jax.sharding.AbstractMesh):
        return None
    return tuple(sharding._device_assignment)


def forbids_transfers() -> bool:
    """Return whether the user's transfer guards forbid to read arrays into this process, or to send them from it."""
    guards = (_config.transfer_guard_device_to_host, _config.transfer_guard_host_to_device)
    return any(str(guard.value).startswith("disallow") for guard in guards)


def can_compile_resharding(aval: Any, source: Any, target: Any) -> bool:
    """Return whether a computation can change an array's sharding from `source` to `target`.

    It cannot if the devices differ, have another order or belong to several islands, or if the memory differs. It also
    cannot for arrays that XLA represents differently or not at all: keys, strings, and parts that still need a sum.
    For elements of less than a byte, collectives across CPU hosts crash the process (jaxlib 0.10.2).
    """
    devices = devices_of(source)
    if devices is None or len(devices) == 1 or devices != devices_of(target):
        return False
    if source.memory_kind != target.memory_kind or len({getattr(each, "slice_index", 0) for each in devices}) > 1:
        return False
    if not isinstance(aval.dtype, np.dtype) or DTYPE_BITS.get(aval.dtype.name, 0) < 8:
        return False
    try:
        tiles(source, aval.ndim), tiles(target, aval.ndim)
    except NotImplementedError:
        return False
    return True


def by_tiles(sharding: Any, rank: int) -> Any:
    """Return XLA's form of the sharding, without a mesh, which would become part of an array's type."""
    hlo = sharding._to_xla_hlo_sharding(rank)
    return GSPMDSharding(sharding._internal_device_list, hlo, memory_kind=sharding.memory_kind)


def mesh_devices(mesh: Any) -> tuple[Any, ...] | None:
    """Return the devices of a mesh, or None if it has no devices."""
    if mesh is None or isinstance(mesh, jax.sharding.AbstractMesh) or mesh.empty:
        return None
    return tuple(mesh.devices.flat)


def shardings_inside(jaxpr: Any) -> Iterator[Any]:
    """Yield the shardings with devices inside the computation, for instance of its constraints and shard_maps."""
    for sharding, _ in dispatch.get_intermediate_shardings(getattr(jaxpr, "jaxpr", jaxpr)):
        if devices_of(sharding) is not None:
            yield sharding


def only_shard_map(jaxpr: Any) -> tuple[list[Any], list[Any]] | None:
    """Return the shardings of the inputs and outputs of a computation that is one shard_map, as pmap's are, or None."""
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    if len(inner.eqns) != 1 or inner.eqns[0].primitive is not _shard_map.shard_map_p:
        return None
    (eqn,) = inner.eqns
    mesh = eqn.params["mesh"]
    if mesh_devices(mesh) is None or list(eqn.invars) != list(inner.invars) or list(eqn.outvars) != list(inner.outvars):
        return None
    named = jax.sharding.NamedSharding
    return (
        [named(mesh, spec) for spec in eqn.params["in_specs"]],
        [named(mesh, spec) for spec in eqn.params["out_specs"]],
    )


# ---- arrays


def physical(aval: Any, sharding: Any) -> tuple[Any, Any]:
    """Return an array's type and sharding on devices: for PRNG keys, those of the numbers."""
    if jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended):
        return core.physical_aval(aval), physical_sharding(aval, sharding)
    return aval, sharding


def tiles(sharding: Any, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return the tile assignment (dimensions, devices) in XLA's form, or None if each device has the whole array."""
    hlo = sharding._to_xla_hlo_sharding(rank)
    if hlo.is_replicated() or hlo.is_maximal():
        return None
    if hlo.is_manual() or _has_partial_sums(hlo):
        raise NotImplementedError(f"arrays whose sharding is {sharding} cannot leave their computation")
    return tuple(hlo.tile_assignment_dimensions()), tuple(hlo.tile_assignment_devices())


def has_partial_sums(sharding: Any, rank: int) -> bool:
    """Return whether the shards of an array are partial sums: such arrays are unreduced, and have no parts."""
    return _has_partial_sums(sharding._to_xla_hlo_sharding(rank))


def _has_partial_sums(hlo: Any) -> bool:
    kind = xla_client.OpSharding.Type.UNREDUCED
    return bool(hlo.is_unreduced() or kind in hlo.subgroup_types())


def check_deleted(arrays: Sequence[Any]) -> None:
    """Raise JAX's error if an array is deleted."""
    for each in arrays:
        each._check_if_deleted()


def check_special(name: str, arrays: Sequence[Any]) -> None:
    """Raise FloatingPointError for values that the user has forbidden (jax_debug_nans, jax_debug_infs)."""
    try:
        dispatch.check_special(name, arrays)
    except api_util.InternalFloatingPointError as error:
        raise FloatingPointError(
            f"program {name!r} returns {error.ty}. Run the function without atoll.program to find the operation"
        ) from None


def in_memory(sharding: Any, space: Any) -> Any:
    """Return the sharding in a `jax.memory.Space`."""
    return sharding.with_memory_kind(core.mem_space_to_kind(space))


def primal(array: Any) -> Any:
    """Return the array under a differentiation tracer."""
    while isinstance(array, core.Tracer) and hasattr(array, "primal"):
        array = array.primal
    return array


def is_committed(array: Any) -> bool:
    return bool(getattr(array, "_committed", True))


def buffer(array: Any) -> Any:
    """Return the array that jaxlib takes as an argument: the numbers of a PRNG key, otherwise the array itself."""
    return array if type(array) is Array else getattr(array, "_base_array", array)


def put(values: Sequence[Any], shardings: Sequence[Any]) -> Sequence[Any]:
    """Return arrays of the host values with these shardings, without the checks of `jax.device_put`."""
    count = len(values)
    arrays: Sequence[Any] = pxla.shard_args(shardings, [None] * count, [_REUSE] * count, values)
    return arrays


@lru_cache(maxsize=256)  # since JAX and NumPy need a dozen calls, for each array that is read or written
def has_numpy_contents(dtype: Any) -> bool:
    """Return whether arrays of the type consist of whole bytes per element, as NumPy's do."""
    return not jax.dtypes.issubdtype(dtype, jax.dtypes.extended) and DTYPE_BITS.get(dtype.name, 0) >= 8


def is_canonical(dtype: Any) -> bool:
    """Return whether JAX makes arrays of this type of host values now, rather than of a type with 32 bits."""
    return bool(jax.dtypes.issubdtype(dtype, jax.dtypes.extended) or jax.dtypes.canonicalize_dtype(dtype) == dtype)


def device_to_host_guard() -> str | None:
    """Return the guard of transfers to the host that applies to this thread, as `jax.transfer_guard` takes it."""
    guard: str | None = _config.transfer_guard_device_to_host.value
    return guard


def host_to_device_guard() -> str | None:
    """Return the guard of transfers to devices that applies to this thread, as `jax.transfer_guard` takes it."""
    guard: str | None = _config.transfer_guard_host_to_device.value
    return guard


def of_shards(aval: Any, sharding: Any, shards: Sequence[Any], committed: bool) -> Any:
    """Return an array of arrays on single devices, in the sharding's order."""
    return Array(aval, sharding, list(shards), committed=committed, _skip_checks=True)


def shard_handler(shape: Sequence[int], dtype: Any, device: Any) -> Any:
    """Return a `result_handler` for an array on one device."""
    return result_handler(core.ShapedArray(tuple(shape), dtype), jax.sharding.SingleDeviceSharding(device), True)


def plain(aval: Any) -> Any:
    """Return the type without its mesh if all axes are automatic, so that equal shapes and dtypes give equal types."""
    mesh = getattr(getattr(aval, "sharding", None), "mesh", None)
    return aval if mesh is None or mesh.empty or not mesh.are_all_axes_auto else aval.update(sharding=None)


def result_handler(aval: Any, sharding: Any, committed: bool) -> Any:
    """Return a function that makes a `jax.Array` of jaxlib's result, with the type that eager JAX gives it."""
    aval = core.update_aval_with_sharding(aval, sharding)
    return pxla.global_aval_to_result_handler(aval, sharding, committed)
