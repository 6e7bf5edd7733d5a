"""The dialect's attributes and types. Each wraps plain data of `atoll.ir`, whose size does not depend on shards."""

from __future__ import annotations

from abc import abstractmethod
from typing import TypeVar

from xdsl.ir import Data, ParametrizedAttribute, TypeAttribute
from xdsl.irdl import irdl_attr_definition
from xdsl.parser import AttrParser
from xdsl.printer import Printer

from atoll.cluster.locations import DeviceLocation
from atoll.ir.dialect import syntax
from atoll.ir.geometry import Located
from atoll.ir.program import HostBuffer, Mapping
from atoll.ir.types import ArraySpec

DataT = TypeVar("DataT")


class Bare(Data[DataT]):
    """An attribute that ops print without its name and brackets."""

    @classmethod
    @abstractmethod
    def parse_bare(cls, parser: AttrParser) -> DataT: ...

    @abstractmethod
    def text(self) -> str: ...

    @classmethod
    def parse_parameter(cls, parser: AttrParser) -> DataT:
        with parser.in_angle_brackets():
            return cls.parse_bare(parser)

    def print_parameter(self, printer: Printer) -> None:
        printer.print_string(f"<{self.text()}>")


@irdl_attr_definition
class Numbers(Bare[tuple[int, ...]]):
    """Virtual devices or positions of inputs: `[0:8]`, `[0, 2, 7]`."""

    name = "atoll.numbers"

    @classmethod
    def parse_bare(cls, parser: AttrParser) -> tuple[int, ...]:
        return syntax.parse_ranges(parser)

    def text(self) -> str:
        return syntax.ranges_text(self.data)


@irdl_attr_definition
class Strides(Bare[tuple[int, ...]]):
    """Strides of the dimensions, in bytes: `[16, 4]`."""

    name = "atoll.strides"

    @classmethod
    def parse_bare(cls, parser: AttrParser) -> tuple[int, ...]:
        return syntax.parse_numbers(parser)

    def text(self) -> str:
        return syntax.list_text(self.data)


@irdl_attr_definition
class DeviceLocations(Bare[tuple[DeviceLocation, ...]]):
    """Physical devices: `[island 0 hosts 0:2 each [0:4]]`."""

    name = "atoll.locations"

    @classmethod
    def parse_bare(cls, parser: AttrParser) -> tuple[DeviceLocation, ...]:
        return syntax.parse_locations(parser)

    def text(self) -> str:
        return syntax.locations_text(self.data)


@irdl_attr_definition
class HostBuffers(Bare[tuple[HostBuffer, ...]]):
    """The client's buffers for a put: `[feed 0 [4, 4] strides [16, 4]]`, `[feeds 0:2 [2] -> [0:2]]`.

    A `feed` fills all of the given positions, or without positions the whole array. Each of several `feeds` fills one
    position.
    """

    name = "atoll.buffers"

    @classmethod
    def parse_bare(cls, parser: AttrParser) -> tuple[HostBuffer, ...]:
        def several() -> list[HostBuffer]:
            one = parser.parse_keyword_in(("feed", "feeds")) == "feed"
            feeds = syntax.parse_range(parser)
            shape = syntax.parse_numbers(parser)
            strides = syntax.parse_numbers(parser) if parser.parse_optional_keyword("strides") else None
            if parser.parse_optional_punctuation("->") is None:
                return [HostBuffer(feeds[0], shape, strides, None)]
            positions = syntax.parse_ranges(parser)
            if one:
                return [HostBuffer(feeds[0], shape, strides, positions)]
            return [HostBuffer(f, shape, strides, (p,)) for f, p in zip(feeds, positions, strict=True)]

        return tuple(buffer for group in syntax.parse_list(parser, several) for buffer in group)

    def text(self) -> str:
        texts = []
        at = 0
        while at < len(self.data):
            first, end = self.data[at], at + 1
            if first.positions is not None and len(first.positions) == 1:
                while end < len(self.data) and self.data[end] == HostBuffer(
                    first.feed + end - at, first.shape, first.strides, (first.positions[0] + end - at,)
                ):
                    end += 1
            text = f"{'feed' if end == at + 1 else 'feeds'} {syntax.range_text(first.feed, end - at)}"
            text += f" {syntax.list_text(first.shape)}"
            if first.strides is not None:
                text += f" strides {syntax.list_text(first.strides)}"
            if first.positions is not None:
                here = first.positions if end == at + 1 else range(first.positions[0], first.positions[0] + end - at)
                text += f" -> {syntax.ranges_text(here)}"
            texts.append(text)
            at = end
        return f"[{', '.join(texts)}]"


