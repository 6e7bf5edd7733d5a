"""Check that a controller loaded from a dump equals the dumped one, including all objects that it refers to."""

from __future__ import annotations

import functools
import gc
import types
from collections import deque
from enum import Enum
from typing import Any

import msgspec

from atoll.controller.controller_dumps import dump_controller, load_controller
from atoll.controller.core import Controller
from atoll.state.object_dumps import declared

# Attributes that a loaded controller lacks, by class: caches, and log and trace entries from before the dump.
_NOT_LOADED: dict[str, set[str]] = {
    "Controller": {"_backlog"},
    "Discards": {"waiting"},
    "EventLog": {"turn", "_new", "_events", "_bytes", "_replaced", "_header"},
    "GroupedCounts": {"version"},
    "MemoryLedger": {"_known", "_version"},
    "Meter": {"_accounts"},  # unused as long as their lowering is unfinished
    "Outbox": {"_last"},
    "RelayTable": {"_known"},
    "SharedLines": {"_spans"},
    "Topology": {"_first_hosts", "_first_devices"},
    "Trace": {"_ends", "_count"},
    "Send": {"feeds"},
}
# Maps that are only searched by key, so that the order of the keys has no effect.
_UNORDERED = {("_SessionRuns", "on_island"), ("Turns", "_tenants")}
# Types of values that are compared as they are.
_VALUES = (str, bytes, Enum, type, types.NoneType, types.ModuleType, msgspec.Raw, msgspec.Struct)
# Types of values that most objects refer to. They are compared without an entry of their own.
_SIMPLE = frozenset({bool, int, float, str, bytes, types.NoneType})
# Names of classes of maps whose contents are compared as those of dictionaries.
_MAPS = frozenset({"WeakValueDictionary", "mappingproxy"})
# Immutable values. Equal objects may share them or have a copy each.
_SHARED = {("GangSpec", "devices"), *(("PartMemory", name) for name in ("peak", "head", "tail", "left"))}


def dumped(controller: Controller) -> bytes:
    return msgspec.msgpack.encode(dump_controller(controller))


def check_dump(controller: Controller) -> Controller:
    """Dump and load a controller, and check the loaded one.

    It must have the same dump, and its objects must refer to each other in the same way.
    """
    controller = getattr(controller, "controller", controller)  # without its recorder
    content = dumped(controller)
    loaded = load_controller(content, controller._admission._version)
    again = dumped(loaded)
    if content != again:  # an integer may have become a float
        one, other = ordered(msgspec.msgpack.decode(content)), ordered(msgspec.msgpack.decode(again))
        for tag, objects in one["objects"]["tables"].items():
            for number, (before, after) in enumerate(zip(objects, other["objects"]["tables"][tag], strict=True)):
                assert before == after, f"{tag} {number}"
        assert one == other
    try:
        check_same(controller, loaded)
    except AssertionError:
        gc.collect()  # weak references still find objects that only garbage refers to, and that no dump has
        check_same(controller, loaded)
    return loaded


def handled_events(controller: Controller) -> int:
    """Return how many events the controller has handled, including those before it was dumped and loaded."""
    counts = controller.log.statistics()
    return counts["missing"] + counts["events"]


def ordered(value: Any, depth: int = 0) -> Any:
    """Return the dump with a list of items in place of each map whose order matters, which are all but those around
    objects.
    """
    if isinstance(value, dict):
        items = {key: ordered(each, depth + 1) for key, each in value.items()}
        return items if depth < 3 else list(items.items())
    return [ordered(each, depth + 1) for each in value] if isinstance(value, list) else value


class Path:
    """The attributes and items that lead to two objects.

    Its text is made only if the objects differ, since a check compares many objects.
    """

    __slots__ = ("_before", "_form", "_part")

    def __init__(self, before: Path | str, form: str, part: object = None) -> None:
        self._before = before
        self._form = form
        self._part = part

    def __str__(self) -> str:
        return f"{self._before}{self._form.format(self._part)}"


def check_same(one: Any, other: Any) -> None:
    """Check that two objects refer to the same structure with equal values."""
    known: dict[int, Any] = {}
    alive: list[Any] = []
    left = deque([(one, other, Path(type(one).__name__, ""))])
    while left:
        a, b, path = left.popleft()
        kind = kind_of(type(a))
        if kind is Kind.CALLABLE:
            compare_callable(a, b, path, left)
            continue
        if kind is Kind.NUMBER and isinstance(b, int | float):
            assert a == b, f"{path}: {a} and {b}"
            continue
        a, b = plain(a), plain(b)
        assert type(a) is type(b), f"{path}: {type(a).__name__} and {type(b).__name__}"
        if kind is Kind.VALUE:
            assert a == b if not isinstance(a, msgspec.Raw) else bytes(a) == bytes(b), f"{path}: {a!r} and {b!r}"
            continue
        if id(a) in known:
            if not is_value(type(a)):
                assert known[id(a)] is b, f"{path}: not the same object"
            continue
        known[id(a)] = b
        alive.append((a, b))
        if kind is Kind.MAP:
            assert len(a) == len(b), f"{path}: {list(a)} and {list(b)}"
            for number, ((key, x), (other_key, y)) in enumerate(zip(a.items(), b.items(), strict=True)):
                if not are_simple(key, other_key):
                    left.append((key, other_key, Path(path, " key {}", number)))
                if not are_simple(x, y):
                    left.append((x, y, Path(path, "[{}]", key if isinstance(key, int | str | tuple) else number)))
        elif kind is Kind.SET:
            assert a == b, f"{path}: {a} and {b}"
        elif kind is Kind.SEQUENCE:
            assert len(a) == len(b), f"{path}: {len(a)} and {len(b)} items"
            for number, (x, y) in enumerate(zip(a, b, strict=True)):
                if not are_simple(x, y):
                    left.append((x, y, Path(path, "[{}]", number)))
        else:
            for name, x, y in attributes(a, b, path):
                if not are_simple(x, y):
                    left.append((x, y, Path(path, ".{}", name)))


