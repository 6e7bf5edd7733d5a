"""Attributes of sends and receives: which parts of shards leave a host, and which arrive."""

from __future__ import annotations

from typing import NamedTuple

from xdsl.irdl import irdl_attr_definition
from xdsl.parser import AttrParser

from atoll.ir.dialect import syntax
from atoll.ir.dialect.attributes import Bare
from atoll.ir.types import Box


class SentPart(NamedTuple):
    """`box` of the shard at `position` goes to `host` as `feed`."""

    position: int
    box: Box
    host: int
    feed: int


class ReceivedPart(NamedTuple):
    """`feed` is `box` of the shard at `position`."""

    position: int
    box: Box
    feed: int


@irdl_attr_definition
class Sent(Bare[tuple[SentPart, ...]]):
    """`[0:4 [0:2, 0:8] -> host 1 feeds 0:4]`: neighbouring shards that send equal boxes to one host stand together."""

    name = "atoll.sent"

    @classmethod
    def parse_bare(cls, parser: AttrParser) -> tuple[SentPart, ...]:
        def several() -> list[SentPart]:
            positions, box = syntax.parse_range(parser), syntax.parse_box(parser)
            parser.parse_punctuation("->")
            parser.parse_keyword("host")
            host = parser.parse_integer()
            parser.parse_keyword("feeds")
            return [SentPart(p, box, host, f) for p, f in zip(positions, syntax.parse_range(parser), strict=True)]

        return tuple(part for group in syntax.parse_list(parser, several) for part in group)

    def text(self) -> str:
        texts = []
        at = 0
        while at < len(self.data):
            p, box, host, feed = self.data[at]
            end = at + 1
            while end < len(self.data) and self.data[end] == (p + end - at, box, host, feed + end - at):
                end += 1
            count = end - at
            where = f"{syntax.range_text(p, count)} {syntax.box_text(box)}"
            texts.append(f"{where} -> host {host} feeds {syntax.range_text(feed, count)}")
            at = end
        return f"[{', '.join(texts)}]"


@irdl_attr_definition
class Received(Bare[tuple[ReceivedPart, ...]]):
    """`[feeds 0:4 -> 0:4 [0:2, 0:8]]`, shortened as what is sent."""

    name = "atoll.received"

    @classmethod
    def parse_bare(cls, parser: AttrParser) -> tuple[ReceivedPart, ...]:
        def several() -> list[ReceivedPart]:
            parser.parse_keyword("feeds")
            feeds = syntax.parse_range(parser)
            parser.parse_punctuation("->")
            positions, box = syntax.parse_range(parser), syntax.parse_box(parser)
            return [ReceivedPart(p, box, f) for p, f in zip(positions, feeds, strict=True)]

        return tuple(part for group in syntax.parse_list(parser, several) for part in group)

    def text(self) -> str:
        texts = []
        at = 0
        while at < len(self.data):
            p, box, feed = self.data[at]
            end = at + 1
            while end < len(self.data) and self.data[end] == (p + end - at, box, feed + end - at):
                end += 1
            count = end - at
            where = f"{syntax.range_text(p, count)} {syntax.box_text(box)}"
            texts.append(f"feeds {syntax.range_text(feed, count)} -> {where}")
            at = end
        return f"[{', '.join(texts)}]"
