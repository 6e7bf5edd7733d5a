"""`atoll.program`: turns a function into one program. A call of the program is one message and one launch.

See section 3 and figure 2 of the paper. A program caches its launches by the same key by which `jax.jit` caches
compiled functions: the arguments' structure, their types and shardings, the static arguments, and JAX's settings.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, overload

import jax
import numpy as np

from atoll.client import jax_internals as internals
from atoll.client.backend import losses
from atoll.client.client_caches import clear_with_client
from atoll.errors import ProgramError
from atoll.programs.launch import ProgramLaunch
from atoll.programs.program_building import Built, build, on_atoll
from atoll.programs.program_functions import FunctionTable
from atoll.programs.program_tracing import OrderedEffects, record
from atoll.programs.stages import Lowered
from atoll.programs.transformations import FlatProgram, NeedsPlaces, bind
from atoll.programs.values import Value

internals.leave_out_of_tracebacks(__file__)

_NO_STATICS = ()


@overload
def program(fun: Callable[..., Any], **options: Any) -> Program: ...
@overload
def program(fun: None = None, **options: Any) -> Callable[[Callable[..., Any]], Program]: ...


def program(fun: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Turn a function over compiled functions into one program. For example::

        @atoll.program
        def step(params, batch):
            return update(params, gradients(params, batch))   # jitted functions on different devices

    The first call with arguments of given types traces the function: computations become nodes, and transfers are added
    when an array is needed on other devices. Later calls send one message, for any number of nodes.

    Args:
      fun: A function of arrays, or of pytrees of arrays. It may call functions of jit, pmap and shard_map on any
        devices, their derivatives, other programs, `jax.device_put`, and JAX's ordinary operations. Python runs it
        once for arguments of given types, and again after the loss of a host.
      static_argnums, static_argnames: Arguments that are not arrays, as in `jax.jit`.
      donate_argnums, donate_argnames: Arguments that the program may consume, as in `jax.jit`.
      retrace_after_loss: False if the function always chooses the same devices for its arguments. Then a loss of hosts
        is no reason to run it again, unless the program has constants.

    As with jit, call `jax.set_mesh` outside the function. Callbacks, such as those of `jax.debug.print` and
    `io_callback`, run in each call. If they are ordered, there is no program: Python runs the function in each call.

    Derivatives (jax.grad, vjp, jvp) and batches (jax.vmap) of a program are also programs. A gradient takes two
    launches: of a forward program and of a backward program. Inside functions that JAX traces into one computation
    (jit, scan), inside other programs, and on backends other than Atoll, the call runs the function itself.

    Raises:
      atoll.ProgramError: The function cannot be turned into a program.
      jax.errors.ConcretizationTypeError and related errors: Python needs a value that only the cluster will compute.
    """
    return functools.partial(Program, **options) if fun is None else Program(fun, **options)


@dataclass(frozen=True, slots=True)
class _Traced:
    """The cache entry for arguments of given types. Without a `launch`, calls run the function itself."""

    built: Built | None
    out_tree: Any
    launch: ProgramLaunch | None
    plain: bool
    # The cluster's count of host losses before tracing. A later loss may include constants, so the function is then
    # traced again. None if the function need not be traced again.
    losses: int | None

    @property
    def is_current(self) -> bool:
        return self.losses is None or self.losses == losses()


