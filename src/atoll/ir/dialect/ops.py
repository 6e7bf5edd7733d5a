"""The ops of a program: one for each sharded computation or movement of data, whatever the number of shards.

They stand for the nodes of `atoll.ir.program`, whose docstrings say what each means. Before placement their values are
`!atoll.array`s on virtual devices; afterwards `!atoll.placed`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Self

from xdsl.dialects.builtin import IntAttr, StringAttr, UnitAttr
from xdsl.ir import Attribute, Operation, Region, SSAValue
from xdsl.irdl import (
    AnyAttr,
    IRDLOperation,
    irdl_op_definition,
    operand_def,
    opt_prop_def,
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

from atoll.ir.dialect.attributes import Bare, DeviceLocations, HostBuffers, Mappings, Numbers, Strides
from atoll.ir.dialect.dialect_types import ArrayType, CompletionType, PlacedCompletionType, PlacedType
from atoll.ir.types import NUMBERS, ArraySpec, Replicated

PRESENT = UnitAttr()


def spec_of(value: SSAValue) -> ArraySpec:
    """What array a value is. Raises where it is a completion."""
    match value.type:
        case ArrayType(data=spec):
            return spec
        case PlacedType(data=located):
            return located.spec
        case CompletionType() | PlacedCompletionType():
            raise VerifyException("a call's completion is no array")
    raise VerifyException(f"{value.type} is no array")


class Node(IRDLOperation):
    """An op that makes values out of values."""

    def consumes(self, index: int) -> bool:
        """Whether it takes the buffer of operand number `index`."""
        return "donate" in self.properties

    @classmethod
    @abstractmethod
    def parse_facts(cls, parser: Parser, operands: list[SSAValue], properties: dict[str, Attribute]) -> None:
        """Reads what stands between the op's name and its types."""

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
    """A value that is defined above. Its type is known from there, so ops do not write the types of operands."""
    operand = parser.parse_unresolved_operand()
    values = parser.ssa_values.get(operand.operand_name, ())
    if operand.index >= len(values):
        parser.raise_error(f"{operand.span.text} is not defined above", operand.span)
    return values[operand.index]


def parse_values(parser: Parser, delimiter: Parser.Delimiter = Parser.Delimiter.NONE) -> list[SSAValue]:
    return parser.parse_comma_separated_list(delimiter, lambda: parse_value(parser))


def parse_number(parser: Parser, word: str) -> IntAttr:
    """`word`, and the number behind it."""
    parser.parse_keyword(word)
    return IntAttr(parser.parse_integer())


def print_optional(printer: Printer, word: str, attribute: Attribute | None) -> None:
    """` word`, and what it says, where the attribute is there."""
    if attribute is None:
        return
    printer.print_string(f" {word} {attribute.text()}" if isinstance(attribute, Bare) else f" {word}")


def parse_flags(parser: Parser, properties: dict[str, Attribute], flags: Iterable[str]) -> None:
    properties.update((flag, PRESENT) for flag in flags if parser.parse_optional_keyword(flag))


@irdl_op_definition
class ReturnOp(IRDLOperation):
    """The values that a launch hands back, in order."""

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
    """A program: its arguments, its nodes, and what it returns. `feeds` counts its feeds."""

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
        """All ops but the return."""
        return [op for op in self.body.block.ops if not isinstance(op, ReturnOp)]

    def each(self) -> Iterator[Operation]:
        """All ops but the return, one by one. The caller may replace or erase the one that it was given last."""
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

    Runs a compiled function as one gang. A last result of type completion is the call's own. With `stream N` it is a
    function of colocated Python.
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
            raise VerifyException(f"a call of @{self.callee.data} has either devices or locations")
        for name in ("donated", "preserved"):
            named = self.properties.get(name)
            for position in named.data if isinstance(named, Numbers) else ():
                if not 0 <= position < len(self.operands):
                    raise VerifyException(f"a call of @{self.callee.data} has no input {position} to donate")


@irdl_op_definition
class TransferOp(Node):
    """`%2, %3 = atoll.transfer %0, %1 donate reshard : ...`

    Gives each input the sharding, memory and layout of its result. Without `reshard`, shard i becomes shard i.
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
    """`%0 = atoll.put [feed 0 [4, 4]] : ...`: makes one array out of the client's host buffers."""

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
    """`atoll.report %0`: reports to the controller what a number is."""

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
            raise VerifyException(f"a number that decides is one integer or boolean, no {spec.dtype}{list(spec.shape)}")


@irdl_op_definition
class RearrangeOp(Node):
    """`%2 = atoll.rearrange %0, %1 [0 at 0:1 -> 0 at 0:1, 1 at 0:1 -> 0 at 1:2] donate bitcast : ...`

    Makes arrays out of shards of other arrays, which stay where they are.
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
        """For each result, the (input, position) that each of its shards is."""
        held = [len(spec_of(value).sharding.devices) for value in self.operands]
        sources: list[dict[int, tuple[int, int]]] = [{} for _ in self.results]
        for mapping in self.mappings.data:
            taken, given = range(*mapping.source), range(*mapping.target)
            if len(taken) != len(given):
                raise VerifyException("a mapping takes as many shards as it gives")
            into = sources[mapping.output]
            for source, target in zip(taken, given, strict=True):
                if not 0 <= source < held[mapping.input] or target in into:
                    raise VerifyException("a mapping names a shard that is not there, or gives one twice")
                into[target] = (mapping.input, source)
        for result, into in zip(self.results, sources, strict=True):
            if into.keys() != set(range(len(spec_of(result).sharding.devices))):
                raise VerifyException("the mappings do not fill each output's shards exactly once")
        return [[into[i] for i in range(len(into))] for into in sources]
