"""Dump a graph of objects to versioned structs, and load it again.

Each class whose objects outlive a process has a struct with the attributes to store, which `dump_of` declares. Nothing
else is stored: an attribute that the struct lacks is wired by the constructor or rebuilt after loading. Objects refer
to each other by number (`Ref`), and immutable values that many objects share are stored once (`Shared`). A callback is
stored as the name of a declared method, its object and its arguments (`callback`).

A dump contains the versions of its structs. `load` reads a struct of another version if both versions allow it: added
fields get their defaults, and unknown fields are ignored. Otherwise it raises IncompatibleJournalError.
"""

from __future__ import annotations

import functools
import types
import typing
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Any, Generic, TypeVar, Union, get_args, get_origin

import msgspec

from atoll._version import __version__
from atoll.decodable import decodable
from atoll.errors import IncompatibleJournalError, JournalError
from atoll.state.versions import Version, check_version

T = TypeVar("T")
K = TypeVar("K")
_Convert = Callable[[Any, Any], Any] | None  # None if the stored form is the value itself


class RefTo(msgspec.Struct, frozen=True):
    """Marks a reference in an annotation, for classes of higher layers: `Annotated[int, RefTo(tag)]`."""

    tag: str


class _RefToKind(msgspec.Struct, frozen=True):
    """Marks a reference to a class whose struct is declared later."""

    kind: type[Any]

    @property
    def tag(self) -> str:
        return _BY_KIND[self.kind].tag


class _SharedOf(msgspec.Struct, frozen=True):
    annotation: Any


class As(msgspec.Struct, frozen=True):
    """Marks an annotation of a stored form that differs from the value.

    Attributes:
      make: makes the value from the stored form.
      unpacks: whether `make` takes the items of the stored form as arguments.
      read: makes the stored form from the value.
      update: changes a value that exists, and to which other objects may refer.
    """

    make: Callable[..., Any]
    unpacks: bool = False
    read: Callable[[Any], Any] | None = None
    update: Callable[[Any, Any], None] | None = None


if TYPE_CHECKING:

    class Ref(Generic[T]):
        """The number of an object of a declared class."""

    class Shared(Generic[T]):
        """The number of an immutable value that several objects share."""

    Deque = list
    CountsOf = dict[K, int]
    AnyRef = object
else:

    class Ref:
        def __class_getitem__(cls, kind: Any) -> Any:
            kind = get_origin(kind) or kind
            return Annotated[int, RefTo(_BY_KIND[kind].tag) if kind in _BY_KIND else _RefToKind(kind)]

    class Shared:
        def __class_getitem__(cls, annotation: Any) -> Any:
            return Annotated[int, _SharedOf(annotation)]

    class Deque:
        def __class_getitem__(cls, item: Any) -> Any:
            return Annotated[list[item], As(deque, read=list)]

    class CountsOf:
        def __class_getitem__(cls, key: Any) -> Any:
            return Annotated[dict[key, int], As(Counter)]


class ObjectRef(msgspec.Struct, frozen=True):
    """A reference to an object of any declared class."""

    tag: str
    number: int


if not TYPE_CHECKING:
    AnyRef = Annotated[ObjectRef, "any"]


class Callback(msgspec.Struct, frozen=True, array_like=True):
    """A stored callback. `owner` is the number of its object, or -1. `arguments` precede those of the caller."""

    name: str
    owner: int
    arguments: tuple[Any, ...] = ()


class Dump(msgspec.Struct, omit_defaults=True, rename=lambda name: name.strip("_")):
    """Base class of the structs. A field has the name of its attribute, and is stored without leading underscores."""