@irdl_attr_definition
class Mappings(Bare[tuple[Mapping, ...]]):
    """The sources of a rearrangement's shards: `[0 at 0:4:2 -> 1 at 0:2]` (shards of input 0 to those of output 1)."""

    name = "atoll.mappings"

    @classmethod
    def parse_bare(cls, parser: AttrParser) -> tuple[Mapping, ...]:
        def shards() -> tuple[int, tuple[int, int, int]]:
            which = parser.parse_integer()
            parser.parse_keyword("at")
            start = parser.parse_integer()
            parser.parse_punctuation(":")
            stop = parser.parse_integer()
            return which, (start, stop, parser.parse_integer() if parser.parse_optional_punctuation(":") else 1)

        def one() -> Mapping:
            source, taken = shards()
            parser.parse_punctuation("->")
            target, given = shards()
            return Mapping(source, target, taken, given)

        return syntax.parse_list(parser, one)

    def text(self) -> str:
        def shards(which: int, bounds: tuple[int, int, int]) -> str:
            start, stop, step = bounds
            return f"{which} at {start}:{stop}" + (f":{step}" if step != 1 else "")

        texts = [f"{shards(m.input, m.source)} -> {shards(m.output, m.target)}" for m in self.data]
        return f"[{', '.join(texts)}]"


@irdl_attr_definition
class ArrayType(Data[ArraySpec], TypeAttribute):
    """A sharded array on virtual devices: `!atoll.array<float32[8, 128], devices = [0:8], tiled = [8, 1]>`.

    The text omits the tiling of a replicated array, and the default memory kind and layout.
    """

    name = "atoll.array"

    @classmethod
    def parse_parameter(cls, parser: AttrParser) -> ArraySpec:
        with parser.in_angle_brackets():
            return syntax.parse_array(parser)

    def print_parameter(self, printer: Printer) -> None:
        printer.print_string(f"<{syntax.array_text(self.data)}>")


@irdl_attr_definition
class PlacedType(Data[Located], TypeAttribute):
    """A sharded array on physical devices: `!atoll.placed<at = [island 0 hosts 0:2 each [0:4]], ...>`."""

    name = "atoll.placed"

    @classmethod
    def parse_parameter(cls, parser: AttrParser) -> Located:
        with parser.in_angle_brackets():
            parser.parse_keyword("at")
            parser.parse_punctuation("=")
            locations = syntax.parse_locations(parser)
            parser.parse_punctuation(",")
            return Located(syntax.parse_array(parser), locations)

    def print_parameter(self, printer: Printer) -> None:
        printer.print_string(
            f"<at = {syntax.locations_text(self.data.locations)}, {syntax.array_text(self.data.spec)}>"
        )


@irdl_attr_definition
class CompletionType(ParametrizedAttribute, TypeAttribute):
    """The completion of a call, or of sending bytes to the client: `!atoll.completion`."""

    name = "atoll.completion"


@irdl_attr_definition
class PlacedCompletionType(Data[tuple[int, ...]], TypeAttribute):
    """A completion that these hosts report: `!atoll.placed_completion<[0:2]>`."""

    name = "atoll.placed_completion"

    @classmethod
    def parse_parameter(cls, parser: AttrParser) -> tuple[int, ...]:
        with parser.in_angle_brackets():
            return syntax.parse_ranges(parser)

    def print_parameter(self, printer: Printer) -> None:
        printer.print_string(f"<{syntax.ranges_text(self.data)}>")
