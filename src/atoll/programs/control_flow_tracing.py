"""Traces control flow: records all functions that may run in a node, and compares their results.

If all of these are compiled functions on one mesh, the node becomes one compiled function: XLA chooses on the devices,
without the controller.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from atoll.client import jax_internals as internals
from atoll.errors import ProgramError
from atoll.ir.types import NUMBERS
from atoll.programs.program_building import needed
from atoll.programs.program_tracing import OrderedEffects, ProgramTrace, ProgramTracer, record
from atoll.programs.recording import CallNode, ControlFlowNode, RecordedNode, Recording, Region
from atoll.programs.values import Value, constant_value

internals.leave_out_of_tracebacks(__file__)


def switch(
    trace: ProgramTrace,
    what: str,
    index: Any,
    branches: Sequence[Callable[..., Any]],
    names: Sequence[str],
    operands: tuple[Any, ...],
) -> Any:
    """Record `branches[index](*operands)`, with the index clamped to the range. `what` and `names` are for errors.

    Raise TypeError if the results of the branches differ.
    """
    leaves, tree = jax.tree.flatten(operands)
    values = [trace.usable(leaf, what) for leaf in leaves]
    parts = [_Traced(trace, name, branch, tree, values) for name, branch in zip(names, branches, strict=True)]
    _check_alike(what, parts)
    decides = _number(trace.usable(index, what), what)
    inputs = _Inputs(trace)
    recorded = [part.part(inputs.take(part)) for part in parts]
    if _is_on_one_mesh(parts):

        def on_devices(index: Any, *given: Any) -> Any:
            return jax.lax.switch(index.astype(np.int32), [_evaluated(part) for part in recorded], *given)

        results = _as_one_function(what, on_devices, parts[0])(index, *inputs.tracers())
    else:
        _check_not_nested(trace, what)
        decider = trace.resharded(decides, _placed(decides)).root
        node = ControlFlowNode([decider, *inputs.values], _made(parts[0].results), recorded, internals.line())
        results = _recorded(trace, node)
    return parts[0].tree.unflatten(results)


def while_loop(
    trace: ProgramTrace, cond_fun: Callable[[Any], Any], body_fun: Callable[[Any], Any], init_val: Any
) -> Any:
    """Record a loop of `body_fun` while `cond_fun` returns true.

    Raise TypeError if the body returns other types than it takes, or if the condition does not return a boolean.
    """
    leaves, tree = jax.tree.flatten((init_val,))
    leaves, values, body = _settled(trace, body_fun, leaves, tree)
    condition = _Traced(trace, "cond_fun", cond_fun, tree, values)
    decides = [(result.aval.shape, result.aval.dtype) for result in condition.results]
    if condition.tree != jax.tree.structure(0) or decides != [((), np.bool_)]:
        given = condition.tree.unflatten([value.aval for value in condition.results])
        raise TypeError(f"cond_fun of atoll.while_loop must return a boolean scalar, but returns {given}")
    for result in condition.results:
        _place(result, None)
    stays = [result.root is argument for result, argument in zip(body.results, body.arguments, strict=True)]
    for part in (condition, body):
        part.leave_out([argument for argument, each in zip(part.arguments, stays, strict=True) if not each])
    inputs = _Inputs(trace)
    taken = [inputs.take(part) for part in (condition, body)]
    constants = len(inputs.values)
    for i, (value, result) in enumerate(zip(values, body.results, strict=True)):
        if not stays[i]:
            for part, where in zip((condition, body), taken, strict=True):
                where[id(part.arguments[i])] = len(inputs.values)
            inputs.values.append(trace.resharded(value, result.sharding))
    body.results = [each for each, kept in zip(body.results, stays, strict=True) if not kept]
    parts = [part.part(where) for part, where in zip((condition, body), taken, strict=True)]
    if not body.results:
        return init_val
    if _is_on_one_mesh([body, condition]):
        goes_on, following = map(_evaluated, parts)

        def on_devices(*given: Any) -> Any:
            fixed, carried = given[:constants], given[constants:]
            return jax.lax.while_loop(lambda c: goes_on(*fixed, *c)[0], lambda c: following(*fixed, *c), carried)

        results = _as_one_function("while_loop", on_devices, body)(*inputs.tracers())
    else:
        _check_not_nested(trace, "atoll.while_loop")
        node = ControlFlowNode(inputs.values, _made(body.results), parts, internals.line(), constants)
        results = _recorded(trace, node)
    carried = iter(results)
    flat = [leaf if kept else next(carried) for leaf, kept in zip(leaves, stays, strict=True)]
    return tree.unflatten(flat)[0]


def _recorded(trace: ProgramTrace, node: ControlFlowNode) -> list[ProgramTracer]:
    trace.recording.nodes.append(node)
    return [ProgramTracer(trace, value) for value in node.outputs]


def _made(results: Sequence[Value]) -> list[Value]:
    return [Value(result.aval, True, internals.line(), result.sharding) for result in results]


class _Traced:
    """A function that a node may run, traced with placeholders for `values`."""

    def __init__(
        self,
        trace: ProgramTrace,
        name: str,
        function: Callable[..., Any],
        tree: Any,
        values: Sequence[Value],
        *,
        may_consume: bool = False,
    ) -> None:
        self.name = name
        self.arguments = [value.stand_in(shared=not may_consume) for value in values]
        self.origins = {id(inner): outer for inner, outer in zip(self.arguments, values, strict=True)}
        trees: list[Any] = []

        def flat(tracers: list[Any]) -> list[Any]:
            results, out_tree = jax.tree.flatten(function(*tree.unflatten(tracers)))
            trees.append(out_tree)
            return list(results)

        self.recording: Recording = record(name, flat, self.arguments, trace.recording.functions, trace)
        self.tree = trees[0]
        self.results: list[Value] = self.recording.results
        self.nodes: list[RecordedNode] = needed(self.recording)
        if any(isinstance(node, CallNode) and node.has_effects for node in self.nodes):
            raise OrderedEffects(
                f"{name} has effects, and depends on data: the program cannot be lowered. "
                "Calls run its function instead"
            )
        self._left_out: set[int] = set()

    def leave_out(self, arguments: Sequence[Value]) -> None:
        """Exclude arguments from the inputs of the part: they change in each iteration."""
        self._left_out.update(id(each) for each in arguments)

    def free(self) -> list[Value]:
        """Return the values that the function uses or returns, but does not compute."""
        made = {id(value.root) for node in self.nodes for value in node.outputs}
        used = [*(value for node in self.nodes for value in node.inputs), *self.results]
        roots = {id(value.root): value.root for value in used}
        return [root for key, root in roots.items() if key not in made and key not in self._left_out]

    def origin(self, trace: ProgramTrace, root: Value) -> Value:
        """Return the value of the enclosing function for which `root` is a placeholder."""
        outer = self.origins.get(id(root)) or self.recording.captured.get(id(root))
        return outer if outer is not None else trace.value_of(root.constant)

    def part(self, taken: dict[int, int]) -> Region:
        return Region(self.name, self.nodes, taken, self.results)


class _Inputs:
    """The values of the enclosing function that a node takes."""

    def __init__(self, trace: ProgramTrace) -> None:
        self._trace = trace
        self.values: list[Value] = []

    def tracers(self) -> list[ProgramTracer]:
        return [ProgramTracer(self._trace, value) for value in self.values]

    def take(self, part: _Traced) -> dict[int, int]:
        """Return the positions of the part's free values among the inputs, by identity. Add missing inputs."""
        taken = {}
        for root in part.free():
            outer = self._trace.resharded(part.origin(self._trace, root), _placed(root)).root
            if all(outer is not each for each in self.values):
                self.values.append(outer)
            taken[id(root)] = next(i for i, each in enumerate(self.values) if each is outer)
        return taken