@dataclass(eq=False)
class Schema:
    """A class and its struct. See `dump_of`."""

    kind: type[Any]
    struct: type[Dump]
    tag: str
    version: int
    oldest: int
    rebuilt: Mapping[str, Callable[[], Any]]
    rebuild: Callable[[Any], None] | None

    @functools.cached_property
    def _annotations(self) -> tuple[tuple[str, Any], ...]:
        hints = typing.get_type_hints(self.struct, include_extras=True)
        return tuple((name, hints[name]) for name in self.struct.__struct_fields__)

    @functools.cached_property
    def dumped(self) -> tuple[tuple[Callable[[Any], Any], _Convert], ...]:
        """For each field, how its attribute is read and converted."""
        return tuple((attrgetter(name), _DUMPS.converter(annotation)) for name, annotation in self._annotations)

    @functools.cached_property
    def loaded(self) -> tuple[tuple[str, _Convert, Callable[[Any, str, Any], None]], ...]:
        """For each field, its name, how it is converted, and how an attribute that exists is set."""
        return tuple(
            (name, _LOADS.converter(annotation), _update_of(annotation)) for name, annotation in self._annotations
        )


class _Method(msgspec.Struct, frozen=True):
    """A method or function that stored callbacks may name, with the annotations of the arguments that are stored."""

    name: str
    owner: type[Any] | None
    function: Any
    arguments: tuple[Any, ...]


_BY_KIND: dict[type[Any], Schema] = {}
_BY_TAG: dict[str, Schema] = {}
_BY_FUNCTION: dict[Any, _Method] = {}
_BY_NAME: dict[str, _Method] = {}


def dump_of(
    kind: type[Any],
    tag: str,
    version: int = 1,
    oldest: int = 1,
    rebuilt: Mapping[str, Callable[[], Any]] | None = None,
    rebuild: Callable[[Any], None] | None = None,
) -> Callable[[type[Dump]], type[Dump]]:
    """Declare the struct of a class.

    Args:
      kind: the class.
      tag: the name of the struct in dumps.
      version: the version of the struct. Increase it with each change.
      oldest: the oldest version that can be exchanged with this one. Increase it with each incompatible change.
      rebuilt: attributes that a loaded object begins with and that are not stored, with functions that make them.
      rebuild: called with each loaded object after all objects are loaded.
    """

    def declare(struct: type[Dump]) -> type[Dump]:
        assert kind not in _BY_KIND, kind
        assert tag not in _BY_TAG, tag
        schema = Schema(kind, struct, tag, version, oldest, rebuilt or {}, rebuild)
        _BY_KIND[kind] = _BY_TAG[tag] = schema
        return struct

    return declare


def callback(name: str, owner: type[Any] | None, function: Any, *arguments: Any) -> None:
    """Declare a method of `owner`, or a function, that is stored as a callback.

    `arguments` annotate the arguments that are stored. The callback may have fewer.
    """
    assert name not in _BY_NAME, name
    _BY_NAME[name] = _BY_FUNCTION[function] = _Method(name, owner, function, arguments)


class Objects(msgspec.Struct, frozen=True):
    """A dump of a graph of objects.

    Attributes:
      versions: the version of each struct, and the oldest one that can be exchanged with it, by tag.
      roots: the numbers of objects that exist before loading, by name.
      tables: the structs of each tag. The number of an object is its position.
      values: the shared values, by annotation. The number of a value is its position.
    """

    atoll: str
    versions: dict[str, Version]
    roots: dict[str, int]
    tables: Any
    values: Any


class _StoredObjects(Objects, frozen=True):
    tables: dict[str, msgspec.Raw]
    values: dict[str, msgspec.Raw]


def _members(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)


def _key_of(annotation: Any) -> str:
    """Return the name of a type of shared values."""
    return str(getattr(annotation, "__qualname__", annotation) if isinstance(annotation, type) else annotation)


# ---- the functions that convert values


