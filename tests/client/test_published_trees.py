"""Forms of trees that publishers of other tenants send: subscribers get an error that names the arrays."""

from __future__ import annotations

import itertools
import re
from collections import OrderedDict, namedtuple
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

from atoll.client.array_packing import FEWEST
from atoll.client.client_caches import clear_client_caches
from atoll.client.published_trees import (
    TreeOutline,
    _plain,
    _unplain,
    check_shardings,
    divided,
    form_of,
    numbered_leaves,
    outline_of,
    packs_of,
    shardings_of,
)
from atoll.errors import OK
from atoll.protocol.messages import VersionArray
from atoll.protocol.tree_forms import Pack
from atoll.protocol.version_requests import OpenedArrays

PACK = Pack(("['w'][0]", "['w'][1]"), 2, (3,), (0,), (), ())


def opened(structure: bytes) -> OpenedArrays:
    """Two arrays, of which the second one is a pack of two in a correct form."""
    held = (VersionArray("['b']", "float32", (4,)), VersionArray("['w'][0] and 1 more", "float32", (6,)))
    return OpenedArrays(OK, 1, 1, held, structure)


def tree_of(structure: bytes, like: Any = None) -> Any:
    version = opened(structure)
    form = form_of("eve/policy", version)
    tree, numbers = numbered_leaves("eve/policy", version, form, packs_of("eve/policy", version, form), like)
    return jax.tree.unflatten(jax.tree.structure(tree), numbers)


def encoded(tree: Any, packs: Any = None) -> bytes:
    return msgspec.msgpack.encode([tree, {1: PACK} if packs is None else packs])


def test_a_correct_form_has_the_numbers_of_all_leaves() -> None:
    form = encoded(["dict", {"b": 0, "w": ["list", [1, 2]], "none": None}])
    assert tree_of(form) == {"b": 0, "w": [1, 2], "none": None}
    assert tree_of(form, like={"b": 0.0, "w": (0.0, 0.0)}) == {"b": 0, "w": (1, 2)}


def nested(depth: int) -> bytes:
    return b"\x92" + b"\x92\xa4list\x91" * depth + b"\x00" + b"\x80"


@pytest.mark.parametrize(
    "structure",
    [
        b"",
        b"no msgpack",
        b"\xc1",
        encoded(None),
        encoded(7),
        encoded(["dict", 5]),
        encoded(["dict", {"b": 0}]),
        encoded(["dict", {"b": 0, 7: 1, "c": 2}]),
        encoded(["list", [0, 1, 1]]),
        encoded(["list", [0, 1, 3]]),
        encoded(["list", [0, 1, -1]]),
        encoded(["list", [0, 1, True]]),
        encoded(["list", [0, 1, "ab"]]),
        encoded(["list", [0, 1, b"ab"]]),
        encoded(["list", [0, 1, 1 << 63]]),
        encoded(["list", [0, 1, 2], 3]),
        encoded(["list", [0, 1, 2]], {}),
        encoded(["list", [0, 1, 2]], {0: PACK, 1: PACK}),
        encoded(["list", [0, 1, 2]], {1: msgspec.structs.replace(PACK, shape=(1 << 31,))}),
        encoded(["list", [0, 1, 2]], {"1": PACK}),
        nested(100_000),
        nested(400),
    ],
)
def test_a_wrong_form_is_an_error_that_names_the_arrays(structure: bytes) -> None:
    with pytest.raises(ValueError, match="eve/policy"):
        tree_of(structure)


def plain_of(tree: Any) -> Any:
    return _plain(tree, zip(jax.tree.leaves(tree), itertools.count()))


def test_the_form_of_a_tree_is_read_back() -> None:
    tree = {"b": {}, "c": 2.5, "a": (7, [np.zeros(3), None])}
    assert _unplain(plain_of(tree)) == {"a": (0, [1, None]), "b": {}, "c": 2}


class Node:
    """A node of a tree that accepts arrays only."""

    def __init__(self, *arrays: Any) -> None:
        if not all(isinstance(each, np.ndarray) for each in arrays):
            raise ValueError("not an array")
        self.arrays = arrays


jax.tree_util.register_pytree_node(Node, lambda node: (node.arrays, None), lambda _, arrays: Node(*arrays))
Pair = namedtuple("Pair", ["x"])


@pytest.mark.parametrize(
    "tree",
    [
        Node(np.zeros(1)),
        [Node(np.zeros(1))],
        [np.ones(1), Node()],
        [Node(), np.ones(1)],
        [Node(np.zeros(1), np.zeros(2)), np.ones(1)],
        Pair(np.zeros(1)),
        OrderedDict(a=np.zeros(1)),
        {1: np.zeros(1)},
    ],
)
def test_other_nodes_than_dicts_lists_and_tuples_have_no_form_and_are_not_touched(tree: Any) -> None:
    with pytest.raises(TypeError):
        plain_of(tree)


def decoded(outline: TreeOutline, numbers: list[int]) -> Any:
    return _unplain(msgspec.msgpack.decode(outline.encoded(numbers)))


