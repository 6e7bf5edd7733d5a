"""The dialect's types.

Each carries plain data of `atoll.ir`: a type is as cheap as the struct that it wraps, whatever the number of shards.
"""

from __future__ import annotations

from xdsl.ir import Data, ParametrizedAttribute, TypeAttribute
from xdsl.irdl import irdl_attr_definition
from xdsl.parser import AttrParser
from xdsl.printer import Printer

from atoll.ir.dialect import syntax
from atoll.ir.geometry import Located
from atoll.ir.types import ArraySpec


@irdl_attr_definition
class ArrayType(Data[ArraySpec], TypeAttribute):
    """A sharded array on virtual devices: `!atoll.array<float32[8, 128], devices = [0:8], tiled = [8, 1]>`.

    A replicated array has no tiling in its text; memory kind and layout stand there where they are not the default.
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
    """No array, but that something is done: a call, or bytes on their way to the client. `!atoll.completion`."""

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