class Program:
    """A program, created by `program`. Thread-safe."""

    def __init__(
        self,
        fun: Callable[..., Any],
        *,
        static_argnums: int | Sequence[int] | None = None,
        static_argnames: str | Iterable[str] | None = None,
        donate_argnums: int | Sequence[int] | None = None,
        donate_argnames: str | Iterable[str] | None = None,
        retrace_after_loss: bool = True,
    ) -> None:
        if not callable(fun):
            raise ProgramError(f"a program needs a function, got {fun!r}")
        functools.update_wrapper(self, fun)
        self._fun = fun
        self._name = getattr(fun, "__name__", type(fun).__name__)
        self._parameters = names = _parameters(fun)
        self._static_numbers, self._static_names = _both(static_argnums, static_argnames, names)
        self._donated_numbers, self._donated_names = _both(donate_argnums, donate_argnames, names)
        _check_names(fun, (*self._static_names, *self._donated_names))
        _check_numbers(fun, "static_argnums", self._static_numbers)
        _check_numbers(fun, "donate_argnums", self._donated_numbers)
        self._has_statics = bool(self._static_numbers or self._static_names)
        self._retraces_after_loss = retrace_after_loss
        self._cache: dict[Hashable, _Traced] = {}
        self._flat: dict[Hashable, tuple[FlatProgram, Any] | None] = {}
        self._tracing = threading.RLock()
        clear_with_client(self)

    def __repr__(self) -> str:
        return f"<atoll.program {self._name}>"

    def __deepcopy__(self, memo: dict[int, Any]) -> Program:
        return self  # like Python's functions

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not internals.trace_state_clean():
            if internals.is_transforming():
                return self._transformed(args, kwargs)
            with jax.named_scope(internals.PROGRAM_SCOPE):
                return self._fun(*args, **kwargs)
        statics: Any = _NO_STATICS
        dynamic = args, kwargs
        if self._has_statics:
            dynamic, statics = self._split(args, kwargs)
        leaves, tree = jax.tree.flatten(dynamic)
        key = (tree, tuple([_kind(leaf) for leaf in leaves]), statics, internals.trace_context())
        traced = self._cache.get(key)
        if traced is None or not traced.is_current:
            with self._tracing:
                traced = self._cache.get(key)
                if traced is None or not traced.is_current:
                    traced = self._cache[key] = self._traced(leaves, tree, statics, self._retraces_after_loss)
        if traced.launch is None or traced.built is None:
            return self._fun(*args, **kwargs)
        results = traced.launch.call(leaves)
        if not traced.plain:
            results = traced.built.returned(results, leaves)
        return traced.out_tree.unflatten(results)

    def _transformed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the program under a transformation, for which JAX has rules about the program as a whole."""
        dynamic, statics = self._split(args, kwargs)
        leaves, tree = jax.tree.flatten(dynamic)
        key = (tree, tuple([internals.abstractify(leaf) for leaf in leaves]), statics, internals.trace_context())
        if key not in self._flat:
            try:
                self._flat[key] = self._flattened(leaves, tree, statics)
            except NeedsPlaces:
                self._flat[key] = None
        found = self._flat[key]
        if found is None:
            primals = [internals.primal(leaf) for leaf in leaves]
            if any(isinstance(each, internals.Tracer) for each in primals):
                return self._fun(*args, **kwargs)
            placed = (*key, tuple(map(_kind, primals)))
            found = self._flat.get(placed)
            if found is None:
                found = self._flat[placed] = self._flattened(leaves, tree, statics, primals)
        flat, out_tree = found
        return out_tree.unflatten(bind(flat, leaves))

    def _flattened(
        self, leaves: Sequence[Any], tree: Any, statics: Any, placed: Sequence[Any] | None = None
    ) -> tuple[FlatProgram, Any]:
        """Return the program of flat arguments and results, and the tree of its results.

        If the function needs the shardings of its arguments, it is traced with the arrays of `placed`.
        """
        out_trees: list[Any] = []

        def flat(*given: Any) -> list[Any]:
            args, kwargs = self._joined(tree.unflatten(given), statics)
            results, out_tree = jax.tree.flatten(self._fun(*args, **kwargs))
            out_trees[:] = [out_tree]
            return list(results)

        flat.__name__ = flat.__qualname__ = self._name
        made = FlatProgram(flat, Program)
        avals = tuple(map(internals.abstractify, leaves))
        if placed is None:
            made.result_types(*avals)
            return made, out_trees[0]
        built, out_tree = self._build(placed, tree, statics)
        made.set_result_types(avals, [each.aval for each in built.described()])
        return made, out_tree

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """Trace the program for these arguments, each an array or a `jax.ShapeDtypeStruct`."""
        dynamic, statics = self._split(args, kwargs)
        leaves, tree = jax.tree.flatten(dynamic)
        built, out_tree = self._build(leaves, tree, statics)
        return Lowered(built, tree, out_tree, self._donated_leaves(tree))

    def compile_ahead(self, *args: Any, **kwargs: Any) -> None:
        """Trace and compile the program for these arguments without running it, so that the first call does neither.

        Each argument is an array or a `jax.ShapeDtypeStruct`, whose sharding is None for an array of NumPy. Unless the
        program has constants, calls with such arguments do not trace it again after a loss of hosts.
        """
        dynamic, statics = self._split(args, kwargs)
        leaves, tree = jax.tree.flatten(dynamic)
        key = (tree, tuple([_kind_of_type(leaf) for leaf in leaves]), statics, internals.trace_context())
        with self._tracing:
            traced = self._cache.get(key)
            if traced is None or not traced.is_current:
                self._cache[key] = self._traced(leaves, tree, statics, retraces=False)

    def clear_cache(self) -> None:
        """Drop all traced programs, so that the cluster can free them."""
        self._cache.clear()
        self._flat.clear()

    # ---- tracing

    def _traced(self, leaves: Sequence[Any], tree: Any, statics: Any, retraces: bool) -> _Traced:
        before = losses()
        try:
            built, out_tree = self._build(leaves, tree, statics)
        except OrderedEffects:
            return _Traced(None, None, None, True, before)
        launch = ProgramLaunch(built) if built.program.nodes and on_atoll(built) else None
        is_lasting = launch is not None and not launch.has_constants and not retraces
        return _Traced(built, out_tree, launch, built.plain, None if is_lasting else before)

    def _build(self, leaves: Sequence[Any], tree: Any, statics: Any) -> tuple[Built, Any]:
        paths = [path for path, _ in jax.tree.leaves_with_path(tree.unflatten(leaves))]
        values = [
            _argument(leaf, f"argument {self._argument_name(path, statics)}")
            for leaf, path in zip(leaves, paths, strict=True)
        ]
        out_trees: list[Any] = []

        def flat(tracers: list[Any]) -> list[Any]:
            args, kwargs = self._joined(tree.unflatten(tracers), statics)
            results = jax.tree.flatten(self._fun(*args, **kwargs))
            out_trees.append(results[1])
            return list(results[0])

        with contextlib.closing(FunctionTable()) as functions:
            recording = record(self._name, flat, values, functions)
            recording.results[:] = [_returned(each, self._name) for each in recording.results]
            return build(recording, self._donated_leaves(tree)), out_trees[0]

    def _split(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Return the arguments without the static arguments, and the static arguments."""
        numbers = [i % len(args) for i in self._static_numbers if -len(args) <= i < len(args)]
        statics = [(i, type(args[i]), args[i]) for i in numbers]
        named = [(name, type(kwargs[name]), kwargs[name]) for name in self._static_names if name in kwargs]
        for where, _, value in (*statics, *named):
            try:
                hash(value)
            except TypeError:
                raise ProgramError(
                    f"static argument {where!r} of program {self._name!r} is not hashable: {type(value)}"
                ) from None
        rest = tuple(arg for i, arg in enumerate(args) if i not in numbers)
        return (rest, {k: v for k, v in kwargs.items() if k not in self._static_names}), (*statics, *named)

    def _joined(self, dynamic: Any, statics: Any) -> tuple[list[Any], dict[str, Any]]:
        args, kwargs = list(dynamic[0]), dict(dynamic[1])
        for where, _, value in sorted(statics, key=lambda each: (isinstance(each[0], str), each[0])):
            if isinstance(where, str):
                kwargs[where] = value
            else:
                args.insert(where, value)
        return args, kwargs

    def _argument_name(self, path: Sequence[Any], statics: Any) -> str:
        """Return the argument's name for errors: `x['weights']`, or `args[3]` if the parameter has no name."""
        kind, which, *rest = path
        if kind.idx == 1:
            name = which.key
        else:
            position = which.idx
            for where in sorted(where for where, *_ in statics if isinstance(where, int)):
                position += where <= position
            name = self._parameters[position] if position < len(self._parameters) else f"args[{position}]"
        return f"{name}{jax.tree_util.keystr(tuple(rest))}"

    def _donated_leaves(self, tree: Any) -> frozenset[int]:
        if not self._donated_numbers and not self._donated_names:
            return frozenset()
        args, kwargs = tree.unflatten(range(tree.num_leaves))
        before = [i for i in self._static_numbers if i >= 0]
        donated: list[int] = []
        for i in self._donated_numbers:
            position = i - sum(each < i for each in before)
            if i not in before and -len(args) <= position < len(args):
                donated.extend(jax.tree.leaves(args[position]))
        for name in self._donated_names:
            donated.extend(jax.tree.leaves(kwargs.get(name)))
        return frozenset(donated)


