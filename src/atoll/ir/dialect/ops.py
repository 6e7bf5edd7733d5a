"""The dialect's ops: one per sharded computation or transfer of data, for any number of shards.

The ops of a program correspond to the nodes of `atoll.ir.program`, whose docstrings specify them. Values are
`!atoll.array` before placement, and `!atoll.placed` after it. Later passes replace transfers and routes by sends, moves
and receives, whose attribute `of` is the number of the transfer.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Self

from xdsl.dialects.builtin import ArrayAttr, IntAttr, StringAttr, UnitAttr
from xdsl.ir import Attribute, Operation, Region, SSAValue
from xdsl.irdl import (
    AnyAttr,
    IRDLOperation,
    irdl_op_definition,
    operand_def,
    opt_operand_def,
    opt_prop_def,
    opt_result_def,
    prop_def,
    region_def,
    result_def,
    traits_def,
    var_operand_def,
    var_result_def,
)
from xdsl.parser import Parser
from xdsl.printer import Printer
from xdsl.traits import IsolatedFromAbove, IsTerminator
from xdsl.utils.exceptions import VerifyException

from atoll.errors import StatusError
from atoll.ir.dialect.attributes import (
    ArrayType,
    Bare,
    CompletionType,
    DeviceLocations,
    HostBuffers,
    Mappings,
    Numbers,
    PlacedCompletionType,
    PlacedType,
    Strides,
)
from atoll.ir.row_exchange import check_route
from atoll.ir.types import NUMBERS, ArraySpec, Replicated

PRESENT = UnitAttr()


def spec_of(value: SSAValue) -> ArraySpec:
    """Return the array type of a value. Raises VerifyException if the value is not an array."""
    match value.type:
        case ArrayType(data=spec):
            return spec
        case PlacedType(data=located):
            return located.spec
        case CompletionType() | PlacedCompletionType():
            raise VerifyException("expected an array, not the completion of a call")
    raise VerifyException(f"expected an array, not {value.type}")


class Node(IRDLOperation):
    """An op that makes values from values."""

    def consumes(self, index: int) -> bool:
        """Return whether the op consumes the buffer of operand `index`."""
        return "donate" in self.properties

    @classmethod
    @abstractmethod
    def parse_facts(cls, parser: Parser, operands: list[SSAValue], properties: dict[str, Attribute]) -> None:
        """Parse the text between the op's name and its types."""

    @abstractmethod
    def print_facts(self, printer: Printer) -> None: ...

    @classmethod
    def parse(cls, parser: Parser) -> Self:
        operands: list[SSAValue] = []
        properties: dict[str, Attribute] = {}
        cls.parse_facts(parser, operands, properties)
        types: Sequence[Attribute] = ()
        if parser.parse_optional_punctuation(":"):
            types = parser.parse_comma_separated_list(parser.Delimiter.NONE, parser.parse_type)
        return cls.create(operands=operands, result_types=types, properties=properties)

    def print(self, printer: Printer) -> None:
        self.print_facts(printer)
        if self.results:
            printer.print_string(" : ")
            printer.print_list(self.result_types, printer.print_attribute)


def print_values(printer: Printer, values: Iterable[SSAValue]) -> None:
    printer.print_list(values, printer.print_ssa_value)


def parse_value(parser: Parser) -> SSAValue:
    """Parse a value that is defined above. Its definition contains its type, so operands are printed without types."""
    operand = parser.parse_unresolved_operand()
    values = parser.ssa_values.get(operand.operand_name, ())
    if operand.index >= len(values):
        parser.raise_error(f"{operand.span.text} is not defined above", operand.span)
    return values[operand.index]


def parse_values(parser: Parser, delimiter: Parser.Delimiter = Parser.Delimiter.NONE) -> list[SSAValue]:
    return parser.parse_comma_separated_list(delimiter, lambda: parse_value(parser))


def parse_number(parser: Parser, word: str) -> IntAttr:
    """Parse `word` and the number after it."""
    parser.parse_keyword(word)
    return IntAttr(parser.parse_integer())


def print_optional(printer: Printer, word: str, attribute: Attribute | None) -> None:
    """Print ` word` and the attribute's text, if the op has the attribute."""
    if attribute is None:
        return
    printer.print_string(f" {word} {attribute.text()}" if isinstance(attribute, Bare) else f" {word}")


def parse_flags(parser: Parser, properties: dict[str, Attribute], flags: Iterable[str]) -> None:
    properties.update((flag, PRESENT) for flag in flags if parser.parse_optional_keyword(flag))


