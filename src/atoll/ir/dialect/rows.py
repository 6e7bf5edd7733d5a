"""The ops of sparse exchanges: of programs as they were asked for, and what they become once locations are known."""

from __future__ import annotations

from xdsl.dialects.builtin import ArrayAttr, IntAttr
from xdsl.ir import Attribute, SSAValue
from xdsl.irdl import (
    AnyAttr,
    irdl_op_definition,
    operand_def,
    opt_operand_def,
    opt_result_def,
    prop_def,
    result_def,
    var_operand_def,
    var_result_def,
)
from xdsl.parser import Parser
from xdsl.printer import Printer
from xdsl.utils.exceptions import VerifyException

from atoll.errors import StatusError
from atoll.ir.dialect.dialect_types import PlacedType
from atoll.ir.dialect.ops import Node, parse_number, parse_values, print_values, spec_of
from atoll.ir.row_exchange import check_route


def _parse_feeds(parser: Parser, properties: dict[str, Attribute]) -> None:
    properties["first"] = parse_number(parser, "feeds")
    properties["groups"] = parse_number(parser, "groups")
    properties["destination"] = parse_number(parser, "destination")


def _print_feeds(printer: Printer, op: SendRowsOp | ReceiveRowsOp) -> None:
    printer.print_string(f" feeds {op.first.data} groups {op.groups.data} destination {op.destination.data}")


class _Exchange(Node):
    """What rows on their way out and on their way back have in common."""

    inputs = var_operand_def(AnyAttr())
    values = var_result_def(AnyAttr())
    groups = prop_def(IntAttr)

    @classmethod
    def parse_facts(cls, parser: Parser, operands: list[SSAValue], properties: dict[str, Attribute]) -> None:
        operands.extend(parse_values(parser))
        properties["groups"] = parse_number(parser, "groups")

    def print_facts(self, printer: Printer) -> None:
        printer.print_string(" ")
        print_values(printer, self.operands)
        printer.print_string(f" groups {self.groups.data}")

    def verify_(self) -> None:
        inputs, outputs = map(spec_of, self.operands), map(spec_of, self.results)
        try:
            check_route(tuple(inputs), tuple(outputs), self.groups.data, is_back=isinstance(self, UnrouteOp))
        except StatusError as error:
            raise VerifyException(error.status.message) from None


@irdl_op_definition
class RouteOp(_Exchange):
    """`%2, %3, %4, %5 = atoll.route %0, %1 groups 8 : ...`

    Rows go where their sizes say, in an order if there is a third input; a block of them, and its spans, for each
    destination.
    """

    name = "atoll.route"


@irdl_op_definition
class UnrouteOp(_Exchange):
    """`%6 = atoll.unroute %2, %3, %4, %5 groups 8 : ...`: rows go back to where they came from."""

    name = "atoll.unroute"


@irdl_op_definition
class SendRowsOp(Node):
    """`atoll.send_rows of 0 %0, %1 feeds 3 groups 8 destination 2 to !atoll.placed<...>`

    Hands rows of an array to the hosts that are to have them, by their sizes or spans, and in an order if there is a
    third input. The destination is -1 on the way back.
    """

    name = "atoll.send_rows"
    of = prop_def(IntAttr)
    rows = operand_def(PlacedType)
    numbers = operand_def(PlacedType)
    order = opt_operand_def(PlacedType)
    first = prop_def(IntAttr)
    groups = prop_def(IntAttr)
    destination = prop_def(IntAttr)
    target = prop_def(PlacedType)

    @classmethod
    def parse_facts(cls, parser: Parser, operands: list[SSAValue], properties: dict[str, Attribute]) -> None:
        properties["of"] = parse_number(parser, "of")
        operands.extend(parse_values(parser))
        _parse_feeds(parser, properties)
        parser.parse_keyword("to")
        properties["target"] = parser.parse_type()

    def print_facts(self, printer: Printer) -> None:
        printer.print_string(f" of {self.of.data} ")
        print_values(printer, self.operands)
        _print_feeds(printer, self)
        printer.print_string(" to ")
        printer.print_attribute(self.target)


@irdl_op_definition
class ReceiveRowsOp(Node):
    """`%2, %3 = atoll.receive_rows of 0 feeds 3 groups 8 destination 2 from !atoll.placed<...> : ...`

    Puts an array together out of the rows that came. On the way back they come from several arrays, whose feeds follow
    one another, and there are no spans.
    """

    name = "atoll.receive_rows"
    of = prop_def(IntAttr)
    value = result_def(PlacedType)
    spans = opt_result_def(PlacedType)
    first = prop_def(IntAttr)
    groups = prop_def(IntAttr)
    destination = prop_def(IntAttr)
    sources = prop_def(ArrayAttr[PlacedType])

    @classmethod
    def parse_facts(cls, parser: Parser, operands: list[SSAValue], properties: dict[str, Attribute]) -> None:
        properties["of"] = parse_number(parser, "of")
        _parse_feeds(parser, properties)
        parser.parse_keyword("from")
        properties["sources"] = ArrayAttr(parser.parse_comma_separated_list(parser.Delimiter.NONE, parser.parse_type))

    def print_facts(self, printer: Printer) -> None:
        printer.print_string(f" of {self.of.data}")
        _print_feeds(printer, self)
        printer.print_string(" from ")
        printer.print_list(self.sources.data, printer.print_attribute)
