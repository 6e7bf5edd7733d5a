"""The form of a published tree: the arrays that a request publishes, and the tree that subscribers make of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from atoll.client import array_checksums, array_packing
from atoll.errors import Code, Details, Kind, StatusError, failed
from atoll.protocol.messages import MOST_STRUCTURE, VersionArray
from atoll.protocol.tree_forms import Pack, TreeForm
from atoll.protocol.version_requests import OpenedVersion
from atoll.wire.framing import NO_MESSAGE

_MOST_SUMMED = 128  # arrays whose checksums one function computes
_MOST_NAMED = 5  # arrays in the text of an error
_DICT, _LIST, _TUPLE = "dict", "list", "tuple"


class StagedArray(NamedTuple):
    """An array of a request: a leaf of the tree, or a pack of several."""

    devices: tuple[int, ...]
    value: Any
    path: str
    pack: Pack | None
    positions: list[int]  # of the leaves in the tree


def arrays_to_publish(
    tree: Any, leaves: Sequence[Any], paths: Sequence[str], copies: bool, checksums: bool
) -> tuple[list[StagedArray], bytes]:
    """Return the arrays of the request, sorted by devices, and the encoded form of the tree.

    With `copies`, the arrays are copies. Otherwise they are the leaves of the tree, and packs of small leaves. With
    `checksums`, arrays with their checksums follow.
    """
    groups = array_packing.groups(leaves)
    arrays = []
    for positions, count in groups:
        value, pack = array_packing.pack(
            [leaves[each] for each in positions], [paths[each] for each in positions], count
        )
        path = f"{paths[positions[0]]} and {len(positions) - 1} more"
        arrays.append(StagedArray(_devices(value), value, path, pack, positions))
    packed = set(itertools.chain.from_iterable(positions for positions, _ in groups))
    alone = [position for position in range(len(leaves)) if position not in packed]
    values = [leaves[position] for position in alone]
    for position, leaf in zip(alone, array_packing.copied(values) if copies else values, strict=True):
        arrays.append(StagedArray(_devices(leaf), leaf, paths[position], None, [position]))
    arrays.sort(key=lambda array: array.devices)
    groups_of_sums = tuple(_numbers_by_devices(arrays)) if checksums else ()
    structure = _encode_structure(tree, arrays, groups_of_sums)
    for place, numbers in enumerate(groups_of_sums):
        value = array_checksums.checksums([arrays[number].value for number in numbers])
        arrays.append(StagedArray(_devices(value), value, f"checksums {place}", None, []))
    return arrays, structure


def _numbers_by_devices(arrays: Sequence[StagedArray]) -> Iterator[tuple[int, ...]]:
    """Yield the numbers of arrays on the same devices, at most `_MOST_SUMMED` at once."""
    for _, some in itertools.groupby(range(len(arrays)), key=lambda number: arrays[number].devices):
        numbers = tuple(some)
        yield from (numbers[first : first + _MOST_SUMMED] for first in range(0, len(numbers), _MOST_SUMMED))


def _devices(array: Any) -> tuple[int, ...]:
    return tuple(device.id for device in array.sharding._device_assignment)


def _encode_structure(tree: Any, arrays: Sequence[StagedArray], checksums: tuple[tuple[int, ...], ...]) -> bytes:
    """Return the form of the tree; b"" if it is too large and not needed."""
    import jax

    order = list(itertools.chain.from_iterable(each.positions for each in arrays))
    numbers = [0] * len(order)
    for number, position in enumerate(order):
        numbers[position] = number
    packs = {number: each.pack for number, each in enumerate(arrays) if each.pack is not None}
    try:
        plain = _plain(jax.tree.unflatten(jax.tree.structure(tree), numbers))
    except TypeError:
        plain = None
    for form in (TreeForm(plain, packs, checksums), TreeForm(None, packs, checksums)):
        content = msgspec.msgpack.encode(form)
        if len(content) <= MOST_STRUCTURE:
            return content
    text = f"the paths of {len(order)} arrays have more than {MOST_STRUCTURE >> 20} MiB: publish fewer arrays at once"
    raise StatusError(Code.INVALID_ARGUMENT, text)


def _plain(node: Any) -> Any:
    """Return a node as lists, in which numbers are leaves. Raise TypeError for nodes of other types."""
    kind = type(node)
    if kind is int or node is None:
        return node
    if kind is dict and all(type(key) is str for key in node):
        return [_DICT, {key: _plain(each) for key, each in node.items()}]
    if kind is list or kind is tuple:
        return [_LIST if kind is list else _TUPLE, [_plain(each) for each in node]]
    raise TypeError


def form_of(name: str, opened: OpenedVersion) -> TreeForm:
    """Return the form of the published tree. Raise ValueError if it is not valid, since any script may publish."""
    try:
        form = msgspec.msgpack.decode(opened.structure, type=TreeForm)
    except NO_MESSAGE as error:
        raise ValueError(f"the form of the tree {name} cannot be read: {error}") from None
    return form


def divided(name: str, opened: OpenedVersion, form: TreeForm) -> tuple[OpenedVersion, tuple[VersionArray, ...]]:
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


def check(name: str, opened: OpenedVersion, form: TreeForm, arrays: Sequence[Any], sums: Sequence[Any]) -> None:
    """Raise DATA_LOSS with the devices of arrays that differ from their checksums."""
    expected: dict[int, np.ndarray] = {}
    for numbers, found in zip(form.checksums, sums, strict=True):
        cells = [array_checksums.cells_of(arrays[number].shape) for number in numbers]
        expected.update(zip(numbers, np.split(np.asarray(found), np.cumsum(cells)[:-1]), strict=True))
    wrong = array_checksums.wrong_devices(arrays, [expected[number] for number in range(len(arrays))])
    if wrong:
        named = [
            f"array {opened.arrays[number].path} on device{'s' * (len(devices) > 1)} {', '.join(map(str, devices))}"
            for number, devices in itertools.islice(wrong.items(), _MOST_NAMED)
        ]
        more = f" and {len(wrong) - len(named)} more arrays" if len(wrong) > len(named) else ""
        text = f"version {opened.version} of {name} differs from its checksums: {'; '.join(named)}{more}"
        raise failed(Code.DATA_LOSS, text, Details(Kind.CONTENTS, retriable=True))


def packs_of(name: str, opened: OpenedVersion, form: TreeForm) -> list[Pack | None]:
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


def numbered_tree(name: str, opened: OpenedVersion, form: TreeForm, packs: list[Pack | None], like: Any) -> Any:
    """Return the published tree with the numbers of leaves. Raise ValueError if the form is unknown."""
    import jax

    if like is not None:
        leaves = itertools.chain.from_iterable(
            [array.path] if pack is None else pack.paths for array, pack in zip(opened.arrays, packs, strict=True)
        )
        numbers = {path: number for number, path in enumerate(leaves)}
        paths, definition = jax.tree_util.tree_flatten_with_path(like)
        names = [jax.tree_util.keystr(path) or "." for path, _ in paths]
        if set(names) != set(numbers):
            missing, more = sorted(set(numbers) - set(names))[:5], sorted(set(names) - set(numbers))[:5]
            raise ValueError(f"`like` does not fit {name}: it lacks {missing} and has {more} besides")
        return jax.tree.unflatten(definition, [numbers[each] for each in names])
    if form.tree is None:
        raise ValueError(f"{name} has nodes that are not dicts, lists or tuples: pass a tree of its form as `like`")
    try:
        tree = _unplain(form.tree)
        found = jax.tree.leaves(tree)
    except (ValueError, TypeError, AttributeError, RecursionError):
        found = []
    if sorted(found) != list(range(sum(map(leaf_count, packs)))):
        raise ValueError(f"the form of the tree {name} cannot be read: pass a tree of its form as `like`")
    return tree


def _unplain(node: Any) -> Any:
    if type(node) is int or node is None:
        return node
    kind, content = node
    if kind == _DICT:
        return {key: _unplain(each) for key, each in content.items()}
    each = [_unplain(each) for each in content]
    return tuple(each) if kind == _TUPLE else each


def fill_shardings(tree: Any, shardings: Any, chosen: list[Any]) -> None:
    """Set the sharding of each array from a tree of shardings that is a prefix of the tree of numbers."""
    import jax

    def fill(sharding: Any, part: Any) -> None:
        for number in jax.tree.leaves(part):
            chosen[number] = sharding

    is_sharding = lambda each: isinstance(each, jax.sharding.Sharding)  # noqa: E731
    jax.tree.map(fill, shardings, tree, is_leaf=is_sharding)
    if None in chosen:
        raise ValueError("the tree of shardings has no sharding for some arrays")