@irdl_op_definition
class ReturnOp(IRDLOperation):
    """The results of a launch, in order."""

    name = "atoll.return"
    inputs = var_operand_def(AnyAttr())
    traits = traits_def(IsTerminator())

    @classmethod
    def parse(cls, parser: Parser) -> Self:
        return cls.create(operands=parse_values(parser, parser.Delimiter.PAREN))

    def print(self, printer: Printer) -> None:
        printer.print_string(" ")
        with printer.in_parens():
            print_values(printer, self.operands)


@irdl_op_definition
class ProgramOp(IRDLOperation):
    """A program: its arguments, its nodes and its return. `feeds` is the number of its feeds."""

    name = "atoll.program"
    sym_name = prop_def(StringAttr)
    feeds = prop_def(IntAttr)
    body = region_def("single_block")
    traits = traits_def(IsolatedFromAbove())

    @classmethod
    def parse(cls, parser: Parser) -> Self:
        name = parser.parse_symbol_name()
        arguments = parser.parse_comma_separated_list(parser.Delimiter.PAREN, parser.parse_argument)
        feeds = parser.parse_integer() if parser.parse_optional_keyword("feeds") else 0
        body = parser.parse_region(arguments)
        return cls.create(properties={"sym_name": name, "feeds": IntAttr(feeds)}, regions=[body])

    def print(self, printer: Printer) -> None:
        printer.print_string(" ")
        printer.print_symbol_name(self.sym_name.data)
        with printer.in_parens():
            printer.print_list(self.body.block.args, printer.print_block_argument)
        if self.feeds.data:
            printer.print_string(f" feeds {self.feeds.data}")
        printer.print_string(" ")
        printer.print_region(self.body, print_entry_block_args=False)

    @classmethod
    def of(cls, name: str, feeds: int, body: Region) -> Self:
        return cls.create(properties={"sym_name": StringAttr(name), "feeds": IntAttr(feeds)}, regions=[body])

    def nodes(self) -> list[Operation]:
        """Return all ops except the return."""
        return [op for op in self.body.block.ops if not isinstance(op, ReturnOp)]

    def each(self) -> Iterator[Operation]:
        """Yield all ops except the return. The caller may replace or erase the op that it got last."""
        op = self.body.block.first_op
        while op is not None and not isinstance(op, ReturnOp):
            following = op.next_op
            yield op
            op = following

    def returned(self) -> ReturnOp:
        last = self.body.block.last_op
        assert isinstance(last, ReturnOp)
        return last


@irdl_op_definition
class CallOp(Node):
    """`%2 = atoll.call @step(%0, %1) on [0:8] donate [1] preserve [0] : !atoll.array<...>`

    Runs a compiled function as one gang. If the last result is a completion, it is that of the call. With `stream N`,
    the function is a colocated Python function.
    """

    name = "atoll.call"
    callee = prop_def(StringAttr)
    inputs = var_operand_def(AnyAttr())
    values = var_result_def(AnyAttr())
    devices = opt_prop_def(Numbers)  # before placement
    locations = opt_prop_def(DeviceLocations)  # after it
    donated = opt_prop_def(Numbers)
    preserved = opt_prop_def(Numbers)
    stream = opt_prop_def(IntAttr)

    def consumes(self, index: int) -> bool:
        return self.donated is not None and index in self.donated.data

    @property
    def completes(self) -> bool:
        return bool(self.results) and isinstance(self.results[-1].type, CompletionType | PlacedCompletionType)

    @classmethod
    def parse_facts(cls, parser: Parser, operands: list[SSAValue], properties: dict[str, Attribute]) -> None:
        properties["callee"] = parser.parse_symbol_name()
        operands.extend(parse_values(parser, parser.Delimiter.PAREN))
        if parser.parse_optional_keyword("on"):
            properties["devices"] = Numbers(Numbers.parse_bare(parser))
        else:
            parser.parse_keyword("at")
            properties["locations"] = DeviceLocations(DeviceLocations.parse_bare(parser))
        for word, name in (("donate", "donated"), ("preserve", "preserved")):
            if parser.parse_optional_keyword(word):
                properties[name] = Numbers(Numbers.parse_bare(parser))
        if parser.parse_optional_keyword("stream"):
            properties["stream"] = IntAttr(parser.parse_integer(allow_boolean=False))

    def print_facts(self, printer: Printer) -> None:
        printer.print_string(" ")
        printer.print_symbol_name(self.callee.data)
        with printer.in_parens():
            print_values(printer, self.operands)
        print_optional(printer, "on", self.devices)
        print_optional(printer, "at", self.locations)
        print_optional(printer, "donate", self.donated)
        print_optional(printer, "preserve", self.preserved)
        if self.stream is not None:
            printer.print_string(f" stream {self.stream.data}")

    def verify_(self) -> None:
        for value in self.operands:
            spec_of(value)
        if ("devices" in self.properties) == ("locations" in self.properties):
            raise VerifyException(f"a call of @{self.callee.data} must have either devices or locations")
        for name in ("donated", "preserved"):
            named = self.properties.get(name)
            for position in named.data if isinstance(named, Numbers) else ():
                if not 0 <= position < len(self.operands):
                    raise VerifyException(f"a call of @{self.callee.data} has no input {position} to donate")