def _check_alike(what: str, parts: Sequence[_Traced]) -> None:
    """Raise TypeError if the results of two parts differ. Put uncommitted results where other parts' results are."""
    first = parts[0]
    for other in parts[1:]:
        if other.tree != first.tree:
            raise TypeError(
                f"branches of {what} must return the same tree, but {first.name} returns {first.tree}, and "
                f"{other.name} returns {other.tree}"
            )
    for i, path in enumerate(_paths(first.tree)):
        results = [part.results[i] for part in parts]
        strong = next((each for each in results if not each.aval.weak_type), results[0])
        placed = next((each.sharding for each in results if each.has_sharding), None)
        for part in parts:
            result = part.results[i]
            if result.host and result.constant is not None and result.aval.weak_type and not result.aval.shape:
                cast = constant_value(np.asarray(result.constant, strong.aval.dtype), result.line)
                result = part.results[i] = cast  # not in place: the constant may also be an operand
            _place(result, placed)
            _compare(f"branches of {what}", first, part, path, first.results[i], result)


def _compare(what: str, first: _Traced, other: _Traced, path: str, one: Value, two: Value) -> None:
    if (one.aval.shape, one.aval.dtype) != (two.aval.shape, two.aval.dtype):
        raise TypeError(
            f"{what} must have equal types, but output{path} of {first.name} is {one.aval.str_short()}, and of "
            f"{other.name} {two.aval.str_short()}"
        )
    if one.spec.sharding != two.spec.sharding:
        raise TypeError(
            f"{what} must have equal shardings, but output{path} of {first.name} is {one.sharding} (made at "
            f"{one.line}), and of {other.name} {two.sharding} (made at {two.line}): put one of them where the other is "
            "with jax.device_put"
        )


