"""Parse the text of programs, as rendered by `atoll.ir.text.render`, so that tests can contain programs as text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import TypeVar

from msgspec.structs import replace

from atoll.ir.program import (
    Call,
    DeviceToHost,
    HostBuffer,
    HostToDevice,
    Mapping,
    Node,
    Program,
    Rearrange,
    Report,
    Route,
    Transfer,
    Unroute,
    output_count,
)
from atoll.ir.types import ArraySpec, Even, Opaque, Replicated, Sharding, Tiled, Tiling, Uneven

T = TypeVar("T")

_TOKEN = re.compile(r'\s+|("(?:[^"\\]|\\.)*"|!?[A-Za-z_][\w.]*|-?\d+|->|.)')


def parse(text: str, functions: Sequence[str]) -> Program:
    """Return the program. `functions[i]` is the name of function i."""
    return _Parser(text, functions).program()


class _Parser:
    def __init__(self, text: str, functions: Sequence[str]) -> None:
        self.tokens = [token for token in _TOKEN.findall(text) if token]
        self.functions = functions
        self.numbers: dict[str, int] = {}  # of values, by the text's numbers

    def program(self) -> Program:
        self.expect("builtin.module", "{", "atoll.program", "@")
        name = self.name()
        arguments = self.list(self.argument, "(", ")")
        feeds = self.integer() if self.has("feeds") else 0
        self.expect("{")
        nodes: list[Node] = []
        while not self.has("atoll.return"):
            nodes.append(self.node())
        results = self.list(self.value, "(", ")")
        self.expect("}", "}")
        assert not self.tokens
        return Program(name, arguments, tuple(nodes), results, feeds)

    def argument(self) -> ArraySpec:
        self.define()
        self.expect(":")
        return self.array()

    def node(self) -> Node:
        values = 0
        if self.tokens[0] == "%":
            values = len(self.items(self.define))
            self.expect("=")
        kind = self.take().removeprefix("atoll.")
        node: Node = getattr(self, f"_{kind}")()
        types = self.items(self.type) if self.has(":") else ()
        node = replace(node, outputs=tuple(spec for spec in types if spec is not None))
        if isinstance(node, Call):
            node = replace(node, completion=None in types)
        assert output_count(node) == values == len(types)
        return node

    def _call(self) -> Call:
        self.expect("@")
        function = self.functions.index(self.name())
        inputs = self.list(self.value, "(", ")")
        self.expect("on")
        devices = self.ranges()
        donated = self.ranges() if self.has("donate") else ()
        preserved = self.ranges() if self.has("preserve") else ()
        stream = self.integer() if self.has("stream") else None
        return Call(function, inputs, (), devices, donated, preserved, False, stream)

    def _put(self) -> HostToDevice:
        lists = [self.list(self.host_buffers)]
        while self.has(","):
            lists.append(self.list(self.host_buffers))
        buffers = [replace(each, output=output) for output, own in enumerate(lists) for some in own for each in some]
        return HostToDevice(tuple(buffers), ())

    def _get(self) -> DeviceToHost:
        values = self.items(self.value)
        positions = self.ranges() if self.has("shards") else ()
        self.expect("feed")
        return DeviceToHost(values, self.integer(), self.strides(), (), positions)

    def _report(self) -> Report:
        return Report((self.value(),))

    def _transfer(self) -> Transfer:
        inputs = self.items(self.value)
        return Transfer(inputs, (), self.has("donate"), self.has("reshard"))

    def _rearrange(self) -> Rearrange:
        inputs, mappings = self.items(self.value), self.list(self.mapping)
        return Rearrange(inputs, (), mappings, self.has("donate"), self.has("bitcast"))

    def _route(self) -> Route:
        inputs = self.items(self.value)
        self.expect("groups")
        return Route(inputs, (), self.integer())

    def _unroute(self) -> Unroute:
        route = self._route()
        return Unroute(route.inputs, (), route.groups)  # type: ignore[arg-type]

    def host_buffers(self) -> list[HostBuffer]:
        one = self.take() == "feed"
        feeds = self.range()
        shape, strides = self.list(self.integer), self.strides()
        if not self.has("->"):
            return [HostBuffer(feeds[0], shape, strides, None)]
        positions = self.ranges()
        if one:
            return [HostBuffer(feeds[0], shape, strides, positions)]
        return [HostBuffer(feed, shape, strides, (each,)) for feed, each in zip(feeds, positions, strict=True)]

    def mapping(self) -> Mapping:
        source, taken = self.shards()
        self.expect("->")
        target, given = self.shards()
        return Mapping(source, target, taken, given)

    def shards(self) -> tuple[int, tuple[int, int, int]]:
        array = self.integer()
        self.expect("at")
        start = self.integer()
        self.expect(":")
        stop = self.integer()
        return array, (start, stop, self.integer() if self.has(":") else 1)

    # ---- types

    def type(self) -> ArraySpec | None:
        return None if self.has("!atoll.completion") else self.array()

    def array(self) -> ArraySpec:
        self.expect("!atoll.array", "<")
        dtype, shape = self.take(), self.list(self.integer)
        self.expect(",", "devices", "=")
        devices = self.ranges()
        tiling: Tiling = Replicated()
        memory, layout = "", None
        while self.has(","):
            word = self.take()
            if word == "opaque":
                tiling = Opaque()
                continue
            self.expect("=")
            match word:
                case "tiled":
                    dims = self.list(self.integer)
                    tiling = Tiled(dims, self.ranges() if self.has("order") else tuple(range(len(devices))))
                case "even":
                    tiling = Even(self.list(self.integer))
                case "uneven":
                    tiling = Uneven(tuple(shape for shapes in self.list(self.repeated) for shape in shapes))
                case "memory":
                    memory = json.loads(self.take())
                case "layout":
                    layout = self.list(self.integer)
        self.expect(">")
        return ArraySpec(dtype, shape, Sharding(devices, tiling, memory), layout)

    def repeated(self) -> tuple[tuple[int, ...], ...]:
        shape = self.list(self.integer)
        return (shape,) * (self.integer() if self.has("x") else 1)

    def strides(self) -> tuple[int, ...] | None:
        return self.list(self.integer) if self.has("strides") else None

    # ---- tokens

    def take(self) -> str:
        return self.tokens.pop(0)

    def has(self, token: str) -> bool:
        found = self.tokens[0] == token
        if found:
            self.take()
        return found

    def expect(self, *tokens: str) -> None:
        for token in tokens:
            found = self.take()
            assert found == token, f"expected {token}, not {found}"

    def integer(self) -> int:
        return int(self.take())

    def name(self) -> str:
        token = self.take()
        return str(json.loads(token)) if token.startswith('"') else token

    def define(self) -> None:
        self.expect("%")
        self.numbers[self.take()] = len(self.numbers)

    def value(self) -> int:
        self.expect("%")
        return self.numbers[self.take()]

    def items(self, item: Callable[[], T]) -> tuple[T, ...]:
        found = [item()]
        while self.has(","):
            found.append(item())
        return tuple(found)

    def list(self, item: Callable[[], T], start: str = "[", stop: str = "]") -> tuple[T, ...]:
        self.expect(start)
        if self.has(stop):
            return ()
        found = self.items(item)
        self.expect(stop)
        return found

    def range(self) -> tuple[int, ...]:
        start = self.integer()
        if not self.has(":"):
            return (start,)
        stop = self.integer()
        return tuple(range(start, stop, self.integer() if self.has(":") else 1))

    def ranges(self) -> tuple[int, ...]:
        return tuple(number for some in self.list(self.range) for number in some)