class _Converters:
    """Makes the functions that convert values, from the annotations of the values. Subclasses have the leaves.

    Each function takes the `_Dumper` or `_Loader` and the value. It is made once, and serves all dumps.
    """

    def __init__(self) -> None:
        self._converters: dict[Any, _Convert] = {}

    def converter(self, annotation: Any) -> _Convert:
        """Return the function that converts a value with this annotation, or None if both forms are equal."""
        if annotation not in self._converters:
            self._converters[annotation] = self._new_converter(annotation)
        return self._converters[annotation]

    def _new_converter(self, annotation: Any) -> _Convert:
        members = _members(annotation)
        present = [each for each in members if each is not type(None)]
        if len(present) > 1 or len(present) < len(members):
            converts = [(each, self.converter(each)) for each in present]
            special = [(each, convert) for each, convert in converts if convert is not None]
            if len(special) == len(present) == 1:
                return _unless_none(special[0][1])
            return self._union([(self._kind_of(each), convert) for each, convert in special]) if special else None
        if annotation is Callback:
            return self._callback
        origin, arguments = get_origin(annotation), get_args(annotation)
        if origin is Annotated:
            return self._annotated(arguments[0], arguments[1])
        if origin is dict:
            return _dict_converter(self.converter(arguments[0]), self.converter(arguments[1]))
        if origin is tuple and not (len(arguments) == 2 and arguments[1] is Ellipsis):
            return _tuple_converter([self.converter(each) for each in arguments])
        if origin in (tuple, list, set, frozenset):
            return self._items(origin, self.converter(arguments[0]))
        return None

    def _annotated(self, annotation: Any, mark: Any) -> _Convert:
        if annotation is ObjectRef:
            return self._object_ref
        if isinstance(mark, RefTo | _RefToKind):
            return self._reference(_BY_TAG[mark.tag])
        if isinstance(mark, _SharedOf):
            return self._share(mark.annotation)
        return self._marked(self.converter(annotation), mark)

    def _kind_of(self, annotation: Any) -> Any:
        """Return the type of the values of an annotation that is a member of a union."""
        raise NotImplementedError

    def _union(self, kinds: list[tuple[Any, Callable[[Any, Any], Any]]]) -> _Convert:
        """Return the function for values of these types, in addition to values that stay as they are."""
        is_of = self._is_of

        def convert_union(state: Any, value: Any) -> Any:
            for kind, convert in kinds:
                if is_of(value, kind):
                    return convert(state, value)
            return value

        return convert_union

    def _is_of(self, value: Any, kind: Any) -> bool:
        """Return whether a value is of this type, which `_kind_of` returned."""
        raise NotImplementedError

    def _callback(self, state: Any, value: Any) -> Any:
        """Convert a callback."""
        raise NotImplementedError

    def _object_ref(self, state: Any, value: Any) -> Any:
        """Convert a reference to an object of any declared class."""
        raise NotImplementedError

    def _reference(self, schema: Schema) -> _Convert:
        """Return the function for references to objects of a declared class."""
        raise NotImplementedError

    def _share(self, annotation: Any) -> _Convert:
        """Return the function for shared values with this annotation."""
        raise NotImplementedError

    def _marked(self, convert: _Convert, mark: As) -> _Convert:
        """Return the function for a marked annotation. `convert` is the function for the rest of it."""
        raise NotImplementedError

    def _items(self, origin: Any, convert: _Convert) -> _Convert:
        """Return the function for collections of the type `origin`. `convert` is the function for the items."""
        raise NotImplementedError


def _unless_none(convert: Callable[[Any, Any], Any]) -> _Convert:
    return lambda state, value: None if value is None else convert(state, value)


def _dict_converter(key_of: _Convert, value_of: _Convert) -> _Convert:
    if key_of is None and value_of is None:
        return None
    if key_of is None:
        assert value_of is not None
        return lambda state, found: {key: value_of(state, each) for key, each in found.items()}
    if value_of is None:
        return lambda state, found: {key_of(state, key): each for key, each in found.items()}
    return lambda state, found: {key_of(state, key): value_of(state, each) for key, each in found.items()}


def _tuple_converter(converts: list[_Convert]) -> _Convert:
    """Return the function for tuples of a fixed length."""
    if not any(converts):
        return None
    return lambda state, value: tuple(
        [each if convert is None else convert(state, each) for each, convert in zip(value, converts, strict=True)]
    )


# ---- dump


