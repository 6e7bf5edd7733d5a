"""Objects are dumped with the versions of their structs, and loaded by a version of Atoll that can read them."""

from __future__ import annotations

from collections import Counter, deque
from functools import partial
from typing import Any

import msgspec
import pytest

from atoll.errors import IncompatibleJournalError, JournalError
from atoll.state import object_dumps
from atoll.state.object_dumps import (
    AnyRef,
    Callback,
    CountsOf,
    Deque,
    Dump,
    Ref,
    Shared,
    callback,
    decode,
    dump,
    dump_of,
    encode,
    load,
)


class Node:
    """An object with all kinds of attributes."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.following: Node | None = None
        self.others: dict[int, Node] = {}
        self.queue: deque[Node] = deque()
        self.counts: Counter[str] = Counter()
        self.shape: tuple[int, ...] = ()
        self.call: Any = None
        self.any: Any = None
        self.cache = "computed"

    def called(self, other: Node, number: int) -> str:
        return f"{self.name} {other.name} {number}"


@dump_of(Node, "test node", version=3, oldest=2, rebuilt={"cache": lambda: "computed again"})
class NodeDump(Dump):
    name: str
    shape: Shared[tuple[int, ...]]
    following: Ref[Node] | None = None
    others: dict[int, Ref[Node]] = {}
    queue: Deque[Ref[Node]] = []
    counts: CountsOf[str] = {}
    call: Callback | None = None
    any: AnyRef | None = None


callback("test node: called", Node, Node.called, Ref[Node], int)


def graph() -> Node:
    root, one, other = Node("root"), Node("one"), Node("other")
    root.following, root.others, root.queue = one, {7: other, 3: root}, deque([other, one, other])
    one.shape = other.shape = (1, 2)
    one.counts.update("aab")
    other.call, other.any = partial(root.called, one, 5), one
    return root


def loaded(content: bytes) -> Node:
    root = Node("")
    load(decode(content), {"root": root})
    return root


def test_a_graph_with_cycles_comes_back_as_it_was() -> None:
    root = loaded(encode(dump({"root": graph()})))
    one, other = root.following, root.others[7]
    assert one is not None
    assert (root.name, one.name, other.name, list(root.others)) == ("root", "one", "other", [7, 3])
    assert root.others[3] is root
    assert list(root.queue) == [other, one, other]
    assert type(root.queue) is deque
    assert one.shape is other.shape
    assert (one.counts, type(one.counts)) == (Counter("aab"), Counter)
    assert other.call() == "root one 5"
    assert other.any is one
    assert (root.cache, one.cache) == ("computed", "computed again"), "the root exists already"


def test_a_long_chain_of_objects_needs_no_deep_stack() -> None:
    root = last = Node("0")
    for number in range(1, 30_000):
        last.following = Node(str(number))
        last = last.following
    again: Node | None = loaded(encode(dump({"root": root})))
    count = 0
    while again is not None:
        assert again.name == str(count)
        again, count = again.following, count + 1
    assert count == 30_000


def changed(change: Any) -> bytes:
    content = msgspec.msgpack.decode(encode(dump({"root": graph()})))
    change(content)
    return msgspec.msgpack.encode(content)


def test_a_field_that_is_missing_has_its_default_and_an_unknown_one_is_skipped() -> None:
    def change(content: Any) -> None:
        for each in content["tables"]["test node"]:
            each.pop("counts", None)
            each["new"] = [1, 2]

    root = loaded(changed(change))
    assert root.following is not None
    assert (root.following.name, root.following.counts) == ("one", Counter())


@pytest.mark.parametrize("versions", [(3, 2), (2, 1), (2, 2), (4, 3), (9, 1)])
def test_versions_that_can_be_exchanged_are_read(versions: tuple[int, int]) -> None:
    def change(content: Any) -> None:
        content["versions"]["test node"] = versions
        content["atoll"] = "9.9"

    assert loaded(changed(change)).name == "root"


@pytest.mark.parametrize(("versions", "version"), [((1, 1), 1), ((4, 4), 4), ((9, 5), 9)])
def test_other_versions_are_refused_and_both_are_named(
    versions: tuple[int, int], version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def change(content: Any) -> None:
        content["versions"]["test node"] = versions
        content["atoll"] = "9.9"

    text = rf"atoll 9\.9 stored version {version} of 'test node', and atoll .* reads versions 2 to 3"
    with pytest.raises(IncompatibleJournalError, match=text):
        loaded(changed(change))


def test_a_struct_that_is_unknown_is_refused() -> None:
    def change(content: Any) -> None:
        content["tables"]["another"] = [{}]

    with pytest.raises(IncompatibleJournalError, match="stored 'another'"):
        loaded(changed(change))


@pytest.mark.parametrize("content", [b"", b"\x80", b"something else"])
def test_what_is_no_dump_is_an_error(content: bytes) -> None:
    with pytest.raises(JournalError):
        loaded(content)


def test_an_object_that_refers_to_nothing_in_the_dump_is_an_error() -> None:
    def change(content: Any) -> None:
        content["tables"]["test node"][0]["following"] = 99

    with pytest.raises(JournalError, match="cannot be read"):
        loaded(changed(change))


def test_what_has_no_struct_or_name_cannot_be_dumped() -> None:
    root = graph()
    root.any = object_dumps.As(list)
    with pytest.raises(TypeError, match="As has no declared struct"):
        dump({"root": root})
    root.any, root.call = None, graph
    with pytest.raises(TypeError, match="graph is not declared as a callback"):
        dump({"root": root})