@irdl_op_definition
class TransferOp(Node):
    """`%2, %3 = atoll.transfer %0, %1 donate reshard : ...`

    Changes each input to the sharding, memory and layout of its result. Without `reshard`, shard i becomes shard i.
    """

    name = "atoll.transfer"
    inputs = var_operand_def(AnyAttr())
    values = var_result_def(AnyAttr())
    donate = opt_prop_def(UnitAttr)
    reshard = opt_prop_def(UnitAttr)

    @classmethod
    def parse_facts(cls, parser: Parser, operands: list[SSAValue], properties: dict[str, Attribute]) -> None:
        operands.extend(parse_values(parser))
        parse_flags(parser, properties, ("donate", "reshard"))

    def print_facts(self, printer: Printer) -> None:
        printer.print_string(" ")
        print_values(printer, self.operands)
        print_optional(printer, "donate", self.donate)
        print_optional(printer, "reshard", self.reshard)

    def verify_(self) -> None:
        if len(self.operands) != len(self.results):
            raise VerifyException(f"a transfer has {len(self.operands)} inputs and {len(self.results)} results")
        for operand, result in zip(self.operands, self.results, strict=True):
            source, target = spec_of(operand), spec_of(result)
            if source.shape != target.shape or source.dtype != target.dtype:
                raise VerifyException(
                    f"a transfer cannot change {source.dtype}{source.shape} to {target.dtype}{target.shape}"
                )
            before, after = len(source.sharding.devices), len(target.sharding.devices)
            if self.reshard is None and before != after:
                raise VerifyException(f"an array on {before} devices cannot be copied shard by shard to {after}")


@irdl_op_definition
class PutOp(Node):
    """`%0 = atoll.put [feed 0 [4, 4]] : ...`: makes one array from the client's host buffers."""

    name = "atoll.put"
    buffers = prop_def(HostBuffers)
    value = result_def(AnyAttr())

    @classmethod
    def parse_facts(cls, parser: Parser, operands: list[SSAValue], properties: dict[str, Attribute]) -> None:
        properties["buffers"] = HostBuffers(HostBuffers.parse_bare(parser))

    def print_facts(self, printer: Printer) -> None:
        printer.print_string(f" {self.buffers.text()}")

    def verify_(self) -> None:
        count = len(spec_of(self.value).sharding.devices)
        times = [0] * count
        for buffer in self.buffers.data:
            for position in range(count) if buffer.positions is None else buffer.positions:
                if 0 <= position < count:
                    times[position] += 1
        if any(each != 1 for each in times):
            raise VerifyException("the host buffers do not fill each shard exactly once")


@irdl_op_definition
class GetOp(Node):
    """`%1 = atoll.get %0 feed 0 strides [16, 4] : !atoll.completion`: sends an array's contents to the client."""

    name = "atoll.get"
    input = operand_def(AnyAttr())
    completion = result_def(AnyAttr())
    feed = prop_def(IntAttr)
    strides = opt_prop_def(Strides)

    @classmethod
    def parse_facts(cls, parser: Parser, operands: list[SSAValue], properties: dict[str, Attribute]) -> None:
        operands.append(parse_value(parser))
        properties["feed"] = parse_number(parser, "feed")
        if parser.parse_optional_keyword("strides"):
            properties["strides"] = Strides(Strides.parse_bare(parser))

    def print_facts(self, printer: Printer) -> None:
        printer.print_string(" ")
        printer.print_ssa_value(self.input)
        printer.print_string(f" feed {self.feed.data}")
        print_optional(printer, "strides", self.strides)

    def verify_(self) -> None:
        spec_of(self.input)


@irdl_op_definition
class ReportOp(Node):
    """`atoll.report %0`: reports a number to the controller."""

    name = "atoll.report"
    input = operand_def(AnyAttr())

    @classmethod
    def parse_facts(cls, parser: Parser, operands: list[SSAValue], properties: dict[str, Attribute]) -> None:
        operands.append(parse_value(parser))

    def print_facts(self, printer: Printer) -> None:
        printer.print_string(" ")
        printer.print_ssa_value(self.input)

    def verify_(self) -> None:
        spec = spec_of(self.input)
        if spec.shape or spec.dtype not in NUMBERS or not isinstance(spec.sharding.tiling, Replicated):
            raise VerifyException(
                f"a switch or loop is controlled by one integer or boolean, not by {spec.dtype}{list(spec.shape)}"
            )


