"""Prints and parses the dialect's numbers, arrays and locations.

Texts are short for any number of shards. They contain ranges in lists of numbers (`[0:2048]`, `[0:16:2]`), repeated
shapes once with their number, and no order of tiles if it is 0, 1, 2, ...
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import TypeVar

from xdsl.parser import AttrParser

from atoll.cluster.locations import DeviceLocation
from atoll.ir.exchange import runs
from atoll.ir.types import ArraySpec, Box, Even, Opaque, Replicated, Shape, Sharding, Tiled, Tiling, Uneven

T = TypeVar("T")


def list_text(numbers: Sequence[int]) -> str:
    return f"[{', '.join(map(str, numbers))}]"


def parse_list(parser: AttrParser, parse: Callable[[], T]) -> tuple[T, ...]:
    """Parse items in square brackets, separated by commas."""
    return tuple(parser.parse_comma_separated_list(parser.Delimiter.SQUARE, parse))


def parse_numbers(parser: AttrParser) -> Shape:
    return parse_list(parser, parser.parse_integer)


# ---- ranges


def range_text(first: int, count: int, step: int = 1) -> str:
    if count == 1:
        return str(first)
    return f"{first}:{first + count * step}" + (f":{step}" if step != 1 else "")


def ranges_text(numbers: Sequence[int]) -> str:
    """Return, for example, `[0:8]` or `[0:4, 9]`."""
    return f"[{', '.join(range_text(*run) for run in runs(numbers))}]"


def parse_range(parser: AttrParser) -> tuple[int, ...]:
    first = parser.parse_integer()
    if parser.parse_optional_punctuation(":") is None:
        return (first,)
    stop = parser.parse_integer()
    step = parser.parse_integer() if parser.parse_optional_punctuation(":") else 1
    return tuple(range(first, stop, step))


def parse_ranges(parser: AttrParser) -> tuple[int, ...]:
    return tuple(number for part in parse_list(parser, lambda: parse_range(parser)) for number in part)


# ---- arrays


def array_text(spec: ArraySpec) -> str:
    """Return, for example, `float32[8, 128], devices = [0:8], tiled = [8, 1], memory = "host", layout = [1, 0]`."""
    sharding = spec.sharding
    text = f"{spec.dtype}{list_text(spec.shape)}, devices = {ranges_text(sharding.devices)}"
    text += _tiling_text(sharding.tiling)
    if sharding.memory_kind:
        text += f", memory = {json.dumps(sharding.memory_kind)}"
    if spec.layout is not None:
        text += f", layout = {list_text(spec.layout)}"
    return text


def _tiling_text(tiling: Tiling) -> str:
    match tiling:
        case Replicated():
            return ""
        case Tiled(dims=dims, order=order):
            iota = order == tuple(range(len(order)))
            return f", tiled = {list_text(dims)}" + ("" if iota else f" order {ranges_text(order)}")
        case Even(shard_shape=shape):
            return f", even = {list_text(shape)}"
        case Uneven(shard_shapes=shapes):
            return f", uneven = [{', '.join(_times(shape, len([*same])) for shape, same in groupby(shapes))}]"
    return ", opaque"


def _times(shape: Shape, count: int) -> str:
    return f"{list_text(shape)} x {count}" if count > 1 else list_text(shape)


def parse_array(parser: AttrParser) -> ArraySpec:
    dtype, shape = parser.parse_identifier(), parse_numbers(parser)
    parser.parse_punctuation(",")
    _keyword(parser, "devices")
    devices = parse_ranges(parser)
    tiling: Tiling = Replicated()
    memory, layout = "", None
    while parser.parse_optional_punctuation(","):
        match parser.parse_keyword_in(("tiled", "even", "uneven", "opaque", "memory", "layout")):
            case "tiled":
                parser.parse_punctuation("=")
                dims = parse_numbers(parser)
                ordered = parser.parse_optional_keyword("order") is not None
                tiling = Tiled(dims, parse_ranges(parser) if ordered else tuple(range(len(devices))))
            case "even":
                parser.parse_punctuation("=")
                tiling = Even(parse_numbers(parser))
            case "uneven":
                parser.parse_punctuation("=")
                repeated = parse_list(parser, lambda: _parse_times(parser))
                tiling = Uneven(tuple(shape for shapes in repeated for shape in shapes))
            case "opaque":
                tiling = Opaque()
            case "memory":
                parser.parse_punctuation("=")
                memory = parser.parse_str_literal()
            case _:
                parser.parse_punctuation("=")
                layout = parse_numbers(parser)
    return ArraySpec(dtype, shape, Sharding(devices, tiling, memory), layout)


def _parse_times(parser: AttrParser) -> tuple[Shape, ...]:
    shape = parse_numbers(parser)
    return (shape,) * (parser.parse_integer() if parser.parse_optional_keyword("x") else 1)


def _keyword(parser: AttrParser, word: str) -> None:
    parser.parse_keyword(word)
    parser.parse_punctuation("=")


def box_text(box: Box) -> str:
    return f"[{', '.join(f'{start}:{stop}' for start, stop in box)}]"


# ---- locations


def locations_text(locations: Sequence[DeviceLocation]) -> str:
    """Return, for example, `[island 0 hosts 0:256 each [0:8]]`. Consecutive hosts with equal ordinals are combined."""
    single = [
        (island, host, tuple(location.ordinal for location in group))
        for (island, host), group in groupby(locations, key=lambda location: (location.island, location.host))
    ]
    texts = []
    for (island, ordinals), group in groupby(single, key=lambda each: (each[0], each[2])):
        for first, count, step in runs([host for _, host, _ in group]):
            texts.append(f"island {island} hosts {range_text(first, count, step)} each {ranges_text(ordinals)}")
    return f"[{', '.join(texts)}]"


def parse_locations(parser: AttrParser) -> tuple[DeviceLocation, ...]:
    def several() -> list[DeviceLocation]:
        parser.parse_keyword("island")
        island = parser.parse_integer()
        parser.parse_keyword("hosts")
        hosts = parse_range(parser)
        parser.parse_keyword("each")
        ordinals = parse_ranges(parser)
        return [DeviceLocation(island, host, ordinal) for host in hosts for ordinal in ordinals]

    return tuple(location for group in parse_list(parser, several) for location in group)
