"""The ops that a transfer becomes once device locations are known. `of` numbers the transfer that an op belongs to."""

from __future__ import annotations

from xdsl.dialects.builtin import IntAttr, UnitAttr
from xdsl.ir import Attribute, SSAValue
from xdsl.irdl import (
    irdl_op_definition,
    operand_def,
    opt_prop_def,
    prop_def,
    result_def,
    var_operand_def,
    var_result_def,
)
from xdsl.parser import Parser
from xdsl.printer import Printer
from xdsl.utils.exceptions import VerifyException

from atoll.ir.dialect.dialect_types import PlacedType
from atoll.ir.dialect.ops import (
    Node,
    parse_flags,
    parse_number,
    parse_value,
    parse_values,
    print_optional,
    print_values,
)


@irdl_op_definition
class MoveOp(Node):
    """`%2, %3 = atoll.move of 0 %0, %1 donate : ...`: shard i becomes shard i, on the host where it is."""

    name = "atoll.move"
    of = prop_def(IntAttr)
    inputs = var_operand_def(PlacedType)
    values = var_result_def(PlacedType)
    donate = opt_prop_def(UnitAttr)

    @classmethod
    def parse_facts(cls, parser: Parser, operands: list[SSAValue], properties: dict[str, Attribute]) -> None:
        properties["of"] = parse_number(parser, "of")
        operands.extend(parse_values(parser))
        parse_flags(parser, properties, ("donate",))

    def print_facts(self, printer: Printer) -> None:
        printer.print_string(f" of {self.of.data} ")
        print_values(printer, self.operands)
        print_optional(printer, "donate", self.donate)

    def verify_(self) -> None:
        for operand, result in zip(self.operands, self.results, strict=True):
            source, target = operand.type, result.type
            if isinstance(source, PlacedType) and isinstance(target, PlacedType):
                before = [location.host for location in source.data.locations]
                if before != [location.host for location in target.data.locations]:
                    raise VerifyException("a move keeps each shard on its host")


@irdl_op_definition
class SendOp(Node):
    """`atoll.send of 0 %0 feeds 3 reshard donate to !atoll.placed<...>`: hands parts of an array to the hosts that need
    them, as feeds from number 3 on.
    """

    name = "atoll.send"
    of = prop_def(IntAttr)
    input = operand_def(PlacedType)
    first = prop_def(IntAttr)
    target = prop_def(PlacedType)
    reshard = opt_prop_def(UnitAttr)
    donate = opt_prop_def(UnitAttr)

    @classmethod
    def parse_facts(cls, parser: Parser, operands: list[SSAValue], properties: dict[str, Attribute]) -> None:
        properties["of"] = parse_number(parser, "of")
        operands.append(parse_value(parser))
        properties["first"] = parse_number(parser, "feeds")
        parse_flags(parser, properties, ("reshard", "donate"))
        parser.parse_keyword("to")
        properties["target"] = parser.parse_type()

    def print_facts(self, printer: Printer) -> None:
        printer.print_string(f" of {self.of.data} ")
        printer.print_ssa_value(self.input)
        printer.print_string(f" feeds {self.first.data}")
        print_optional(printer, "reshard", self.reshard)
        print_optional(printer, "donate", self.donate)
        printer.print_string(" to ")
        printer.print_attribute(self.target)


@irdl_op_definition
class ReceiveOp(Node):
    """`%1 = atoll.receive of 0 feeds 3 reshard from !atoll.placed<...> : ...`: puts an array together out of what was
    sent.
    """

    name = "atoll.receive"
    of = prop_def(IntAttr)
    value = result_def(PlacedType)
    first = prop_def(IntAttr)
    source = prop_def(PlacedType)
    reshard = opt_prop_def(UnitAttr)

    @classmethod
    def parse_facts(cls, parser: Parser, operands: list[SSAValue], properties: dict[str, Attribute]) -> None:
        properties["of"] = parse_number(parser, "of")
        properties["first"] = parse_number(parser, "feeds")
        parse_flags(parser, properties, ("reshard",))
        parser.parse_keyword("from")
        properties["source"] = parser.parse_type()

    def print_facts(self, printer: Printer) -> None:
        printer.print_string(f" of {self.of.data} feeds {self.first.data}")
        print_optional(printer, "reshard", self.reshard)
        printer.print_string(" from ")
        printer.print_attribute(self.source)
