"""Everything that programs use of JAX and that is not public, in one place: JAX 0.10 to 0.12 have it under these names.

How a trace becomes current, what a jit call carries, and the fast paths of arguments and results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax._src import api_util, core, dispatch, effects, source_info_util, traceback_util
from jax._src import config as _config
from jax._src import pjit as _pjit
from jax._src import shard_map as _shard_map
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
trace_context: Callable[[], Any] = _config.trace_context
trace_state_clean: Callable[[], bool] = core.trace_state_clean
eager_trace: Any = core.eval_trace
set_current_trace: Any = core.set_current_trace
abstractify: Callable[[Any], Any] = core.shaped_abstractify
default_device: Callable[[], Any] = pxla.get_default_device
needs_check_special: Callable[[], bool] = dispatch.needs_check_special
# Whether a copy shares its source's memory, or takes it over.
CopySemantics: Any = xla_client.ArrayCopySemantics

_REUSE = CopySemantics.REUSE_INPUT


def leave_out_of_tracebacks(path: str) -> None:
    """Frames of this file are not the user's."""
    source_info_util.register_exclusion(path)
    traceback_util.register_exclusion(path)


leave_out_of_tracebacks(__file__)


def line() -> str:
    """The innermost of the user's lines that runs now, as `file:line:column (function)`."""
    return str(source_info_util.summarize(source_info_util.current()))


def current_trace() -> Any:
    return core.trace_ctx.trace


Zero: Any = ad.Zero
is_undefined_primal: Callable[[Any], bool] = ad.is_undefined_primal

# Of these traces a program has rules: see `programs.transformations`. Others see the calls of its function.
_WITH_RULES = (ad.JVPTrace, ad.LinearizeTrace, _partial_eval.JaxprTrace, batching.BatchTrace)


def is_transforming() -> bool:
    """Whether what is called now is differentiated or batched by itself; not traced into one computation, as by jit."""
    return isinstance(core.trace_ctx.trace, _WITH_RULES)


def make_primitive(
    name: str,
    run: Callable[..., Any],
    result_types: Callable[..., Any],
    inline: Callable[..., Any],
    jvp: Callable[..., Any],
    transpose: Callable[..., Any],
    batch: Callable[..., Any],
) -> Any:
    """A primitive of several results with these rules. `inline` does the same by other primitives, for XLA."""
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
    """What eager JAX does for a primitive that no tracer takes part in."""
    return core.eval_trace.process_primitive(primitive, arguments, params)


def stage_now(value: Any) -> Any:
    """The array that eager JAX makes of a host value."""
    return core.eval_trace.stage_value(value)


# Modules whose primitives eager JAX runs as several computations, or as a jit call that they make themselves.
_COMPOSED = ("pjit", "ad_checkpoint", "custom_derivatives", "custom_batching")


def run_as_eager_jax(trace: Any, primitive: Any, arguments: Sequence[Any], params: dict[str, Any]) -> Any:
    """Has `trace` see the jit calls that eager JAX makes for the primitive."""
    with set_current_trace(trace):
        if getattr(primitive.impl, "__module__", "").rpartition(".")[2] in _COMPOSED:
            return primitive.impl(*arguments, **params)
        return dispatch.apply_primitive(primitive, *arguments, **params)


def run_shard_map(trace: Any, primitive: Any, fun: Any, arguments: Sequence[Any], params: dict[str, Any]) -> Any:
    """Has `trace` see one jit call for a shard_map that stands outside of any."""
    structures: list[Any] = []

    def shard_map(*xs: Any) -> list[Any]:
        results = primitive.bind(*xs, subfuns=(fun,), **params)
        structures.append(results)
        return list(results)

    with set_current_trace(trace):
        flat = jax.jit(shard_map)(*arguments)
    return structures[-1].update(flat)


# ---- what a jit call carries


@dataclass(frozen=True)
class Effects:
    """What others can see of a computation besides its results. Mutable arrays that it makes itself are none."""

    some: bool
    ordered: bool  # with all others that are ordered, from launch to launch
    references: bool  # to mutable arrays of others

    @classmethod
    def of(cls, jaxpr: Any) -> Effects:
        seen = [each for each in jaxpr.effects if not isinstance(each, core.InternalMutableArrayEffect)]
        ordered = effects.ordered_effects.filter_in(seen)
        lowerable = effects.lowerable_effects.filter_in(seen)
        return cls(bool(seen), bool(ordered), len(lowerable) < len(seen))


def calls_out(primitive: Any, params: dict[str, Any]) -> bool:
    """Whether an operation has effects, whatever it is given."""
    if primitive is jit_p:
        return Effects.of(params["jaxpr"]).some
    return primitive.name in ("debug_callback", "debug_print", "io_callback") or bool(params.get("has_side_effect"))


def note_effects(devices: Iterable[Any], results: Any) -> None:
    """Has `jax.effects_barrier` wait for a run on these devices, which was asked for its tokens."""
    token = results.consume_token().get_token(0)
    for device in devices:
        dispatch.runtime_tokens.set_output_runtime_token(device, token)


def uses_references(primitive: Any, arguments: Sequence[Any]) -> bool:
    """Whether a primitive makes or uses mutable arrays (jax.Ref)."""
    return bool(primitive.ref_primitive) or any(isinstance(each, core.Ref) for each in arguments)


def as_function(jaxpr: Any, name: str) -> Callable[..., Any]:
    """A function that evaluates the jaxpr; jit names its module after it."""

    def run(*arguments: Any) -> Any:
        return tuple(core.jaxpr_as_fun(jaxpr)(*arguments))

    run.__name__ = run.__qualname__ = name
    return run