def _kind(leaf: Any) -> Any:
    """Return the properties of an argument on which a trace depends, as a part of the cache key."""
    kind = type(leaf)
    if kind is internals.Array:
        return leaf.aval, leaf.sharding, leaf._committed
    if isinstance(leaf, np.ndarray):
        return leaf.dtype, leaf.shape
    if isinstance(leaf, jax.ShapeDtypeStruct):
        raise ProgramError(f"a program must be called with arrays, not with {leaf}; only lower() takes types")
    if hasattr(leaf, "sharding"):
        return leaf.aval, leaf.sharding, internals.is_committed(leaf)
    return kind


def _kind_of_type(leaf: Any) -> Any:
    """Return the properties of an argument that `_kind` returns for an array of this type."""
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return _kind(leaf)
    return (leaf.dtype, leaf.shape) if leaf.sharding is None else (internals.abstractify(leaf), leaf.sharding, True)


def _argument(leaf: Any, name: str) -> Value:
    try:
        aval = internals.abstractify(leaf)
    except TypeError as error:
        raise ProgramError(
            f"{name} of a program is not an array but {type(leaf)}: make it static (static_argnums, static_argnames)"
        ) from error
    sharding = getattr(leaf, "sharding", None)
    committed = sharding is not None and internals.is_committed(leaf)
    return Value(aval, committed, name, sharding_like=sharding, host=sharding is None)