class _Dumper:
    """Numbers the objects that it meets, and makes their structs in the order of their numbers."""

    def __init__(self) -> None:
        self.numbers: dict[int, int] = {}  # of objects, by identity
        self.known: dict[str, dict[int, int]] = {}  # numbers of shared values, by annotation and identity
        self._met: dict[str, list[Any]] = {}  # objects by tag
        self._left: deque[tuple[Schema, Any]] = deque()
        self._shared: dict[str, list[Any]] = {}
        self._alive: list[Any] = []  # so that identities stay unique

    def dump(self, roots: Mapping[str, Any]) -> Objects:
        numbers = {name: self.number(_schema_of(type(root)), root) for name, root in roots.items()}
        structs: dict[str, list[Dump]] = {}
        while self._left:
            schema, each = self._left.popleft()
            values = [read(each) if convert is None else convert(self, read(each)) for read, convert in schema.dumped]
            structs.setdefault(schema.tag, []).append(schema.struct(*values))
        versions = {tag: (_BY_TAG[tag].version, _BY_TAG[tag].oldest) for tag in structs}
        return Objects(__version__, versions, numbers, structs, self._shared)

    def number(self, schema: Schema, each: Any) -> int:
        number = self.numbers.get(id(each))
        if number is None:
            met = self._met.setdefault(schema.tag, [])
            number = self.numbers[id(each)] = len(met)
            met.append(each)
            self._left.append((schema, each))
        return number

    def share(self, key: str, value: Any, convert: _Convert) -> int:
        """Store a value that is not known yet, and return its number."""
        shared = self._shared.setdefault(key, [])
        number = self.known.setdefault(key, {})[id(value)] = len(shared)
        self._alive.append(value)
        shared.append(value if convert is None else convert(self, value))
        return number


class _DumpConverters(_Converters):
    def _kind_of(self, annotation: Any) -> Any:
        origin, arguments = get_origin(annotation), get_args(annotation)
        if origin is Annotated:
            mark = arguments[1]
            if arguments[0] is ObjectRef:
                return object
            if isinstance(mark, RefTo | _RefToKind):
                return _BY_TAG[mark.tag].kind
            if isinstance(mark, As) and isinstance(mark.make, type):
                return mark.make
            return self._kind_of(mark.annotation if isinstance(mark, _SharedOf) else arguments[0])
        if annotation is Callback:
            return (types.MethodType, types.FunctionType, functools.partial)
        return origin or annotation

    def _is_of(self, value: Any, kind: Any) -> bool:
        return isinstance(value, kind)

    def _callback(self, dumper: _Dumper, value: Any) -> Callback:
        bound: tuple[Any, ...] = ()
        if isinstance(value, functools.partial):
            bound, value = value.args, value.func
        method = _BY_FUNCTION.get(getattr(value, "__func__", value))
        if method is None:
            raise TypeError(f"{value.__qualname__} is not declared as a callback")
        owner = -1 if method.owner is None else dumper.number(_schema_of(type(value.__self__)), value.__self__)
        converts = [self.converter(each) for each in method.arguments[: len(bound)]]
        return Callback(
            method.name,
            owner,
            tuple(
                each if convert is None else convert(dumper, each)
                for each, convert in zip(bound, converts, strict=True)
            ),
        )

    def _object_ref(self, dumper: _Dumper, value: Any) -> ObjectRef:
        schema = _schema_of(type(value))
        return ObjectRef(schema.tag, dumper.number(schema, value))

    def _reference(self, schema: Schema) -> _Convert:
        def number(dumper: _Dumper, each: Any) -> int:
            found = dumper.numbers.get(id(each))
            return dumper.number(schema, each) if found is None else found

        return number

    def _share(self, annotation: Any) -> _Convert:
        key, convert = _key_of(annotation), self.converter(annotation)

        def share(dumper: _Dumper, value: Any) -> int:
            known = dumper.known.get(key)
            found = known.get(id(value)) if known is not None else None
            return dumper.share(key, value, convert) if found is None else found

        return share

    def _marked(self, convert: _Convert, mark: As) -> _Convert:
        read_value = mark.read
        if read_value is None:
            return convert
        if convert is None:
            return lambda dumper, value: read_value(value)
        return lambda dumper, value: convert(dumper, read_value(value))

    def _items(self, origin: Any, convert: _Convert) -> _Convert:
        if origin in (set, frozenset):  # in an order, so that equal states have equal dumps
            if convert is None:
                return lambda dumper, value: sorted(value)
            return lambda dumper, value: sorted([convert(dumper, each) for each in value])
        return None if convert is None else lambda dumper, value: [convert(dumper, each) for each in value]