# The name scope of what a program's function does where JAX traces it into one computation.
PROGRAM_SCOPE = "atoll.program"


def has_program(jaxpr: Any) -> bool:
    """Whether a program's function is in the computation, or the computation in what JAX evaluates of one."""
    if PROGRAM_SCOPE in str(source_info_util.current_name_stack()):
        return True
    return any(
        PROGRAM_SCOPE in str(eqn.source_info.name_stack) or any(map(has_program, core.jaxprs_in_params(eqn.params)))
        for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns
    )


def only_operation(jaxpr: Any) -> str | None:
    """The operation that a computation is, and no jit call; None where it is several."""
    eqns = getattr(jaxpr, "jaxpr", jaxpr).eqns
    return eqns[0].primitive.name if len(eqns) == 1 and eqns[0].primitive is not jit_p else None


def devices_of(sharding: Any) -> tuple[Any, ...] | None:
    """The devices in the sharding's order; None where it names none."""
    if isinstance(sharding, type(UNSPECIFIED)) or sharding is None:
        return None
    if isinstance(getattr(sharding, "mesh", None), jax.sharding.AbstractMesh):
        return None
    return tuple(sharding._device_assignment)


def can_compile_resharding(aval: Any, source: Any, target: Any) -> bool:
    """Whether a computation can give an array with the sharding `source` the sharding `target`.

    Not where the devices are others, in another order, or of several islands; where the memory is another; nor for what
    XLA knows as something else, or not at all: keys, strings, parts that are still to be summed. Collectives of several
    hosts of CPUs end their process over elements of less than a byte (jaxlib 0.10.2).
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
    """The sharding as XLA has it, without a mesh that may be part of an array's type."""
    hlo = sharding._to_xla_hlo_sharding(rank)
    return GSPMDSharding(sharding._internal_device_list, hlo, memory_kind=sharding.memory_kind)


def mesh_devices(mesh: Any) -> tuple[Any, ...] | None:
    """The devices of a mesh that has some."""
    if mesh is None or isinstance(mesh, jax.sharding.AbstractMesh) or mesh.empty:
        return None
    return tuple(mesh.devices.flat)


def shardings_inside(jaxpr: Any) -> Iterator[Any]:
    """Those that the computation itself names, for instance in its constraints and shard_maps."""
    for sharding, _ in dispatch.get_intermediate_shardings(getattr(jaxpr, "jaxpr", jaxpr)):
        if devices_of(sharding) is not None:
            yield sharding


def only_shard_map(jaxpr: Any) -> tuple[list[Any], list[Any]] | None:
    """The shardings of the inputs and outputs of a computation that is one shard_map, as pmap's are; else None."""
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
    """An array's type on devices: for PRNG keys, that of the numbers."""
    if jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended):
        return core.physical_aval(aval), physical_sharding(aval, sharding)
    return aval, sharding


def tiles(sharding: Any, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The tile assignment (dimensions, devices) in XLA's form; None for an array that is whole on each device."""
    hlo = sharding._to_xla_hlo_sharding(rank)
    if hlo.is_replicated() or hlo.is_maximal():
        return None
    if hlo.is_manual() or hlo.is_unreduced():
        raise NotImplementedError(f"arrays whose sharding is {sharding} cannot leave their computation")
    return tuple(hlo.tile_assignment_dimensions()), tuple(hlo.tile_assignment_devices())


def check_deleted(arrays: Sequence[Any]) -> None:
    """Raises JAX's error for one that is deleted."""
    for each in arrays:
        each._check_if_deleted()


def check_special(name: str, arrays: Sequence[Any]) -> None:
    """Raises FloatingPointError where the user has asked for it (jax_debug_nans, jax_debug_infs)."""
    try:
        dispatch.check_special(name, arrays)
    except api_util.InternalFloatingPointError as error:
        raise FloatingPointError(
            f"program {name!r} returns {error.ty}; without atoll.program, JAX finds the operation that makes it"
        ) from None


def in_memory(sharding: Any, space: Any) -> Any:
    """The sharding in a `jax.memory.Space`."""
    return sharding.with_memory_kind(core.mem_space_to_kind(space))


def primal(array: Any) -> Any:
    """The array itself, of one that stands under derivatives."""
    while isinstance(array, core.Tracer) and hasattr(array, "primal"):
        array = array.primal
    return array


def is_committed(array: Any) -> bool:
    return bool(getattr(array, "_committed", True))


def buffer(array: Any) -> Any:
    """What jaxlib takes as an argument: the numbers behind a key, else the array itself."""
    return array if type(array) is Array else getattr(array, "_base_array", array)


def put(values: Sequence[Any], shardings: Sequence[Any]) -> Sequence[Any]:
    """Arrays of host values, with these shardings; without the checks of `jax.device_put`."""
    count = len(values)
    arrays: Sequence[Any] = pxla.shard_args(shardings, [None] * count, [_REUSE] * count, values)
    return arrays


def plain(aval: Any) -> Any:
    """The type without a mesh all of whose axes are automatic: arrays of equal shape and dtype are then of one type."""
    mesh = getattr(getattr(aval, "sharding", None), "mesh", None)
    return aval if mesh is None or mesh.empty or not mesh.are_all_axes_auto else aval.update(sharding=None)


def result_handler(aval: Any, sharding: Any, committed: bool) -> Any:
    """Makes a `jax.Array` of what jaxlib returns, of the type that eager JAX gives it."""
    aval = core.update_aval_with_sharding(aval, sharding)
    return pxla.global_aval_to_result_handler(aval, sharding, committed)