def _returned(each: Any, name: str) -> Any:
    if isinstance(each, Value) or hasattr(each, "sharding"):
        return each
    try:
        return jax.numpy.asarray(each)
    except TypeError as error:
        raise ProgramError(f"program {name!r} returns {type(each)}, which is not an array") from error


def _parameters(fun: Callable[..., Any]) -> list[str]:
    """Return the names of the positional parameters."""
    try:
        parameters = inspect.signature(fun).parameters.values()
    except (TypeError, ValueError):
        return []
    return [each.name for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]


def _check_names(fun: Callable[..., Any], names: Iterable[str]) -> None:
    """Raise ValueError for a name that is not a parameter of the function."""
    try:
        parameters = inspect.signature(fun).parameters
    except (TypeError, ValueError):
        return
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return
    for name in names:
        if name not in parameters:
            raise ValueError(f"{getattr(fun, '__name__', fun)} has no argument {name!r}; it takes {list(parameters)}")


def _check_numbers(fun: Callable[..., Any], option: str, numbers: Sequence[int]) -> None:
    """Raise ValueError for a number that no argument of the function can have, like `jax.jit`."""
    try:
        parameters = inspect.signature(fun).parameters.values()
    except (TypeError, ValueError):
        return
    if any(each.kind is each.VAR_POSITIONAL for each in parameters):
        return
    names = _parameters(fun)
    for number in numbers:
        if not -len(names) <= number < len(names):
            raise ValueError(f"{option}={number}: {getattr(fun, '__name__', fun)} takes only {names}")


def _both(
    numbers: int | Sequence[int] | None, names: str | Iterable[str] | None, parameters: list[str]
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Infer the numbers of arguments from their names, and the names from the numbers, like `jax.jit`."""
    given = () if numbers is None else (numbers,) if isinstance(numbers, int) else tuple(numbers)
    named = () if names is None else (names,) if isinstance(names, str) else tuple(names)
    if numbers is None:
        given = tuple(parameters.index(name) for name in named if name in parameters)
    if names is None:
        named = tuple(parameters[i] for i in given if -len(parameters) <= i < len(parameters))
    return given, named