def _schema_of(kind: type[Any]) -> Schema:
    schema = _BY_KIND.get(kind)
    if schema is None:
        raise TypeError(f"{kind.__module__}.{kind.__qualname__} has no declared struct")
    return schema


def dump(roots: Mapping[str, Any]) -> Objects:
    """Return a dump of these objects, and of all objects to which they refer. Encode it before the objects change."""
    return _Dumper().dump(roots)


def encode(objects: Objects) -> bytes:
    return msgspec.msgpack.encode(objects)


# ---- load


class _Loader:
    """Makes all objects first, and then sets their attributes."""

    def __init__(self, stored: _StoredObjects) -> None:
        self.tables: dict[str, list[Any]] = {}  # objects
        self._stored = stored
        self._values: dict[str, list[Any]] = {}

    def load(self, roots: Mapping[str, Any]) -> None:
        stored = self._stored
        structs = {}
        for tag, raw in stored.tables.items():
            self._check(tag)
            structs[tag] = msgspec.msgpack.decode(raw, type=decodable(list[_BY_TAG[tag].struct]))  # type: ignore[misc]
            kind: Any = _BY_TAG[tag].kind
            self.tables[tag] = [_unset(kind) for _ in structs[tag]]
        existing = set()
        for name, number in stored.roots.items():
            if name not in roots:
                raise IncompatibleJournalError(
                    f"atoll {stored.atoll} stored {name!r}, which atoll {__version__} does not have"
                )
            tag = _schema_of(type(roots[name])).tag
            self.tables[tag][number] = roots[name]
            existing.add((tag, number))
        for tag, dumped in structs.items():
            self._fill(_BY_TAG[tag], dumped, existing)
        for tag in structs:
            rebuild = _BY_TAG[tag].rebuild
            if rebuild is not None:
                for each in self.tables[tag]:
                    rebuild(each)

    def _check(self, tag: str) -> None:
        """Raise JournalError if a struct cannot be read."""
        writer, schema = self._stored.atoll, _BY_TAG.get(tag)
        version, oldest = self._stored.versions.get(tag, (0, 0))
        if schema is None:
            raise IncompatibleJournalError(
                f"atoll {writer} stored {tag!r} (version {version}), which atoll {__version__} cannot read"
            )
        check_version(writer, tag, (version, oldest), (schema.version, schema.oldest))

    def _fill(self, schema: Schema, dumped: list[Dump], existing: set[tuple[str, int]]) -> None:
        rebuilt = list(schema.rebuilt.items())
        put = _setter(schema.kind)
        for number, (each, struct) in enumerate(zip(self.tables[schema.tag], dumped, strict=True)):
            if (schema.tag, number) in existing:
                for name, convert, update in schema.loaded:
                    value = getattr(struct, name)
                    update(each, name, value if convert is None else convert(self, value))
                continue
            for name, convert, _ in schema.loaded:
                value = getattr(struct, name)
                put(each, name, value if convert is None else convert(self, value))
            for name, make in rebuilt:
                put(each, name, make())

    def shared_values(self, key: str, annotation: Any, convert: _Convert) -> list[Any]:
        values = self._values.get(key)
        if values is None:
            raw = self._stored.values.get(key)
            found = [] if raw is None else msgspec.msgpack.decode(raw, type=decodable(list[annotation]))
            values = self._values[key] = found if convert is None else [convert(self, each) for each in found]
        return values

    def method(self, name: str) -> _Method:
        method = _BY_NAME.get(name)
        if method is None:
            raise IncompatibleJournalError(
                f"atoll {self._stored.atoll} stored the callback {name!r}, which atoll {__version__} does not have"
            )
        return method


