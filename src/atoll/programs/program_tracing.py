"""Traces a function: runs it once, and records the computations that JAX would run.

Tracing follows JAX's eager evaluation. A jit call becomes one node, a `device_put` a transfer, and any other operation
the jit call that eager JAX makes of it. Operations that do not depend on arguments and have no effects are computed
immediately. Therefore a program returns exactly the same values, bit for bit, as its function without the program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from atoll.client import jax_internals as internals
from atoll.errors import ProgramError
from atoll.programs.program_functions import FunctionTable, JitCall, ReshardingTable, SeveralMeshes
from atoll.programs.recording import CallNode, Recording, TransferNode
from atoll.programs.transformations import program_p
from atoll.programs.values import ShardingLike, Value, constant_value

internals.leave_out_of_tracebacks(__file__)

_SMALL_BYTES = 4096  # host constants up to this size are compared by contents
_copy = jax.jit(jax.numpy.copy)
_ADVICE = (
    "A program runs on the cluster after it has been traced, so Python cannot use its values. Choose on the "
    "devices (atoll.cond, jax.numpy.where), make the argument static (static_argnums, static_argnames), "
    "or move that part out of the program."
)


class OrderedEffects(ProgramError):
    """A function with ordered effects cannot be one launch."""


# The functions that record primitives as nodes of their own, called with (trace, arguments, parameters).
RECORDERS: dict[Any, Callable[[ProgramTrace, Sequence[Any], dict[str, Any]], list[ProgramTracer]]] = {}


class ProgramTracer(internals.Tracer):  # type: ignore[misc]
    """Represents an array of the program. Unlike jit's tracers, it has the array's sharding."""

    __slots__ = ("value",)

    def __init__(self, trace: ProgramTrace, value: Value) -> None:
        super().__init__(trace, value.aval)
        self.value = value

    @property
    def sharding(self) -> Any:
        if not self.value.has_sharding:
            raise AttributeError(f"a host value has no sharding until it is used.{self._origin_msg()}")
        return self.value.sharding

    @property
    def committed(self) -> bool:
        return self.value.committed

    @property
    def _committed(self) -> bool:
        return self.value.committed

    def full_lower(self) -> ProgramTracer:
        return self

    def _origin_msg(self) -> str:
        return (
            f"\nThe error occurred at {internals.line()}, while tracing the program "
            f"{self._trace.recording.name!r}. The value was made at {self.value.line}.\n{_ADVICE}"
        )


class ProgramTrace(internals.Trace):  # type: ignore[misc]
    """Records into `recording`. For a part of a control flow node, `outer` is the trace of the enclosing function."""

    def __init__(self, recording: Recording, outer: ProgramTrace | None = None) -> None:
        super().__init__()
        self.recording = recording
        self.outer = outer
        self._functions = recording.functions
        self._reshardings = ReshardingTable(recording.functions)
        self._constants: dict[Any, Value] = {}
        self._computed: set[int] = set()  # identities of arrays that the trace itself has computed
        self._alive: list[Any] = []  # keeps objects alive whose identities are used

    # ---- called by JAX

    def process_primitive(self, primitive: Any, tracers: Sequence[Any], params: dict[str, Any], /) -> Any:
        if not any(isinstance(each, ProgramTracer) for each in tracers) and not internals.calls_out(primitive, params):
            return self._compute(primitive, tracers, params)
        if primitive is internals.jit_p:
            return self._call(JitCall.of(params), tracers)
        if primitive is program_p:
            return self._inline(params["flat"].fun, tracers)
        if primitive is internals.device_put_p:
            copies = params["copy_semantics"]
            return [
                self._put(each, device, copy)
                for each, device, copy in zip(tracers, params["devices"], copies, strict=True)
            ]
        if primitive in RECORDERS:
            return RECORDERS[primitive](self, tracers, params)
        if internals.uses_references(primitive, tracers):
            raise ProgramError(
                f"{primitive.name} at {internals.line()} uses a mutable array (jax.Ref), which a program does not "
                "support: create and use it inside of a jit function"
            )
        return internals.run_as_eager_jax(self, primitive, tracers, params)

    def process_call(self, primitive: Any, fun: Any, tracers: Sequence[Any], params: Any, /) -> Any:
        return self._inline(fun, tracers)

    def process_custom_jvp_call(self, primitive: Any, fun: Any, jvp: Any, tracers: Sequence[Any], /, **_: Any) -> Any:
        return self._inline(fun, tracers)

    def process_custom_vjp_call(
        self, primitive: Any, fun: Any, fwd: Any, bwd: Any, tracers: Sequence[Any], /, **_: Any
    ) -> Any:
        return self._inline(fun, tracers)

    def process_shard_map(self, primitive: Any, fun: Any, tracers: Sequence[Any], /, **params: Any) -> Any:
        return internals.run_shard_map(self, primitive, fun, tracers, params)

    def stage_value(self, value: Any) -> Any:
        return value if isinstance(value, ProgramTracer) else self._computed_here(internals.stage_now(value), [value])

    def _inline(self, fun: Any, tracers: Sequence[Any]) -> Any:
        with internals.set_current_trace(self):
            return getattr(fun, "call_wrapped", fun)(*tracers)

    def _compute(self, primitive: Any, arguments: Sequence[Any], params: dict[str, Any]) -> Any:
        """Compute an operation that does not depend on arguments, and thus is the same in each launch."""
        return self._computed_here(internals.run_now(primitive, arguments, params), arguments)

    def _computed_here(self, results: Any, arguments: Sequence[Any]) -> Any:
        """Return `results`. Remember those that are not among `arguments` as constants of the program."""
        given = {id(each) for each in arguments}
        for each in jax.tree.leaves(results):
            if id(each) not in given:
                self._computed.add(id(each))
                self._alive.append(each)
        return results

    # ---- values

    def value_of(self, given: Any) -> Value:
        if isinstance(given, ProgramTracer):
            return given.value if given._trace is self else self._captured(given)
        key = _identity(given)
        value = self._constants.get(key)
        if value is None:
            value = self._constants[key] = constant_value(given, internals.line())
            value.shared |= self.outer is not None or id(given) in self._computed
            self._alive.append(given)
        return value

    def _captured(self, given: ProgramTracer) -> Value:
        """Return the placeholder for a value of the enclosing trace."""
        if self.outer is None:
            raise ProgramError(f"a value of another program is used in {self.recording.name!r}")
        value = self.outer.usable(given, self.recording.name)
        inner = self._constants.get(id(value))
        if inner is None:
            inner = self._constants[id(value)] = value.stand_in()
            self.recording.captured[id(inner)] = value
            self._alive.append(value)
        return inner

    def usable(self, given: Any, what: str) -> Value:
        value = self.value_of(given)
        if value.root.host and value.root.donated:
            self._undo_donation(value.root)  # its upload was consumed, but the host still has the value
        if value.donated_at():
            raise ProgramError(
                f"{what} at {internals.line()} uses an array that was donated at {value.donated_at()} (made at "
                f"{value.line}). Donate it to its last use only, or pass a copy there: jax.numpy.copy(x)."
            )
        return value

    def _undo_donation(self, root: Value) -> None:
        """Let no node consume the value."""
        for node in self.recording.nodes:
            if not isinstance(node, TransferNode):
                node.donated = tuple(i for i in node.donated if node.inputs[i].root is not root)
            elif node.inputs[0] is root:
                node.donated = False
        root.donated = ""
        root.shared = True

    # ---- nodes

    def _call(self, call: JitCall, given: Sequence[Any]) -> Any:
        line = internals.line()
        effects = internals.Effects.of(call.jaxpr)
        if effects.references:
            raise ProgramError(
                f"{call.name} at {line} uses a mutable array (jax.Ref) from outside, which a program does not "
                "support: call it outside of the program"
            )
        if effects.ordered:
            raise OrderedEffects(
                f"{call.name} at {line} has ordered effects, whose order JAX keeps from one launch to the next: the "
                "program cannot be lowered. Calls run its function instead"
            )
        operands = [self.usable(each, call.name) for each in given]
        try:
            bound = self._functions.bind(call, operands)
        except SeveralMeshes:
            return self._over_several_meshes(call, given, line)
        donated = []
        inputs = []
        for i, (value, target) in enumerate(zip(operands, bound.inputs, strict=True)):
            donates = i in call.donated
            resharded = self.resharded(value, target, fresh=donates)
            if donates and not resharded.root.shared:
                if sum(other.root is resharded.root for other in operands) > 1:
                    raise ProgramError(f"{call.name} at {line} takes an array twice and donates it: donate a copy")
                donated.append(i)
            inputs.append(resharded)
        for i in donated:
            inputs[i].root.donated = line
        outputs = [
            Value(aval, bound.committed, line, sharding)
            for aval, sharding in zip(call.out_avals, bound.outputs, strict=True)
        ]
        self.recording.nodes.append(CallNode(bound.function, inputs, outputs, tuple(donated), line, effects.some))
        return [ProgramTracer(self, value) for value in outputs]

    def _over_several_meshes(self, call: JitCall, given: Sequence[Any], line: str) -> Any:
        """Record the operations of a jit call on several meshes as separate nodes."""
        if (operation := internals.only_operation(call.jaxpr)) is not None:
            raise ProgramError(
                f"{operation} at {line} has functions on several meshes, but must be one computation on one mesh. "
                "Use atoll.cond, atoll.switch or atoll.while_loop for functions on several meshes"
            )
        return self._inline(internals.as_function(call.jaxpr, call.name), given)

    def _put(self, given: Any, device: Any, copy: Any) -> Any:
        value = self.usable(given, "device_put")
        target = getattr(device, "sharding", device) if hasattr(device, "layout") else device
        if hasattr(device, "layout") and device.layout is not None:
            raise ProgramError(f"device_put at {internals.line()} sets a layout; programs support default layouts only")
        if isinstance(target, jax.Device):
            target = SingleDeviceSharding(target)
        elif isinstance(target, jax.memory.Space):
            here = value.sharding if value.has_sharding else SingleDeviceSharding(internals.default_device())
            target = internals.in_memory(here, target)
        if target is not None and internals.devices_of(target) is None:
            raise ProgramError(f"device_put at {internals.line()} to {target}, which has no devices")
        donates = copy == internals.CopySemantics.DONATE_INPUT
        if (
            copy == internals.CopySemantics.ALWAYS_COPY
            and value.has_sharding
            and (target is None or value.is_sharded_as(target))
        ):
            with internals.set_current_trace(self):
                return _copy(given)
        if target is None:
            return ProgramTracer(self, value)
        resharded = self.resharded(value, target, fresh=donates, consume=donates)
        if resharded is not value.root:
            resharded.shared |= resharded.put  # two device_puts return two arrays, so neither may be consumed
            resharded.put = True
        if donates:
            value.donated = internals.line()
        return ProgramTracer(self, resharded.view())

    def resharded(self, value: Value, target: ShardingLike, *, fresh: bool = False, consume: bool = False) -> Value:
        """Return the value with the sharding `target`. Record a transfer if it has another sharding.

        Other uses of the value do not share a `fresh` copy. With `consume`, the transfer donates its source.
        """
        root = value.root
        if root.sharding_like is None:
            root.sharding_like = target
            return root
        sharding = target() if callable(target) else target
        if root.is_sharded_as(sharding):
            return root
        spec = Value(root.aval, True, "", sharding).spec.sharding
        copy = root.copies.get(spec)
        if copy is None or fresh or copy.donated_at():
            copy = Value(root.aval, True, internals.line(), sharding)
            donates = consume and not root.shared
            self.recording.nodes.append(self._resharding(root, copy, sharding, donates))
            if donates:
                root.donated = copy.line
            if not fresh:
                root.copies[spec] = copy
        return copy

    def _resharding(self, root: Value, copy: Value, sharding: Any, donates: bool) -> CallNode | TransferNode:
        """Return the node that makes the copy.

        If a user donates an array, a transfer makes the copy, since XLA does not free memory that it cannot reuse.
        """
        function = None if donates and self._is_given(root) else self._reshardings.find(root, sharding)
        if function is None:
            return TransferNode([root], [copy], donates, copy.line)
        return CallNode(function, [root], [copy], (), copy.line, reshards=True)

    def _is_given(self, root: Value) -> bool:
        return root.constant is not None or any(each.root is root for each in self.recording.arguments)


def _identity(given: Any) -> Any:
    """Return a key that is equal for constants that may share one array."""
    if isinstance(given, np.ndarray | np.generic) and given.nbytes <= _SMALL_BYTES:
        return type(given), given.dtype, given.shape, given.tobytes()
    if isinstance(given, bool | int | float | complex):
        return type(given), repr(given)
    return id(given) if not isinstance(given, np.ndarray) else object()


def record(
    name: str, function: Any, arguments: Sequence[Value], functions: FunctionTable, outer: ProgramTrace | None = None
) -> Recording:
    """Trace `function`, which takes a list of tracers for `arguments` and returns its flat results."""
    recording = Recording(name, list(arguments), functions)
    trace = ProgramTrace(recording, outer)
    tracers = [ProgramTracer(trace, value) for value in arguments]
    try:
        with internals.set_current_trace(trace):
            results = function(tracers)
            for each in results:
                if isinstance(each, ProgramTracer):
                    recording.results.append(trace.usable(each, f"the end of program {name!r}"))
                elif outer is not None:
                    recording.results.append(trace.value_of(each))
                else:
                    recording.results.append(each)
    except jax.errors.NonConcreteBooleanIndexError as error:
        # JAX does not ask the tracer for a message.
        error.add_note(f"The error occurred while tracing the program {name!r}. {_ADVICE}")
        raise
    finally:
        trace.invalidate()
    return recording
