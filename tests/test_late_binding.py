"""Objects are complete after construction: no attribute without a value, and none that another object fills in."""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter
from collections.abc import Iterable, Iterator

import pytest

from tests.prose import children, dotted, nodes_of
from tests.test_layers import SOURCE, modules

pytestmark = pytest.mark.together("sources")

# Attributes of objects of Python and other projects, which have no constructor or method for that purpose.
FOREIGN = {
    ("client/plugin.py", "ifrt_proxy.get_client"): "JAX connects to a proxy by this function of its module",
    ("cluster/processes/bugs.py", "threading.excepthook"): "Python's hook for exceptions that end threads",
    ("devices/partial_jax.py", "metadata.distributions"): "JAX searches for plug-ins by this function of Python",
    (
        "devices/xla/compiled_programs.py",
        "compilation_cache.get_file_cache",
    ): "JAX chooses its cache of programs in this function",
    (
        "host_services/python/program/colocated_functions.py",
        "private._get_cpu_device_map",
    ): "JAX looks up the devices of colocated Python here",
    (
        "host_services/python/program/colocated_functions.py",
        "store.get_or_create",
    ): "JAX keeps the objects of colocated Python here",
    ("operate/command/terminal.py", "sys.unraisablehook"): "Python's hook for exceptions that it drops",
}

# Methods that give an object a collaborator after its construction, as `late_setters` finds them.
SETTERS = {
    ("session/channels.py", "set_callback_handler"): "a session has its relay once a client may call it",
}

_Function = ast.FunctionDef | ast.AsyncFunctionDef


def _is_property(function: _Function) -> bool:
    return any("property" in ast.unparse(each) or ".setter" in ast.unparse(each) for each in function.decorator_list)


@functools.cache
def _methods_and_fields() -> tuple[frozenset[str], frozenset[str]]:
    """Return the names of all methods in `src`, and of all attributes that hold a value."""
    methods, fields = set(), set()
    for path in modules().values():
        for node in nodes_of(path):
            if isinstance(node, ast.ClassDef):
                for each in node.body:
                    if isinstance(each, _Function):
                        (fields if _is_property(each) else methods).add(each.name)
                    elif isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
                        fields.add(each.target.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                fields.add(node.attr)
    return frozenset(methods), frozenset(fields)


@functools.cache
def _callbacks() -> frozenset[str]:
    """Return the names of all attributes in `src` that are declared as functions."""
    return frozenset(
        node.target.attr
        for path in modules().values()
        for node in nodes_of(path)
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Attribute)
        and re.match(r"Callable\b", ast.unparse(node.annotation))
    )


def _is_callable(value: ast.expr, local: frozenset[str], own: frozenset[str]) -> bool:
    """Return whether a value is a function, given the functions around it and the methods of the class."""
    methods, fields = _methods_and_fields()
    match value:
        case ast.Lambda():
            return True
        case ast.Call():
            return dotted(value.func) in ("partial", "functools.partial")
        case ast.Name():
            return value.id in local
        case ast.Attribute(value=ast.Name("self")):
            return value.attr in own or value.attr in methods - fields
        case ast.IfExp():
            return any(_is_callable(each, local, own) for each in (value.body, value.orelse))
        case ast.BoolOp():
            return any(_is_callable(each, local, own) for each in value.values)
    return False


def _is_late(name: str, value: ast.expr, local: frozenset[str], own: frozenset[str]) -> bool:
    is_declared = name in _callbacks() or name in _collaborators()
    return name.startswith("on_") or is_declared or _is_callable(value, local, own)


@functools.cache
def _collaborators() -> frozenset[str]:
    """Return the names of all attributes in `src` that hold implementations of interfaces of `src`.

    A constructor declares them with this type, or they get parameters with this type. Names that records also have for
    data are left out.
    """
    found, of_records = set(), set()
    for path in modules().values():
        for node in nodes_of(path):
            if isinstance(node, ast.ClassDef):
                fields = (each.target for each in node.body if isinstance(each, ast.AnnAssign))
                of_records |= {each.id for each in fields if isinstance(each, ast.Name)}
            if not isinstance(node, ast.FunctionDef) or node.name != "__init__":
                continue
            parameters = {
                each.arg for each in (*node.args.args, *node.args.kwonlyargs) if _is_interface(each.annotation)
            }
            for each in ast.walk(node):
                is_declared = isinstance(each, ast.AnnAssign) and _is_interface(each.annotation)
                for target, value in _targets(each):
                    is_given = isinstance(value, ast.Name) and value.id in parameters
                    if isinstance(target, ast.Attribute) and (is_declared or is_given):
                        found.add(target.attr)
    return frozenset(found - of_records)


def _is_interface(annotation: ast.expr | None) -> bool:
    return annotation is not None and not _protocols().isdisjoint(ast.unparse(annotation).split(" | "))