class _LoadConverters(_Converters):
    def _kind_of(self, annotation: Any) -> Any:
        origin, arguments = get_origin(annotation), get_args(annotation)
        return self._kind_of(arguments[0]) if origin is Annotated else origin or annotation

    def _is_of(self, value: Any, kind: Any) -> bool:
        return type(value) is kind  # a reference is an int, and so are some enums

    def _callback(self, loader: _Loader, stored: Callback) -> Any:
        method = loader.method(stored.name)
        bound = method.function
        if method.owner is not None:
            owner = loader.tables[_schema_of(method.owner).tag][stored.owner]
            bound = types.MethodType(method.function, owner)
        if not stored.arguments:
            return bound
        arguments = []
        for value, annotation in zip(stored.arguments, method.arguments, strict=False):
            convert = self.converter(annotation)
            typed = msgspec.convert(value, decodable(annotation))
            arguments.append(typed if convert is None else convert(loader, typed))
        return functools.partial(bound, *arguments)

    def _object_ref(self, loader: _Loader, stored: ObjectRef) -> Any:
        return loader.tables[stored.tag][stored.number]

    def _reference(self, schema: Schema) -> _Convert:
        tag = schema.tag
        return lambda loader, number: loader.tables[tag][number]

    def _share(self, annotation: Any) -> _Convert:
        key, convert = _key_of(annotation), self.converter(annotation)
        return lambda loader, number: loader.shared_values(key, annotation, convert)[number]

    def _marked(self, convert: _Convert, mark: As) -> _Convert:
        make = mark.make
        if mark.unpacks:
            return lambda loader, value: make(*(value if convert is None else convert(loader, value)))
        if convert is None:
            return lambda loader, value: make(value)
        return lambda loader, value: make(convert(loader, value))

    def _items(self, origin: Any, convert: _Convert) -> _Convert:
        return None if convert is None else lambda loader, value: origin([convert(loader, each) for each in value])


_DUMPS, _LOADS = _DumpConverters(), _LoadConverters()


def _update_of(annotation: Any) -> Callable[[Any, str, Any], None]:
    """Return the function that sets an attribute with this annotation of an object that exists."""
    mark = get_args(annotation)[1] if get_origin(annotation) is Annotated else None
    own = mark.update if isinstance(mark, As) else None
    if own is None:
        return _update
    return lambda each, name, value: own(getattr(each, name), value)


def _unset(kind: Any) -> Any:
    """Return an object of this class whose attributes are to be set."""
    if not issubclass(kind, msgspec.Struct):
        return kind.__new__(kind)
    required = len(kind.__struct_fields__) - len(kind.__struct_defaults__)
    return kind(*[()] * required)  # structs cannot be made without values


def _update(each: Any, name: str, value: Any) -> None:
    """Set an attribute of an object that exists. A container stays the same object, since others may refer to it."""
    present = getattr(each, name)
    if isinstance(present, dict | set):
        present.clear()
        present.update(value)
    elif isinstance(present, list | deque):
        present.clear()
        present.extend(value)
    else:
        _setter(type(each))(each, name, value)


def _setter(kind: type[Any]) -> Callable[[Any, str, Any], None]:
    """Return the function that sets an attribute of an object of this class, even if it is frozen."""
    if not issubclass(kind, msgspec.Struct):
        return object.__setattr__
    return msgspec.structs.force_setattr if kind.__struct_config__.frozen else setattr


def decode(content: bytes | msgspec.Raw) -> Objects:
    """Return the dump that `encode` encoded, for `load`. Raises JournalError if it is invalid."""
    try:
        return msgspec.msgpack.decode(content, type=decodable(_StoredObjects))
    except msgspec.MsgspecError as error:
        raise JournalError(f"a dump cannot be read: {error}") from None


def load(objects: Objects, roots: Mapping[str, Any]) -> None:
    """Load a decoded dump into new objects, and into the `roots`, which exist.

    Raises JournalError if it cannot be read.
    """
    assert isinstance(objects, _StoredObjects)
    try:
        _Loader(objects).load(roots)
    except (msgspec.MsgspecError, LookupError) as error:
        raise JournalError(f"the dump of atoll {objects.atoll} cannot be read: {error}") from None


def declared() -> Iterator[Schema]:
    """Yield the schema of each declared class, in the order of the tags. For tests."""
    for _, schema in sorted(_BY_TAG.items()):
        yield schema