def test_trees_of_one_form_share_an_outline_and_have_their_own_numbers() -> None:
    tree = {"b": [np.zeros(1), None], "a": (np.ones(2), {})}
    outline, leaves = outline_of(tree)
    again, others = outline_of({"a": (np.zeros(2), {}), "b": [2.5, None]})
    assert again is outline
    assert leaves == [tree["a"][0], tree["b"][0]]
    assert others[1] == 2.5
    assert outline.paths == ("['a'][0]", "['b'][0]")
    for numbers in ([0, 1], [1, 0], [1, 0], [0, 1]):
        assert decoded(outline, numbers) == {"a": (numbers[0], {}), "b": [numbers[1], None]}
    assert outline_of({"a": [np.ones(2), {}], "b": [2.5, None]})[0].paths == outline.paths
    assert outline_of({"a": (np.ones(2), {}), "c": [2.5, None]})[0].paths == ("['a'][0]", "['c'][0]")


@pytest.mark.parametrize("tree", [{"x": {1: np.zeros(1)}}, [Pair(np.zeros(1))], Node(np.zeros(1))])
def test_outlines_of_other_nodes_are_not_shared(tree: Any) -> None:
    """The paths in such nodes may depend on more than the structure: the keys 1 and True are equal."""
    outline, _ = outline_of(tree)
    assert outline_of(tree)[0] is not outline
    assert len(outline.paths) == 1
    with pytest.raises(TypeError):
        outline.encoded([0])


def test_a_tree_of_shardings_may_be_a_prefix_and_its_nodes_get_no_numbers() -> None:
    one, other = (jax.sharding.SingleDeviceSharding(device) for device in jax.devices("cpu")[:1] * 2)
    tree = {"a": Node(np.zeros(1), np.zeros(2)), "b": [np.zeros(3), None]}
    assert shardings_of(tree, [2, 0, 1], {"a": one, "b": [other, None]}) == [one, other, one]
    assert shardings_of(tree, [2, 0, 1], one) == [one] * 3
    for wrong in ({"a": None, "b": one}, {"a": one}, {"a": one, "b": [jax.P()]}, jax.P()):
        text = r"^the shardings do not fit the tree: .*(structure error|in place of a jax\.sharding\.Sharding)"
        with pytest.raises(ValueError, match=re.compile(text, re.DOTALL)):
            shardings_of(tree, [2, 0, 1], wrong)


def test_a_sharding_of_too_many_dimensions_names_the_array() -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[:1]), "x")
    row, column = (jax.sharding.NamedSharding(mesh, spec) for spec in (jax.P("x"), jax.P(None, "x")))
    version = opened(encoded(["list", [0, 1, 2]]))
    check_shardings("eve/policy", version, [None, PACK], [[row], [row, row]])
    for wrong, path in (([[column], [row, row]], r"\['b'\]"), ([[row], [row, column]], r"\['w'\]\[0\] and 1 more")):
        with pytest.raises(ValueError, match=f"the sharding of array {path} of eve/policy: .*rank"):
            check_shardings("eve/policy", version, [None, PACK], wrong)


def with_checksums(checksums: Any, cells: int = 6) -> OpenedArrays:
    """The two arrays, and one more that may have their checksums."""
    version = opened(msgspec.msgpack.encode([None, {}, checksums]))
    return msgspec.structs.replace(version, arrays=(*version.arrays, VersionArray("checksums 0", "uint32", (cells,))))


def test_checksums_are_no_leaves() -> None:
    version = with_checksums([[1, 0]])
    rest, sums = divided("eve/policy", version, form_of("eve/policy", version))
    assert rest == opened(version.structure)
    assert sums == version.arrays[2:]


@pytest.mark.parametrize(
    ("checksums", "cells"),
    [
        ([[0]], 4),
        ([[0, 1, 1]], 8),
        ([[0, 2]], 6),
        ([[0, 1]], 7),
        ([[0, 1]] * 3, 6),
        ([[0], [1]], 6),
        ([[0, 1 << 31]], 6),
    ],
)
def test_checksums_of_other_arrays_are_refused(checksums: Any, cells: int) -> None:
    version = with_checksums(checksums, cells)
    with pytest.raises(ValueError, match="its checksums do not fit its arrays"):
        divided("eve/policy", version, form_of("eve/policy", version))


def test_trees_of_the_same_types_share_a_layout_which_ends_with_the_client() -> None:
    small, other = jnp.zeros(4), jnp.zeros(4, "int32")
    outline, leaves = outline_of([small] * FEWEST + [other])
    layout = outline.layout_of(leaves)
    assert [each.positions for each in layout.places] == [list(range(FEWEST)), [FEWEST]]
    assert outline.layout_of([each + 1 for each in leaves]) is layout
    assert layout.structure(outline, (), ()) is layout.structure(outline, (), ())
    assert layout.structure(outline, (), (0, 7)) != layout.structure(outline, (), ())
    converted = outline.layout_of([small.astype("bfloat16")] * FEWEST + [other])
    assert converted is not layout
    assert outline.layout_of(leaves) is layout
    alone = outline.layout_of([*leaves[1:], other])
    assert len(alone.places) == FEWEST + 1
    clear_client_caches()
    assert outline.layout_of([*leaves[1:], other]) is not alone


def test_a_device_stands_for_the_sharding_on_it() -> None:
    one, two = jax.devices()[:2]
    on_one, on_two = map(jax.sharding.SingleDeviceSharding, (one, two))
    tree = {"a": 0, "b": [1, 2]}
    assert shardings_of(tree, (0, 1, 2), one) == [on_one] * 3
    assert shardings_of(tree, (0, 1, 2), {"a": on_one, "b": two}) == [on_one, on_two, on_two]