class Kind(Enum):
    """How objects of a class are compared."""

    CALLABLE = "callable"
    NUMBER = "number"
    VALUE = "value"
    MAP = "map"
    SET = "set"
    SEQUENCE = "sequence"
    OBJECT = "object"


@functools.cache
def kind_of(type_: type[Any]) -> Kind:
    if issubclass(type_, types.MethodType | types.FunctionType | functools.partial):
        return Kind.CALLABLE
    if issubclass(type_, int | float):
        return Kind.NUMBER
    if issubclass(type_, _VALUES) and not is_record(type_):
        return Kind.VALUE
    if issubclass(type_, dict) or type_.__name__ in _MAPS:
        return Kind.MAP
    if issubclass(type_, set | frozenset):
        return Kind.SET
    return Kind.SEQUENCE if issubclass(type_, list | tuple | deque) else Kind.OBJECT


def are_simple(one: Any, other: Any) -> bool:
    """Return whether these are equal values of one simple type. Others are compared step by step."""
    return type(one) is type(other) and type(one) in _SIMPLE and bool(one == other)


def is_record(type_: type[Any]) -> bool:
    """Tell structs of the controller, such as gangs, from those of messages, which are array-like."""
    return issubclass(type_, msgspec.Struct) and not type_.__struct_config__.array_like


@functools.cache
def is_value(type_: type[Any]) -> bool:
    """Return whether equal objects of this class are interchangeable."""
    config = getattr(type_, "__dataclass_params__", None) or getattr(type_, "__struct_config__", None)
    return issubclass(type_, tuple | frozenset) or (config is not None and config.frozen and config.eq)


def plain(value: Any) -> Any:
    """Return a container as the type that msgspec makes of it, if the difference does not matter."""
    if type(value) in (list, tuple):
        return list(value)
    return dict(value) if type(value).__name__ in _MAPS else value


def compare_callable(a: Any, b: Any, path: Path, left: deque[Any]) -> None:
    assert type(a) is type(b), f"{path}: {a} and {b}"
    if isinstance(a, functools.partial):
        left.append((a.func, b.func, Path(path, "()")))
        left.append((a.args, b.args, Path(path, "() arguments")))
    elif isinstance(a, types.MethodType):
        assert a.__func__ is b.__func__, f"{path}: {a} and {b}"
        left.append((a.__self__, b.__self__, Path(path, " of")))
    else:
        assert a.__qualname__ == b.__qualname__, f"{path}: {a} and {b}"


@functools.cache
def declared_attributes(kind: type[Any]) -> frozenset[str]:
    """Return the names of the attributes that a class declares."""
    names = set(getattr(kind, "__struct_fields__", ()))
    for each in kind.__mro__:
        slots = each.__dict__.get("__slots__", ())
        names.update((slots,) if isinstance(slots, str) else slots)
    return frozenset(names)


@functools.cache
def compared_attributes(kind: type[Any], others: tuple[str, ...]) -> tuple[tuple[str, bool, bool], ...]:
    """Return the names of the attributes that are compared, each with whether equal objects may share it, and whether
    it is a map without an order.

    Objects of the class have the attributes `others` in addition to those that the class declares.
    """
    rebuilt = {name for schema in declared() if schema.kind is kind for name in schema.rebuilt}
    skipped = rebuilt | _NOT_LOADED.get(kind.__name__, set()) | {"__weakref__", "__dict__"}
    return tuple(
        (name, (kind.__name__, name) in _SHARED, (kind.__name__, name) in _UNORDERED)
        for name in declared_attributes(kind).union(others) - skipped
        if not callable(getattr(kind, name, None))  # a method that a test has replaced
    )


def attributes(a: Any, b: Any, path: Path) -> list[tuple[str, Any, Any]]:
    missing = object()
    found = []
    for name, is_shared, is_unordered in compared_attributes(type(a), tuple(getattr(a, "__dict__", ()))):
        x, y = getattr(a, name, missing), getattr(b, name, missing)
        assert (x is missing) == (y is missing), f"{path}.{name} is missing in one"
        if is_shared:
            assert x == y, f"{path}.{name}: {x} and {y}"
        elif is_unordered:
            found.append((name, dict(sorted(x.items())), dict(sorted(y.items()))))
        elif x is not missing:
            found.append((name, x, y))
    return found
