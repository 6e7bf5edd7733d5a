"""The device memory of a buffer, as a set of blocks. A buffer on many islands has a block on each, or one on all."""

from __future__ import annotations

from collections.abc import Iterable

from atoll.state.memory_ledger import Block, divide

# Up to this number, blocks are found by looking at all of them. Most buffers have one.
_FEW = 8


class BufferBlocks(dict[Block, None]):
    """Blocks in the order in which they were added. If there are many, those on some hosts are found by an index."""

    __slots__ = ("_by_host",)
    _by_host: dict[int, list[Block]]  # by the first host of each block; made when needed

    def add(self, block: Block) -> None:
        self[block] = None
        if len(self) > _FEW and (index := self._index()) is not None:
            index.setdefault(block.host, []).append(block)

    def add_all(self, blocks: Iterable[Block]) -> None:
        if self._index() is None:  # `on` makes one when it is needed
            self.update(dict.fromkeys(blocks))
            return
        for block in blocks:
            self.add(block)

    def remove(self, block: Block) -> None:
        """Remove a block that is there."""
        del self[block]
        if len(self) >= _FEW and (index := self._index()) is not None:
            if len(self) > _FEW:
                index[block.host].remove(block)
            else:
                del self._by_host

    def take(self) -> list[Block]:
        """Remove all blocks. Return them."""
        blocks = list(self)
        self.clear()
        if len(blocks) > _FEW and self._index() is not None:
            del self._by_host
        return blocks

    def on(self, hosts: tuple[int, ...]) -> list[Block]:
        """Return the blocks on islands with these hosts. Divide a block that is also on other islands."""
        if len(self) == 1:  # most buffers
            (block,) = self
            if block.span is None:
                return [block] if block.host in hosts else []
        self.divide(hosts)
        if len(self) <= max(_FEW, len(hosts)):
            return [block for block in self if block.host in hosts]
        index = self._index()
        if index is None:
            index = self._by_host = {}
            for block in self:
                index.setdefault(block.host, []).append(block)
        return [block for host in hosts for block in index.get(host, ())]

    def divide(self, hosts: tuple[int, ...] = ()) -> None:
        """Divide blocks that are on several islands, unless they are only on these hosts, or on others."""
        for block, span in [(each, each.span) for each in self]:
            if span is None or (hosts and (set(hosts).isdisjoint(span.hosts) or set(hosts).issuperset(span.hosts))):
                continue
            self.remove(block)
            self.add_all(divide(block))

    def _index(self) -> dict[int, list[Block]] | None:
        return getattr(self, "_by_host", None)