def _settled(
    trace: ProgramTrace, body_fun: Callable[[Any], Any], leaves: list[Any], tree: Any
) -> tuple[list[Any], list[Value], _Traced]:
    """Return the initial values as the loop carries them, and its body.

    An initial value that is uncommitted or has a weak type gets the sharding and type that the body returns.
    """
    for _ in range(3):
        values = [trace.usable(leaf, "atoll.while_loop") for leaf in leaves]
        body = _Traced(trace, "body_fun", body_fun, tree, values, may_consume=True)
        if body.tree != tree.children()[0]:
            raise TypeError(
                f"body_fun of atoll.while_loop must return the tree that it takes, {tree.children()[0]}, but returns "
                f"{body.tree}"
            )
        again = []
        for leaf, value, result in zip(leaves, values, body.results, strict=True):
            again.append(_as_carried(trace, leaf, value, result))
        if all(new is old for new, old in zip(again, leaves, strict=True)):
            break
        leaves = again
    for path, argument, result in zip(_paths(body.tree), body.arguments, body.results, strict=True):
        _place(argument, None)
        _place(result, argument.sharding)
        what = "the output and the input of body_fun of atoll.while_loop"
        _compare(what, body, body, path, result, argument)
    return leaves, values, body


def _as_carried(trace: ProgramTrace, leaf: Any, value: Value, result: Value) -> Any:
    is_other = value.aval.dtype != result.aval.dtype or not result.aval.weak_type
    if value.aval.weak_type and is_other and value.aval.shape == result.aval.shape:
        if isinstance(leaf, ProgramTracer) or hasattr(leaf, "sharding"):
            return jax.lax.convert_element_type(leaf, result.aval.dtype)
        return np.asarray(leaf, result.aval.dtype)
    is_placed = value.committed and value.has_sharding
    if is_placed or not result.has_sharding or (value.has_sharding and value.is_sharded_as(result.sharding)):
        return leaf
    return ProgramTracer(trace, trace.resharded(value, result.sharding).view())


# ---- placement


def _place(value: Value, sharding: Any) -> None:
    """Give a value without a sharding this one, or JAX's default device."""
    if not value.has_sharding:
        value.root.sharding_like = sharding or SingleDeviceSharding(internals.default_device())


def _placed(value: Value) -> Any:
    _place(value, None)
    return value.sharding


def _number(value: Value, what: str) -> Value:
    if value.aval.shape or value.aval.dtype.name not in NUMBERS:
        raise TypeError(f"{what} must choose by one integer or boolean, got {value.aval.str_short()}")
    return value


# ---- control flow on one mesh


def _is_on_one_mesh(parts: Sequence[_Traced]) -> bool:
    """Return whether XLA can choose: the parts consist of functions and arrays on the same devices."""
    devices: set[Any] = set()
    for part in parts:
        for node in part.nodes:
            if not isinstance(node, CallNode) or node.function.call.compiler_options:
                return False
            devices.add(node.function.devices)
        devices.update(internals.devices_of(_placed(value)) for value in (*part.free(), *part.results))
    return len(devices) == 1


def _evaluated(part: Region) -> Callable[..., tuple[Any, ...]]:
    """Return a function of a node's inputs that evaluates the recorded part."""

    def evaluate(*given: Any) -> tuple[Any, ...]:
        arrays = {key: given[position] for key, position in part.taken.items()}
        for node in part.nodes:
            assert isinstance(node, CallNode)
            function = node.function
            call = jax.jit(
                internals.as_function(function.call.jaxpr, function.call.name),
                in_shardings=tuple(function.inputs),
                out_shardings=tuple(function.outputs),
            )
            made = call(*(arrays[id(value.root)] for value in node.inputs))
            arrays.update(zip(map(id, node.outputs), made, strict=True))
        return tuple(arrays[id(value.root)] for value in part.results)

    return evaluate


def _as_one_function(name: str, function: Callable[..., Any], given: _Traced) -> Any:
    function.__name__ = function.__qualname__ = name.removeprefix("atoll.")
    return jax.jit(function, out_shardings=tuple(value.sharding for value in given.results))


def _check_not_nested(trace: ProgramTrace, what: str) -> None:
    if trace.outer is not None:
        raise ProgramError(
            f"{what} at {internals.line()} is inside a branch or loop of another, and both are on several meshes, "
            "which is not supported: choose once for both (atoll.switch), or run the inner one on one mesh"
        )


def _paths(tree: Any) -> list[str]:
    """Return the path of each leaf for error messages."""
    paths = jax.tree.leaves_with_path(tree.unflatten(range(tree.num_leaves)))
    return [jax.tree_util.keystr(path) for path, _ in paths]
