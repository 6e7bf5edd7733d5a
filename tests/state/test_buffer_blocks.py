"""The blocks of a buffer: found by their hosts, whatever their number."""

from __future__ import annotations

import random

import pytest

from atoll.state.buffer_blocks import BufferBlocks
from atoll.state.memory_ledger import Block, BlockSpan


def block(*hosts: int) -> Block:
    return Block(tuple(((host, 0), 8) for host in hosts))


@pytest.mark.parametrize("seed", range(20))
def test_blocks_are_found_by_their_hosts_as_by_looking_at_all(seed):
    """Islands have two hosts each. Some blocks are on the same island."""
    choices = random.Random(seed)
    blocks, all_of_them = BufferBlocks(), list[Block]()
    for _ in range(200):
        island = choices.randrange(30)
        hosts = (2 * island, 2 * island + 1)
        if all_of_them and choices.random() < 0.4:
            gone = all_of_them.pop(choices.randrange(len(all_of_them)))
            blocks.remove(gone)
            assert gone not in blocks
        elif choices.random() < 0.02:
            assert blocks.take() == all_of_them
            all_of_them.clear()
        else:
            all_of_them.append(block(*hosts))
            blocks.add(all_of_them[-1])
            assert all_of_them[-1] in blocks
        assert list(blocks) == all_of_them
        assert len(blocks) == len(all_of_them)
        assert blocks.on(hosts) == [each for each in all_of_them if each.host in hosts]
        everywhere = tuple(range(60))
        assert sorted(map(id, blocks.on(everywhere))) == sorted(map(id, all_of_them))


def test_a_buffer_without_blocks_is_false():
    assert not BufferBlocks()
    assert BufferBlocks.fromkeys([block(0)])


def joint(*hosts: int) -> Block:
    pieces = tuple((((host, 0), 8),) for host in hosts)
    return Block(tuple(each for piece in pieces for each in piece), span=BlockSpan(hosts, pieces))


def test_a_block_on_many_islands_is_divided_for_gangs_on_some_of_them_only() -> None:
    whole = joint(0, 1, 2)
    blocks = BufferBlocks.fromkeys([whole])
    for hosts, expected in (((0, 1, 2), [whole]), ((3, 4), []), ((2, 1, 0, 3), [whole])):
        assert blocks.on(hosts) == expected
    assert list(blocks) == [whole]
    (part,) = blocks.on((1,))
    assert part.requirement == (((1, 0), 8),)
    assert tuple(blocks) == whole.parts
    assert part in whole.parts
