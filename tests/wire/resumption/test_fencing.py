"""A connection on which nothing is said for a while: what is sent meanwhile is kept, and nothing is acknowledged."""

from __future__ import annotations

import asyncio

from atoll.wire.framing import PIECE_BYTES, encode
from atoll.wire.resumption.resumable_connections import AcceptedConnection
from atoll.wire.resumption.retransmit_buffer import Counts
from tests.wire.resumption.network import Dialer, Listener, Network, Note, play, until

LARGE = Note(9, b"x" * PIECE_BYTES)


async def fenced(network: Network, listener: Listener) -> tuple[AcceptedConnection, Dialer]:
    """Has sent one message before, which is acknowledged, and another, which is not."""
    dialer = await Dialer.open(network, listener)
    await until(lambda: dialer.connection.can_resume)
    connection = listener.connection
    assert isinstance(connection, AcceptedConnection)
    connection.send(Note(1))
    await until(lambda: dialer.messages == [Note(1)])
    dialer.connection.acknowledge()
    await until(lambda: connection.link.buffer.acknowledged == (1, 0))
    connection.send(Note(2))
    await until(lambda: dialer.messages == [Note(1), Note(2)])
    connection.fence()
    return connection, dialer


def test_what_is_sent_on_a_corked_connection_arrives_once_it_is_uncorked():
    async def main() -> None:
        listener = Listener()
        connection, dialer = await fenced(Network([]), listener)
        connection.send(Note(3))
        connection.send_in_pieces(encode(LARGE))
        connection.send(Note(4))
        dialer.connection.send(Note(7))
        await until(lambda: listener.messages == [Note(7)])
        connection.acknowledge()
        dialer.connection.acknowledge()
        await asyncio.sleep(1)
        assert dialer.messages == [Note(1), Note(2)], "nothing is said"
        assert connection.link.buffer.acknowledged == (2, 0), "acknowledgements of the peer count"
        assert len(dialer.connection.link.buffer.whole) == 2, "nothing is acknowledged, nor was Hello before"
        assert listener.events == ["away"], "its silence is not that of its peer"
        connection.unfence()
        await until(lambda: len(dialer.messages) == 5)
        assert dialer.messages == [Note(1), Note(2), Note(3), Note(4), LARGE]
        connection.acknowledge()
        await until(lambda: not dialer.connection.link.buffer.whole)
        assert listener.events == ["away", "back"]
        assert not dialer.lost
        dialer.connection.close()

    play(main)


def test_what_was_corked_arrives_once_where_the_socket_is_lost_meanwhile():
    async def main() -> None:
        listener, network = Listener(), Network([])
        connection, dialer = await fenced(network, listener)
        connection.send(Note(3))
        network.cut(network.ends[0])
        await until(lambda: len(dialer.messages) == 3)
        connection.unfence()
        connection.send(Note(4))
        await until(lambda: len(dialer.messages) == 4)
        assert dialer.messages == [Note(number) for number in (1, 2, 3, 4)]
        assert listener.events[-1] == "back"
        dialer.connection.close()

    play(main)


def test_one_that_was_lost_and_is_not_back_yet_may_be_uncorked():
    async def main() -> None:
        listener, network = Listener(), Network([])
        connection, dialer = await fenced(network, listener)
        network.can_dial = False
        network.cut(network.ends[0])
        connection.send(Note(3))
        connection.unfence()
        assert connection.is_away
        assert "back" not in listener.events
        network.can_dial = True
        await until(lambda: dialer.messages[2:] == [Note(3)])
        assert listener.events[-1] == "back"
        dialer.connection.close()

    play(main)


def test_a_corked_connection_is_closed_with_its_last_words_when_it_is_uncorked():
    async def main() -> None:
        listener = Listener()
        connection, dialer = await fenced(Network([]), listener)
        connection.send(Note(3))
        connection.close()
        await asyncio.sleep(1)
        assert dialer.messages == [Note(1), Note(2)]
        assert not dialer.lost
        connection.unfence()
        await until(lambda: bool(dialer.lost))
        assert dialer.messages == [Note(number) for number in (1, 2, 3)]
        assert listener.table.all() == []

    play(main)


def test_where_a_later_term_has_begun_meanwhile_nothing_of_it_was_said():
    async def main() -> None:
        listener, network = Listener(), Network([])
        connection, dialer = await fenced(network, listener)
        state = connection.record()
        connection.send(Note(3))  # of which the other knows nothing
        other = Listener(term=1)
        other.restore(state)
        other.table.begin(1000)
        assert other.connection.link.term_history == [(1000, Counts(2, 0))]
        network.listener = other
        dialer.connection.drop("it hears nothing")
        other.connection.send(Note(4))
        await until(lambda: dialer.messages[2:] == [Note(4)])
        assert not dialer.lost, "it continues with the other one"
        dialer.connection.close()
        connection.drop("the test")

    play(main)
