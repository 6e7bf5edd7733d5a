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
    """`[0:4 [0:2, 0:8] -> host 1 feeds 0:4]`: neighbouring shards that send equal boxes to one host stand together, and
    so do neighbouring hosts that get as many: `[0:8 [0:2, 0:8] -> hosts 1:3 each 4 feeds 0:8]`."""

    name = "atoll.sent"

    @classmethod
    def parse_bare(cls, parser: AttrParser) -> tuple[SentPart, ...]:
        def several() -> list[SentPart]:
            positions, box = syntax.parse_range(parser), syntax.parse_box(parser)
            parser.parse_punctuation("->")
            one = parser.parse_keyword_in(("host", "hosts")) == "host"
            hosts, each = syntax.parse_range(parser), len(positions)
            if not one:
                parser.parse_keyword("each")
                each = parser.parse_integer()
            parser.parse_keyword("feeds")
            feeds = syntax.parse_range(parser)
            where = [host for host in hosts for _ in range(each)]
            return [SentPart(p, box, h, f) for p, h, f in zip(positions, where, feeds, strict=True)]

        return tuple(part for group in syntax.parse_list(parser, several) for part in group)

    def text(self) -> str:
        texts = []
        at = 0
        while at < len(self.data):
            position, box, host, feed = self.data[at]
            each = self._run(at, 0)
            hosts = 1
            while self._run(at, hosts * each, hosts) >= each:
                hosts += 1
            count = hosts * each
            where = f"host {host}" if hosts == 1 else f"hosts {syntax.range_text(host, hosts)} each {each}"
            taken = f"{syntax.range_text(position, count)} {syntax.box_text(box)}"
            texts.append(f"{taken} -> {where} feeds {syntax.range_text(feed, count)}")
            at += count
        return f"[{', '.join(texts)}]"

    def _run(self, start: int, skipped: int, hosts: int = 0) -> int:
        """How many parts, from `skipped` after `start` on, go on as that began, to the host that is `hosts` later."""
        position, box, host, feed = self.data[start]
        offset = skipped
        while start + offset < len(self.data):
            if self.data[start + offset] != (position + offset, box, host + hosts, feed + offset):
                break
            offset += 1
        return offset - skipped


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
