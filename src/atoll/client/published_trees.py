"""The form of a published tree: the arrays that a request publishes, and the tree that subscribers make of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec
import numpy as np

from atoll.client import array_checksums, array_packing
from atoll.client import jax_internals as internals
from atoll.client.array_contents import Content
from atoll.client.client_caches import clear_with_client
from atoll.decodable import decodable
from atoll.errors import Code, Details, Kind, StatusError, failed
from atoll.protocol.messages import MAX_STRUCTURE, VersionArray
from atoll.protocol.tree_forms import Pack, TreeForm
from atoll.protocol.version_requests import OpenedArrays
from atoll.quantities import counted, noun_for
from atoll.wire.framing import NO_MESSAGE

_MAX_SUMMED = 128  # arrays whose checksums one function computes
_MAX_NAMED = 5  # arrays in the text of an error
_MAX_OUTLINES = 16
_MAX_LAYOUTS = 2  # of an outline: of the tree, and of the tree with another dtype
_DICT, _LIST, _TUPLE = "dict", "list", "tuple"
_NO_TREE = msgspec.Raw(msgspec.msgpack.encode(None))


class Place(NamedTuple):
    """An array of a request without its value: a leaf of the tree, or a pack of several."""

    devices: tuple[int, ...]
    path: str
    pack: Pack | None
    positions: list[int]  # of the leaves in the tree


class StagedArray(NamedTuple):
    """An array of a request. `content` is the number of its content, or 0."""

    place: Place
    value: Any
    content: int = 0


class TreeLayout:
    """The arrays of a request that publishes a tree, without their values.

    They depend on the types of the leaves only. So they are found once for all trees with the same types.

    Attributes:
      types: the positions of the leaves of each type, as `array_packing.by_type` returns them.
      places: the arrays, sorted by devices.
      not_packed: the positions of the leaves that are arrays of the request themselves.
      numbers: the number of each leaf in the order of the arrays.
    """

    def __init__(self, shardings: list[Any], avals: list[Any], paths: Sequence[str]) -> None:
        self._shardings, self._avals = shardings, avals
        self.types = array_packing.by_type(shardings, avals)
        self.places: list[Place] = []
        groups = array_packing.groups(self.types)
        for positions, count in groups:
            first, names = positions[0], [paths[position] for position in positions]
            pack = array_packing.described(shardings[first], avals[first], names, count)
            path = f"{names[0]} and {len(names) - 1} more"
            self.places.append(Place(_devices(shardings[first]), path, pack, positions))
        packed = itertools.chain.from_iterable(positions for positions, _ in groups)
        self.not_packed = sorted(set(range(len(paths))).difference(packed))
        self.places += [Place(_devices(shardings[each]), paths[each], None, [each]) for each in self.not_packed]
        self.places.sort(key=lambda place: place.devices)
        order = list(itertools.chain.from_iterable(each.positions for each in self.places))
        self.numbers = sorted(range(len(order)), key=order.__getitem__)
        self._structure: tuple[Any, bytes] = None, b""

    def has(self, shardings: list[Any], avals: list[Any]) -> bool:
        """Return whether leaves have these types.

        Types are mostly the same objects as those of the last tree, which is known without a call per leaf: the results
        of a compiled function have the types of its earlier results.
        """
        if self._shardings != shardings or self._avals != avals:
            return False
        self._shardings, self._avals = shardings, avals
        return True

    def structure(
        self, outline: TreeOutline, checksums: tuple[tuple[int, ...], ...], contents: tuple[int, ...]
    ) -> bytes:
        """Return the encoded form of the tree. `contents` is empty if all numbers would be 0."""
        key = checksums, contents
        if self._structure[0] != key:
            packs = {number: each.pack for number, each in enumerate(self.places) if each.pack is not None}
            self._structure = key, _encode_structure(outline, self.numbers, packs, checksums, contents)
        return self._structure[1]


class TreeOutline:
    """The nodes of a tree, and the paths of its leaves.

    Attributes:
      paths: in the order in which JAX flattens the tree.
      longest: one of the longest paths.
      is_plain: whether `_plain` describes the nodes.
    """

    def __init__(self, tree: Any, leaves: Sequence[Any], paths: Sequence[str]) -> None:
        self.paths = tuple(paths)
        self.longest = max(self.paths, key=len, default="")
        self._nodes: Any = None
        self.is_plain = False
        with suppress(TypeError, RecursionError):
            self._nodes = _plain(tree, zip(leaves, itertools.count(), strict=False))
            self.is_plain = True
        self._encoded: tuple[list[int], bytes] | None = None
        self._layouts: list[TreeLayout] = []
        clear_with_client(self)

    def clear_cache(self) -> None:
        self._layouts.clear()

    def layout_of(self, leaves: Sequence[Any]) -> TreeLayout:
        """Return the layout of a tree with these leaves."""
        shardings, avals = list(map(internals.sharding_of, leaves)), list(map(internals.aval_of, leaves))
        found = next((each for each in self._layouts if each.has(shardings, avals)), None)
        if found is None:
            found = TreeLayout(shardings, avals, self.paths)
            self._layouts = [*self._layouts[-(_MAX_LAYOUTS - 1) :], found]
        return found

    def encoded(self, numbers: list[int]) -> bytes:
        """Return the encoded tree with these numbers as leaves.

        Raise TypeError, UnicodeEncodeError or RecursionError if only its publisher can make such a tree.
        """
        if not self.is_plain:
            raise TypeError("the tree has nodes of other types")
        found = self._encoded
        if found is None or found[0] != numbers:
            found = self._encoded = numbers, msgspec.msgpack.encode(_renumbered(self._nodes, numbers))
        return found[1]


# The outlines of the trees that were published last. A script publishes trees of the same form again and again.
_outlines: dict[Any, TreeOutline] = {}


def outline_of(tree: Any) -> tuple[TreeOutline, list[Any]]:
    """Return the outline of a tree, and its leaves."""
    import jax

    leaves, structure = jax.tree.flatten(tree)
    try:
        found = _outlines.get(structure)
    except (TypeError, ValueError):  # nodes that cannot be compared
        found = None
    if found is None:
        paths = [jax.tree_util.keystr(path) or "." for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
        found = TreeOutline(tree, leaves, paths)
        if found.is_plain:  # the paths in other nodes may depend on more than the structure
            if len(_outlines) >= _MAX_OUTLINES:
                _outlines.clear()
            _outlines[structure] = found
    return found, leaves


def arrays_to_publish(
    outline: TreeOutline,
    leaves: Sequence[Any],
    layout: TreeLayout,
    contents: Sequence[Content],
    copies: bool,
    checksums: bool,
) -> tuple[list[StagedArray], bytes]:
    """Return the arrays of the request, sorted by devices, and the encoded form of the tree.

    They are the leaves of the tree, and packs of small leaves. With `copies`, they are copies of those leaves that were
    not published before: a script that donates its arrays keeps the others. With `checksums`, arrays with their
    checksums follow.
    """
    values = leaves
    if copies and (copied := [position for position in layout.not_packed if not contents[position].is_known]):
        values = list(leaves)
        for position, value in zip(copied, array_packing.copied([leaves[each] for each in copied]), strict=True):
            values[position] = value
    arrays = []
    for place in layout.places:
        if place.pack is None:
            (position,) = place.positions
            arrays.append(StagedArray(place, values[position], contents[position].number))
        else:
            some = list(map(leaves.__getitem__, place.positions))
            arrays.append(StagedArray(place, array_packing.pack(some, place.pack.count)))
    groups_of_sums = tuple(_numbers_by_devices(arrays)) if checksums else ()
    numbers_of_contents = tuple([each.content for each in arrays])
    structure = layout.structure(outline, groups_of_sums, numbers_of_contents if any(numbers_of_contents) else ())
    for number, numbers in enumerate(groups_of_sums):
        value = array_checksums.checksums([arrays[number].value for number in numbers])
        arrays.append(StagedArray(Place(_devices(value.sharding), f"checksums {number}", None, []), value))
    return arrays, structure


def _numbers_by_devices(arrays: Sequence[StagedArray]) -> Iterator[tuple[int, ...]]:
    """Yield the numbers of arrays on the same devices, at most `_MAX_SUMMED` at once."""
    for _, some in itertools.groupby(range(len(arrays)), key=lambda number: arrays[number].place.devices):
        numbers = tuple(some)
        yield from (numbers[first : first + _MAX_SUMMED] for first in range(0, len(numbers), _MAX_SUMMED))


def _devices(sharding: Any) -> tuple[int, ...]:
    return tuple(device.id for device in sharding._device_assignment)


def _encode_structure(
    outline: TreeOutline,
    numbers: list[int],
    packs: dict[int, Pack],
    checksums: tuple[tuple[int, ...], ...],
    contents: tuple[int, ...],
) -> bytes:
    """Return the form of the tree, whose leaves have these numbers.

    It lacks the tree if subscribers have to pass `like`: for other nodes than `_plain` describes, keys that are not
    Unicode, and trees that are very deep or large.
    """
    with suppress(TypeError, UnicodeEncodeError, RecursionError):
        plain = msgspec.Raw(outline.encoded(numbers))
        content = msgspec.msgpack.encode(TreeForm(plain, packs, checksums, contents))
        if len(content) <= MAX_STRUCTURE:
            return content
    content = msgspec.msgpack.encode(TreeForm(_NO_TREE, packs, checksums, contents))
    if len(content) <= MAX_STRUCTURE:
        return content
    text = f"the paths of {len(numbers)} arrays have more than {MAX_STRUCTURE >> 20} MiB: publish fewer arrays at once"
    raise StatusError(Code.INVALID_ARGUMENT, text)


def _plain(node: Any, leaves: Iterator[tuple[Any, int]]) -> Any:
    """Return a node as lists, in which numbers are leaves. Raise TypeError for nodes of other types.

    `leaves` are the next leaves of the tree with their numbers. Nodes of other types are not touched: they may refuse
    numbers in place of arrays.
    """
    kind = type(node)
    if node is None:
        return None
    if kind is dict and all(type(key) is str for key in node):
        return [_DICT, {key: _plain(node[key], leaves) for key in sorted(node)}]
    if kind is list or kind is tuple:
        return [_LIST if kind is list else _TUPLE, [_plain(each, leaves) for each in node]]
    leaf, number = next(leaves, (None, -1))
    if node is not leaf:
        raise TypeError(f"{kind} is no leaf")
    return number


def _renumbered(node: Any, numbers: Sequence[int]) -> Any:
    """Return a node of a plain tree with other numbers of leaves."""
    if type(node) is int:
        return numbers[node]
    if node is None:
        return None
    kind, content = node
    if kind == _DICT:
        return [kind, {key: _renumbered(each, numbers) for key, each in content.items()}]
    return [kind, [_renumbered(each, numbers) for each in content]]


def form_of(name: str, opened: OpenedArrays) -> TreeForm:
    """Return the form of the published tree. Raise ValueError if it is not valid, since any script may publish."""
    try:
        form = msgspec.msgpack.decode(opened.structure, type=decodable(TreeForm))
    except NO_MESSAGE as error:
        raise ValueError(f"the form of the tree {name} cannot be read: {error}") from None
    return form


def divided(name: str, opened: OpenedArrays, form: TreeForm) -> tuple[OpenedArrays, tuple[VersionArray, ...]]:
    """Return the version without its checksums, and the arrays of its checksums.

    Raise ValueError if these cannot be the checksums of the other arrays.
    """
    count = len(opened.arrays) - len(form.checksums)
    arrays, sums = opened.arrays[: max(0, count)], opened.arrays[max(0, count) :]
    numbers = sorted(itertools.chain.from_iterable(form.checksums))
    is_valid = count > 0 and (not form.checksums or numbers == list(range(count)))
    for each, covered in zip(sums, form.checksums, strict=False):
        cells = sum(array_checksums.cells_of(arrays[number].shape) for number in covered) if is_valid else -1
        is_valid = is_valid and (each.dtype, each.shape) == ("uint32", (cells,))
    if not is_valid:
        raise ValueError(f"{name} has an invalid form: its checksums do not fit its arrays")
    return msgspec.structs.replace(opened, arrays=arrays), sums


def check(name: str, opened: OpenedArrays, form: TreeForm, arrays: Sequence[Any], sums: Sequence[Any]) -> None:
    """Raise DATA_LOSS with the devices of arrays that differ from their checksums."""
    expected: dict[int, np.ndarray] = {}
    for numbers, found in zip(form.checksums, sums, strict=True):
        cells = [array_checksums.cells_of(arrays[number].shape) for number in numbers]
        expected.update(zip(numbers, np.split(np.asarray(found), np.cumsum(cells)[:-1]), strict=True))
    wrong = array_checksums.wrong_devices(arrays, [expected[number] for number in range(len(arrays))])
    if wrong:
        named = [
            f"array {opened.arrays[number].path} on {noun_for(len(devices), 'device')} {', '.join(map(str, devices))}"
            for number, devices in itertools.islice(wrong.items(), _MAX_NAMED)
        ]
        more = f" and {counted(len(wrong) - len(named), 'more array')}" if len(wrong) > len(named) else ""
        text = f"version {opened.version} of {name} differs from its checksums: {'; '.join(named)}{more}"
        raise failed(Code.DATA_LOSS, text, Details(Kind.CONTENTS, retriable=True))


def contents_of(opened: OpenedArrays, form: TreeForm) -> Sequence[int]:
    """Return the number of the content of each array, or 0. `opened` is without its checksums."""
    return form.contents if len(form.contents) == len(opened.arrays) else [0] * len(opened.arrays)


def packs_of(name: str, opened: OpenedArrays, form: TreeForm) -> list[Pack | None]:
    """Return the pack that each array of the version is, or None. Raise ValueError if one cannot be a pack."""
    packs = [form.packs.get(number) for number in range(len(opened.arrays))]
    for array, pack in zip(opened.arrays, packs, strict=True):
        if pack is not None:
            try:
                pack.check(array.shape)
            except ValueError as error:
                raise ValueError(f"{name} has an invalid form: {error}") from None
    return packs


def leaf_count(pack: Pack | None) -> int:
    return 1 if pack is None else len(pack.paths)


def numbered_leaves(
    name: str, opened: OpenedArrays, form: TreeForm, packs: list[Pack | None], like: Any
) -> tuple[Any, list[int]]:
    """Return a tree of the form of the published one, and the numbers of its leaves. Raise ValueError if it is unknown.

    The tree is `like` if there is one. Its nodes may refuse numbers in place of arrays.
    """
    import jax

    if like is not None:
        leaves = itertools.chain.from_iterable(
            [array.path] if pack is None else pack.paths for array, pack in zip(opened.arrays, packs, strict=True)
        )
        numbers = {path: number for number, path in enumerate(leaves)}
        paths, _ = jax.tree_util.tree_flatten_with_path(like)
        names = [jax.tree_util.keystr(path) or "." for path, _ in paths]
        if set(names) != set(numbers):
            missing, more = sorted(set(numbers) - set(names))[:5], sorted(set(names) - set(numbers))[:5]
            raise ValueError(f"`like` does not fit {name}: it lacks {missing} and has {more} besides")
        return like, [numbers[each] for each in names]
    plain = bytes(form.tree)
    if plain == bytes(_NO_TREE):
        text = f"{name} has other nodes than dicts with strings as keys, lists and tuples, or is too large"
        raise ValueError(f"{text}: pass a tree of its form as `like`")
    with suppress(ValueError, TypeError, AttributeError, RecursionError, msgspec.DecodeError):
        tree, found = _decoded_tree(plain)
        if len(found) == sum(map(leaf_count, packs)):
            return tree, found
    raise ValueError(f"the form of the tree {name} cannot be read: pass a tree of its form as `like`")


@lru_cache(maxsize=_MAX_OUTLINES)
def _decoded_tree(plain: bytes) -> tuple[Any, list[int]]:
    """Return a tree that a publisher has encoded, and the numbers of its leaves.

    The versions of a name usually have the same tree. Raise an error if the leaves are not numbered from 0.
    """
    import jax

    tree = _unplain(msgspec.msgpack.decode(plain))
    found = jax.tree.leaves(tree)
    if sorted(found) != list(range(len(found))):
        raise ValueError("the leaves do not have the numbers from 0")
    return tree, found


def _unplain(node: Any) -> Any:
    if type(node) is int or node is None:
        return node
    kind, content = node
    if kind == _DICT:
        return {key: _unplain(each) for key, each in content.items()}
    each = [_unplain(each) for each in content]
    return tuple(each) if kind == _TUPLE else each


def shardings_of(tree: Any, numbers: Sequence[int], shardings: Any) -> list[Any]:
    """Return the sharding of each leaf by its number, from a tree of shardings that is a prefix of the tree.

    As in `jax.device_put`, a device stands for the sharding on this device. Raise ValueError if the shardings are not a
    prefix.
    """
    import jax

    places = jax.sharding.Sharding, jax.Device
    if isinstance(shardings, places):
        return [_sharding_on(shardings)] * len(numbers)
    left, chosen = iter(numbers), [None] * len(numbers)

    def fill(sharding: Any, part: Any) -> None:
        if not isinstance(sharding, places):
            raise ValueError(f"the tree of shardings has {sharding!r} in place of a jax.sharding.Sharding")
        for number in itertools.islice(left, jax.tree.structure(part).num_leaves):
            chosen[number] = _sharding_on(sharding)

    try:
        jax.tree.map(fill, shardings, tree, is_leaf=lambda each: isinstance(each, places))
    except ValueError as error:
        text = "pass one sharding, or a tree of shardings that is a prefix of the tree of arrays"
        raise ValueError(f"the shardings do not fit the tree: {text}. {error}") from None
    return chosen


def _sharding_on(place: Any) -> Any:
    import jax

    return jax.sharding.SingleDeviceSharding(place) if isinstance(place, jax.Device) else place


def check_shardings(
    name: str, opened: OpenedArrays, packs: Sequence[Pack | None], shardings: Sequence[list[Any]]
) -> None:
    """Raise ValueError if one of the shardings of an array, or of the arrays in a pack, has too many dimensions."""
    for array, pack, some in zip(opened.arrays, packs, shardings, strict=True):
        shape = array.shape if pack is None else pack.shape
        for sharding in some[:1] if some.count(some[0]) == len(some) else set(some):
            try:
                sharding.check_compatible_aval(shape)
            except ValueError as error:
                raise ValueError(f"the sharding of array {array.path} of {name}: {error}") from None