@irdl_op_definition
class RearrangeOp(Node):
    """`%2 = atoll.rearrange %0, %1 [0 at 0:1 -> 0 at 0:1, 1 at 0:1 -> 0 at 1:2] donate bitcast : ...`

    Makes arrays from shards of other arrays, without moving or copying them.
    """

    name = "atoll.rearrange"
    inputs = var_operand_def(AnyAttr())
    values = var_result_def(AnyAttr())
    mappings = prop_def(Mappings)
    donate = opt_prop_def(UnitAttr)
    bitcast = opt_prop_def(UnitAttr)

    @classmethod
    def parse_facts(cls, parser: Parser, operands: list[SSAValue], properties: dict[str, Attribute]) -> None:
        operands.extend(parse_values(parser))
        properties["mappings"] = Mappings(Mappings.parse_bare(parser))
        parse_flags(parser, properties, ("donate", "bitcast"))

    def print_facts(self, printer: Printer) -> None:
        printer.print_string(" ")
        print_values(printer, self.operands)
        printer.print_string(f" {self.mappings.text()}")
        print_optional(printer, "donate", self.donate)
        print_optional(printer, "bitcast", self.bitcast)

    def verify_(self) -> None:
        self.sources()

    def sources(self) -> list[list[tuple[int, int]]]:
        """Return the (input, position) of each shard of each result."""
        held = [len(spec_of(value).sharding.devices) for value in self.operands]
        sources: list[dict[int, tuple[int, int]]] = [{} for _ in self.results]
        for mapping in self.mappings.data:
            taken, given = range(*mapping.source), range(*mapping.target)
            if len(taken) != len(given):
                raise VerifyException(f"a mapping takes {len(taken)} shards and returns {len(given)}")
            into = sources[mapping.output]
            for source, target in zip(taken, given, strict=True):
                if not 0 <= source < held[mapping.input] or target in into:
                    raise VerifyException("a mapping has a shard that does not exist, or a target shard twice")
                into[target] = (mapping.input, source)
        for result, into in zip(self.results, sources, strict=True):
            if into.keys() != set(range(len(spec_of(result).sharding.devices))):
                raise VerifyException("the mappings do not fill each output's shards exactly once")
        return [[into[i] for i in range(len(into))] for into in sources]


@irdl_op_definition
class MoveOp(Node):
    """`%2, %3 = atoll.move of 0 %0, %1 donate : ...`: shard i becomes shard i, on the same host."""

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
                    raise VerifyException("a move cannot move a shard to another host")


@irdl_op_definition
class SendOp(Node):
    """`atoll.send of 0 %0 feeds 3 reshard donate to !atoll.placed<...>`

    Sends parts of an array to the hosts that need them, as feeds numbered from 3.
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
    """`%1 = atoll.receive of 0 feeds 3 reshard from !atoll.placed<...> : ...`

    Makes an array from the feeds of the corresponding send.
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


def _parse_feeds(parser: Parser, properties: dict[str, Attribute]) -> None:
    properties["first"] = parse_number(parser, "feeds")
    properties["groups"] = parse_number(parser, "groups")
    properties["destination"] = parse_number(parser, "destination")


def _print_feeds(printer: Printer, op: SendRowsOp | ReceiveRowsOp) -> None:
    printer.print_string(f" feeds {op.first.data} groups {op.groups.data} destination {op.destination.data}")


class _RoutesRows(Node):
    """The common base of `RouteOp` and `UnrouteOp`."""

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
class RouteOp(_RoutesRows):
    """`%2, %3, %4, %5 = atoll.route %0, %1 groups 8 : ...`

    Sends rows to destinations by their sizes, in the order of a third input if there is one. The results are a block
    and its spans per destination.
    """

    name = "atoll.route"


@irdl_op_definition
class UnrouteOp(_RoutesRows):
    """`%6 = atoll.unroute %2, %3, %4, %5 groups 8 : ...`: sends rows back to their origin."""

    name = "atoll.unroute"


@irdl_op_definition
class SendRowsOp(Node):
    """`atoll.send_rows of 0 %0, %1 feeds 3 groups 8 destination 2 to !atoll.placed<...>`

    Sends rows of an array to other hosts, by their sizes or spans, and in the order of a third input if there is one.
    The destination is -1 for an unroute.
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

    Makes an array from the rows that were sent. For an unroute, rows come from several arrays with consecutive ranges
    of feeds, and there are no spans.
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