@functools.cache
def _protocols() -> frozenset[str]:
    """Return the names of the interfaces in `src`."""
    return frozenset(
        node.name
        for path in modules().values()
        for node in nodes_of(path)
        if isinstance(node, ast.ClassDef) and any(ast.unparse(base).startswith("Protocol") for base in node.bases)
    )


def late_setters(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yield the methods that only exist to give an object a function or an implementation of an interface.

    By their names these are `use_...`, `set_...` and `bind_...`. `set_handlers`, for objects that change hands at run
    time, replaces all handlers.
    """
    for node in nodes:
        for method in node.body if isinstance(node, ast.ClassDef) else ():
            if not isinstance(method, _Function) or not re.match("(use|set|bind)_(?!handlers$)", method.name):
                continue
            collaborators = {
                each.arg
                for each in (*method.args.args, *method.args.kwonlyargs)
                if each.annotation is not None
                and any(
                    name.startswith("Callable[") or name in _protocols()
                    for name in ast.unparse(each.annotation).split(" | ")
                )
            }
            stored = (pair for each in ast.walk(method) for pair in _targets(each))
            if any(
                isinstance(target, ast.Attribute) and isinstance(value, ast.Name) and value.id in collaborators
                for target, value in stored
            ):
                yield method.name


def _targets(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    """Yield the pairs of target and value of an assignment."""
    if isinstance(node, ast.AnnAssign):
        yield node.target, node.value
    elif isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                yield from zip(target.elts, node.value.elts, strict=False)
            else:
                yield target, node.value


def late_bindings(
    node: ast.AST, local: frozenset[str] = frozenset(), own: frozenset[str] = frozenset()
) -> Iterator[str]:
    """Yield the late-bound attributes in a module, as they are written.

    These are attributes that a method declares without a value, and attributes of other objects to which a function is
    assigned, or that are callbacks by their name (`on_...`) or their declaration, or implementations of an interface.
    """
    for each in children(node):
        if isinstance(each, ast.expr):  # which contains neither assignments nor definitions
            continue
        for target, value in _targets(each):
            if not isinstance(target, ast.Attribute):
                continue
            holder = ast.unparse(target.value)
            if value is None or (holder not in ("self", "cls") and _is_late(target.attr, value, local, own)):
                yield f"{holder}.{target.attr}"
        functions, methods = local, own
        if isinstance(each, ast.ClassDef):
            methods = frozenset(
                inner.name for inner in each.body if isinstance(inner, _Function) and not _is_property(inner)
            )
        elif isinstance(each, _Function):
            functions = local | {
                inner.name for inner in ast.walk(each) if isinstance(inner, _Function) and inner is not each
            }
        yield from late_bindings(each, functions, methods)


def test_no_attribute_is_bound_late() -> None:
    found = Counter(
        (str(path.relative_to(SOURCE)), name)
        for path in modules().values()
        for name in late_bindings(nodes_of(path)[0])
    )
    assert sorted(found.keys() - FOREIGN.keys()) == [], "pass these to the constructor"
    assert sorted(FOREIGN.keys() - found.keys()) == [], "these are gone: delete their entries"


def test_no_method_only_sets_a_collaborator() -> None:
    found = {
        (str(path.relative_to(SOURCE)), name) for path in modules().values() for name in late_setters(nodes_of(path))
    }
    assert sorted(found - SETTERS.keys()) == [], "pass these to the constructor"
    assert sorted(SETTERS.keys() - found) == [], "these are gone: delete their entries"


def test_methods_that_set_a_collaborator_are_found() -> None:
    source = """
class Scheduler:
    def use_memory(self, reserve: Callable[[int], bool]) -> None:
        self._reserve = reserve

    def bind_policy(self, policy: ControlConnection | None = None, count: int = 0) -> None:
        self._count, self._policy = count, policy

    def set_handlers(self, on_end: Callable[[], None]) -> None:
        self._on_end = on_end

    def set_limit(self, limit: int) -> None:
        self._limit = limit

    def use_once(self, call: Callable[[], int]) -> None:
        self._value = call()
"""
    assert "ControlConnection" in _protocols()
    assert list(late_setters(ast.walk(ast.parse(source)))) == ["use_memory", "bind_policy"]


def test_late_bindings_are_found() -> None:
    source = """
class Host:
    def __init__(self, link, port):
        self.link: Link
        self.port: Port = port
        self.handle = self.received
        link.handle = self.received
        link.name, link.lose = "host", lambda reason: None
        link.on_away = port.away
        link.owner = self

        def ended(): ...

        link.end = partial(ended, 1)
        link.other = ended
        link.answers = Answers()

    def received(self, message): ...
"""
    assert list(late_bindings(ast.parse(source))) == [
        *("self.link", "link.handle", "link.lose", "link.on_away", "link.end", "link.other", "link.answers"),
    ]
