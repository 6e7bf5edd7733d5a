"""Check that a controller loaded from a dump equals the dumped one, including all objects that it refers to."""

from __future__ import annotations

import functools
import types
from collections import deque
from enum import Enum
from typing import Any

import msgspec

from atoll.controller.controller_dumps import dump_controller, load_controller
from atoll.controller.core import Controller
from atoll.state.object_dumps import rebuilt_attributes

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
_UNORDERED = {("_SessionRuns", "on_island")}
# Types of values that are compared as they are.
_VALUES = (str, bytes, Enum, type, types.NoneType, types.ModuleType, msgspec.Raw, msgspec.Struct)
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
        if isinstance(a, types.MethodType | types.FunctionType | functools.partial):
            compare_callable(a, b, path, left)
            continue
        if isinstance(a, int | float) and isinstance(b, int | float):
            assert a == b, f"{path}: {a} and {b}"
            continue
        a, b = plain(a), plain(b)
        assert type(a) is type(b), f"{path}: {type(a).__name__} and {type(b).__name__}"
        if isinstance(a, _VALUES) and not is_record(a):
            assert a == b if not isinstance(a, msgspec.Raw) else bytes(a) == bytes(b), f"{path}: {a!r} and {b!r}"
            continue
        if id(a) in known:
            if not is_value(a):
                assert known[id(a)] is b, f"{path}: not the same object"
            continue
        known[id(a)] = b
        alive.append((a, b))
        if isinstance(a, dict):
            assert len(a) == len(b), f"{path}: {list(a)} and {list(b)}"
            for number, ((key, x), (other_key, y)) in enumerate(zip(a.items(), b.items(), strict=True)):
                left.append((key, other_key, Path(path, " key {}", number)))
                left.append((x, y, Path(path, "[{}]", key if isinstance(key, int | str | tuple) else number)))
        elif isinstance(a, set | frozenset):
            assert a == b, f"{path}: {a} and {b}"
        elif isinstance(a, list | tuple | deque):
            assert len(a) == len(b), f"{path}: {len(a)} and {len(b)} items"
            left.extend((x, y, Path(path, "[{}]", i)) for i, (x, y) in enumerate(zip(a, b, strict=True)))
        else:
            left.extend((x, y, Path(path, ".{}", name)) for name, x, y in attributes(a, b, path))


def is_record(each: Any) -> bool:
    """Return whether this is a struct with an identity, such as a gang."""
    return isinstance(each, msgspec.Struct) and not each.__struct_config__.eq


def is_value(each: Any) -> bool:
    """Return whether equal objects of this kind are interchangeable."""
    frozen = getattr(each, "__dataclass_params__", None)
    return isinstance(each, tuple | frozenset) or (frozen is not None and frozen.frozen and frozen.eq)


def plain(value: Any) -> Any:
    """Return a container as the type that msgspec makes of it, if the difference does not matter."""
    if type(value).__name__ in ("WeakValueDictionary", "mappingproxy"):
        return dict(value)
    return list(value) if type(value) in (list, tuple) else value


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
def attributes_of(kind: type[Any]) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names of the attributes that a class declares, and of those that are not compared."""
    names = set(getattr(kind, "__struct_fields__", ()))
    for each in kind.__mro__:
        slots = each.__dict__.get("__slots__", ())
        names.update((slots,) if isinstance(slots, str) else slots)
    skipped = rebuilt_attributes(kind) | _NOT_LOADED.get(kind.__name__, set()) | {"__weakref__", "__dict__"}
    return frozenset(names), skipped


def attributes(a: Any, b: Any, path: Path) -> list[tuple[str, Any, Any]]:
    kind = type(a)
    declared, skipped = attributes_of(kind)
    missing = object()
    found = []
    for name in declared.union(getattr(a, "__dict__", ())) - skipped:
        if callable(getattr(kind, name, None)):  # a method that a test has replaced
            continue
        x, y = getattr(a, name, missing), getattr(b, name, missing)
        assert (x is missing) == (y is missing), f"{path}.{name} is missing in one"
        if (kind.__name__, name) in _SHARED:
            assert x == y, f"{path}.{name}: {x} and {y}"
        elif (kind.__name__, name) in _UNORDERED:
            found.append((name, dict(sorted(x.items())), dict(sorted(y.items()))))
        elif x is not missing:
            found.append((name, x, y))
    return found
